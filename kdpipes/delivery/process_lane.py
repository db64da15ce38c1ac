"""A worker process and its successors, as the one who waits for their batches sees them."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import signal
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cloudpickle

from kdpipes.core.errors import WorkerError, add_note
from kdpipes.core.processes import uninterrupted
from kdpipes.delivery.behind_deal import dealer_of
from kdpipes.delivery.deal import DealerMapDataPipe
from kdpipes.delivery.merger import Lane, Tally
from kdpipes.delivery.packing import unpack
from kdpipes.delivery.producer import Frame, Kind, Order, Position
from kdpipes.delivery.shared_slots import places_of
from kdpipes.delivery.wire import NO_SLOT, Flag, Message, Said, Told, message
from kdpipes.delivery.worker import Options, Parcel
from kdpipes.delivery.worker_process import ProcessPool, WorkerProcess

__all__ = ["NUM_LENT", "DeathPolicy", "ProcessLane"]

NUM_LENT = 2  # slots of a worker that users may hold, before they get copies
_FEW = 16  # small batches that are acknowledged together
_START_UP_S = 60.0

_log = logging.getLogger("kdpipes")


@dataclass(frozen=True)
class DeathPolicy:
    """What becomes of a worker that dies or gets stuck.

    Args:
        timeout_s: How long to wait for one batch, before the worker is taken for stuck; None is for ever.
        is_restarted: Whether it gets a successor.
        num_deaths: How many workers may die at the same sample.
        max_worker_deaths: How many may die without a batch in between, whatever the cause.
        handler: What `on_error` says, if it lets samples be left out.
    """

    timeout_s: float | None
    is_restarted: bool
    num_deaths: int
    max_worker_deaths: int
    handler: Any


class _Unopened(NamedTuple):
    """An item as a worker has sent it."""

    worker: WorkerProcess
    said: Message


class ProcessLane(Lane):
    """A worker process, and its successors.

    Args:
        parcel: The chain.
        options: How the worker works.
        pool: Ends it with the others.
        start_method: How its process starts; None is the platform's way.
        policy: What becomes of a worker that dies.
        tally: What is counted.
        cursor_place: Among the cursors of a position, the worker's.
    """

    def __init__(
        self,
        parcel: Parcel,
        options: Options,
        pool: ProcessPool,
        *,
        start_method: str | None,
        policy: DeathPolicy,
        tally: Tally,
        cursor_place: int,
    ) -> None:
        self._parcel = parcel
        self._options = options
        self._pool = pool
        self._context: Any = multiprocessing.get_context(start_method)
        self._policy = policy
        self._tally = tally
        self._cursor_place = cursor_place
        self._generation = 0
        self._order = Order(Position())
        self._position = Position()  # after what has come from the worker
        self._frames: deque[Frame] = deque()
        self._num_done = 0
        self._deaths: list[str] = []  # what workers were doing when they died, since the last batch
        self._worker: WorkerProcess | None = None
        self._start()

    @property
    def num_waiting(self) -> int:
        return len(self._frames)

    def begin(self, order: Order) -> None:
        self._drop_frames()
        self._deaths.clear()
        self._order, self._position = order, order.position
        worker = self._worker
        if worker is not None and (self.is_torn or not worker.is_sound):
            self._tally.num_deaths += worker.has_ended() and not worker.is_over
            self._worker = None
            self._pool.end(worker)
        if self._worker is None:
            self._start()
        self._send_order()

    def peek(self) -> Frame:
        while not self._frames:
            self._wait()
        return self._frames[0]

    def take(self) -> Any:
        content = self._frames.popleft().content
        if not isinstance(content, _Unopened):
            return content
        try:
            return self._open(*content)
        except OSError as error:  # mapping the slot takes a descriptor
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise self._too_many_files(error) from error
            raise

    def close(self) -> None:
        self._frames.clear()
        self._pool.close()  # all of them at a time

    def _start(self) -> None:
        self._num_done = 0
        while True:
            try:
                with uninterrupted():  # a process that is not in the pool yet would never be ended
                    self._worker = self._pool.add(WorkerProcess.start(self._context, self._parcel, self._options))
                return
            except (BrokenPipeError, ProcessLookupError):  # it died before it had read the chain
                self._tally.num_deaths += 1
                self._deaths.append("starting")
                self._judge("", "starting", "A worker process died during start-up, before it had read its chain.")
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise self._too_many_files(error) from error
                raise

    def _too_many_files(self, error: OSError) -> OSError:
        """Return the error for too many open files, with the number of descriptors that the workers need."""
        import resource  # imported late: Windows does not have it

        number = self._options.num_workers * (self._options.num_slots + 6)  # 6 for link, sentinels and record
        return OSError(
            error.errno,
            f"{os.strerror(error.errno or errno.EMFILE)}. {self._options.num_workers} workers need up to {number} file "
            f"descriptors in addition to those that are open; `ulimit -n` is "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}. Raise it, or use fewer workers.",
        )

    def _send_order(self) -> None:
        assert self._worker is not None
        self._generation += 1
        self._worker.send(message(Told.ORDER, [cloudpickle.dumps(self._order)], generation=self._generation))

    def _done(self, worker: WorkerProcess, number: int, *, at_once: bool) -> None:
        """Tell the worker that batches have been taken, and which slots it may write again."""
        if worker is not self._worker:
            return
        self._num_done += number
        returned = worker.slots.returned
        if self._num_done and (at_once or returned or self._num_done >= _FEW):
            slots = b"".join(returned.popleft().to_bytes(2, "little") for _ in range(len(returned)))
            worker.send(message(Told.DONE, [slots], num=self._num_done))
            self._num_done = 0

    def _wait(self) -> None:
        """Wait for the worker to say something, or to die."""
        worker, timeout_s = self._worker, self._policy.timeout_s
        if worker is None:
            raise RuntimeError("The loader has been closed, or its worker could not be started.")
        self._done(worker, 0, at_once=True)
        if timeout_s is not None and not worker.is_ready:
            timeout_s += _START_UP_S
        try:
            messages = worker.listen(timeout_s)
        except TimeoutError:
            worker.kill(signal.SIGKILL)
            self._replace(worker, f"made no batch in {self._policy.timeout_s:g} s, and was ended")
            return
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise self._too_many_files(error) from error
            raise
        if messages is None:
            self._replace(worker, "")
            return
        for said in messages:
            self._hear(worker, said)

    def _hear(self, worker: WorkerProcess, said: Message) -> None:
        if said.kind == Said.READY:
            worker.is_ready = True
        elif said.kind == Said.SLOT and said.file is not None:
            worker.slots.attach(said.slot, said.file)
        elif said.kind == Said.RECORD:
            worker.record = said.file
        elif said.kind == Said.WARNING:
            _log.warning("%s", said.payload.decode())
        elif said.generation == self._generation or (said.kind == Kind.ERROR and not said.generation):
            self._queue(worker, said)
        elif said.kind == Kind.ITEM:
            self._discard(worker, said.slot)

    def _queue(self, worker: WorkerProcess, said: Message) -> None:
        is_last = bool(said.flags & Flag.LAST)
        frame = Frame(Kind(said.kind), said.number, is_last=is_last, num_samples=said.num, cursor=said.cursor)
        if frame.kind is Kind.ITEM:
            frame.content = _Unopened(worker, said)
        elif frame.kind in (Kind.ERROR, Kind.SKIP, Kind.TIMES):
            frame.content = unpack(said.payload, [])
            worker.is_over = worker.is_over or not said.generation
        if frame.kind in (Kind.ITEM, Kind.OVER):
            self._deaths.clear()
            self._position = self._position.after(frame, self._cursor_place)
        self._frames.append(frame)

    def _open(self, worker: WorkerProcess, said: Message) -> Any:
        """Return an item; its tensors are views of a slot, or of memory of their own."""
        content = memoryview(said.payload)
        number = int.from_bytes(content[:8], "little")
        head = 8 * number + 8
        sizes = memoryview(content[8:head]).cast("Q").tolist()
        if said.slot == NO_SLOT:
            places, end = places_of([head, *sizes])
            buffers, stream = [content[start:stop] for start, stop in places[1:]], content[end:]
            self._tally.num_slow += bool(said.flags & Flag.SLOW)
        else:
            buffers, stream = self._buffers(worker, said.slot, sizes), content[head:]
        try:
            item = unpack(buffers.pop(0) if said.flags & Flag.STREAM_IN_SLOT else stream, buffers)
        except Exception as error:
            place = f"batch {said.number} of epoch {self._order.position.epoch}{self._samples_of(said.number)}"
            add_note(error, f"kdpipes: while unpickling {place}, sent by worker process {worker.process.pid}")
            raise
        del buffers
        self._done(worker, 1, at_once=said.slot != NO_SLOT)
        return item

    def _samples_of(self, batch: int) -> str:
        """Return the keys of the samples in a batch as text for an error; empty if the chain is not indexed."""
        dealer = dealer_of(self._parcel.open())
        with contextlib.suppress(Exception):  # an error here must not hide the original one
            if isinstance(dealer, DealerMapDataPipe):
                keys = [sample.key for sample in dealer.whole_samples(self._order.position.epoch, batch) or []]
                shown = ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "")
                return f" (samples {shown})"
        return ""

    def _buffers(self, worker: WorkerProcess, slot: int, sizes: list[int]) -> list[memoryview]:
        if worker.slots.num_lent < NUM_LENT:
            return worker.slots.lend(slot, sizes)
        self._tally.num_copied += 1
        return worker.slots.copy(slot, sizes)

    def _discard(self, worker: WorkerProcess, slot: int) -> None:
        if slot != NO_SLOT:
            worker.slots.returned.append(slot)
        self._done(worker, 1, at_once=slot != NO_SLOT)

    def _drop_frames(self) -> None:
        for frame in self._frames:
            if isinstance(frame.content, _Unopened):
                self._discard(frame.content.worker, frame.content.said.slot)
        self._frames.clear()

    def _replace(self, worker: WorkerProcess, cause: str) -> None:
        """Put a successor in the place of a worker that has died, or raise the error that says how it died."""
        code, (key, doing) = worker.status(), worker.doing()
        if not worker.is_ready:
            doing = "starting"
        elif not doing:
            doing = f"making batch {self._position.number} or later"
        told = f"Worker process {worker.process.pid} {cause or _cause(code)}, while {doing}."
        self._tally.num_deaths += 1
        self._deaths.append(doing)
        with uninterrupted():
            self._worker = None
            self._pool.forget(worker)
            self._close(worker)
        # Ctrl-C may end a process of the fork server with status 1 before the process can ignore it.
        is_final = self._context.get_start_method() != "forkserver" or self._deaths.count(doing) > 1
        if not worker.is_ready and code is not None and code >= 0 and is_final:
            raise WorkerError(f"{told} {_HINTS[self._context.get_start_method()]}")
        self._judge(key, doing, told)
        _log.warning("%s Another one takes its place.", told)
        self._start()
        self._order = replace(self._order, position=self._position, banned=self._tally.banned)
        self._send_order()

    def _judge(self, key: str, doing: str, told: str) -> None:
        """Raise, or let `on_error` leave a sample out, if too many workers have died."""
        policy = self._policy
        is_known = self._deaths.count(doing) >= policy.num_deaths
        if not policy.is_restarted:
            raise WorkerError(f"{told} {_ADVICE}")
        if is_known and policy.handler is not None and key and key not in self._tally.banned:
            self._tally.banned[key] = told
            policy.handler.write_down(key, told)
            self._deaths.clear()
        elif is_known:
            raise WorkerError(
                f"{told} {self._deaths.count(doing)} workers have died at this point; `num_deaths` is "
                f"{policy.num_deaths}. {_ADVICE}"
            )
        elif len(self._deaths) >= policy.max_worker_deaths:
            raise WorkerError(
                f"{told} {len(self._deaths)} workers have died without a batch in between; `max_worker_deaths` "
                f"of `ProcessReadingService` is {policy.max_worker_deaths}. {_ADVICE}"
            )

    def _close(self, worker: WorkerProcess) -> None:
        """Keep what a dead worker has left behind while batches of it wait; the views of users keep their own."""
        for frame in self._frames:
            if isinstance(frame.content, _Unopened) and frame.content.worker is worker:
                frame.content = self._open(*frame.content)
        worker.close()


_ADVICE = "See its output for the cause. The next iteration starts new workers."
_PRINTED = "See its output for the cause."
_GUARD = f'{_PRINTED} Under spawn and forkserver, a script must make its loaders under `if __name__ == "__main__":`.'
_HINTS = {"fork": _PRINTED, "spawn": _GUARD, "forkserver": _GUARD}


def _cause(code: int | None) -> str:
    if code is None:
        return "ended, and somebody else was told how"
    if code >= 0:
        return f"ended with status {code} before its work was done"
    end = f"was ended by signal {signal.Signals(-code).name}"
    return f"{end}, as the system does when memory runs out" if code == -signal.SIGKILL else end
