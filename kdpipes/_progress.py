"""A progress bar for what may take long."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

__all__ = ["shown_if_slow"]

Item = TypeVar("Item")
DELAY_S = 2.0  # so long nobody wonders


class _Bar(tqdm):  # type: ignore[misc]  # tqdm carries no types
    monitor_interval = 0  # a thread of tqdm's own would be there when workers are forked


def shown_if_slow(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield `items`, with a progress bar if that takes longer than `DELAY_S`; without one in worker processes.

    Args:
        items: What is worked through.
        total: How many there are.
        what: What goes on: "reading 'y'".
    """
    is_worker = multiprocessing.parent_process() is not None
    bar: Iterator[Item] = iter(_Bar(items, what, total, leave=False, unit=" samples", delay=DELAY_S, disable=is_worker))
    return bar
