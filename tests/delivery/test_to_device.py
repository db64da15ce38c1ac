"""Batches on a device: on the CPU nothing happens; the order of sending and receiving is tested with a stand-in."""

from __future__ import annotations

import os
import traceback
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe, _ahead, _mapped
from tests.torchdata_parts import InProcessReadingService

Pair = namedtuple("Pair", "x y")


def chain() -> Any:
    pipe = kdp.from_dataset([(number, 0) for number in range(10)]).select("x y").deal(batch_size=4)
    return pipe.collate_samples().to_device("cpu")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_the_cpu_batches_stay_what_they_are(num_workers: int) -> None:
    with kdp.Loader(chain(), num_workers=num_workers) as loader:
        assert len(loader) == 3
        assert [x.tolist() for x, y in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_only_tensors_move_and_containers_keep_their_form() -> None:
    batch = {"a": [torch.ones(1), "word"], "b": Pair(torch.zeros(1), None), "c": (1, b"x")}
    moved = _mapped(batch, lambda tensor: tensor + 1)
    assert repr(moved) == repr({"a": [torch.ones(1) + 1, "word"], "b": Pair(torch.ones(1), None), "c": (1, b"x")})


class StandIn:
    """A stream that notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, batch: Any) -> Any:
        self.log.append(f"send {batch}")
        return batch

    def receive(self, batch: Any) -> Any:
        self.log.append(f"receive {batch}")
        return batch


def test_the_next_batch_is_sent_before_one_is_received() -> None:
    stream = StandIn()
    assert list(_ahead(iter([1, 2, 3]), stream)) == [1, 2, 3]
    assert stream.log == ["send 1", "send 2", "receive 1", "send 3", "receive 2", "receive 3"]
    assert list(_ahead(iter([]), StandIn())) == []


def test_an_error_comes_after_the_batches_before_it() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    received = _ahead(batches(), StandIn())
    assert next(received) == 1
    with pytest.raises(KeyError, match="lost"):
        next(received)


def test_the_state_ignores_a_batch_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = DeviceMoverIterDataPipe
    monkeypatch.setattr(mover, "iterate", lambda self: _ahead(iter(self.source), StandIn()))
    for num_workers in (0, 2):
        with kdp.Loader(chain(), num_workers=num_workers) as loader:
            next(iter(loader))
            assert loader.state_dict()["batch"] == 1


def test_it_is_rejected_in_a_worker_of_the_dataloader() -> None:
    loader = DataLoader(chain(), batch_size=None, num_workers=1)
    with pytest.raises(kdp.ChainError, match=r"`\.to_device\(\)` runs in the main process") as caught:
        list(loader)
    traceback.clear_frames(caught.tb)  # or torch's iterator waits seconds for its workers when it is collected


@pytest.mark.parametrize(
    ("device", "error"), [("gpu", ValueError), (0, TypeError), (None, TypeError)], ids=["gpu", "0", "None"]
)
def test_what_is_no_device_is_rejected(device: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match='`device` must be a device like "cuda"'):
        IterableWrapper([1]).to_device(device)


def test_a_missing_device_is_an_error_when_iteration_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipes = {name: chain().source.to_device(name) for name in ("cuda", "cuda:2", "xla")}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ValueError, match=r"`device` must be one that this machine has, but is 'cuda' instead.* no CUDA"
    ):
        kdp.Loader(pipes["cuda"]).__iter__().__next__()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"but is 'cuda:2' instead\. torch .* finds 2 CUDA devices here"):
        iter(pipes["cuda:2"])
    with pytest.raises(ValueError, match=r"one that this machine has, but is 'xla' instead\."):
        iter(pipes["xla"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_a_gpu() -> None:
    pipe = kdp.from_dataset([(torch.full((3, 64, 64), number), 0) for number in range(40)]).select("x y")
    with kdp.Loader(pipe.deal(batch_size=4).collate_samples().to_device("cuda"), num_workers=2) as loader:
        assert not torch.cuda.is_initialized()
        batches = [x for x, y in loader]
    assert all(x.is_cuda for x in batches)
    assert torch.stack([x.float().mean() for x in batches]).cpu().tolist() == [4 * n + 1.5 for n in range(10)]


def test_pipes_after_it_run_in_the_main_process_with_state() -> None:
    pipe = chain().map(_process_of).filter(_is_here)
    with kdp.Loader(pipe, num_workers=2) as loader:
        batches = iter(loader)
        assert next(batches)[1] == os.getpid()
        assert loader.state_dict()["batch"] == 1
        assert len(list(batches)) == 2


def test_batches_that_are_joined_behind_it_count_as_many() -> None:
    with kdp.Loader(chain().batch(2), num_workers=2) as loader:
        batches = iter(loader)
        assert len(next(batches)) == 2
        state = loader.state_dict()
        assert state["batch"] == 2
        assert len(next(batches)) == 1


def test_a_main_process_pipe_aside_is_an_error_with_workers() -> None:
    pipe = chain().zip(chain())
    for service in (None, InProcessReadingService()):
        with kdp.Loader(pipe, reading_service=service) as loader:
            assert len(list(loader)) == 3
    with pytest.raises(kdp.ChainError, match="`to_device` must run in the main process, so it must be at the end"):
        kdp.Loader(pipe, num_workers=1)


def _process_of(batch: Any) -> Any:
    return batch, os.getpid()


def _is_here(item: Any) -> bool:
    return item[1] == os.getpid()
