"""KappaData 1.0: a KDDataset behind its ModeWrapper, in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corpus import tree_of
from kappadata import KDDataset, ModeWrapper
from torch.utils.data import DataLoader

from peers._images import by_pillow


class Photos(KDDataset):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._images = tree_of(folder)

    def __len__(self) -> int:
        return len(self._images)

    def getitem_x(self, index: int, ctx: Any = None) -> Any:
        return by_pillow(self._images[index][0])

    def getitem_y(self, index: int, ctx: Any = None) -> int:
        return self._images[index][1]


@contextmanager
def mode_wrapper(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    dataset = ModeWrapper(Photos(folder), mode="x y")
    yield DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=True)
