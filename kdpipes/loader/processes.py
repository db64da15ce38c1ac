"""The main-process side of worker processes: start them, receive batches, restart them when they die, end them."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any, NamedTuple

from kdpipes.core import pickling
from kdpipes.core.activity import read_record
from kdpipes.core.chain import Chain
from kdpipes.core.errors import WorkerError, add_note
from kdpipes.core.messages import logger
from kdpipes.core.operation import entry_name
from kdpipes.core.processes import ForkLock, at_fork, forget_after_fork, interrupts_blocked, uninterrupted
from kdpipes.core.shared import Shared, sharing
from kdpipes.delivery.clock import Position
from kdpipes.delivery.deal import DealerMapDataPipe
from kdpipes.loader.buffers import Arena, BorrowedBuffers, unpack
from kdpipes.loader.channel import Channel, Kind, Message, SharedFile, encoded
from kdpipes.loader.merge import Counters
from kdpipes.loader.worker import Assignment, Options, Worker
from kdpipes.loader.worker_main import Packed, work
from kdpipes.storage.jobs import Payload

NUM_BORROWED = 2  # buffers of a worker that users may hold, before they get copies
_FEW = 16  # small batches that are acknowledged together
_START_UP_S = 60.0
_PATIENCE_S = 1.0
_NUM_FILES = 8  # per worker: link, pidfd, multiprocessing's two pipes, record, arena; and arenas being replaced

_log = logger("kdpipes")
# Workers start one at a time: one that another thread forks between `socketpair` and the end of `start` would inherit
# both ends of the other's link, and keep it open when its owners have ended.
_one_at_a_time = ForkLock()
_starting = threading.Event()


@dataclass(eq=False)
class WorkerProcess:
    """A started worker process.

    Args:
        process: The process, of multiprocessing.
        channel: The messages to and from it.
        end: A descriptor that can be read once the process has ended.
    """

    process: Any
    channel: Channel
    end: int
    owner: int = field(default_factory=os.getpid)  # the process that it is a child of
    buffers: BorrowedBuffers = field(default_factory=BorrowedBuffers)
    record: SharedFile | None = None  # what it does with which sample, once it has read its chain
    is_over: bool = False  # it has reported that it cannot work

    @classmethod
    def start(cls, context: Any, payload: Payload, options: Options) -> WorkerProcess:
        """Start a process with a context of multiprocessing."""
        # Multiprocessing's helpers start early: later, they would inherit a blocked Ctrl-C, or unblock it (3.11).
        if context.get_start_method() in ("spawn", "forkserver"):
            # While multiprocessing imports the script, `__mp_main__` is not yet `__main__`.
            if sys.modules.get("__mp_main__", sys.modules["__main__"]) is not sys.modules["__main__"]:
                if multiprocessing.current_process().name == _NAME:
                    os._exit(_NO_GUARD)  # the main process raises the error, once for all workers
                raise WorkerError(_GUARD)
            resource_tracker.ensure_running()
        if context.get_start_method() == "forkserver":
            forkserver.ensure_running()
        with _one_at_a_time.lock:
            ours, theirs = socket.socketpair()
            process = context.Process(target=work, args=(payload, theirs, options), name=_NAME, daemon=True)
            _starting.set()
            try:
                with interrupts_blocked():
                    process.start()
                end = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else process.sentinel
            except BaseException as error:
                ours.close()
                if process.pid is not None:
                    process.kill()
                    process.join()
                # The fork server of Python 3.14 imports the script.
                if isinstance(error, ConnectionError | EOFError):
                    raise WorkerError(_GUARD) from error
                raise
            finally:
                _starting.clear()
                theirs.close()
        started = cls(process, Channel(ours), end)
        forget_after_fork(started)
        return started

    @property
    def is_sound(self) -> bool:
        """Whether it runs, and for this process."""
        return not self.is_over and self.owner == os.getpid() and not self.has_ended()

    def listen(self, timeout_s: float | None) -> list[Message] | None:
        """Wait for messages and return them; None means that the process has died.

        Raises:
            TimeoutError: No message came for `timeout_s`.
        """
        # The end of the link alone would not do: a process that the worker has forked may hold the link open. What has
        # come over the link is read first, since batches that a worker has sent before it died are good.
        self.channel.post(b"")
        poll = select.poll()
        poll.register(self.channel.link, select.POLLIN | (select.POLLOUT if self.channel.outgoing else 0))
        poll.register(self.end, select.POLLIN)
        events = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
        if not events:
            raise TimeoutError
        return self.channel.receive(wait=False) if self.channel.link.fileno() in events else None

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the process has ended, after waiting for that."""
        return bool(connection.wait([self.end], max(timeout_s, 0.0)))

    def status(self) -> int | None:
        """Return the exit code of a process that is ending; None if another thread has reaped it."""
        self.has_ended(_PATIENCE_S)
        # The fork server reports the code a moment after the end.
        self.process.join(_PATIENCE_S if getattr(self.process, "_start_method", "") == "forkserver" else 0)
        code: int | None = self.process.exitcode
        return code

    def kill(self, number: int) -> None:
        """Send a signal to the process, and never to another one that has got its number."""
        with contextlib.suppress(ProcessLookupError):
            if hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(self.end, number)
            else:
                os.kill(self.process.pid, number)

    def forget(self) -> None:
        """Remove the process from multiprocessing's list of children, which are ended when the interpreter exits."""
        # A process that the user forks would otherwise wait for the workers of its parent, and end them.
        getattr(multiprocessing.process, "_children", set()).discard(self.process)

    def close(self) -> None:
        """Release this process's resources for a worker that has ended."""
        self.forget()
        if self.end != self.process.sentinel:
            os.close(self.end)
        with contextlib.suppress(ValueError):  # another thread has reaped it: its status is not known
            self.process.close()
        self.channel.close()
        self.buffers.arena = None
        self.record = None


