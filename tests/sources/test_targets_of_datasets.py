"""An attribute `targets` or `labels` of a data set counts only if items hold it; looking changes no label."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kdpipes as kdp


class Dataset(torch.utils.data.Dataset[Any]):
    """Eight items like those of torchvision's data sets, which count how often they are loaded."""

    target_transform: Any = None

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 8

    def label(self, index: int) -> Any:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        label = self.label(index)
        return index, label if self.target_transform is None else self.target_transform(label)


class Cifar(Dataset):
    classes = ["airplane", "bird", "cat", "deer"]
    targets: Any = [3, 1, 0, 2, 3, 1, 0, 2]

    def label(self, index: int) -> Any:
        return self.targets[index]


class Mnist(Cifar):
    targets = torch.tensor([3, 1, 0, 2, 3, 1, 0, 2])

    def label(self, index: int) -> Any:
        return int(self.targets[index])


class Svhn(Dataset):
    targets = np.zeros((8, 5))  # not one label for each item
    labels = np.array([3, 1, 0, 2, 3, 1, 0, 2])

    def label(self, index: int) -> Any:
        return int(self.labels[index])


class Segmentation(Dataset):
    """Like VOCSegmentation: `targets` and `masks` are paths, items hold masks."""

    targets = [f"{n}.png" for n in range(8)]
    masks = targets

    def label(self, index: int) -> Any:
        return Image.new("L", (2, 2), index)


class Detection(Segmentation):
    """Like VOCDetection: items hold the annotation."""

    def label(self, index: int) -> Any:
        return {"annotation": {"object": [{"name": "dog", "n": index}]}}


class Kitti(Segmentation):
    def label(self, index: int) -> Any:
        return [{"type": "Car", "bbox": [float(index)]}]


class Coarse(Dataset):
    targets = list(range(8))

    def label(self, index: int) -> Any:
        return self.targets[index] % 2


class OneBased(Dataset):
    labels = [1, 2, 3, 4, 1, 2, 3, 4]

    def label(self, index: int) -> Any:
        return self.labels[index] - 1


class OneHot(Cifar):
    def label(self, index: int) -> Any:
        return torch.eye(4)[self.targets[index]]


class Normalized(Dataset):
    targets = torch.linspace(0, 100, 8)

    def label(self, index: int) -> Any:
        return (self.targets[index] / 100).item()


class OwnOrder(Dataset):
    labels = ["dog", "cat"] * 4

    def label(self, index: int) -> Any:
        return {"dog": 0, "cat": 1}[self.labels[index]]


class Regression(Dataset):
    targets = torch.tensor([0.1, 1.5, 2.25, 3.0, 0.1, 1.5, 2.25, 3.0])

    def label(self, index: int) -> Any:
        return self.targets[index]


AGREEING = [Cifar, Mnist, Svhn, Regression]
DIFFERING = [Segmentation, Detection, Kitti, Coarse, OneBased, OneHot, Normalized, OwnOrder]
LOOKS: dict[str, Callable[[Any], Any]] = {
    "column": lambda pipe: pipe.column("y"),
    "repr": repr,
    "html": lambda pipe: pipe.select("y").deal(batch_size=4)._repr_html_(),
    "class names": lambda pipe: pipe.class_names(),
    "plan": lambda pipe: repr(pipe.oversample()),
    "state": lambda pipe: kdp.Loader(pipe.select("x").deal(batch_size=4)).state_dict(),
    "fingerprint": lambda pipe: pipe.fingerprint(),
    "loader": lambda pipe: list(kdp.Loader(pipe.select("x").deal(batch_size=4))),
}


def texts_of(labels: Any) -> list[str]:
    return [str(label.tobytes() if isinstance(label, Image.Image) else label) for label in labels]


@pytest.mark.filterwarnings("ignore:The labels are read from the items:UserWarning")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", [*AGREEING, *DIFFERING])
def test_no_look_changes_a_label(kind: type[Dataset], look: str) -> None:
    wanted = texts_of(kind().label(index) for index in range(8))
    pipe = kdp.from_dataset(kind())
    assert texts_of(pipe[index]["y"] for index in range(8)) == wanted
    LOOKS[look](pipe)
    assert texts_of(pipe[index]["y"] for index in range(8)) == wanted
    for size in (1, 8):
        batches = list(kdp.Loader(pipe.select("y", bare=True).deal(batch_size=size)))
        assert texts_of(label for batch in batches for label in batch) == wanted


