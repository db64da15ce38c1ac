"""`in_one_torch_thread`: torch does not spread its operations on one image over threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kdpipes as kdp
from kdpipes.core.processes import in_one_torch_thread

LARGE = 32_768  # torch spreads operations of more elements over threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


class Spread(TorchDispatchMode):
    """Collects the operations on large tensors that run in several threads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.num_large = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = isinstance(result, torch.Tensor) and result._is_view()
        if isinstance(result, torch.Tensor) and result.numel() > LARGE and not is_view:
            self.num_large += 1
            if torch.get_num_threads() > 1:
                self.names.add(str(function))
        return result


STEPS = [
    kdp.RandomResizedCrop(200),
    kdp.HorizontalFlip(1.0),
    kdp.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.1),
    kdp.ToTensor(),
    kdp.Normalize([0.5], [0.5]),
]


def test_transforms_and_batches_without_workers_use_one() -> None:
    images = [torch.full((3, 220, 230), value, dtype=torch.uint8) for value in range(4)]
    pipe = kdp.from_dataset(images, fields="x").transform("x", *STEPS).select("x")
    with kdp.Loader(pipe.deal(batch_size=2, seed=0).collate_samples()) as loader, Spread() as spread:
        assert [len(batch[0]) for batch in loader] == [2, 2]
    assert spread.num_large > 20
    assert spread.names <= {"aten.lift_fresh.default"}  # it only wraps a tensor


def test_a_transform_that_is_called_by_itself_uses_one() -> None:
    image = torch.full((3, 220, 230), 7, dtype=torch.uint8)
    with Spread() as spread:
        for step in STEPS[:3]:
            image = step(image, np.random.default_rng(0))
        kdp.Normalize([0.5], [0.5])(kdp.ToTensor()(image))
    assert spread.num_large > 5
    assert spread.names <= {"aten.lift_fresh.default"}


def test_transforms_of_fields_together_use_one() -> None:
    rows = [(torch.full((3, 220, 230), 7, dtype=torch.uint8), torch.ones(220, 230))] * 2
    source = kdp.from_dataset(rows, fields="image mask")  # which looks at a few numbers of the tensors
    with Spread() as spread:
        pipe = source.transform("image mask", *STEPS[:2])
        assert [tuple(pipe[index]["mask"].shape) for index in range(2)] == [(200, 200), (200, 200)]
    assert spread.num_large > 5
    assert not spread.names


def test_functions_of_users_keep_their_threads() -> None:
    found = []
    pipe = kdp.from_dataset([1, 2], fields="x").transform("x", lambda x: found.append(torch.get_num_threads()) or x)
    assert [pipe[index]["x"] for index in range(2)] == [1, 2]
    assert found == [3, 3]


def test_the_number_comes_back_after_an_error() -> None:
    @in_one_torch_thread
    def fail() -> None:
        raise ValueError(str(torch.get_num_threads()))

    with pytest.raises(ValueError, match="1"):
        fail()


def test_other_threads_change_nothing() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(in_one_torch_thread(torch.get_num_threads)()))
    thread.start()
    thread.join()
    assert found == [3]
