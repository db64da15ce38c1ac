"""A local folder of whole remote shards, which several processes fill and share within a limit of bytes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from kdpipes.core.errors import DataError
from kdpipes.storage.files import ReplacedError, reject_other
from kdpipes.storage.local import HeldFile, cached_name, locked, make_cache_folder, pread, write_all
from kdpipes.storage.readers import Version, md5_of
from kdpipes.storage.remote import BrokenStreamError, RemoteStream

_NAME = re.compile(r"([0-9a-f]{32}-([0-9]+))\.(tar|part)")
_WHOLE, _PART, _LOCK = ".tar", ".part", "lock"
_PATIENCE_S, _POLL_S = 60.0, 0.01
_CHUNK = 1 << 20
_without_md5: set[str] = set()  # folders whose tags look like checksums but are not


class Shard(NamedTuple):
    """A remote shard, as it was when its index was read.

    Args:
        url: The URL of the tar.
        version: The version of the tar.
        is_checked: Whether the index has a checksum of each member. Readers compare it with what they read.
    """

    url: str
    version: Version
    is_checked: bool = False

    @property
    def name(self) -> str:
        """The name of its local files; another version has another name."""
        return _name_of(self.url, *self.version)

    @property
    def folder(self) -> str:
        """The URL of its folder."""
        return self.url.rpartition("/")[0]


@lru_cache(maxsize=1024)
def _name_of(url: str, size: int, tag: str) -> str:
    return f"{cached_name(url, tag)}-{size}"


Download = Callable[[Shard, HeldFile], bool]
Expendable = Callable[[list["StoredFile"]], Iterable["StoredFile"]]


class StoredFile(NamedTuple):
    """A file in the folder: a whole shard, or part of one, for which the whole size in bytes is reserved."""

    path: Path
    name: str  # of the shard
    size: int  # of the whole shard
    num_bytes: int  # of the file
    used: float  # when it was used last


class ShardFolder:
    """Whole shards as files, `NAME.tar`, and unfinished ones, `NAME.part`.

    A process that fills a part holds it alone; processes that read a shard share it; files that no process holds may be
    removed. One process at a time makes room, with the file `lock` locked. When a process is killed, the system
    releases what it held, and the next process continues with its part.

    Args:
        path: The folder; made when it is first needed.
        max_bytes: The maximum size; None is half of what is free on the disk, counting its own shards as free.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def max_bytes(self) -> int:
        """Return the maximum size in bytes."""
        if self._max_bytes is None:
            make_cache_folder(self.path)
            held = sum(entry.num_bytes for entry in self.entries())
            self._max_bytes = (shutil.disk_usage(self.path).free + held) // 2
        return self._max_bytes

    def entries(self) -> list[StoredFile]:
        """Return its files."""
        found = []
        with os.scandir(self.path) as files:
            for file in files:
                match = _NAME.fullmatch(file.name)
                with suppress(FileNotFoundError):  # another process has just removed or finished it
                    if match is not None:
                        status, size = file.stat(), int(match[2])
                        found.append(StoredFile(Path(file.path), match[1], size, status.st_size, status.st_mtime))
        return found

    def has(self, shard: Shard) -> bool:
        """Return whether a shard is there, judging by file names."""
        return os.path.exists(self._path_of(shard, _WHOLE))  # noqa: PTH110 - False where nothing can be seen

    def find(self, shard: Shard) -> HeldFile | None:
        """Return the file of a shard, shared with other readers, if it is there."""
        while True:
            try:
                file = HeldFile(self._path_of(shard, _WHOLE))
            except (FileNotFoundError, NotADirectoryError):
                return None
            file.hold_together()
            if file.is_in_place():
                break
            file.close()
        if file.num_bytes() == shard.version.size:
            with suppress(OSError):  # the file may belong to another user
                os.utime(file.descriptor)
            return file
        file.close()
        if (broken := _seized(file.path)) is not None:
            with broken:
                broken.remove()
        return None

    def fetch(self, shard: Shard, download: Download, expendable: Expendable, *, waits: bool) -> HeldFile | None:
        """Return the file of a shard, shared with other readers; a missing one is downloaded by one process.

        `download` fills a part, and returns whether it is whole. `expendable` returns which of the other files may be
        removed, first ones first. The result is None if there is no room, the download was stopped, or another process
        is downloading the shard and this one does not wait, or the other one makes no progress.
        """
        if shard.version.size > self.max_bytes():
            return None
        while True:
            file = self.find(shard) or self._begin(shard, expendable)
            if file is None or file.path.suffix == _WHOLE:
                return file
            if file.is_alone:
                is_filled = self._is_filled(shard, file, download)
                if is_filled and file.is_in_place():
                    return file
                file.close()
                if not is_filled:
                    return None
            else:
                has_ended = waits and _has_ended(file)
                file.close()
                if not has_ended:
                    return None

    def repair(self, shard: Shard, offset: int, content: bytes) -> None:
        """Write some bytes of a shard again, for all processes that hold it."""
        held = self.find(shard)
        if held is not None:
            with held, HeldFile(held.path, os.O_RDWR) as file:
                view = memoryview(content)
                while view.nbytes:
                    num_written = os.pwrite(file.descriptor, view, offset)
                    view, offset = view[num_written:], offset + num_written

    def _path_of(self, shard: Shard, suffix: str) -> Path:
        return self.path / f"{shard.name}{suffix}"

    def _begin(self, shard: Shard, expendable: Expendable) -> HeldFile | None:
        """Return the part to fill, held alone unless another process has it; or the whole if it has appeared."""
        make_cache_folder(self.path)
        with locked(self.path / _LOCK):
            found = self.find(shard)
            if found is not None:
                return found
            part = HeldFile(self._path_of(shard, _PART), os.O_RDWR | os.O_CREAT | os.O_APPEND)
            if not part.hold_alone() or not part.is_in_place():
                part.is_alone = False
                return part
            if self._make_room(shard, expendable):
                return part
            with part:
                if not part.num_bytes():
                    part.remove()
            return None

    def _make_room(self, shard: Shard, expendable: Expendable) -> bool:
        """Remove files that are needed less, if that is enough for a shard, and return whether it is."""
        others = [entry for entry in self.entries() if entry.name != shard.name]
        missing = sum(entry.size for entry in others) + shard.version.size - self.max_bytes()
        seized: list[HeldFile] = []
        try:
            for entry in expendable(others) if missing > 0 else ():
                if (file := _seized(entry.path)) is not None:
                    seized.append(file)
                    missing -= entry.size
                if missing <= 0:
                    break
            for file in seized if missing <= 0 else ():
                file.remove()
        finally:
            for file in seized:
                file.close()
        return missing <= 0

    def _is_filled(self, shard: Shard, part: HeldFile, download: Download) -> bool:
        """Download what a part lacks, and return whether it has become the whole shard, which is then shared."""
        try:
            if not download(shard, part):
                return False
            os.fsync(part.descriptor)
            with locked(self.path / _LOCK):
                part.path = part.path.replace(self._path_of(shard, _WHOLE))
            part.hold_together()
        except BaseException as error:
            with part:
                if isinstance(error, OSError | ReplacedError):
                    part.remove()
            raise
        return True


