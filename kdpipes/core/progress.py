"""A progress bar for what may take long."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from kdpipes.core.masked import masked

__all__ = ["bytes_if_slow", "shown_if_slow"]

Item = TypeVar("Item")
DELAY_S = 2.0  # so long nobody wonders


class _Bar(tqdm):  # type: ignore[misc]  # tqdm carries no types
    monitor_interval = 0  # a thread of tqdm's own would be there when workers are forked


_Bar.set_lock(threading.RLock())  # tqdm's own is multiprocessing's, which then has chosen how processes start


def shown_if_slow(items: Iterable[Item], total: int | None, what: str, unit: str = "samples") -> Iterator[Item]:
    """Yield `items`, with a progress bar if that takes longer than `DELAY_S`; without one in workers and other ranks.

    Args:
        items: What is worked through.
        total: How many there are, if that is known.
        what: What goes on: "reading 'y'".
        unit: What is counted.
    """
    if _is_aside():
        return iter(items)
    return iter(_Bar(items, masked(what), total, leave=False, unit=f" {unit}", delay=DELAY_S))


@contextmanager
def bytes_if_slow(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Yield what any thread calls with a number of bytes that are done; the bar is shown as that of `shown_if_slow`.

    Args:
        total: How many bytes there are.
        what: What goes on: "copying 's3://birds'".
    """
    if _is_aside():
        yield lambda num_bytes: None
        return
    lock = threading.Lock()
    with _Bar(None, masked(what), total, leave=False, unit="B", unit_scale=True, delay=DELAY_S) as bar:

        def advance(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        yield advance


def _is_aside() -> bool:
    is_worker = multiprocessing.parent_process() is not None
    return is_worker or os.environ.get("RANK", "0") != "0" or sys.stderr is None
