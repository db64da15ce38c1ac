"""The main function of a worker process, and its communication with the main process."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import mmap
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kdpipes.core import activity
from kdpipes.core.errors import add_note
from kdpipes.core.processes import ignore_interrupts
from kdpipes.delivery.batch_pipe import OneToOne, make_batches_in
from kdpipes.loader.buffers import Array, SharedBuffers, pack, places_of
from kdpipes.loader.channel import Channel, Kind, Message, SharedFile
from kdpipes.loader.profile import producer_of
from kdpipes.loader.worker import Assignment, Options, follow
from kdpipes.storage.jobs import Payload, begin_worker, packed_error

_SMALL = 1 << 14  # bytes that are part of the message; larger batches go through shared memory
_FEW_BYTES = 1 << 16
_MANY = 32  # times as many small batches are made ahead


class Packed(NamedTuple):
    """A batch on its way.

    Args:
        stream: The pickle of the batch; None if that is the first of the arrays, because it is long.
        places: Where each array begins and ends.
        buffer: The shared buffer that the arrays are in; None if they are in `content`.
        content: The arrays.
        lack: Why they are there, if there was no shared memory.
    """

    stream: bytes | None
    places: Sequence[tuple[int, int]]
    buffer: int | None = None
    content: bytearray | None = None
    lack: str = ""


def work(payload: Payload, link: socket.socket, options: Options) -> None:
    """Make what is ordered over `link` until it is closed."""
    ignore_interrupts()
    begin_worker(options.num_threads)
    gc.freeze()  # what is inherited is shared until it is written to, which the collector would do
    _keep_memory()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the main process has closed it
        _work(payload, Sender(link, options), options)


def _work(payload: Payload, sender: Sender, options: Options) -> None:
    try:
        file = SharedFile.create()  # in which this process notes which sample it is at
        os.ftruncate(file.number, mmap.PAGESIZE)
        activity.current = activity.Record(file.number)
        chain = payload.open()
        if isinstance(chain, OneToOne):  # the last pipe, so nothing keeps its batches
            chain.make_batches_in(sender.buffers.empty)
        producer = producer_of(chain, options)
        # Otherwise a pipe may hold batches back while their memory is used for others.
        if producer.is_one_to_one:
            make_batches_in(sender.buffers.empty)
    except BaseException as error:
        sender.send(Message(Kind.ERROR, content=error))
        return
    sender.channel.send(Message(Kind.READY, content=file))
    follow(producer, sender)


def _keep_memory() -> None:
    """Let glibc of this worker process keep the memory of a batch for the next one."""
    # By default, glibc maps blocks of 32 MiB and more anew for each batch, and the system clears all of their pages.
    # Chains that allocate whole batches besides the one that is sent, as `.collate_samples().cutmix()` on 64 float32
    # images of 224 x 224, make 1.4 times as many batches per CPU second with this (19.7 against 13.9); others 1.02.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap as well
            libc.mallopt(-1, 1 << 29)  # M_TRIM_THRESHOLD: 512 MiB of it are kept


class Sender:
    """Sends what the worker makes, and waits when it is too far ahead."""

    def __init__(self, link: socket.socket, options: Options) -> None:
        self._options = options
        self.channel = Channel(link)
        self.buffers = SharedBuffers(options.num_buffers)
        self._arena_sent = 0
        self._assignments: deque[Message] = deque()
        self._is_stopped = False
        self._ahead: deque[int] = deque()  # the sizes of batches that nobody has taken yet

    def next_assignment(self) -> Assignment | None:
        while not self._assignments and not self._is_stopped:
            self._listen(wait=True)
        if self._is_stopped:
            return None
        latest = self._assignments.pop()
        self._assignments.clear()
        self.buffers.begin_batch()  # an error may have ended the last epoch within a batch
        self.channel.send(Message(Kind.BEGUN, latest.number))
        assignment: Assignment = latest.content
        # Stock pipes and users' code draw from the global generators.
        if assignment.seeds is not None:
            seeds = copy.deepcopy(assignment.seeds)
            random.seed(seeds.generate_seed())
            torch.manual_seed(seeds.generate_seed())
            np.random.seed(seeds.generate_seed() >> 32)
        return assignment

    def may_go_on(self) -> bool:
        self._listen(wait=False)
        while not self._assignments and not self._is_stopped and self.is_far_ahead():
            self._listen(wait=True)
        return not self._assignments and not self._is_stopped

    def is_far_ahead(self) -> bool:
        """Return whether as many batches or bytes are waiting as may be made ahead."""
        number = len(self._ahead)
        size = sum(self._ahead)
        if number and size + self._ahead[-1] > self._options.max_bytes:
            return True
        if number < self._options.prefetch:
            return False
        return size >= _FEW_BYTES or max(self._ahead) > _SMALL or number >= self._options.prefetch * _MANY

    def send(self, message: Message) -> None:
        if message.kind is Kind.ITEM:
            message.content = tuple(self._packed(message.content))
            self.buffers.begin_batch()
        elif message.kind is Kind.ERROR:
            error = message.content
            if isinstance(error, RuntimeError) and "CUDA in forked subprocess" in str(error):
                add_note(error, _CUDA_IN_WORKER)
            message.content = packed_error(error)
        self.channel.send(message)

    def _packed(self, item: Any) -> Packed:
        stream, arrays = pack(item, self.buffers.given)
        size = len(stream) + sum(content.nbytes for content, _ in arrays)
        self._ahead.append(size)
        lack = ""
        if size > _SMALL and self.buffers.has_room:
            is_long = len(stream) > _SMALL
            try:
                buffer, places = self.buffers.put([Array(memoryview(stream)), *arrays] if is_long else arrays)
            except OSError as error:
                lack = (
                    f"A batch of {size} bytes does not fit into shared memory ({error}), so batches are sent through a "
                    "socket, which is slower."
                )
            else:
                if self._arena_sent != self.buffers.arena:
                    self._arena_sent = self.buffers.arena
                    self.channel.send(Message(Kind.ARENA, self.buffers.arena, self.buffers.file))
                return Packed(None if is_long else stream, places, buffer)
        places, end = places_of([Array(content) for content, _ in arrays])
        body = bytearray(end)
        for (start, stop), (content, _) in zip(places, arrays, strict=True):
            body[start:stop] = content
        return Packed(stream, places, None, body, lack)

    def _listen(self, *, wait: bool) -> None:
        messages = self.channel.receive(wait=wait)
        self._is_stopped = self._is_stopped or messages is None
        for message in messages or ():
            if message.kind is Kind.ASSIGNMENT:
                self._assignments.append(message)
            else:
                for _ in range(message.number):
                    self._ahead.popleft()
                if message.content is not None:
                    arena, buffers, is_detached = message.content
                    self.buffers.release(arena, buffers, is_detached=is_detached)


_CUDA_IN_WORKER = (
    "kdpipes: CUDA cannot be used in a worker that was forked from a process that uses it. Leave the device to the "
    'main process, by `.to_device("cuda")` at the end of the chain; or start workers with `start_method="spawn"`.'
)