def _seized(path: Path) -> HeldFile | None:
    """Return a file, held alone, if no other process holds it."""
    try:
        file = HeldFile(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    if file.hold_alone() and file.is_in_place():
        return file
    file.close()
    return None


def _has_ended(part: HeldFile) -> bool:
    """Wait until the process that fills a part has ended; return False if the part stops growing before that."""
    size, since = part.num_bytes(), time.monotonic()
    while not part.hold_together(waits=False):
        if size != part.num_bytes():
            size, since = part.num_bytes(), time.monotonic()
        if time.monotonic() - since > _PATIENCE_S:
            return False
        time.sleep(_POLL_S)
    return True


def download(shard: Shard, file: HeldFile, is_wanted: Callable[[], bool]) -> bool:
    """Append what a file lacks of a shard, and return whether the shard is complete and verified.

    The file must be open for appending and locked. Bytes are written in order, so that its length shows how much is
    there even after a kill. `is_wanted` is called after each chunk, and returns whether to go on.
    """
    earlier, due = None, md5_of(shard.version)
    for _ in range(2):
        if file.num_bytes() > shard.version.size:
            os.ftruncate(file.descriptor, 0)
        try:
            with RemoteStream(shard.url, start=file.num_bytes(), known=shard.version) as stream:
                while content := stream.view(_CHUNK):
                    write_all(file.descriptor, content)
                    if not is_wanted():
                        return False
        except BrokenStreamError as error:
            reject_other(shard.url, shard.version)
            raise DataError(f"Shard {shard.url!r} {error}.") from error
        reject_other(shard.url, shard.version)
        # An MD5 costs 1.4 s of CPU per GB, more than the download. With checksums, readers verify each member anyway,
        # and fetch what is damaged once more.
        if due is None or shard.is_checked or shard.folder in _without_md5:
            return True
        found = _md5(file)
        if found == due:
            return True
        if found == earlier:  # the same bytes twice: the tag is not a checksum, as with S3's own encryption keys
            _without_md5.add(shard.folder)
            return True
        earlier = found
        os.ftruncate(file.descriptor, 0)
    raise DataError(f"Shard {shard.url!r} came damaged twice: its MD5 is {found}, and its tag {shard.version.tag!r}.")


def _md5(file: HeldFile) -> str:
    checksum, place = hashlib.md5(usedforsecurity=False), 0
    while chunk := pread(file.descriptor, _CHUNK, place):
        checksum.update(chunk)
        place += len(chunk)
    return checksum.hexdigest()
