"""A local cache of whole remote shards: prefetched, shared by processes, limited in size."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import threading
import time
import weakref
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from kdpipes.core.errors import DataError
from kdpipes.core.messages import logger, warn
from kdpipes.core.processes import forget_after_fork
from kdpipes.core.secrets import masked
from kdpipes.storage.access import Threads
from kdpipes.storage.files import (
    CAN_HOLD,
    HeldFile,
    ReplacedError,
    cache_folder,
    cached_name,
    locked,
    make_cache_folder,
    pread,
    reject_other,
    write_all,
)
from kdpipes.storage.index_home import keep_index
from kdpipes.storage.readers import Version, md5_of
from kdpipes.storage.remote import BrokenStreamError, RemoteStream

AT_ONCE = 16  # the maximum number of shards read side by side
_NUM_HELD = 2  # minimum number of shards that a process keeps open and locked
_NAME = re.compile(r"([0-9a-f]{32}-([0-9]+))\.(tar|part)")
_WHOLE = ".tar"
_PART = ".part"
_LOCK = "lock"
_PATIENCE_S = 60.0
_POLL_S = 0.01
_CHUNK = 1 << 20
_without_md5: set[str] = set()  # folders whose tags look like checksums but are not
_log = logger(__name__)


class ShardCache:
    """Whole shards in a folder, shared by all local processes that use this folder.

    One process downloads a shard; if it is killed, another process resumes the download. Other processes can read the
    shard once it is complete and verified. To make room, shards that no process is reading are removed: first those
    outside the expected order, then those needed furthest in the future. Safe for threads and forked processes; copies
    use the same folder.

    Args:
        folder: The folder; None means `shards` in the local cache (`KDPIPES_CACHE_DIR`, `~/.cache/kdpipes`).
        max_bytes: The maximum size of the cache, including unfinished shards; None means half of the free space.
        num_ahead: The number of shards to download ahead of the one being read.
    """

    def __init__(self, folder: str | None = None, max_bytes: int | None = None, num_ahead: int = 2) -> None:
        self._place = (folder, max_bytes)
        self._num_ahead = num_ahead
        # Whether the user has chosen the folder.
        self.has_own_folder = folder is not None
        self._end: Any = None
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardCache, (*self._place, self._num_ahead)

    def forget(self) -> None:
        """Reset this object, without threads and open files."""
        self._made: _Fetcher | None = None
        self._lock = threading.Lock()
        self._has_warned = False
        if self._end is not None:
            self._end.detach()

    def takes(self, shard: Shard, num_bytes: int | None = None) -> bool:
        """Return whether the cache probably has room for a shard, or for `num_bytes` needed at the same time."""
        fetcher = self._fetcher()
        needed = shard.version.size if num_bytes is None else num_bytes
        try:
            if shard.name in fetcher.rejected or needed > fetcher.folder.max_bytes():
                return False
        except OSError as error:
            fetcher.failure = error
        return self._is_able(fetcher)

    def has(self, shard: Shard) -> bool:
        """Return whether a shard is in the cache."""
        return CAN_HOLD and self._fetcher().folder.has(shard)

    def path_of(self, shard: Shard, *, fetches: bool) -> str | None:
        """Return the path of a shard in the cache; None if it is missing.

        With `fetches`, a missing shard is downloaded first; None then means that it could not be cached, or that it
        has been replaced in storage.
        """
        try:
            file = self._file(shard, fetches=fetches)
        except ReplacedError:
            return None
        return None if file is None else str(file.path)

    def expect(self, shards: Sequence[Shard], untils: Sequence[int] | None = None) -> None:
        """Set the order in which a new epoch needs shards, and start downloading the first ones.

        A shard that is needed several times must appear several times. For `untils`, see `NeededShards`.
        """
        fetcher = self._fetcher()
        fetcher.failure = None
        fetcher.rejected.clear()
        self.prefetch(shards, untils)

    def prefetch(self, shards: Sequence[Shard], untils: Sequence[int] | None = None) -> None:
        """Set the shards that will be read soon, if the order of the whole epoch is unknown."""
        fetcher = self._fetcher()
        fetcher.order = NeededShards(shards, untils)
        if self._is_able(fetcher):
            fetcher.look_ahead()

    def read(self, shard: Shard, offset: int, size: int, *, fetches: bool = True) -> bytes | None:
        """Return bytes of a shard; None if it is missing and cannot be cached, or if it is too short.

        With `fetches`, a missing shard is downloaded first. Raises ReplacedError if it has been replaced in storage.
        """
        file = self._file(shard, fetches=fetches)
        content = None if file is None else pread(file.descriptor, size, offset)
        return content if content is None or len(content) == size else None

    def repair(self, shard: Shard, offset: int, content: bytes) -> None:
        """Overwrite damaged bytes of a shard."""
        try:
            self._fetcher().folder.repair(shard, offset, content)
        except OSError as error:  # the folder may be read-only
            _log.warning("The damaged copy of %s cannot be repaired: %s", masked(shard.url), error)

    def _file(self, shard: Shard, *, fetches: bool) -> HeldFile | None:
        fetcher = self._fetcher()
        if not CAN_HOLD:
            return None
        if fetcher.order.reach(shard):
            fetcher.look_ahead()
        try:
            is_wanted = fetches and self.takes(shard)
            file = fetcher.file_of(shard, fetches=is_wanted)
            if file is None and is_wanted and fetcher.order.need(shard.name) < math.inf:
                fetcher.rejected.add(shard.name)  # for this epoch: all cached shards are needed sooner
            return file
        except ReplacedError:
            raise
        except DataError as error:  # reading individual members may still work
            _log.warning("%s Its members are read individually.", error)
            fetcher.rejected.add(shard.name)
        except OSError as error:
            fetcher.failure = error
            self._is_able(fetcher)
        return None

    def _is_able(self, fetcher: _Fetcher) -> bool:
        if not CAN_HOLD:
            fetcher.failure = OSError("files cannot be locked on this system")
        if fetcher.failure is not None and not self._has_warned:
            self._has_warned = True
            warn(
                f"Shards cannot be cached in {str(fetcher.folder.path)!r}: {fetcher.failure}. "
                "Members are read individually."
            )
        return fetcher.failure is None

    def _fetcher(self) -> _Fetcher:
        with self._lock:
            if self._made is None:
                folder, max_bytes = self._place
                path = cache_folder("shards") if folder is None else Path(folder).expanduser()
                self._made = _Fetcher(ShardFolder(path, max_bytes), self._num_ahead)
                self._end = weakref.finalize(self, self._made.stop)
            return self._made


class _Fetcher:
    """The state of a cache in one process: open shards, the download thread, and the expected order.

    The download thread refers to this object and not to the cache, so that the cache can be garbage-collected while
    the thread runs.
    """

    def __init__(self, folder: ShardFolder, num_ahead: int) -> None:
        self.folder = folder
        self.order = NeededShards()
        self.failure: OSError | None = None  # error of the local disk, which ends all downloads
        self.rejected: set[str] = set()  # shards whose storage fails, or that do not fit in this epoch
        self._num_ahead = num_ahead
        self._lock = threading.Lock()
        self._held: OrderedDict[str, HeldFile] = OrderedDict()
        self._downloads: Future[None] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Stop the thread after the chunk that it is downloading."""
        self._is_stopped = True

    def file_of(self, shard: Shard, *, fetches: bool) -> HeldFile | None:
        """Return the held file of a shard. With `fetches`, a missing shard is downloaded first."""
        with self._lock:
            file = self._held.get(shard.name)
            if file is not None:
                self._held.move_to_end(shard.name)
                return file
        file = self._fetched(shard, waits=True) if fetches else self.folder.find(shard)
        if file is not None:
            # Shards that are read side by side stay open if the cache has room for twice as many.
            number = min(self.order.num_at_once, AT_ONCE)
            is_roomy = 2 * number * shard.version.size <= self.folder.max_bytes()
            with self._lock:
                self._held[shard.name] = file
                while len(self._held) > (max(_NUM_HELD, number) if is_roomy else _NUM_HELD):
                    self._held.popitem(last=False)
        return file

    def look_ahead(self) -> None:
        """Start a thread that downloads the next shards, unless one is running."""
        with self._lock:
            is_idle = self._downloads is None or self._downloads.done()
            if is_idle and self._due(set()) is not None:
                self._downloads = Threads(1, "kdpipes-shards").submit(self._work_ahead)

    def _work_ahead(self) -> None:
        tried: set[str] = set()
        while True:
            with self._lock:
                shard = self._due(tried)
                if shard is None:
                    self._downloads = None
                    return
            tried.add(shard.name)
            try:
                self._fetched(shard, waits=False)
            except DataError as error:  # the thread that needs the shard will raise the error
                _log.info("%s", error)
            except OSError as error:
                self.failure = error

    def _due(self, tried: set[str]) -> Shard | None:
        if self._is_stopped or self.failure is not None:
            return None
        missing = (shard for shard in self.order.ahead(self._num_ahead) if shard.name not in self.rejected | tried)
        return next((shard for shard in missing if not self.folder.has(shard)), None)

    def _fetched(self, shard: Shard, *, waits: bool) -> HeldFile | None:
        def expendable(entries: list[StoredFile]) -> Iterator[StoredFile]:
            """Yield eviction candidates: unneeded files first, then those needed furthest in the future."""
            latest = self.order.need(shard.name)
            for entry in sorted(entries, key=lambda entry: (-self.order.need(entry.name), entry.used)):
                if self.order.need(entry.name) <= latest < math.inf:
                    return
                with self._lock:
                    self._held.pop(entry.name, None)
                yield entry

        return self.folder.fetch(shard, self._download, expendable, waits=waits)

    def _download(self, shard: Shard, file: HeldFile) -> bool:
        is_whole = download(shard, file, lambda: not self._is_stopped)
        if is_whole:
            # The shard is usable even if its index cannot be cached. This runs in a thread, because otherwise the
            # traceback of an error would keep the file open.
            Threads(1, "kdpipes-shards").submit(partial(keep_index, shard.url, shard.version)).exception()
        return is_whole


