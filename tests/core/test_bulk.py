"""Batches whose fields are read at once are those that are made sample by sample."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import kdpipes as kdp
from kdpipes.core.bulk import BulkReader
from kdpipes.testing import check_elastic, check_exactly_once, check_resumable

SIZE = 50


class Counted:
    """A dataset that counts how items are read."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, str]:
        self.read.append(index)
        return index, f"text {index}"


class Batched(Counted):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, str]]:
        self.read.append(indices)
        return [(index, f"text {index}") for index in indices]


class Collating(Counted):
    """A dataset for a DataLoader whose `collate_fn` expects batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices), "texts"


class Getters:
    def __len__(self) -> int:
        return SIZE

    def getitem_x(self, index: int) -> int:
        return index

    def getitem_y(self, index: int) -> str:
        return f"text {index}"


ITEMS: list[Any] = [(number, f"text {number}") for number in range(SIZE)]
SOURCES: dict[str, Any] = {
    "a list": lambda: kdp.from_dataset(ITEMS),
    "dictionaries": lambda: kdp.from_dataset([{"x": x, "y": y} for x, y in ITEMS]),
    "an array": lambda: kdp.from_dataset(np.arange(2 * SIZE).reshape(SIZE, 2), "x"),
    "tensors": lambda: kdp.from_dataset(TensorDataset(torch.arange(SIZE), torch.arange(2 * SIZE).reshape(-1, 2))),
    "labels": lambda: kdp.from_dataset(ITEMS, labels=["a", "b"] * (SIZE // 2)),
    "a dataset": lambda: kdp.from_dataset(Counted()),
    "__getitems__": lambda: kdp.from_dataset(Batched()),
    "a batch for DataLoader": lambda: kdp.from_dataset(Collating()),
    "a subset": lambda: kdp.from_dataset(Subset(Batched(), range(3, SIZE))),
    "getters": lambda: kdp.from_dataset(Getters()),
    "lists": lambda: kdp.from_dataset([[x, y] for x, y in ITEMS]),
    "odd items": lambda: kdp.from_dataset([{"x": 1, "y": 2}, *ITEMS[1:]]),
}


def jittered(x: Any, rng: np.random.Generator) -> Any:
    return x, int(rng.integers(1000))


def changes(pipe: Any) -> Any:
    return pipe.permute(3).transform("x", jittered, jittered).rename_fields(z="x").take_percent(to_percent=0.9)


def plain(items: Any) -> str:
    return repr([[tuple(item) for item in batch] for batch in items])


@pytest.fixture
def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that says how many samples were read at once since the last call."""
    numbers: list[int] = []
    read = BulkReader.read

    def counted(self: Any, source: Any, positions: Any, bulk: Any) -> Any:
        items = read(self, source, positions, bulk)
        numbers.append(0 if items is None else len(items))
        return items

    monkeypatch.setattr(BulkReader, "read", counted)

    def take() -> int:
        total = sum(numbers)
        numbers.clear()
        return total

    return take


@pytest.mark.parametrize("mode", ["x", "z key index ordinal is_padding"])
@pytest.mark.parametrize("name", SOURCES)
def test_the_batches_are_those_of_single_samples(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> Any:
        source = SOURCES[name]()
        source = source if mode == "x" else changes(source)
        return [list(source.select(mode).deal(batch_size=16, shuffle=True, uneven="pad")) for _ in range(2)]

    found = [plain(epoch) for epoch in batches()]
    monkeypatch.setattr(BulkReader, "read", lambda *args: None)
    assert found == [plain(epoch) for epoch in batches()]


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ("lists", "odd items")])
def test_fields_are_read_at_once(name: str, reads_at_once: Any) -> None:
    pipe = SOURCES[name]().select("x").deal(batch_size=10)
    list(pipe)
    assert reads_at_once() == (40 if name == "a subset" else SIZE)  # its last batch has 7 samples, too few


def test_items_are_not_read_for_known_labels() -> None:
    dataset = Counted()
    pipe = kdp.from_dataset(dataset, labels=list(range(SIZE))).select("y", bare=True).deal(batch_size=10)
    assert [y for batch in pipe for y in batch] == list(range(SIZE))
    assert not dataset.read


def test_getitems_of_a_dataset_is_called_with_lists() -> None:
    dataset = Batched()
    list(kdp.from_dataset(dataset).select("x y").deal(batch_size=25))
    assert all(isinstance(read, list) for read in dataset.read)
    assert sum(map(len, dataset.read)) == SIZE


def test_samples_that_take_long_are_made_one_by_one(reads_at_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdpipes.core.bulk._SLOW_S", 0.0)
    pipe = kdp.from_dataset(Counted()).select("x").deal(batch_size=10)
    list(pipe)
    reads_at_once()
    list(pipe)
    assert reads_at_once() == 0


def test_chains_that_record_or_skip_are_read_sample_by_sample(reads_at_once: Any) -> None:
    source = kdp.from_dataset(ITEMS)
    for pipe in (
        source.record_ctx().transform("x", jittered).select("x", return_ctx=True),
        source.on_error("skip").select("x"),
        source.select("x").map(len),
        source.cache_in_memory().select("x"),
        source.transform("x", lambda x, ctx: x).select("x"),
    ):
        list(pipe.deal(batch_size=10))
        assert reads_at_once() == 0


def test_an_error_names_its_sample() -> None:
    def reject(x: int) -> int:
        if x == 33:
            raise ValueError("odd")
        return x

    pipe = kdp.from_dataset(ITEMS).transform("x", reject).select("x").deal(batch_size=20)
    for num_workers in (0, 1):
        with kdp.Loader(pipe, num_workers=num_workers) as loader, pytest.raises(ValueError, match="odd") as caught:
            list(loader)
        assert any("applying 'reject' to field 'x' of sample '33'" in note for note in caught.value.__notes__)


def test_none_as_a_result_names_its_sample() -> None:
    pipe = kdp.from_dataset(ITEMS).transform("x", lambda x: None if x == 7 else x).select("x").deal(batch_size=20)
    with pytest.raises(TypeError, match="must return the new value") as caught:
        list(pipe)
    assert any("of sample '7'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("is_dataset", [False, True])
def test_a_worker_that_dies_names_the_sample(is_dataset: bool) -> None:
    def die(x: int) -> int:
        if x == 33:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    class Deadly(Counted):
        def __getitem__(self, index: int) -> tuple[int, str]:
            return die(index), ""

    source = kdp.from_dataset(Deadly()) if is_dataset else kdp.from_dataset(ITEMS).transform("x", die)
    with (
        kdp.Loader(source.select("x").deal(batch_size=20), num_workers=1) as loader,
        pytest.raises(kdp.WorkerError, match="of sample '33'"),
    ):
        list(loader)


def test_the_order_is_elastic_and_resumable() -> None:
    chain = changes(kdp.from_dataset(Batched())).select("z key").deal(global_batch_size=12, uneven="pad")
    for check in (check_elastic, check_resumable, check_exactly_once):
        check(chain)


def test_a_hugging_face_dataset_is_read_at_once(reads_at_once: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": [x for x, _ in ITEMS], "y": [y for _, y in ITEMS]})
    pipe = kdp.from_dataset(dataset, "x y").select("x y").deal(batch_size=10)
    assert [item for batch in pipe for item in batch] == ITEMS
    assert reads_at_once() == SIZE
