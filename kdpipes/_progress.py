"""A progress bar for what may take long."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

__all__ = ["shown_if_slow"]

Item = TypeVar("Item")
DELAY_S = 2.0  # so long nobody wonders


class _Bar(tqdm):  # type: ignore[misc]  # tqdm carries no types
    monitor_interval = 0  # a thread of tqdm's own would be there when workers are forked


_Bar.set_lock(threading.RLock())  # tqdm's own is multiprocessing's, which then has chosen how processes start


def shown_if_slow(items: Iterable[Item], total: int, what: str, unit: str = "samples") -> Iterator[Item]:
    """Yield `items`, with a progress bar if that takes longer than `DELAY_S`; without one in workers and other ranks.

    Args:
        items: What is worked through.
        total: How many there are.
        what: What goes on: "reading 'y'".
        unit: What is counted.
    """
    is_aside = multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0"
    if is_aside or sys.stderr is None:
        return iter(items)
    return iter(_Bar(items, what, total, leave=False, unit=f" {unit}", delay=DELAY_S))
