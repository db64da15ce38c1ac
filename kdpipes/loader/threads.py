"""Worker threads, and the reading of a chain without workers in the calling thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from kdpipes.core.errors import WorkerError
from kdpipes.loader.channel import Kind, Message
from kdpipes.loader.profile import producer_of
from kdpipes.loader.worker import Assignment, Options, Worker, follow

_END: Any = object()


class InlineWorker(Worker):
    """Runs the chain in the calling thread and makes each item on demand."""

    def __init__(self, chain: Any, options: Options) -> None:
        self.producer = producer_of(chain, options)
        self.messages: deque[Message] = deque()
        self._steps: Iterator[None] = iter(())

    def begin(self, assignment: Assignment) -> None:
        self.messages.clear()
        self._steps = self.producer.epoch(assignment, self.messages.append)

    def wait(self) -> None:
        if next(self._steps, _END) is _END and not self.messages:
            self.messages.append(Message(Kind.END))

    def close(self) -> None:
        self.messages.clear()
        self._steps = iter(())
        self.producer.close()


class _Queue:
    """The messages of a worker thread and its next assignment; `changed` guards all of it."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.changed = threading.Condition()
        self.messages: deque[Message] = deque()
        self.assignment: Assignment | None = None  # that the thread has not begun
        self.is_stopped = False
        self.owner = os.getpid()

    def next_assignment(self) -> Assignment | None:
        with self.changed:
            self.changed.wait_for(self._is_outdated)
            assignment = self.assignment
            self.assignment = None
            return None if self.is_stopped else assignment

    def send(self, message: Message) -> None:
        with self.changed:
            if not self._is_outdated():
                self.messages.append(message)
                self.changed.notify_all()

    def may_go_on(self) -> bool:
        def has_room() -> bool:
            return sum(message.kind is Kind.ITEM for message in self.messages) < self.prefetch

        with self.changed:
            self.changed.wait_for(lambda: self._is_outdated() or has_room())
            return not self._is_outdated()

    def _is_outdated(self) -> bool:
        """Return whether the thread must not continue with its assignment."""
        return self.is_stopped or self.assignment is not None

    def stop(self) -> None:
        # In a forked child the thread does not exist, and it may have held the lock when the child was forked.
        if self.owner != os.getpid():
            return
        with self.changed:
            self.is_stopped = True
            self.messages.clear()
            self.changed.notify_all()


class ThreadWorker(Worker):
    """A thread with a copy of the chain's moving parts."""

    def __init__(self, chain: Any, options: Options) -> None:
        self._options = options
        self.producer = producer_of(chain, options)
        self._start()

    def _start(self) -> None:
        self._queue = _Queue(self._options.prefetch)
        self.messages = self._queue.messages
        name = f"kdpipes worker {self._options.worker}"
        arguments = (self.producer, self._queue)
        self._thread = threading.Thread(target=follow, args=arguments, name=name, daemon=True)
        self._thread.start()
        # Neither the thread nor the finalizer refers to this worker, so that it ends when its loader is dropped.
        self._finalizer = weakref.finalize(self, _end, self._queue, self._thread)

    def begin(self, assignment: Assignment) -> None:
        if not self._thread.is_alive():  # this is a process that was forked from the thread's own
            self._finalizer.detach()
            self._start()
        with self._queue.changed:
            self.messages.clear()
            self._queue.assignment = assignment
            self._queue.changed.notify_all()

    def wait(self) -> None:
        changed = self._queue.changed
        timeout_s = self._options.timeout_s
        with changed:
            if not changed.wait_for(lambda: self.messages, timeout_s):
                raise WorkerError(
                    f"A worker thread made no batch in {timeout_s:g} s. Threads cannot be killed. If a worker "
                    "can hang, use `ProcessReadingService`, which can replace it."
                )

    def take(self) -> Any:
        with self._queue.changed:
            self._queue.changed.notify_all()
            return super().take()

    def stop(self) -> None:
        self._queue.stop()

    def close(self) -> None:
        self._finalizer()


def _end(queue: _Queue, thread: threading.Thread) -> None:
    """End a thread that waits; one that is stuck in a user's code ends with the process."""
    queue.stop()
    if queue.owner == os.getpid() and thread is not threading.current_thread():
        thread.join(1.0)
