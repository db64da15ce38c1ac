"""A state fits a data set that holds the same values, wherever its files are, and no other one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import kdpipes as kdp

LONG = np.arange(100_000)


@dataclass
class Row:
    path: Path
    bird: str


class Held(Dataset[Any]):
    """A data set that holds values, fills a cache while it is read, and has paths, a file and transforms."""

    def __init__(self, values: Any, root: str = "/here") -> None:
        self._values, self.source, self._transform = values, root, torch.nn.Sequential(*[torch.nn.ReLU()] * len(root))
        self._file: Any = None
        self._cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        self._file = self._file or Path(__file__).open("rb")  # noqa: SIM115
        return self._cache.setdefault(index, index), 0

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


class Source(Held, kdp.SampleSource):
    def getitem_x(self, index: int) -> Any:
        return self[index][0]


def held(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: Held(make(values))


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "texts": lambda values: [(str(value), 0) for value in values],
    "dictionaries": lambda values: [{"x": [value], "y": 0} for value in values],
    "dataclasses": lambda values: [(Row(Path("a"), str(value)), 0) for value in values],
    "arrays": lambda values: [(np.array([value]), 0) for value in values],
    "array": lambda values: np.stack([values, values]),
    "objects": lambda values: np.array([str(value) for value in values], dtype=object),
    "tensors": lambda values: TensorDataset(torch.tensor(values), torch.zeros(2)),
    "subset": lambda values: Subset(range(9), values),
    "concatenation": lambda values: ConcatDataset([Held(values), Held([])]),
    "Hugging Face": lambda values: datasets.Dataset.from_dict({"x": values, "y": [0, 0]}),
    "rows of Hugging Face": lambda values: datasets.Dataset.from_dict({"x": range(9), "y": [0] * 9}).select(values),
    "pandas": held(lambda values: pd.DataFrame({"x": values})),
    "by ID": held(lambda values: {str(value): 0 for value in values}),
    "bytes": lambda values: [bytes([value]) for value in values],
    "source": Source,
    "dataset of a source": lambda values: Subset(Source(values), [0, 1]),
}


def fits(dataset: Any, other: Any) -> bool:
    """Return whether a state of a loader of one data set can be loaded into one of another."""
    loaders = [
        kdp.Loader((source if isinstance(source, Source) else kdp.from_dataset(source)).select("x").deal(batch_size=1))
        for source in (dataset, other)
    ]
    try:
        loaders[1].load_state_dict(loaders[0].state_dict())
    except ValueError as error:
        return "the data of" not in str(error)
    return True


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_state_fits_no_dataset_with_other_values(kind: str) -> None:
    make = NUMBERS[kind]
    assert [fits(make([1, 2]), make(values)) for values in ([1, 2], [1, 3])] == [True, False]


def test_entries_of_long_data_are_compared_throughout() -> None:
    for make in (list, np.array, torch.tensor, lambda values: [(value,) for value in values]):
        others = LONG, np.where(LONG < 50_000, LONG, 0)
        assert [fits(make(LONG), make(other)) for other in others] == [True, False]


@pytest.mark.parametrize("kind", [Held, Source])
def test_moved_files_and_reading_change_no_state(kind: Any) -> None:
    def files(root: str) -> Any:
        return kind([(f"{root}/a.jpg", 0), (Row(Path(root) / "b.jpg", "heron"), 1)], root)

    dataset = files("/here")
    assert fits(dataset, files("C:\\there"))
    assert dataset[1]
    assert fits(dataset, files("/here"))
