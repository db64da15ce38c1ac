"""A worker process as the main process sees it: what it says, its death, and its successor."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import Any, NamedTuple

import cloudpickle

from kdpipes._record import read_record
from kdpipes.delivery.merger import Lane, Tally
from kdpipes.delivery.packing import unpack
from kdpipes.delivery.producer import Frame, Kind, Order, Position
from kdpipes.delivery.shared_slots import LentSlots
from kdpipes.delivery.wire import NO_SLOT, Message, Reader, Said, Told, message
from kdpipes.delivery.worker import Options, Parcel, work
from kdpipes.errors import WorkerError

__all__ = ["NUM_LENT", "ProcessLane", "end_processes"]

NUM_LENT = 2  # slots of a worker that users may hold, before they get copies
_FEW = 16  # small batches that are acknowledged together
_MAX_DEATHS = 10  # without a batch in between, whatever the workers died of
_START_UP_S = 60.0
_PATIENCE_S = 1.0

_log = logging.getLogger("kdpipes")
_one_at_a_time = threading.RLock()  # so that a worker does not inherit the other end of another one's link


@dataclass(eq=False)
class _Life:
    """One worker process."""

    process: Any
    link: socket.socket
    reader: Reader
    owner: int  # the process that it is a child of
    end: int  # a descriptor that can be read once the process has ended
    outgoing: bytearray = field(default_factory=bytearray)
    slots: LentSlots = field(default_factory=LentSlots)
    record: int | None = None
    is_ready: bool = False
    is_over: bool = False

    def doing(self) -> tuple[str, str]:
        """Return the key of the sample that the worker was at last, and what it did with it."""
        return ("", "") if self.record is None else read_record(self.record)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the process has ended, after waiting for that."""
        return bool(connection.wait([self.end], max(timeout_s, 0.0)))

    def kill(self, number: int) -> None:
        """Send the process a signal, and never another one that has got its number."""
        with contextlib.suppress(ProcessLookupError):
            if hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(self.end, number)
            else:
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """Close what the main process holds of a worker that has ended."""
        _forget(self.process)
        if self.end != self.process.sentinel:
            os.close(self.end)
        with contextlib.suppress(ValueError):  # somebody else has waited for it: its status is not known
            self.process.close()
        self.link.close()
        self.slots.close()
        if self.record is not None:
            os.close(self.record)


class _Unopened(NamedTuple):
    """An item as a worker has sent it."""

    life: _Life
    said: Message


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def _forget(process: Any) -> None:
    """Take a process from multiprocessing's list of children, which it ends when the interpreter exits."""
    getattr(multiprocessing.process, "_children", set()).discard(process)
    _alive.discard(process)


