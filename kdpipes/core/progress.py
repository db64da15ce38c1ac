"""Progress bars that appear only for slow operations."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

from kdpipes.core.secrets import safe_text

Item = TypeVar("Item")
DELAY_S = 2.0  # no bar before this delay


class _Bar(tqdm):  # type: ignore[misc]  # tqdm carries no types
    monitor_interval = 0  # no monitor thread of tqdm, which would be running when workers are forked

    @staticmethod
    def format_meter(*args: Any, **kwargs: Any) -> str:
        """Return the text of the bar. tqdm's own would show a unit that begins with a space as "2.03s/ sample"."""
        return "s/".join(str(tqdm.format_meter(*args, **kwargs)).rsplit("s/ ", 1))


_Bar.set_lock(threading.RLock())  # tqdm's default lock would fix the start method of multiprocessing


def shown_if_slow(items: Iterable[Item], total: int | None, what: str, unit: str = "sample") -> Iterator[Item]:
    """Yield `items`, with a progress bar after `DELAY_S` seconds. Workers and ranks other than 0 show no bar."""
    if _is_aside():
        return iter(items)
    return iter(_Bar(items, safe_text(what), total, leave=False, unit=f" {unit}", delay=DELAY_S))


@contextmanager
def bytes_if_slow(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Yield a thread-safe function that advances a progress bar by a number of bytes.

    The bar appears under the same conditions as in `shown_if_slow`.
    """
    if _is_aside():
        yield lambda num_bytes: None
        return
    lock = threading.Lock()
    with _Bar(None, safe_text(what), total, leave=False, unit="B", unit_scale=True, delay=DELAY_S) as bar:

        def advance(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        yield advance


def _is_aside() -> bool:
    is_worker = multiprocessing.parent_process() is not None
    return is_worker or os.environ.get("RANK", "0") != "0" or sys.stderr is None
