"""What runs in a worker process of `ProcessReadingService`."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import cloudpickle
import torch

from kdpipes.core import activity
from kdpipes.core.processes import ignore_interrupts
from kdpipes.delivery.collate_samples import SampleCollatorIterDataPipe
from kdpipes.delivery.lane_profile import producer_of
from kdpipes.delivery.packing import pack, pack_error, unpack
from kdpipes.delivery.producer import Frame, Kind, Order, seed_process
from kdpipes.delivery.shared_slots import Slots, anonymous_file, places_of
from kdpipes.delivery.wire import NO_SLOT, Flag, Reader, Said, Told, message

__all__ = ["Options", "Parcel", "work"]

_SMALL = 1 << 14  # bytes that are sent along; larger batches go through a slot
_FEW_BYTES = 1 << 16
_MANY = 32  # times as many small batches are made ahead


@dataclass(frozen=True)
class Options:
    """How a worker works: see `ProcessReadingService`."""

    worker: int
    num_workers: int
    first_epoch: int
    prefetch: int
    num_slots: int
    max_bytes: int
    num_threads: int
    is_profiled: bool = False


class Parcel:
    """A chain on its way to a worker: inherited where the process is forked, else a pickle that the worker opens.

    Args:
        chain: The chain, with lambdas, closures and classes of a notebook.
    """

    def __init__(self, chain: Any) -> None:
        self._chain = chain
        self._payload = b""

    def open(self) -> Any:
        """Return the chain."""
        return self._chain if self._chain is not None else cloudpickle.loads(self._payload)

    def __getstate__(self) -> dict[str, Any]:
        return {"_chain": None, "_payload": cloudpickle.dumps(self._chain)}


def work(parcel: Parcel, link: socket.socket, options: Options) -> None:
    """Make what is ordered over `link` until it is closed."""
    _settle(options.num_threads)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the main process has closed it
        _work(parcel, link, options)


def _work(parcel: Parcel, link: socket.socket, options: Options) -> None:
    teller = _Teller(link, options)
    try:
        teller.start_record()
        chain, is_profiled = parcel.open(), options.is_profiled
        if isinstance(chain, SampleCollatorIterDataPipe):  # nobody behind it can keep a batch
            chain.use_memory(teller.slots)
        producer = producer_of(chain, options.worker, options.num_workers, is_profiled=is_profiled)
    except BaseException as error:
        teller.tell(Frame(Kind.ERROR, content=error))
        return
    teller.ready()
    while (order := teller.next_order()) is not None:
        if not teller.may_go_on():  # broken off before it has begun
            continue
        if order.seeds is not None:
            seed_process(copy.deepcopy(order.seeds))
        try:
            for _ in producer.epoch(order, options.first_epoch, teller.tell):
                if not teller.may_go_on():
                    break
        except BaseException as error:  # SystemExit in a user's code, say, which would be a silent end here
            teller.tell(Frame(Kind.ERROR, content=error))


def _settle(num_threads: int) -> None:
    """Take what a process inherits that is not right for a worker."""
    ignore_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(num_threads)
    gc.freeze()  # what is inherited is shared until it is written to, which the collector would do
    _keep_memory()
    threading.Thread(target=_end_with_parent, name="kdpipes-parent-watch", daemon=True).start()


def _keep_memory() -> None:
    """Let glibc keep the memory of a batch for the next one, instead of taking each page anew from the system."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap as well
            libc.mallopt(-1, 1 << 29)  # M_TRIM_THRESHOLD: 512 MiB of it are kept


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    ends: list[Any] = [parent.sentinel]  # which the parent's other children hold open
    with contextlib.suppress(OSError, AttributeError):
        ends.append(os.pidfd_open(parent.pid))
    connection.wait(ends)
    os._exit(1)


def _table(buffers: list[memoryview]) -> bytes:
    """Return how many buffers there are, and their sizes."""
    return b"".join(number.to_bytes(8, "little") for number in [len(buffers), *(buffer.nbytes for buffer in buffers)])


def _inline(buffers: list[memoryview]) -> bytes:
    """Return the sizes of buffers and the buffers, each where it is aligned."""
    parts: list[Any] = [_table(buffers), *buffers]
    places, end = places_of([memoryview(part).nbytes for part in parts])
    content = bytearray(end)
    for (start, stop), part in zip(places, parts, strict=True):
        content[start:stop] = part
    return bytes(content)