@dataclass(eq=False)
class ProcessPool:
    """The worker processes of one loader, which end together: when it is closed or forgotten, or Python ends.

    Args:
        payload: The chain.
        start_method: How processes start; None is the platform's way.
        counters: What is counted.
        is_restarted: Whether a worker that dies or gets stuck is replaced.
        num_deaths: How many may die at the same sample.
        max_worker_deaths: How many may die without a batch in between, for any reason.
        handler: The operation of `on_error`, if it lets samples be left out.
    """

    payload: Payload
    start_method: str | None
    counters: Counters
    is_restarted: bool
    num_deaths: int
    max_worker_deaths: int
    handler: Any
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        weakref.finalize(self, _end_all, self.workers)

    def close(self) -> None:
        """End all workers."""
        _end_all(self.workers)


def _end_all(workers: list[WorkerProcess]) -> None:
    """End workers: those that wait at once, others after a moment."""
    if sys.is_finalizing():
        return  # the interpreter has ended them
    with uninterrupted():  # otherwise the remaining workers would not be ended; takes two seconds at most
        # A forked process has inherited the workers of its parent.
        own = [worker for worker in workers if worker.owner == os.getpid()]
        workers.clear()
        for worker in own:
            # Not `close`: a process that the user has forked holds the link open, too.
            with contextlib.suppress(OSError):  # it has ended already
                worker.channel.link.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _PATIENCE_S
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in [worker for worker in own if not worker.has_ended(deadline - time.monotonic())]:
                worker.kill(number)
            deadline = time.monotonic() + _PATIENCE_S / 2
        for worker in own:
            worker.status()
            worker.close()


def _before_fork() -> None:
    if not _starting.is_set():  # our own workers read nothing that they inherit
        BorrowedBuffers.detach_borrowed()


at_fork(before=_before_fork)


def name_classes(chain: Any) -> None:
    """Let cloudpickle name the classes of a notebook or a function that a chain uses, before workers are forked.

    It pickles such a class by value, under a name that it gives it when it first meets it. A worker that named it would
    send objects of a class of its own, which are not instances of the main process's.
    """
    held = (value.value for pipe in Chain.of(chain).pipes for value in vars(pipe).values() if isinstance(value, Shared))
    with sharing():
        for part in [chain, *map(type, Chain.of(chain).pipes), *map(type, held)]:
            with contextlib.suppress(Exception):  # what does not pickle does not matter: forks inherit it
                pickling.dumps(part)


class _Arrived(NamedTuple):
    """An item as it has arrived."""

    worker: WorkerProcess
    packed: Packed
    arena: Arena | None


