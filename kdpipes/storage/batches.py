"""Entries in batches of some size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["in_batches"]

Name = TypeVar("Name")


def in_batches(entries: Iterable[tuple[Name, bytes]], num_bytes: int) -> Iterator[list[tuple[Name, bytes]]]:
    """Yield entries in lists, each of which is complete when its contents are `num_bytes` long or longer.

    >>> list(in_batches([("a", b"1234"), ("b", b"5"), ("c", b"6")], 5))
    [[('a', b'1234'), ('b', b'5')], [('c', b'6')]]
    """
    batch: list[tuple[Name, bytes]] = []
    size = 0
    for name, content in entries:
        batch.append((name, content))
        size += len(content)
        if size >= num_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
