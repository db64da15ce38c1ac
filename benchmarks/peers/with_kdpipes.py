"""kdpipes over tar shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corpus import shard_urls

import kdpipes as kdp


class NotYetError(ImportError):
    """This kdpipes lacks what a row is about."""


def _batches(chain: Any, batch_size: int, shuffle: Any = True) -> Any:
    pipe = chain.transform("x", kdp.RandomResizedCrop(224), kdp.HorizontalFlip()).select("x y")
    return pipe.deal(batch_size=batch_size, shuffle=shuffle).collate_samples()


@contextmanager
def _loader(chain: Any, workers: int, batch_size: int, shuffle: Any = True) -> Iterator[Any]:
    with kdp.Loader(_batches(chain, batch_size, shuffle), num_workers=workers) as loader:
        yield loader


def _opened(folder: Path) -> Any:
    return kdp.open_shards(shard_urls(folder)).rename_fields(x="jpg", y="cls")


def indexed(folder: Path, workers: int, batch_size: int) -> Any:
    return _loader(_opened(folder).decode_images("x"), workers, batch_size)


def folder(folder: Path, workers: int, batch_size: int) -> Any:
    return _loader(kdp.image_folder(folder / "tree").decode_images("x"), workers, batch_size)


def profile(folder: Path, workers: int, batch_size: int, seconds: float) -> str:
    """Return where the time of `indexed` goes, as kdpipes measures it."""
    return str(kdp.profile(_batches(_opened(folder).decode_images("x"), batch_size), seconds, num_workers=workers))


def streamed(folder: Path, workers: int, batch_size: int) -> Any:
    chain: Any = kdp.stream_shards(shard_urls(folder))
    mixed = chain.rename_fields(x="jpg", y="cls").shuffle(buffer_size=1000)
    return _loader(mixed.decode_images("x"), workers, batch_size, "shards")


def by_pillow_only(folder: Path, workers: int, batch_size: int) -> Any:
    return _loader(_opened(folder).decode_images("x", backend="pillow"), workers, batch_size)


def in_memory(folder: Path, workers: int, batch_size: int) -> Any:
    decoded = _opened(folder).decode_images("x")
    if not hasattr(decoded, "cache_in_memory"):
        raise NotYetError("kdpipes has no `cache_in_memory` here")
    return _loader(decoded.cache_in_memory(), workers, batch_size)
