"""Faults: a killed worker, a full disk, a slow consumer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kdpipes.core.errors import check_count


def kill_one_worker() -> bool:
    """Kill one worker process of this process by SIGKILL, as the system does when memory runs out.

    A loader replaces it, and delivers the same batches.

    Returns:
        Whether there was one.
    """
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    if children:
        os.kill(children[0], getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has only SIGTERM, which kills too
    return bool(children)


@contextmanager
def full_disk(max_bytes: int = 4096) -> Iterator[None]:
    """Limit the size of files in the block: writing beyond it raises OSError, as on a full disk.

    It applies to this process, and to workers that it forks inside; it does not work on Windows. The error is `EFBIG`,
    which kdpipes treats like `ENOSPC`.

    Example:
        >>> with full_disk(100), open("large.bin", "wb", buffering=0) as file:
        ...     file.write(bytes(100))
        ...     file.write(bytes(1))
        Traceback (most recent call last):
        OSError: [Errno 27] File too large
    """
    import resource  # Windows does not have it, but must be able to import this module

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (check_count("max_bytes", max_bytes, minimum=0), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def slow_consumer(batches: Iterable[Any], step: Callable[[Any], Any] = lambda batch: time.sleep(0.1)) -> Iterator[Any]:
    """Yield batches, each after a step that takes long, so that workers wait for room and buffers are full.

    Args:
        batches: A loader, or an iterator of one.
        step: A function that is called with each batch.
    """
    for batch in batches:
        step(batch)
        yield batch
