"""A worker that is a thread, and one that is no worker at all: the chain in the thread that asks for items."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from kdpipes.core.errors import WorkerError
from kdpipes.delivery.lane_profile import producer_of
from kdpipes.delivery.merger import Lane, Tally
from kdpipes.delivery.packing import add_traceback
from kdpipes.delivery.producer import Frame, Kind, Order, Producer

__all__ = ["InlineLane", "ThreadLane"]

_END: Any = object()


class InlineLane(Lane):
    """The chain in the thread that asks for items, made when they are asked for.

    Args:
        chain: The chain.
        first_epoch: The number of its first epoch.
        is_profiled: Whether it is measured.
    """

    def __init__(self, chain: Any, first_epoch: int, *, is_profiled: bool = False) -> None:
        self._producer = producer_of(chain, 0, 1, is_profiled=is_profiled)
        self._first_epoch = first_epoch
        self._frames: deque[Frame] = deque()
        self._steps: Iterator[None] = iter(())

    def begin(self, order: Order) -> None:
        self._frames.clear()
        self._steps = self._producer.epoch(order, self._first_epoch, self._frames.append)

    def peek(self) -> Frame:
        while not self._frames:
            if next(self._steps, _END) is _END and not self._frames:
                self._frames.append(Frame(Kind.END))
        return self._frames[0]

    def take(self) -> Any:
        return self._frames.popleft().content

    def close(self) -> None:
        self._frames.clear()
        self._steps = iter(())


class _Shared:
    """What the thread and the one who waits for it both hold; `changed` guards all of it."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.changed = threading.Condition()
        self.frames: deque[Frame] = deque()
        self.order: Order | None = None
        self.generation = 0
        self.is_stopped = False
        self.owner = os.getpid()

    def num_items(self) -> int:
        return sum(frame.kind is Kind.ITEM for frame in self.frames)


class ThreadLane(Lane):
    """A thread with a copy of the chain's moving parts.

    Args:
        chain: The copy.
        worker: The number of the thread.
        num_workers: How many there are.
        first_epoch: The number of the chain's first epoch.
        prefetch: How many items it makes ahead.
        timeout_s: How long to wait for one item; None is for ever.
        tally: What is counted.
        is_profiled: Whether it is measured.
    """

    def __init__(
        self,
        chain: Any,
        worker: int,
        num_workers: int,
        *,
        first_epoch: int,
        prefetch: int,
        timeout_s: float | None,
        tally: Tally,
        is_profiled: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._tally = tally
        self._prefetch = prefetch
        self._producer = producer_of(chain, worker, num_workers, is_profiled=is_profiled)
        self._first_epoch = first_epoch
        self._name = f"kdpipes worker {worker}"
        self._start()

    def _start(self) -> None:
        self._shared = _Shared(self._prefetch)
        self._thread = threading.Thread(
            target=_run, args=(self._producer, self._first_epoch, self._shared), name=self._name, daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._shared, self._thread)

    @property
    def num_waiting(self) -> int:
        return len(self._shared.frames)

    def begin(self, order: Order) -> None:
        if not self._thread.is_alive():  # this is a process that was forked from the thread's own
            self._finalizer.detach()
            self._start()
        with self._shared.changed:
            self._shared.frames.clear()
            self._shared.order = order
            self._shared.generation += 1
            self._shared.changed.notify_all()

    def peek(self) -> Frame:
        shared = self._shared
        with shared.changed:
            if not shared.changed.wait_for(lambda: shared.frames, self._timeout_s):
                raise WorkerError(
                    f"A worker thread made no batch in {self._timeout_s:g} s. Threads cannot be ended: where work gets "
                    "stuck, use `ProcessReadingService`, which replaces the worker."
                )
            return shared.frames[0]

    def take(self) -> Any:
        with self._shared.changed:
            frame = self._shared.frames.popleft()
            self._shared.changed.notify_all()
        return frame.content

    def stop(self) -> None:
        _tell_to_stop(self._shared)

    def close(self) -> None:
        self._finalizer()


def _run(producer: Producer, first_epoch: int, shared: _Shared) -> None:
    generation = 0

    def send(frame: Frame) -> None:
        if frame.kind is Kind.ERROR:
            add_traceback(frame.content)
        with shared.changed:
            if shared.generation == generation:
                shared.frames.append(frame)
                shared.changed.notify_all()

    def wait_for_order() -> Order | None:
        nonlocal generation
        with shared.changed:
            shared.changed.wait_for(lambda: shared.is_stopped or shared.generation != generation)
            generation = shared.generation
            return None if shared.is_stopped else shared.order

    def may_go_on() -> bool:
        with shared.changed:
            shared.changed.wait_for(
                lambda: shared.is_stopped or shared.generation != generation or shared.num_items() < shared.prefetch
            )
            return not shared.is_stopped and shared.generation == generation

    while True:
        order = wait_for_order()
        if order is None:
            return
        try:
            for _ in producer.epoch(order, first_epoch, send):
                if not may_go_on():
                    break
        except BaseException as error:  # SystemExit in a user's code, say, which would end the thread in silence
            send(Frame(Kind.ERROR, content=error))


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    """End a thread that waits; one that is stuck in a user's code ends with the process."""
    _tell_to_stop(shared)
    if shared.owner == os.getpid() and thread is not threading.current_thread():
        thread.join(1.0)


def _tell_to_stop(shared: _Shared) -> None:
    if shared.owner != os.getpid():
        return  # in a forked child, the thread does not exist, and the parent's may have held the lock
    with shared.changed:
        shared.is_stopped = True
        shared.frames.clear()
        shared.changed.notify_all()
