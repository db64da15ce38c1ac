"""The messages that workers send, and the socket over which a worker process sends and receives them."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import pickle
import secrets
import select
import socket
import struct
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdpipes.core.processes import uninterrupted
from kdpipes.delivery.lanes import Cursors

CAN_SEND_FILES = hasattr(socket, "send_fds") and hasattr(socket.socket, "recvmsg_into")  # not on Windows

_LENGTH = struct.Struct("<Q")
_READ_SIZE = 1 << 18
_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)  # 0 on Windows
# Windows deletes the file with its last descriptor, and lets it be opened again only with the same flag.
_FLAGS = getattr(os, "O_TEMPORARY", 0) | getattr(os, "O_SHORT_LIVED", 0) | getattr(os, "O_BINARY", 0)
_ANCILLARY_SIZE = 16 * 4 + 64  # 16 descriptors, and the system's headers around them


class Kind(enum.IntEnum):
    """What a message is about."""

    # What a worker makes, whether it is a process or a thread:
    ITEM = 0
    OVER = 1  # the end of a batch that became several items, or none
    END = 2  # the end of the epoch
    ERROR = 3
    SKIP = 4  # a sample was skipped in the next batch, or the rest of a shard
    TIMES = 5  # what the worker has measured so far
    TURN = 6  # before a turn of the lanes, if ranks must end together: which of them have samples for it
    # What a worker process reports besides, each with a file:
    READY = 7  # where the worker notes what it does
    ARENA = 8  # a new arena
    # What the main process sends:
    ASSIGNMENT = 9
    TAKEN = 10  # batches have been taken, and buffers may be used again


_KINDS = tuple(Kind)


class SharedFile:
    """An open file that two processes map; it is closed with the last reference to this object.

    Where descriptors can be sent to another process, the file has no name. Otherwise it has a path, which the worker
    sends, and which the main process removes when it has opened the file.

    Args:
        number: The descriptor.
        path: The path; empty if it has no name.
    """

    __slots__ = ("number", "path")

    def __init__(self, number: int, path: str = "") -> None:
        self.number = number
        self.path = path

    @classmethod
    def create(cls, folder: str = "") -> SharedFile:
        """Return a new file: in the folder, or without a name if that is empty."""
        if folder:
            path = str(Path(folder, secrets.token_hex(8)))
            return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600), path)
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("kdpipes"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    @classmethod
    def open(cls, path: str) -> SharedFile:
        """Open a file that another process has created, and remove its path."""
        file = cls(os.open(path, os.O_RDWR | _FLAGS), path)
        with contextlib.suppress(OSError):  # Windows may do that only when the file is closed
            Path(path).unlink()
        return file

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # a process that was forked may have closed all of its descriptors
            os.close(self.number)


@dataclass(slots=True)
class Message:
    """One message.

    Args:
        kind: What it is about.
        number: The number of the batch that it belongs to; or of batches taken, or of the arena.
        content: The item, the error, ...
        is_last: Whether the item is the last one of its batch.
        num_samples: How many samples the batch has that the item is the first of.
        cursors: Where the lanes of a stream that the batch was made of stand after it.
        hashes: The hashes of the samples of a stream that the batch was made of, with its first item.
        generation: The number of the assignment that it belongs to; 0 before the first one.
        file: The file that came with it.
    """

    kind: Kind
    number: int = 0
    content: Any = None
    is_last: bool = False
    num_samples: int = 0
    cursors: Cursors = ()
    hashes: bytes = b""
    generation: int = 0
    file: SharedFile | None = None

    @property
    def is_over(self) -> bool:
        """Whether this is the last message about its batch."""
        return self.is_last or self.kind is Kind.OVER


def encoded(message: Message) -> bytes:
    """Return a message as bytes, with its length before it."""
    fields = (int(message.kind), message.number, message.content, message.is_last, message.num_samples)
    payload = pickle.dumps((*fields, message.cursors, message.hashes, message.generation), protocol=5)
    return _LENGTH.pack(len(payload)) + payload


class Channel:
    """One end of a socket between a worker process and the main process."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._received = bytearray(_READ_SIZE)
        self._arrived: deque[tuple[int, list[tuple[int, int, bytes]], int, Any]] = deque()
        self._files: deque[SharedFile] = deque()
        self._sent: list[SharedFile] = []

    @property
    def is_sending(self) -> bool:
        """Whether something that was posted has not been sent yet."""
        return bool(self._outgoing)

    def send(self, message: Message, file: SharedFile | None = None) -> None:
        """Send a message, and a file with it, and wait until the other side has room for it."""
        if file is not None and not file.path:
            socket.send_fds(self.link, [encoded(message)], [file.number])
            return
        if file is not None:
            message.content = file.path
            self._sent.append(file)  # Windows would delete it, if it was replaced before the other side has opened it
        self.link.sendall(encoded(message))

    def post(self, content: bytes) -> None:
        """Send as much as is possible without waiting; the rest follows with the next call."""
        self._outgoing += content
        with contextlib.suppress(OSError):  # the worker is busy; or it is dead, which `receive` finds out
            if not _DONTWAIT:
                self.link.setblocking(False)
            try:
                while self._outgoing:
                    del self._outgoing[: self.link.send(self._outgoing, _DONTWAIT)]
            finally:
                if not _DONTWAIT:
                    self.link.setblocking(True)

    def receive(self, *, wait: bool) -> list[Message] | None:
        """Return the messages that have arrived, after waiting for some bytes; None if the other side has ended."""
        try:
            # `map` stores the result without running Python code in between, where Ctrl-C would lose descriptors.
            if CAN_SEND_FILES:
                flags = 0 if wait else _DONTWAIT
                self._arrived.extend(map(self.link.recvmsg_into, [[self._received]], [_ANCILLARY_SIZE], [flags]))
            elif wait or select.select([self.link], [], [], 0)[0]:
                self._arrived.extend(zip(map(self.link.recv_into, [self._received]), [[]], [0], [None], strict=True))
            else:
                return []
        except BlockingIOError:
            return []
        except (ConnectionResetError, ConnectionAbortedError):  # the second one on Windows
            return None
        size, flags = self._arrived[0][0], self._arrived[0][2]
        self._keep_files()
        if not size:
            return None
        if CAN_SEND_FILES and flags & socket.MSG_CTRUNC:
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
                kind, *fields = pickle.loads(incoming[begin:end])  # noqa: S301 - sent by a process of ours
                message = Message(_KINDS[kind], *fields)
                if message.kind in (Kind.READY, Kind.ARENA):
                    path = message.content
                    message.file = SharedFile.open(path) if path is not None else self._files.popleft()
                messages.append(message)
                start = end
        del self._incoming[:start]
        return messages
