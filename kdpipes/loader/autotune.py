"""`Loader(num_workers="auto")`: find the number of workers and the read-ahead while the first epoch runs.

The batches of a dealt chain do not depend on the workers. So a loader may stop its workers after any batch, and let
others go on with the next one: a trial costs the start of the workers and the batches that were made ahead.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_WAITING = 0.05  # the loop waits for less than this share of the time: the workers keep up
_GAIN = 1.15  # twice the workers are kept if the loop runs this many times as fast
_MIN_S, _MAX_S = 1.0, 10.0  # how long a setting is measured
_MIN_BATCHES = 8
_MAX_PREFETCH = 8
_PAUSE = 10  # a step of the loop that takes this many times as long as its median: a validation, a person
_CALM = 2  # after so many windows without waiting, the setting stays
_WORKERS_PER_CORE = 4  # at most: workers that wait for storage need no core
_MEMORY_SHARE = 0.5  # of the available memory, what more workers may take


class Setting(NamedTuple):
    """The settings that are tuned: the number of workers, and of batches that each prefetches."""

    num_workers: int
    prefetch: int


def available_cores() -> int:
    """Return the number of cores for this process: its affinity and its cgroup's quota, divided by the local ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))  # "max" is not a number: there is no quota
    with suppress(ValueError):
        cores //= max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return max(cores, 1)


def available_memory() -> int | None:
    """Return how many bytes of memory this process may still take; None where the system does not report it."""
    found = []
    with suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(min(found), 0) if found else None


def memory_of_largest_child() -> int:
    """Return the proportional set size, in bytes, of the largest process that this one has started; 0 if unknown."""
    sizes = [0]
    for child in multiprocessing.active_children():
        with suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines()
            sizes.append(int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024)
    return max(sizes)


@dataclass
class _Window:
    """The measurements of one setting, without the first batches, which are late because workers are starting."""

    num_workers: int
    num_skipped: int = 0
    asked: float | None = None  # when the last batch was delivered
    waited: float = 0.0
    waits: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # what the loop took for each batch, without waiting

    def note(self, now: float, waited: float) -> bool:
        """Note a batch: the time, and how long the loop has waited so far. Return whether the window is full."""
        if self.num_skipped <= self.num_workers:
            self.num_skipped += 1
        elif self.asked is not None:
            self.waits.append(waited - self.waited)
            self.steps.append(max(now - self.asked - self.waits[-1], 0.0))
        self.asked = now
        self.waited = waited
        elapsed = self.elapsed()
        is_enough = len(self.waits) >= max(_MIN_BATCHES, 2 * self.num_workers)
        return bool(self.waits) and elapsed >= _MIN_S and (is_enough or elapsed >= _MAX_S)

    def elapsed(self) -> float:
        """Return the seconds of waiting and of steps; a step that is far longer than most is a pause of the loop."""
        longest = _PAUSE * statistics.median(self.steps or [0.0])
        return sum(self.waits) + sum(min(step, longest) for step in self.steps)

    def share_of_rounds(self) -> float:
        """Return the part of the time that the loop waits in a typical round, which is one batch of each worker."""
        size = self.num_workers
        rounds = [sum(self.waits[at : at + size]) for at in range(0, len(self.waits) - size + 1, size)]
        return statistics.median(rounds or [sum(self.waits)]) * len(self.waits) / (size * self.elapsed())


class Tuner:
    """Decides after each batch whether another setting is tried.

    It doubles the workers while the loop waits for batches and more of them make it faster, up to the limits of cores
    and memory. If the loop then waits for a few late batches only, it doubles the read-ahead.

    Args:
        num_workers: The fixed number of workers; None to find it.
        prefetch: The fixed number of batches that each makes ahead; None to find it.

    Attributes:
        setting: The setting that is used now.
        reason: Why it is used, once it stays; empty before.
        trials: What was measured: settings, batches per second, and the share of the time that the loop waited.
    """

    def __init__(
        self,
        num_workers: int | None,
        prefetch: int | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cores: int | None = None,
        memory: Callable[[], int | None] = available_memory,
        child_memory: Callable[[], int] = memory_of_largest_child,
    ) -> None:
        self.setting = Setting(num_workers or 1, prefetch or 2)
        self.reason = ""
        self.trials: list[dict[str, Any]] = []
        self._finds_workers = num_workers is None
        self._finds_prefetch = prefetch is None
        self._clock = clock
        self._memory = memory
        self._child_memory = child_memory
        self._cores = available_cores() if cores is None else cores
        self._before: Setting | None = None  # the setting that a trial is compared with, and its rate
        self._rate_before = 0.0
        self._num_calm = 0
        self._workers_reason = "" if self._finds_workers else f"`num_workers` is fixed at {num_workers}"
        self.begin()

    def begin(self) -> None:
        """Begin to measure: workers have started, or an epoch has begun."""
        self._window = _Window(self.setting.num_workers)

    def note_batch(self, waited_s: float) -> Setting | None:
        """Note a delivered batch, and return another setting if that is to be used from now on.

        Args:
            waited_s: How long the loop has waited for batches since the loader was made.
        """
        if self.reason or not self._window.note(self._clock(), waited_s):
            return None
        window = self._window
        before = self.setting
        elapsed = window.elapsed()
        rate = len(window.waits) / elapsed
        share = sum(window.waits) / elapsed
        self.trials.append({**self.setting._asdict(), "batches_per_s": rate, "wait_share": share})
        self._decide(rate, share, window.share_of_rounds())
        self.begin()
        return None if self.setting == before else self.setting

    def _decide(self, rate: float, share: float, typical: float) -> None:
        """Choose the next setting, or let it stay.

        Args:
            rate: Batches per second.
            share: The part of the time that the loop waited.
            typical: The part of a typical round of the workers that the loop waited.
        """
        number, prefetch = self.setting
        keeps_up = share < _WAITING
        if self._before is not None and not keeps_up and rate < _GAIN * self._rate_before:
            self.setting = self._before
            self._workers_reason = f"{number} workers were not {_GAIN} times as fast as {self.setting.num_workers}"
            self.reason = self._workers_reason
            return
        self._before = None
        self._num_calm = self._num_calm + 1 if keeps_up else 0
        if keeps_up:  # the first steps of a training loop are slow: look again before the setting stays
            if self._num_calm >= _CALM:
                self.reason = f"the loop waits for {share:.0%} of the time"
            return
        if self._finds_prefetch and typical < _WAITING and prefetch < _MAX_PREFETCH:
            self.setting = Setting(number, 2 * prefetch)  # most batches were there in time, a few came late
            return
        self._workers_reason = self._workers_reason or self._limit(number)
        if self._workers_reason:
            self.reason = self._workers_reason
            return
        self._before = self.setting
        self._rate_before = rate
        self.setting = Setting(min(2 * number, _WORKERS_PER_CORE * self._cores), prefetch)

    def _limit(self, number: int) -> str:
        """Return what forbids more workers; the empty string if nothing does."""
        most = _WORKERS_PER_CORE * self._cores
        if number >= most:
            return f"{number} workers are the limit of {self._cores} cores"
        free = self._memory()
        each = self._child_memory()
        if free is not None and number * each > _MEMORY_SHARE * free:
            return f"{2 * number} workers of {each / 2**20:,.0f} MiB each would take too much memory"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return the setting, whether it stays, why, and what was measured: plain data."""
        return {
            **self.setting._asdict(),
            "is_settled": bool(self.reason),
            "reason": self.reason,
            "trials": [dict(trial) for trial in self.trials],
        }