@pytest.mark.parametrize("kind", AGREEING)
def test_a_plan_by_targets_that_items_hold_loads_few_items(kind: type[Dataset]) -> None:
    dataset = kind()
    pipe = kdp.from_dataset(dataset)
    column = pipe.column("y")
    assert column.tolist() == [float(dataset.label(index)) for index in range(8)]
    assert 0 < len(dataset.loaded) <= 5
    if kind is not Regression:
        assert pipe.filter_classes(valid=[3]).column("x").tolist() == [0, 4]


@pytest.mark.parametrize("kind", DIFFERING)
def test_targets_that_items_do_not_hold_are_ignored(kind: type[Dataset]) -> None:
    pipe = kdp.from_dataset(kind())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        column = [pipe.column("y"), repr(pipe), pipe.column("y")][-1]
    assert texts_of(column) == texts_of(kind().label(index) for index in range(8))
    [warning] = caught
    assert f"read from the items of {kind.__name__}" in str(warning.message)
    assert "pass `labels=`" in str(warning.message)


def test_a_target_transform_counts_without_a_warning() -> None:
    dataset = Cifar()
    dataset.target_transform = lambda label: 10 + label
    pipe = kdp.from_dataset(dataset)
    assert [pipe[0]["y"], *pipe.column("y").tolist()[:2], pipe[0]["y"]] == [13, 13, 11, 13]


def test_comparing_items_moves_no_random_generator() -> None:
    class Augmented(Cifar):
        def __getitem__(self, index: int) -> Any:
            return random.random() + np.random.rand() + torch.rand(1).item(), self.label(index)

    for module in (random.seed, np.random.seed, torch.manual_seed):
        module(0)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    pipe = kdp.from_dataset(Augmented())
    assert pipe.filter_classes(valid=["deer"]).column("y").tolist() == [3, 3]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states  # type: ignore[index]


def test_an_item_that_cannot_be_loaded_is_not_compared() -> None:
    class Damaged(Cifar):
        def label(self, index: int) -> Any:
            if index == 2:
                raise OSError(5, "bad sector")
            return self.targets[index]

    assert [sample["x"] for sample in kdp.from_dataset(Damaged()).filter_classes(valid=[3])] == [0, 4]


def test_workers_deliver_what_the_main_process_has() -> None:
    class Texts(Dataset):
        labels = ["dog", "cat"] * 4

        def label(self, index: int) -> Any:
            return self.labels[index]

    for num_workers in (0, 1):
        pipe = kdp.from_dataset(Texts())
        with kdp.Loader(pipe.select("y", bare=True).deal(batch_size=8), num_workers=num_workers) as loader:
            assert list(loader) == [[1, 0] * 4]
        assert [sample["y"] for sample in pipe] == [1, 0] * 4


class Spotty:
    """A data set that returns None for what it cannot make."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return None if index % 7 == 3 else (index, index % 2)


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("make", [kdp.from_dataset, lambda dataset: kdp.from_dataset(list(dataset_of(dataset)))])
def test_none_is_a_sample_that_cannot_be_made(make: Any, batch_size: int) -> None:
    chain = make(Spotty()).on_error("skip", max_share=1.0).select("x", bare=True).deal(batch_size=batch_size)
    with kdp.Loader(chain) as loader:
        for _ in range(2):
            assert sorted(x for batch in loader for x in batch) == [n for n in range(20) if n % 7 != 3]
    with pytest.raises(kdp.DataError, match=r"Item 3 is None: .*`\.on_error\(\"skip\"\)` skips it"):
        make(Spotty())[3]["x"]
    with pytest.raises(kdp.DataError, match="Item 3 is None"):
        kdp.from_dataset([1, 2, 3, None], "x").column("x")


def dataset_of(dataset: Any) -> Any:
    return (dataset[index] for index in range(len(dataset)))
