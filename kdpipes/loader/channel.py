"""The messages that workers send, and the socket over which a worker process sends and receives them."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import pickle
import socket
import struct
import tempfile
from collections import deque
from dataclasses import dataclass
from typing import Any

from kdpipes.core.processes import uninterrupted
from kdpipes.delivery.clock import Progress

_LENGTH = struct.Struct("<Q")
_READ_SIZE = 1 << 18
_ANCILLARY_SIZE = 16 * 4 + 64  # 16 descriptors, and the system's headers around them


class Kind(enum.IntEnum):
    """The kind of a message."""

    # What a worker makes, whether it is a process or a thread:
    ITEM = 0
    OVER = 1  # the end of a batch that became several items, or none
    END = 2  # the end of the epoch
    ERROR = 3
    SKIP = 4  # a sample was skipped in the next batch, or the rest of a shard
    TIMES = 5  # what the worker has measured so far
    TURN = 6  # before a turn of the lanes, if ranks must end together: which of them have samples for it
    # What a worker process reports besides:
    READY = 7  # the file in which the worker notes what it does
    ARENA = 8  # the file of a new arena, and its number
    BEGUN = 9  # the worker follows the assignment of this number from now on
    # What the main process sends:
    ASSIGNMENT = 10
    TAKEN = 11  # batches have been taken, and buffers may be used again


_KINDS = tuple(Kind)
_NO_PROGRESS = Progress()


class SharedFile:
    """An open file without a name that two processes map; it is closed with the last reference to this object.

    Args:
        number: The descriptor.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def create(cls) -> SharedFile:
        """Return a new file."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("kdpipes"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # a process that was forked may have closed all of its descriptors
            os.close(self.number)


@dataclass(slots=True)
class Message:
    """One message.

    Args:
        kind: What it is about.
        number: The number of the batch that it belongs to, of the assignment, or of the arena; or of batches taken.
        content: The item, the error, the file, ...
        progress: How far the batch is delivered with an item, or the end of the batch.
    """

    kind: Kind
    number: int = 0
    content: Any = None
    progress: Progress = _NO_PROGRESS


def encoded(message: Message) -> bytes:
    """Return a message as bytes, with its length before it. A file does not travel in the bytes."""
    content = message.content
    if isinstance(content, SharedFile):
        content = None
    payload = pickle.dumps((int(message.kind), message.number, content, tuple(message.progress)), protocol=5)
    return _LENGTH.pack(len(payload)) + payload


class Channel:
    """One end of a socket between a worker process and the main process."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.outgoing = bytearray()  # what was posted and has not been sent yet
        self._incoming = bytearray()
        self._received = bytearray(_READ_SIZE)
        self._arrived: deque[tuple[int, list[tuple[int, int, bytes]], int, Any]] = deque()
        self._files: deque[SharedFile] = deque()

    def send(self, message: Message) -> None:
        """Send a message, and wait until the other side has room for it."""
        if isinstance(message.content, SharedFile):
            socket.send_fds(self.link, [encoded(message)], [message.content.number])
        else:
            self.link.sendall(encoded(message))

    def post(self, content: bytes) -> None:
        """Send as much as is possible without waiting; the rest follows with the next call."""
        self.outgoing += content
        with contextlib.suppress(OSError):  # the worker is busy or dead; `receive` tells which
            while self.outgoing:
                del self.outgoing[: self.link.send(self.outgoing, socket.MSG_DONTWAIT)]

    def receive(self, *, wait: bool) -> list[Message] | None:
        """Return the messages that have arrived, after waiting for some bytes; None if the other side has ended."""
        try:
            # `map` stores the result without running Python code in between, where Ctrl-C would lose descriptors.
            flags = 0 if wait else socket.MSG_DONTWAIT
            self._arrived.extend(map(self.link.recvmsg_into, [[self._received]], [_ANCILLARY_SIZE], [flags]))
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        size = self._arrived[0][0]
        flags = self._arrived[0][2]
        self._keep_files()
        if not size:
            return None
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "The memory of a worker cannot be opened: too many files are open")
        self._incoming += memoryview(self._received)[:size]
        return self._complete()

    def close(self) -> None:
        """Close the socket, and descriptors that no message has taken."""
        self.link.close()
        self._keep_files()
        self._files.clear()

    def _keep_files(self) -> None:
        if not any(ancillary for _, ancillary, _, _ in self._arrived):
            self._arrived.clear()
            return
        with uninterrupted():
            for _, ancillary, _, _ in self._arrived:
                for _, _, content in ancillary:
                    self._files.extend(map(SharedFile, memoryview(content).cast("i")))
            self._arrived.clear()

    def _complete(self) -> list[Message]:
        """Take the messages that have arrived completely."""
        messages: list[Message] = []
        start = 0
        with memoryview(self._incoming) as incoming:
            while len(incoming) - start >= _LENGTH.size:
                begin = start + _LENGTH.size
                end = begin + _LENGTH.unpack_from(incoming, start)[0]
                if len(incoming) < end:
                    break
                kind, number, content, progress = pickle.loads(incoming[begin:end])  # noqa: S301 - sent by us
                message = Message(_KINDS[kind], number, content, Progress(*progress))
                if message.kind in (Kind.READY, Kind.ARENA):
                    message.content = self._files.popleft()
                messages.append(message)
                start = end
        del self._incoming[:start]
        return messages
