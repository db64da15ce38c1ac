"""One shard from elsewhere into a file of this machine: in ranges, resumed after a break, verified."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import lru_cache
from typing import NamedTuple

from kdpipes.core.errors import DataError
from kdpipes.storage.files import Version, forget_listings, md5_of, version_of
from kdpipes.storage.held_files import HeldFile
from kdpipes.storage.ranges import NoRangesError, Span
from kdpipes.storage.remote_stream import BrokenStreamError, RemoteStream
from kdpipes.storage.urls import identity_of

__all__ = ["ReplacedError", "Shard", "download"]

_CHUNK = 1 << 20
_with_ranges: set[str] = set()  # folders on servers that support range requests
_without_md5: set[str] = set()  # folders whose tags look like checksums and are none


class ReplacedError(DataError):
    """A shard is no longer what it was when its index was read."""


class Shard(NamedTuple):
    """A shard elsewhere, as it was when its index was read."""

    url: str
    version: Version

    @property
    def name(self) -> str:
        """What its files here are called: another version is another name."""
        return _name_of(self.url, *self.version)


@lru_cache(maxsize=1024)
def _name_of(url: str, size: int, tag: str) -> str:
    text = f"{identity_of(url)}\n{tag}".encode("utf-8", "surrogateescape")
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}-{size}"


def download(
    shard: Shard,
    file: HeldFile,
    submit: Callable[[Span], Future[bytes]],
    *,
    range_size: int,
    num_ranges: int,
    is_wanted: Callable[[], bool],
) -> bool:
    """Write what is missing of a shard at the end of a file, and return whether it is all there, and verified.

    Ranges are read side by side and written one after the other, so that the file's length says what there is, also
    after the process was killed.

    Args:
        shard: What is read.
        file: Where to, open for appending and held alone; what it has is the beginning of this version.
        submit: Begins to read a range.
        range_size: The size of a range in bytes.
        num_ranges: How many are under way at a time; so many are lost at most when the process is killed.
        is_wanted: Asked after each range whether to go on.

    Raises:
        ReplacedError: The shard is another one now.
        DataError: It cannot be read, or is damaged on the way again and again.
        OSError: The file cannot be written.
    """
    earlier = None
    for _ in range(2):
        try:
            is_whole = _append(shard, file, submit, range_size, num_ranges, is_wanted)
        except NoRangesError:
            is_whole = _append_front_to_back(shard, file, is_wanted)
        if not is_whole:
            return False
        _refuse_other(shard)
        found = _wrong_md5(shard, file)
        if found is None:
            return True
        if found == earlier:  # the same bytes twice: the tag is no checksum, as with S3 and keys of one's own
            _without_md5.add(_folder(shard))
            return True
        earlier = found
        os.ftruncate(file.descriptor, 0)
    raise DataError(f"Shard {shard.url!r} came damaged twice: its MD5 is {found}, and its tag {shard.version.tag!r}.")


def _append(
    shard: Shard,
    file: HeldFile,
    submit: Callable[[Span], Future[bytes]],
    range_size: int,
    num_ranges: int,
    is_wanted: Callable[[], bool],
) -> bool:
    if file.num_bytes() > shard.version.size:
        os.ftruncate(file.descriptor, 0)
    spans = _ranges(shard, file.num_bytes(), range_size)
    # A server without range requests would send the whole file for each request.
    is_known = not shard.url.startswith("http") or _folder(shard) in _with_ranges
    num_at_once = num_ranges if is_known else 1
    pending: deque[Future[bytes]] = deque()
    try:
        while True:
            while len(pending) < num_at_once and (span := next(spans, None)) is not None:
                pending.append(submit(span))
            if not pending:
                return True
            if not is_wanted():
                return False
            _write(file, pending.popleft().result())
            num_at_once = num_ranges
            _with_ranges.add(_folder(shard))
    finally:
        for coming in pending:
            coming.cancel()


def _append_front_to_back(shard: Shard, file: HeldFile, is_wanted: Callable[[], bool]) -> bool:
    """Write a shard from a server without range requests, from the start; earlier parts are dropped."""
    os.ftruncate(file.descriptor, 0)
    try:
        with RemoteStream(shard.url) as stream:
            while content := stream.read(_CHUNK):
                if not is_wanted():
                    return False
                _write(file, content)
    except BrokenStreamError as error:
        raise DataError(f"Shard {shard.url!r} {error}.") from error
    return True


def _ranges(shard: Shard, start: int, range_size: int) -> Iterator[Span]:
    for place in range(start, shard.version.size, range_size):
        yield Span(shard.url, place, min(place + range_size, shard.version.size))


def _write(file: HeldFile, content: bytes) -> None:
    view = memoryview(content)
    while view.nbytes:
        view = view[os.write(file.descriptor, view) :]


def _refuse_other(shard: Shard) -> None:
    try:
        forget_listings([shard.url])
        now = version_of(shard.url)
    except FileNotFoundError as error:
        raise ReplacedError(f"Shard {shard.url!r} has been removed while it was read.") from error
    if now != shard.version:
        raise ReplacedError(
            f"Shard {shard.url!r} has been replaced since its index was read: it was {_shown(shard.version)}, and is "
            f"{_shown(now)} now. Open the shards again."
        )


def _shown(version: Version) -> str:
    return f"{version.size} bytes ({version.tag or 'no tag'})"


def _wrong_md5(shard: Shard, file: HeldFile) -> str | None:
    """Return the checksum of a file if its tag says another one."""
    due = md5_of(shard.version)
    if due is None or _folder(shard) in _without_md5:
        return None
    found = _md5(file)
    return None if found == due else found


def _folder(shard: Shard) -> str:
    return shard.url.rpartition("/")[0]


def _md5(file: HeldFile) -> str:
    checksum, place = hashlib.md5(usedforsecurity=False), 0
    while chunk := os.pread(file.descriptor, _CHUNK, place):
        checksum.update(chunk)
        place += len(chunk)
    return checksum.hexdigest()
