"""The messages between the main process and a worker, over a socket that passes descriptors as well."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kdpipes.core.processes import uninterrupted

__all__ = ["NO_SLOT", "Flag", "Message", "Reader", "ReceivedFile", "Said", "Told", "message"]

NO_SLOT = 0xFFFF
_HEADER = struct.Struct("<QBBHIqIIIq")
_NOWHERE = (0, 0, -1)
_READ_SIZE = 1 << 18
_ANCILLARY_SIZE = 16 * 4 + 64  # 16 descriptors, and what the system puts around them


class Said(enum.IntEnum):
    """What a worker says, besides the frames of an epoch (see `Kind`)."""

    READY = 16
    SLOT = 17  # a descriptor comes with it
    RECORD = 18  # a descriptor comes with it: where the worker writes down what it does
    WARNING = 19  # a line for the log


class Told(enum.IntEnum):
    """What a worker is told."""

    ORDER = 32
    DONE = 33  # batches have been taken, and slots are free again
    STOP = 34


class Flag(enum.IntFlag):
    """What a message about an item says of it."""

    LAST = 1  # it is the last one of its batch
    STREAM_IN_SLOT = 2  # its pickle is the first buffer of the slot
    SLOW = 4  # there was no shared memory for it


class ReceivedFile:
    """A descriptor received over a socket; it is closed with the last reference to this object.

    Args:
        number: The descriptor.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # a process that was forked may have closed all of its descriptors
            os.close(self.number)


class Message(NamedTuple):
    """One message; `num` is the number of samples in the batch, or of batches that have been taken."""

    kind: int
    flags: int
    slot: int
    generation: int
    number: int
    num: int
    payload: bytearray
    file: ReceivedFile | None = None
    cursor: tuple[int, int, int] | None = None


def message(
    kind: int,
    payloads: Sequence[bytes | memoryview] = (),
    *,
    flags: int = 0,
    slot: int = NO_SLOT,
    generation: int = 0,
    number: int = 0,
    num: int = 0,
    cursor: tuple[int, int, int] | None = None,
) -> bytes:
    """Return a message as bytes."""
    size = sum(map(len, payloads))
    return b"".join([_HEADER.pack(size, kind, flags, slot, generation, number, num, *(cursor or _NOWHERE)), *payloads])


class Reader:
    """Reads messages from a socket, as many at a time as have come.

    Args:
        link: The socket.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._bytes = bytearray()
        self._received = bytearray(_READ_SIZE)
        self._arrived: deque[tuple[int, list[tuple[int, int, bytes]], int, Any]] = deque()
        self._files: deque[ReceivedFile] = deque()

    def read(self, *, wait: bool = True) -> Iterator[Message] | None:
        """Return the messages that have come, after waiting for some bytes; None at the end of the link."""
        try:
            flags = 0 if wait else socket.MSG_DONTWAIT
            # `map` stores the result without running Python code in between, where Ctrl-C would lose descriptors.
            self._arrived.extend(map(self._link.recvmsg_into, [[self._received]], [_ANCILLARY_SIZE], [flags]))
        except BlockingIOError:
            return iter(())
        except ConnectionResetError:
            return None
        number, told = self._arrived[0][0], self._arrived[0][2]
        self._keep_files()
        if not number:
            return None
        if told & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "The memory of a worker cannot be opened: too many files are open")
        self._bytes += memoryview(self._received)[:number]
        return iter(list(self._messages()))

    def close(self) -> None:
        """Close the descriptors that no message has taken."""
        self._keep_files()
        self._files.clear()

    def _keep_files(self) -> None:
        if not any(ancillary for _, ancillary, _, _ in self._arrived):
            self._arrived.clear()
            return
        with uninterrupted():
            for _, ancillary, _, _ in self._arrived:
                for _, _, content in ancillary:
                    self._files.extend(map(ReceivedFile, memoryview(content).cast("i")))
            self._arrived.clear()

    def _messages(self) -> Iterator[Message]:
        start = 0
        while len(self._bytes) - start >= _HEADER.size:
            size, *fields = _HEADER.unpack_from(self._bytes, start)
            end = start + _HEADER.size + size
            if len(self._bytes) < end:
                break
            file = self._files.popleft() if fields[0] in (Said.SLOT, Said.RECORD) else None
            kind, flags, slot, generation, number, num, *place = fields
            payload = self._bytes[start + _HEADER.size : end]
            cursor = None if place[2] < 0 else (place[0], place[1], place[2])
            yield Message(kind, flags, slot, generation, number, num, payload, file, cursor)
            start = end
        del self._bytes[:start]
