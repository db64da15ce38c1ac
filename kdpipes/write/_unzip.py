"""A zip from anywhere: what is in it, which of that is refused, and the content of its members, verified."""

from __future__ import annotations

import io
import lzma
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, cast

from fsspec.implementations.local import LocalFileSystem

from kdpipes.core.errors import DataError
from kdpipes.storage.ranges import RangeReader, Span
from kdpipes.write._files import RemoteFile
from kdpipes.write._markers import MARKERS
from kdpipes.write._source_tree import is_inside

__all__ = ["Contents", "content_of", "contents_of", "opened_zip"]

_BLOCK, _CHUNK = 1 << 22, 1 << 20
_NUM_AHEAD, _NUM_KEPT = 3, 8
_ENCRYPTED = 0x1
_DRIVE = re.compile(r"[A-Za-z]:")
_UNREADABLE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, OSError)


class Contents(NamedTuple):
    """What a zip has, by path.

    Args:
        folders: Folders that it names.
        members: Files.
    """

    folders: list[str]
    members: dict[str, zipfile.ZipInfo]

    def num_bytes(self) -> int:
        """Return how many bytes the files have when they are unpacked, as the zip states."""
        return sum(info.file_size for info in self.members.values())


class _Blocks(io.RawIOBase):
    """A file elsewhere, by position: in blocks, tried again, with the next ones on their way."""

    def __init__(self, file: RemoteFile) -> None:
        self._url, self._size, self._at = file.url, file.size, 0
        self._reader = RangeReader(
            max_gap=-1, max_span=_BLOCK, max_bytes=_NUM_KEPT * _BLOCK, num_threads=1 + _NUM_AHEAD
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        if self._at >= self._size:
            return 0
        start = self._at % _BLOCK
        content = memoryview(self._block(self._at // _BLOCK))[start : start + len(buffer)]
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def _block(self, number: int) -> bytes:
        spans = [self._span(next_number) for next_number in range(number, number + 1 + _NUM_AHEAD)]
        self._reader.announce(spans)
        return self._reader.read(spans[0])

    def _span(self, number: int) -> Span:
        return Span(self._url, min(number * _BLOCK, self._size), min((number + 1) * _BLOCK, self._size))


@contextmanager
def opened_zip(file: RemoteFile) -> Iterator[zipfile.ZipFile]:
    """Open a zip, of which several threads may read.

    Raises:
        DataError: It is none, or damaged.
    """
    with _opened(file) as content:
        try:
            archive = zipfile.ZipFile(content)
        except DataError:
            raise
        except (*_UNREADABLE, ValueError) as error:
            raise DataError(f"{file.url!r} is no zip that can be read: {error}.") from error
        with archive:
            yield archive


def _opened(file: RemoteFile) -> IO[bytes]:
    if isinstance(file.filesystem, LocalFileSystem):
        return Path(file.path).open("rb")
    return cast("IO[bytes]", io.BufferedReader(_Blocks(file), _CHUNK))


def contents_of(archive: zipfile.ZipFile, url: str) -> Contents:
    """Return what a zip has, in the order in which it lies there.

    Raises:
        DataError: A member would lie outside of the folder, is a link or a device, is encrypted, or has a folder's
            place.
    """
    folders, members = set(), {}
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        _refuse_harm(info, url)
        name = "/".join(part for part in info.filename.split("/") if part not in ("", "."))
        if not name or MARKERS & set(name.split("/")):
            continue
        if info.is_dir():
            folders.add(name)
        else:
            members[name] = info
            folders.add(name.rpartition("/")[0])
    folders |= {
        "/".join(parts[:end]) for parts in (name.split("/") for name in folders) for end in range(1, len(parts))
    }
    twice = next((name for name in members if name in folders), None)
    if twice is not None:
        raise DataError(f"Member {twice!r} of {url!r} is refused: it is a file, and a folder of others.")
    return Contents(sorted(folders - {""}), members)


def _refuse_harm(info: zipfile.ZipInfo, url: str) -> None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if not _is_harmless(info.orig_filename):
        reason = "it would lie outside of the folder"
    elif kind == stat.S_IFLNK:
        reason = "it is a symbolic link"
    elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        reason = "it is neither a file nor a folder"
    elif info.flag_bits & _ENCRYPTED:
        reason = "it is encrypted"
    else:
        return
    raise DataError(f"Member {info.orig_filename!r} of {url!r} is refused: {reason}.")


def _is_harmless(name: str) -> bool:
    """Return whether a member's path stays inside of the folder, on any system."""
    return is_inside(name.replace("\\", "/")) and not _DRIVE.match(name)


def content_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo, url: str) -> Iterator[bytes]:
    """Yield the content of a member, as much as the zip states and verified by its checksum.

    Raises:
        DataError: It is damaged.
    """
    try:
        with archive.open(info) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(f"Member {info.filename!r} of {url!r} cannot be unpacked: {error}.") from error