class ProcessWorker(Worker):
    """The main process's side of one worker process; starts another one when it dies."""

    def __init__(self, pool: ProcessPool, options: Options) -> None:
        self._pool = pool
        self._options = options
        self._context = multiprocessing.get_context(pool.start_method)
        self._counters = pool.counters
        self._assignment = Assignment(Position())
        self._num_assignments = 0
        self._is_followed = False  # whether the worker's messages are those of the last assignment
        self._position = Position()  # after what has come from the worker
        self.messages: deque[Message] = deque()
        self._num_taken = 0
        self._deaths: list[str] = []  # the activities of workers that died since the last batch
        self._worker: WorkerProcess | None = None
        self._start()

    def begin(self, assignment: Assignment) -> None:
        for message in self.messages:
            if message.kind is Kind.ITEM:
                self._discard(message.content)
        self.messages.clear()
        self._deaths.clear()
        self._assignment = assignment
        self._position = assignment.position
        worker = self._worker
        if worker is not None and (self.is_torn or not worker.is_sound):
            self._counters.num_deaths += worker.has_ended() and not worker.is_over
            self._worker = None
            with uninterrupted():
                self._pool.workers.remove(worker)
                _end_all([worker])
        if self._worker is None:
            self._start()
        self._send_assignment()

    def wait(self) -> None:
        with self._opening_files():
            self._wait()

    def is_ready(self) -> bool:
        if not self.messages and self._worker is not None:
            with contextlib.suppress(TimeoutError), self._opening_files():
                for message in self._worker.listen(0) or ():  # `peek` deals with a worker that has died
                    self._receive(self._worker, message)
        return bool(self.messages)

    def take(self) -> Any:
        message = self.messages.popleft()
        return self._unpacked(message) if message.kind is Kind.ITEM else message.content

    def close(self) -> None:
        self.messages.clear()
        self._pool.close()  # all of them at a time

    def _start(self) -> None:
        self._num_taken = 0
        while True:
            try:
                # A process that is not in the pool yet would never be ended.
                with self._opening_files(), uninterrupted():
                    self._worker = WorkerProcess.start(self._context, self._pool.payload, self._options)
                    self._pool.workers.append(self._worker)
                return
            except (BrokenPipeError, ProcessLookupError):  # it died before it had read the chain
                self._counters.num_deaths += 1
                self._deaths.append("starting")
                self._judge("", (), "starting", "A worker process died during start-up, before it had read its chain.")

    @contextlib.contextmanager
    def _opening_files(self) -> Iterator[None]:
        """If too many files are open, raise an error with the number of descriptors that the workers need."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # Windows, where this module is imported as well, has no such module.
            import resource

            number = self._options.num_workers
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}. {number} workers need up to {number * _NUM_FILES} file descriptors in "
                f"addition to those that are open; `ulimit -n` is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}. "
                "Raise it, or use fewer workers.",
            ) from error

    def _send_assignment(self) -> None:
        assert self._worker is not None
        self._num_assignments += 1
        self._is_followed = False
        self._worker.channel.post(encoded(Message(Kind.ASSIGNMENT, self._num_assignments, self._assignment)))

    def _acknowledge(self, worker: WorkerProcess, number: int, *, at_once: bool) -> None:
        """Tell the worker that batches have been taken, and which buffers it may write again."""
        # A forked child has inherited the socket, but batches are acknowledged by the worker's own parent.
        if worker is not self._worker or worker.owner != os.getpid():
            return
        self._num_taken += number
        released = worker.buffers.take_released()
        if released is not None or (self._num_taken and (at_once or self._num_taken >= _FEW)):
            worker.channel.post(encoded(Message(Kind.TAKEN, self._num_taken, released)))
            self._num_taken = 0

    def _wait(self) -> None:
        """Wait for messages of the worker, or for its death."""
        worker = self._worker
        timeout_s = self._options.timeout_s
        if worker is None:
            raise RuntimeError("The loader has been closed, or its worker could not be started. Make a new one.")
        self._acknowledge(worker, 0, at_once=True)
        if timeout_s is not None and worker.record is None:
            timeout_s += _START_UP_S
        try:
            messages = worker.listen(timeout_s)
        except TimeoutError:
            worker.kill(signal.SIGKILL)
            self._replace(worker, f"made no batch in {self._options.timeout_s:g} s, and was ended")
            return
        if messages is None:
            self._replace(worker, "")
            return
        for message in messages:
            self._receive(worker, message)

    def _receive(self, worker: WorkerProcess, message: Message) -> None:
        if message.kind is Kind.ITEM:
            # A batch belongs to the arena that was the newest when it was sent, so that later arenas do not matter.
            message.content = _Arrived(worker, Packed(*message.content), worker.buffers.arena)
        if message.kind is Kind.READY:
            worker.record = message.content
        elif message.kind is Kind.ARENA:
            worker.buffers.attach(message.number, message.content)
        elif message.kind is Kind.BEGUN:
            self._is_followed = message.number == self._num_assignments
        elif self._is_followed or worker.record is None:
            if message.kind is Kind.ERROR:
                worker.is_over = worker.record is None
                message.content = pickle.loads(message.content)  # noqa: S301 - sent by a worker of ours
            elif message.kind in (Kind.ITEM, Kind.OVER):
                self._deaths.clear()
                self._position = self._position.after(message.number, message.progress)
            self.messages.append(message)
        elif message.kind is Kind.ITEM:
            self._discard(message.content)

    def _unpacked(self, message: Message) -> Any:
        """Return an item; its tensors are views of a shared buffer, or of memory of their own."""
        worker, packed, arena = message.content
        if packed.buffer is None or arena is None:
            body = memoryview(packed.content or b"")
            arrays = [body[start:end] for start, end in packed.places]
            if packed.lack and not self._counters.num_slow:
                _log.warning("%s", packed.lack)
            self._counters.num_slow += bool(packed.lack)
        elif len(worker.buffers.borrowed) < NUM_BORROWED:
            arrays = worker.buffers.borrow(arena, packed.buffer, packed.places)
        else:
            self._counters.num_copied += 1
            arrays = worker.buffers.copy(arena, packed.buffer, packed.places)
        try:
            item = unpack(arrays.pop(0) if packed.stream is None else packed.stream, arrays)
        except Exception as error:
            epoch = self._assignment.position.epoch
            place = f"batch {message.number} of epoch {epoch}{self._samples_of(message.number)}"
            add_note(error, f"kdpipes: while unpickling {place}, sent by worker process {worker.process.pid}")
            raise
        del arrays
        self._acknowledge(worker, 1, at_once=packed.buffer is not None)
        return item

    def _samples_of(self, batch: int) -> str:
        """Return the keys of the samples in a batch as text for an error; empty if the chain is not indexed."""
        dealer = Chain.of(self._pool.payload.open()).resumable_deal()
        with contextlib.suppress(Exception):  # an error here must not hide the original one
            if isinstance(dealer, DealerMapDataPipe):
                keys = [sample.key for sample in dealer.whole_samples(self._assignment.position.epoch, batch) or []]
                shown = ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "")
                return f" (samples {shown})"
        return ""

    def _discard(self, arrived: _Arrived) -> None:
        buffer = arrived.packed.buffer
        arena = arrived.arena
        if buffer is not None and arena is not None:
            arrived.worker.buffers.release(arena, buffer)
        self._acknowledge(arrived.worker, 1, at_once=buffer is not None)

    def _replace(self, worker: WorkerProcess, cause: str) -> None:
        """Replace a worker that has died, or raise an error that describes its death."""
        code = worker.status()
        key = ""
        position: tuple[int, ...] = ()
        doing = "starting"
        if worker.record is not None:
            key, position, doing = read_record(worker.record.number)
            doing = doing or f"making batch {self._position.number} or later"
        death = f"Worker process {worker.process.pid} {cause or _cause(code)}, while {doing}."
        self._counters.num_deaths += 1
        work = entry_name(doing, position)  # samples may have equal keys
        self._deaths.append(work)
        has_begun = worker.record is not None
        with uninterrupted():
            self._worker = None
            self._pool.workers.remove(worker)
            worker.close()  # batches that have arrived keep their arenas
        # Ctrl-C may end a process of the fork server with status 1 before the process can ignore it.
        is_final = self._context.get_start_method() != "forkserver" or self._deaths.count(work) > 1
        if code == _NO_GUARD:
            raise WorkerError(_GUARD)
        if not has_begun and code is not None and code >= 0 and is_final:
            raise WorkerError(f"{death} See its output for the cause.")
        self._judge(key, position, work, death)
        _log.warning("%s Another one takes its place.", death)
        self._start()
        self._assignment = replace(self._assignment, position=self._position, banned=self._counters.banned)
        self._send_assignment()

    def _judge(self, key: str, position: tuple[int, ...], work: str, death: str) -> None:
        """Raise, or let `on_error` leave a sample out, if too many workers have died."""
        pool = self._pool
        num_same = self._deaths.count(work)
        is_known = num_same >= pool.num_deaths
        if not pool.is_restarted:
            raise WorkerError(f"{death} {_ADVICE}")
        if not isinstance(Chain.of(pool.payload.open()).resumable_deal(), DealerMapDataPipe):
            position = ()  # which may be another one in the next epoch of a stream
        name = entry_name(key, position)
        if is_known and pool.handler is not None and key and name not in self._counters.banned:
            self._counters.banned[name] = death
            pool.handler.write_down(key, death, position=position)
            self._deaths.clear()
        elif is_known:
            raise WorkerError(
                f"{death} {num_same} workers have died at this point; `num_deaths` is {pool.num_deaths}. {_ADVICE}"
            )
        elif len(self._deaths) >= pool.max_worker_deaths:
            raise WorkerError(
                f"{death} {len(self._deaths)} workers have died without a batch in between; `max_worker_deaths` "
                f"of `ProcessReadingService` is {pool.max_worker_deaths}. {_ADVICE}"
            )


_ADVICE = "See its output for the cause. The next iteration starts new workers."
_GUARD = (
    "Workers that are not forked import the script, which makes loaders when it is imported. Make them under "
    '`if __name__ == "__main__":`.'
)
_NAME = "kdpipes worker"
_NO_GUARD = 78  # the exit status of a worker that cannot import the script


def _cause(code: int | None) -> str:
    if code is None:
        return "exited (exit status unknown: another thread reaped it)"
    if code >= 0:
        return f"ended with status {code} before its work was done"
    end = f"was ended by signal {signal.Signals(-code).name}"
    return f"{end}, as the system does when memory runs out" if code == -signal.SIGKILL else end
