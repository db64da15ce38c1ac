"""Bytes by offset, front to back: of a file with positions, or of a stream that has none."""

from __future__ import annotations

import os
from typing import IO, Protocol

__all__ = ["FileBytes", "ForwardBytes", "StreamBytes", "pread"]

_CHUNK = 1 << 20
_STEP = 1 << 24
_STRAIGHT = 1 << 14
_SMALL, _LARGE = 1 << 12, 1 << 18


def pread(descriptor: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at `offset`, or those that are there: the system gives no more than 2 GiB at once."""
    content = os.pread(descriptor, size, offset)
    while len(content) < size and (more := os.pread(descriptor, size - len(content), offset + len(content))):
        content += more
    return content


class ForwardBytes(Protocol):
    """What gives bytes by offset; offsets only grow, unless it `goes_back`.

    `size` is how many bytes there are, None until that is known.
    """

    size: int | None
    goes_back: bool

    @property
    def position(self) -> int:
        """Up to where bytes have been read."""

    def take(self, offset: int, size: int, /) -> bytes:
        """Return the bytes from `offset` on: `size` of them, or fewer where the end comes first."""


class FileBytes:
    """The bytes of a file that is open on this machine. One that shrinks meanwhile gives fewer bytes, and no signal.

    What is large is read straight into the object that is returned, what is small through a window, which grows while
    all of the file is read and is small while most of it is passed over.
    """

    goes_back = True

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._window = b""
        self._begin = 0
        self._ahead = _SMALL
        self._position = 0
        self.size: int | None = os.fstat(descriptor).st_size

    @property
    def position(self) -> int:
        """Up to where bytes have been read."""
        return self._position

    def take(self, offset: int, size: int, /) -> bytes:
        start = offset - self._begin
        stop = start + size
        return self._window[start:stop] if stop <= len(self._window) else self._read(offset, size)

    def _read(self, offset: int, size: int) -> bytes:
        if size > _STRAIGHT:
            content = pread(self._descriptor, size, offset)
            self._position = offset + len(content)
            return content
        is_next = offset <= self._begin + len(self._window)
        self._ahead = min(2 * self._ahead, _LARGE) if is_next else _SMALL
        self._window, self._begin = pread(self._descriptor, max(size, self._ahead), offset), offset
        self._position = offset + len(self._window)
        return self._window[:size]


class StreamBytes:
    """The bytes of a file that can only be read on. However many are asked for, memory is taken as they come."""

    goes_back = False

    def __init__(self, file: IO[bytes]) -> None:
        self._read = getattr(file, "read1", file.read)  # what is there before damage comes through
        self._chunk = b""
        self._begin = 0
        self.size: int | None = None

    @property
    def position(self) -> int:
        """Up to where bytes have been read."""
        return self._begin + len(self._chunk)

    def take(self, offset: int, size: int, /) -> bytes:
        start = offset - self._begin
        stop = start + size
        return self._chunk[start:stop] if stop <= len(self._chunk) else self._take_more(offset, size)

    def _take_more(self, offset: int, size: int) -> bytes:
        while self.position < offset and self._advance(_CHUNK):
            pass
        parts = [self._chunk[max(offset - self._begin, 0) :]]
        missing = size - len(parts[0])
        while missing > 0 and self._advance(missing):
            parts.append(self._chunk)
            missing -= len(self._chunk)
        if missing < 0:
            parts[-1] = parts[-1][:missing]
        return b"".join(parts)

    def _advance(self, wanted: int) -> bool:
        chunk = self._read(min(max(wanted, _CHUNK), _STEP))
        self._begin, self._chunk = self.position, chunk
        if not chunk:
            self.size = self._begin
        return bool(chunk)