class _Teller:
    """Sends what the worker makes, and waits when it is too far ahead."""

    def __init__(self, link: socket.socket, options: Options) -> None:
        self._link = link
        self._options = options
        self._reader = Reader(link)
        self.slots = Slots(options.num_slots)
        self._generation = 0
        self._orders: deque[tuple[int, Order]] = deque()
        self._is_stopped = False
        self._ahead: deque[int] = deque()  # the sizes of batches that nobody has taken yet
        self._has_warned = False

    def start_record(self) -> None:
        file = anonymous_file()
        os.ftruncate(file, os.sysconf("SC_PAGESIZE"))
        socket.send_fds(self._link, [message(Said.RECORD)], [file])
        activity.start_record(file)
        os.close(file)

    def ready(self) -> None:
        self._send(message(Said.READY))

    def next_order(self) -> Order | None:
        """Wait for the order of an epoch; None means that there are no more."""
        while not self._orders and not self._is_stopped:
            self._listen(wait=True)
        if self._is_stopped:
            return None
        self._generation, order = self._orders.pop()
        self._orders.clear()
        return order

    def may_go_on(self) -> bool:
        """Wait until there is room for another batch; False means that this epoch is not wanted any more."""
        self._listen(wait=False)
        while not self._orders and not self._is_stopped and self._is_far_ahead():
            self._listen(wait=True)
        return not self._orders and not self._is_stopped

    def tell(self, frame: Frame) -> None:
        """Send a frame."""
        place: dict[str, Any] = {"generation": self._generation, "number": frame.number, "num": frame.num_samples}
        place["cursor"] = frame.cursor
        if frame.kind is Kind.ERROR:
            self._send(message(frame.kind, [pack_error(frame.content)], **place))
        elif frame.kind in (Kind.SKIP, Kind.TIMES):
            self._send(message(frame.kind, [pack(frame.content)[0]], **place))
        elif frame.kind is Kind.ITEM:
            self._tell_item(frame.content, int(frame.is_last), place)
        else:
            self._send(message(frame.kind, **place))

    def _tell_item(self, item: Any, flags: int, place: dict[str, Any]) -> None:
        stream, buffers = pack(item)
        size = len(stream) + sum(buffer.nbytes for buffer in buffers)
        self._ahead.append(size)
        if size > _SMALL and self.slots.num_free:
            is_long = len(stream) > _SMALL
            in_slot = [memoryview(stream), *buffers] if is_long else buffers
            slot = self._put(in_slot)
            if slot != NO_SLOT:
                payload = [_table(in_slot)] if is_long else [_table(in_slot), stream]
                flags |= Flag.STREAM_IN_SLOT if is_long else 0
                self._send(message(Kind.ITEM, payload, flags=flags, slot=slot, **place))
                return
            flags |= Flag.SLOW
        self._send(message(Kind.ITEM, [_inline(buffers), stream], flags=flags, **place))

    def _put(self, buffers: list[memoryview]) -> int:
        try:
            slot, new_file = self.slots.put(buffers)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                size = sum(buffer.nbytes for buffer in buffers)
                told = f"There is no shared memory for a batch of {size} bytes ({error}): batches take a slower way."
                self._send(message(Said.WARNING, [told.encode()]))
            return NO_SLOT
        if new_file is not None:
            socket.send_fds(self._link, [message(Said.SLOT, slot=slot)], [new_file])
        return slot

    def _send(self, content: bytes) -> None:
        self._link.sendall(content)

    def _is_far_ahead(self) -> bool:
        number, size = len(self._ahead), sum(self._ahead)
        if number and size + self._ahead[-1] > self._options.max_bytes:
            return True
        if number < self._options.prefetch:
            return False
        return size >= _FEW_BYTES or max(self._ahead) > _SMALL or number >= self._options.prefetch * _MANY

    def _listen(self, *, wait: bool) -> None:
        messages = self._reader.read(wait=wait)
        if messages is None:
            self._is_stopped = True
            return
        for told in messages:
            if told.kind == Told.ORDER:
                self._orders.append((told.generation, unpack(told.payload, [])))
            elif told.kind == Told.DONE:
                for _ in range(told.num):
                    self._ahead.popleft()
                for slot in memoryview(told.payload).cast("H"):
                    self.slots.give_back(slot)
            elif told.kind == Told.STOP:
                self._is_stopped = True
