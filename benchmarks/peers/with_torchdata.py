"""torchdata alone: its stock pipes over tar shards, in DataLoader2, batches made in its workers or in this process.

The service does not prefetch by threads, with which it is fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kdpipes  # noqa: F401 - keeps torchdata's banner quiet; nothing of it is used
from peers._images import by_pillow

# isort: split
from torch.utils.data import default_collate
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import FileLister


def _read(sample: dict[str, Any]) -> tuple[bytes, int]:
    return sample[".jpg"].read(), int(sample[".cls"].read())


def _decode(sample: tuple[bytes, int]) -> tuple[Any, int]:
    return by_pillow(sample[0]), sample[1]


def _images(folder: Path) -> Any:
    shards = FileLister(str(folder / "shards"), "*.tar").shuffle().sharding_filter()
    samples = shards.open_files("b").load_from_tar().webdataset().map(_read)
    return samples.shuffle(buffer_size=1000).map(_decode)


def _loader(pipe: Any, workers: int) -> Any:
    service = MultiProcessingReadingService(workers, worker_prefetch_cnt=0, main_prefetch_cnt=0)
    return DataLoader2(pipe, reading_service=service)


@contextmanager
def in_batches(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    loader = _loader(_images(folder).batch(batch_size).collate(default_collate), workers)
    yield loader
    loader.shutdown()


class _Batches:
    """Items of a loader, put together in this process."""

    def __init__(self, loader: Any, batch_size: int) -> None:
        self._loader, self._batch_size = loader, batch_size

    def __iter__(self) -> Iterator[Any]:
        items = []
        for item in self._loader:
            items.append(item)
            if len(items) == self._batch_size:
                yield default_collate(items)
                items = []
        if items:
            yield default_collate(items)


@contextmanager
def by_item(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    loader = _loader(_images(folder), workers)
    yield _Batches(loader, batch_size)
    loader.shutdown()