class NeededShards:
    """The order in which an epoch needs shards, and the current position in it.

    Args:
        shards: The shards in the order in which they are needed. A shard may appear several times.
        untils: For each shard, the index of the last shard in this order that is begun before the epoch has finished
            with it; by default its own index.
    """

    def __init__(self, shards: Sequence[Shard] = (), untils: Sequence[int] | None = None) -> None:
        self._shards = list(shards)
        ends = range(len(self._shards)) if untils is None else untils
        self._width = max((until - index for index, until in enumerate(ends)), default=0)
        self._visits: dict[str, list[tuple[int, int]]] = defaultdict(list)  # the ends and the starts of each shard
        for index, (shard, until) in enumerate(zip(self._shards, ends, strict=True)):
            self._visits[shard.name].append((until, index))
        self._now = -1

    @property
    def num_at_once(self) -> int:
        """The maximum number of shards read side by side."""
        return self._width + 1

    def reach(self, shard: Shard) -> bool:
        """Record that a shard is being read, and return whether this advances the epoch."""
        index = self._next(shard.name, self._now)
        if index is None or index <= self._now:
            return False
        self._now = index
        return True

    def ahead(self, number: int) -> list[Shard]:
        """Return the next shards, after those read side by side with the current one."""
        return self._shards[self._now + 1 : self._now + 1 + number + self._width]

    def need(self, name: str) -> float:
        """Return the index at which a shard is needed next, in this epoch or an equal next one; infinity if never.

        The shard before the current one counts as needed, because other workers may still read it.
        """
        if name not in self._visits:
            return math.inf
        index = self._next(name, self._now - 1)
        return len(self._shards) + self._visits[name][0][1] if index is None else index

    def _next(self, name: str, now: int) -> int | None:
        """Return the index at which a shard is in use now or needed next; None if there is none."""
        visits = self._visits.get(name, [])
        number = bisect_left(visits, (now,))
        return visits[number][1] if number < len(visits) else None


