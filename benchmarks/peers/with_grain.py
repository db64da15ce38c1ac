"""Grain: a MapDataset, read ahead in threads and put into batches in its workers, one endless pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import torch
from corpus import tree_of

from peers._images import by_pillow


def _load(item: tuple[str, int]) -> tuple[Any, int]:
    return by_pillow(item[0]).numpy(), item[1]


class _Epochs:
    """An endless iterator, in parts of an epoch's length; NumPy's arrays as tensors of the same memory."""

    def __init__(self, batches: Iterator[Any], length: int) -> None:
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Any]:
        for images, labels in islice(self._batches, self._length):
            yield torch.from_numpy(images), labels


@contextmanager
def dataset(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    images = tree_of(folder)
    shuffled = grain.MapDataset.source(images).shuffle(seed=0).repeat().map(_load)
    batches = shuffled.to_iter_dataset().batch(batch_size)
    loader = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    yield _Epochs(iter(loader), -(-len(images) // batch_size))
