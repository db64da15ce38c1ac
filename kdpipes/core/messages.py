"""Log lines, warnings and progress bars, in which secrets and control characters of data are masked."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

from kdpipes.core.secrets import safe_text
from kdpipes.core.tracebacks import calling_line


class _SafeText(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        safe = safe_text(text)
        if safe != text:
            record.msg = safe
            record.args = ()
        return True


_safe_text = _SafeText()


def logger(name: str) -> logging.Logger:
    """Return the logger with a name. All modules get their loggers from here."""
    named = logging.getLogger(name)
    named.addFilter(_safe_text)
    return named


def warn(text: str) -> None:
    """Issue a warning that points to the line of the user's code."""
    frame, line = calling_line()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    file = frame.f_code.co_filename
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(safe_text(text), UserWarning, file, line, module, registry)


def counted(number: float, unit: str) -> str:
    """Return a number with its unit: "1 batch", "2,000 samples", "3 entries"."""
    plural = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}es" if unit.endswith(("ch", "s")) else f"{unit}s"
    return f"{number:,} {unit if number == 1 else plural}"


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