class Shard(NamedTuple):
    """A remote shard, as of the time when its index was read.

    Args:
        url: The URL of the tar.
        version: The version of the tar.
        is_checked: Whether the index has a checksum of each member, which readers verify.
    """

    url: str
    version: Version
    is_checked: bool = False

    @property
    def name(self) -> str:
        """The name of its local files, which depends on the version."""
        return _name_of(self.url, *self.version)


@lru_cache(maxsize=1024)
def _name_of(url: str, size: int, tag: str) -> str:
    return f"{cached_name(url, tag)}-{size}"


Download = Callable[[Shard, HeldFile], bool]
Expendable = Callable[[list["StoredFile"]], Iterable["StoredFile"]]


class StoredFile(NamedTuple):
    """A file in the folder: a whole shard, or part of one. A part reserves the size of the whole shard."""

    path: Path
    name: str  # of the shard
    size: int  # of the whole shard
    num_bytes: int  # of the file
    used: float  # the time of its last use


class ShardFolder:
    """A folder of shards: `NAME.tar` is a whole shard, and `NAME.part` an unfinished one.

    A process that downloads a part has an exclusive lock on it, and readers of a shard have shared locks. Files without
    a lock may be removed. Only the process that has locked the file `lock` makes room. When a process is killed, the
    system releases its locks, and the next process continues with its part.

    Args:
        path: The folder, which is created when it is first needed.
        max_bytes: The maximum size; None means half of the free disk space, counting the shards of the folder as free.
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
        """Return the files in the folder."""
        entries = []
        with os.scandir(self.path) as files:
            for file in files:
                match = _NAME.fullmatch(file.name)
                with suppress(FileNotFoundError):  # another process has just removed or finished it
                    if match is not None:
                        status = file.stat()
                        size = int(match[2])
                        entries.append(StoredFile(Path(file.path), match[1], size, status.st_size, status.st_mtime))
        return entries

    def has(self, shard: Shard) -> bool:
        """Return whether the folder has a whole shard, judging by the file name alone."""
        return os.path.exists(self._path_of(shard, _WHOLE))  # noqa: PTH110 - False if the folder is unreadable

    def find(self, shard: Shard) -> HeldFile | None:
        """Return the file of a shard with a shared lock; None if it is missing."""
        while True:
            try:
                file = HeldFile(self._path_of(shard, _WHOLE))
            except (FileNotFoundError, NotADirectoryError):
                return None
            file.hold(waits=True)
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
        """Return the file of a shard with a shared lock. If it is missing, one process downloads it.

        `download` fills a part, and returns whether it is complete. `expendable` takes the other files and returns the
        removable ones in the order of removal. The result is None if there is no room, if the download was stopped, or
        if another process is downloading the shard and this one does not wait or the other one makes no progress.
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
        """Overwrite bytes of a shard in place, for all processes that read it."""
        held = self.find(shard)
        if held is not None:
            with held, HeldFile(held.path, os.O_RDWR) as file:
                view = memoryview(content)
                while view.nbytes:
                    num_written = os.pwrite(file.descriptor, view, offset)
                    view = view[num_written:]
                    offset = offset + num_written

    def _path_of(self, shard: Shard, suffix: str) -> Path:
        return self.path / f"{shard.name}{suffix}"

    def _begin(self, shard: Shard, expendable: Expendable) -> HeldFile | None:
        """Return the part to fill, locked unless another process has it, or the whole shard if it exists by now."""
        make_cache_folder(self.path)
        with locked(self.path / _LOCK):
            file = self.find(shard)
            if file is not None:
                return file
            part = HeldFile(self._path_of(shard, _PART), os.O_RDWR | os.O_CREAT | os.O_APPEND)
            if not part.hold(is_alone=True) or not part.is_in_place():
                part.is_alone = False
                return part
            if self._make_room(shard, expendable):
                return part
            with part:
                if not part.num_bytes():
                    part.remove()
            return None

    def _make_room(self, shard: Shard, expendable: Expendable) -> bool:
        """Make room for a shard by removing less needed files, if that suffices; return whether it does."""
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
        """Complete a part and turn it into a whole shard with a shared lock; return whether that succeeded."""
        try:
            if not download(shard, part):
                return False
            os.fsync(part.descriptor)
            with locked(self.path / _LOCK):
                part.path = part.path.replace(self._path_of(shard, _WHOLE))
            part.hold(waits=True)
        except BaseException as error:
            with part:
                if isinstance(error, OSError | ReplacedError):
                    part.remove()
            raise
        return True