def _after_fork() -> None:
    """Let a process that the user forks neither wait for the lock of another one nor end the workers of its parent."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()
    for process in list(_alive):
        _forget(process)


def _before_fork() -> None:
    if not _starting.is_set():  # our own workers read nothing that they inherit
        LentSlots.wear_out()


_starting = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def end_processes(lives: list[_Life]) -> None:
    """End workers: those that wait at once, others after a moment."""
    if sys.is_finalizing():
        return  # the interpreter has ended them
    own = [life for life in lives if life.owner == os.getpid()]  # a process that was forked has inherited others
    lives.clear()
    for life in own:
        with contextlib.suppress(OSError):  # it has ended already
            life.link.send(message(Told.STOP), socket.MSG_DONTWAIT)
            life.link.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + _PATIENCE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        late = [life for life in own if not life.has_ended(deadline - time.monotonic())]
        for life in late:
            life.kill(number)
        deadline = time.monotonic() + _PATIENCE_S / 2
    for life in own:
        life.has_ended(_PATIENCE_S)
        life.process.join(0)
        life.close()


class ProcessLane(Lane):
    """A worker process, and its successors.

    Args:
        parcel: The chain.
        options: How the worker works.
        start_method: How its process starts; None is the platform's way.
        timeout_s: How long to wait for one batch, before the worker is taken for stuck; None is for ever.
        is_restarted: Whether a worker that dies gets a successor.
        num_deaths: How many workers may die at the same sample.
        tally: What is counted.
        handler: What `on_error` says, if it lets samples be left out.
        has_own_cursor: Whether the worker reads shards of its own.
    """

    def __init__(
        self,
        parcel: Parcel,
        options: Options,
        *,
        start_method: str | None,
        timeout_s: float | None,
        is_restarted: bool,
        num_deaths: int,
        tally: Tally,
        handler: Any,
        has_own_cursor: bool,
    ) -> None:
        self._parcel = parcel
        self._options = options
        self._context: Any = multiprocessing.get_context(start_method)
        self._timeout_s = timeout_s
        self._is_restarted = is_restarted
        self._num_deaths = num_deaths
        self._tally = tally
        self._handler = handler
        self._cursor_place = options.worker if has_own_cursor else 0
        self._generation = 0
        self._order: Order | None = None
        self._position = Position()  # after what has come from the worker
        self._frames: deque[Frame] = deque()
        self._num_done = 0
        self._deaths: list[str] = []  # what workers were doing when they died, since the last batch
        self._lives: list[_Life] = []
        self._finalizer = weakref.finalize(self, end_processes, self._lives)
        self._start()

    @property
    def num_waiting(self) -> int:
        return len(self._frames)

    def begin(self, order: Order) -> None:
        self._drop_frames()
        self._deaths.clear()
        self._order, self._position = order, order.position
        if self.is_torn or not self._lives or not self._is_sound(self._lives[0]):
            self._tally.num_deaths += any(life.has_ended() and not life.is_over for life in self._lives)
            self._restart()
        self._generation += 1
        self._send_order()

    def peek(self) -> Frame:
        while not self._frames:
            self._wait()
        return self._frames[0]

    def take(self) -> Any:
        content = self._frames.popleft().content
        return self._open(*content) if isinstance(content, _Unopened) else content

    def close(self) -> None:
        self._frames.clear()
        self._finalizer.detach()
        end_processes(self._lives)

    def _start(self) -> None:
        with _one_at_a_time:
            ours, theirs = socket.socketpair()
            process = self._context.Process(
                target=work, args=(self._parcel, theirs, self._options), name="kdpipes worker", daemon=True
            )
            _starting.set()
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                _starting.clear()
                theirs.close()
        _alive.add(process)
        end = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else process.sentinel
        self._lives.append(_Life(process, ours, Reader(ours), os.getpid(), end))
        self._num_done = 0

    def _restart(self) -> None:
        end_processes(self._lives)
        self._start()

    def _is_sound(self, life: _Life) -> bool:
        return not life.is_over and life.owner == os.getpid() and not life.has_ended()

    def _send_order(self) -> None:
        payload = cloudpickle.dumps(self._order)
        self._send(message(Told.ORDER, [payload], generation=self._generation))

    def _send(self, content: bytes) -> None:
        """Send as much as goes without waiting; the rest follows when this side waits."""
        life = self._lives[0]
        life.outgoing += content
        with contextlib.suppress(OSError):  # it is busy; or it has died, which reading what it said last comes to
            while life.outgoing:
                del life.outgoing[: life.link.send(life.outgoing, socket.MSG_DONTWAIT)]

    def _done(self, number: int, *, at_once: bool) -> None:
        """Tell the worker that batches have been taken, and which slots it may write again."""
        self._num_done += number
        returned = self._lives[0].slots.returned
        if self._num_done and (at_once or returned or self._num_done >= _FEW):
            slots = b"".join(returned.popleft().to_bytes(2, "little") for _ in range(len(returned)))
            self._send(message(Told.DONE, [slots], num=self._num_done))
            self._num_done = 0

    def _wait(self) -> None:
        """Wait for the worker to say something, or to die."""
        life = self._lives[0]
        self._done(0, at_once=True)
        self._send(b"")
        poll = select.poll()
        poll.register(life.link, select.POLLIN | (select.POLLOUT if life.outgoing else 0))
        poll.register(life.end, select.POLLIN)
        timeout_s = self._timeout_s if self._timeout_s is None or life.is_ready else self._timeout_s + _START_UP_S
        events = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
        if not events:
            life.kill(signal.SIGKILL)
            self._bury(life, f"made no batch in {self._timeout_s:g} s, and was ended")
            return
        messages = life.reader.read(wait=False) if life.link.fileno() in events else None
        if messages is None:
            self._bury(life, "")
            return
        for said in messages:
            self._hear(life, said)

    def _hear(self, life: _Life, said: Message) -> None:
        if said.kind == Said.READY:
            life.is_ready = True
        elif said.kind == Said.SLOT and said.file is not None:
            life.slots.attach(said.slot, said.file)
        elif said.kind == Said.RECORD:
            life.record = said.file
        elif said.kind == Said.TALE:
            _log.warning("%s", said.payload.decode())
        elif said.generation == self._generation or (said.kind == Kind.ERROR and not said.generation):
            self._queue(life, said)
        elif said.kind == Kind.ITEM:
            self._discard(life, said.slot)

    def _queue(self, life: _Life, said: Message) -> None:
        frame = Frame(
            Kind(said.kind), said.number, is_last=bool(said.flags & 1), num_samples=said.num, cursor=said.cursor
        )
        if frame.kind is Kind.ITEM:
            frame.content = _Unopened(life, said)
        elif frame.kind in (Kind.ERROR, Kind.SKIP):
            frame.content = unpack(said.payload, [])
            life.is_over = life.is_over or not said.generation
        if frame.kind in (Kind.ITEM, Kind.OVER):
            self._deaths.clear()
            self._position = self._position.after(frame, self._cursor_place)
        self._frames.append(frame)

    def _open(self, life: _Life, said: Message) -> Any:
        """Return an item; its tensors are views of a slot, or of memory of their own."""
        number = int.from_bytes(said.payload[:8], "little")
        sizes = [int.from_bytes(said.payload[8 * place + 8 : 8 * place + 16], "little") for place in range(number)]
        rest = memoryview(said.payload)[8 * number + 8 :]
        if said.slot == NO_SLOT:
            buffers, rest = _cut(rest, sizes)
            self._tally.num_slow += bool(said.flags & 4)
        elif life.slots.num_lent < NUM_LENT:
            buffers = life.slots.lend(said.slot, sizes)
        else:
            self._tally.num_copied += 1
            buffers = life.slots.copy(said.slot, sizes)
        stream = buffers.pop(0) if said.flags & 2 else rest
        item = unpack(stream, buffers)
        del stream, buffers
        if life in self._lives:
            self._done(1, at_once=said.slot != NO_SLOT)
        return item

    def _discard(self, life: _Life, slot: int) -> None:
        if slot != NO_SLOT:
            life.slots.returned.append(slot)
        if life in self._lives:
            self._done(1, at_once=slot != NO_SLOT)

    def _drop_frames(self) -> None:
        for frame in self._frames:
            if isinstance(frame.content, _Unopened):
                self._discard(frame.content.life, frame.content.said.slot)
        self._frames.clear()

    def _bury(self, life: _Life, cause: str) -> None:
        """Put a successor in the place of a worker that has died, or raise the error that says how it died."""
        life.has_ended(_PATIENCE_S)
        life.process.join(0)
        pid, code, (key, doing) = life.process.pid, life.process.exitcode, life.doing()
        cause = cause or _cause(code)
        self._tally.num_deaths += 1
        number = self._position.number
        doing = doing or f"making batch {number} or later" if life.is_ready else "starting"
        self._deaths.append(doing)
        self._lives.remove(life)
        self._keep_alive(life)
        told = f"Worker process {pid} {cause}, while {doing}."
        if not life.is_ready and code is not None and code >= 0:
            raise WorkerError(f"{told} {_GUARD}")
        if not self._is_restarted:
            raise WorkerError(f"{told} {_ADVICE}")
        if self._handler is not None and key and self._deaths.count(doing) >= self._num_deaths:
            self._tally.banned[key] = told
            self._handler.write_down(key, told)
            self._deaths.clear()
        elif self._deaths.count(doing) >= self._num_deaths or len(self._deaths) >= _MAX_DEATHS:
            raise WorkerError(f"{told} It was worker number {len(self._deaths)} to die here. {_ADVICE}")
        _log.warning("%s Another one takes its place.", told)
        self._start()
        self._generation += 1
        assert self._order is not None
        self._order = replace(self._order, position=self._position, banned=self._tally.banned)
        self._send_order()

    def _keep_alive(self, life: _Life) -> None:
        """Keep what a dead worker has left behind while batches of it wait; the views of users keep their own."""
        for frame in self._frames:
            if isinstance(frame.content, _Unopened) and frame.content.life is life:
                frame.content = self._open(*frame.content)
        life.close()


_ADVICE = "What it printed says more. The next iteration starts new workers."


_GUARD = 'What it printed says why. Under spawn, a script makes its loaders under `if __name__ == "__main__":`.'


def _cause(code: int | None) -> str:
    if code is None:
        return "ended, and somebody else was told how"
    if code >= 0:
        return f"ended with status {code} before its work was done"
    end = f"was ended by signal {signal.Signals(-code).name}"
    return f"{end}, as the system does when memory runs out" if code == -signal.SIGKILL else end


def _cut(content: memoryview, sizes: list[int]) -> tuple[list[memoryview], memoryview]:
    buffers, start = [], 0
    for size in sizes:
        buffers.append(content[start : start + size])
        start += size
    return buffers, content[start:]