def _seized(path: Path) -> HeldFile | None:
    """Return a file with an exclusive lock; None if another process has locked it or it is missing."""
    try:
        file = HeldFile(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    if file.hold(is_alone=True) and file.is_in_place():
        return file
    file.close()
    return None


def _has_ended(part: HeldFile) -> bool:
    """Wait until the process that fills a part has finished; return False if the part stops growing before."""
    size = part.num_bytes()
    since = time.monotonic()
    while not part.hold():
        if size != part.num_bytes():
            size = part.num_bytes()
            since = time.monotonic()
        if time.monotonic() - since > _PATIENCE_S:
            return False
        time.sleep(_POLL_S)
    return True


def download(shard: Shard, file: HeldFile, is_wanted: Callable[[], bool]) -> bool:
    """Append the missing bytes of a shard to a file, and return whether the shard is complete and verified.

    The file must be locked and open for appending. Bytes are written in order, so that even after a kill, its length
    tells how much has been downloaded. `is_wanted` is called after each chunk and returns whether to continue.
    """
    earlier = None
    expected = md5_of(shard.version)
    folder = shard.url.rpartition("/")[0]
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
        # and fetch damaged ones again.
        if expected is None or shard.is_checked or folder in _without_md5:
            return True
        checksum = _md5(file)
        if checksum == expected:
            return True
        # The same bytes twice: the tag is not a checksum, as with S3's own encryption keys.
        if checksum == earlier:
            _without_md5.add(folder)
            return True
        earlier = checksum
        os.ftruncate(file.descriptor, 0)
    raise DataError(
        f"Shard {shard.url!r} arrived damaged twice: its MD5 is {checksum}, but its tag is {shard.version.tag!r}."
    )


def _md5(file: HeldFile) -> str:
    checksum = hashlib.md5(usedforsecurity=False)
    offset = 0
    while chunk := pread(file.descriptor, _CHUNK, offset):
        checksum.update(chunk)
        offset += len(chunk)
    return checksum.hexdigest()
