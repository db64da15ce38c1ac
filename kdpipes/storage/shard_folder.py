"""A folder of whole shards from elsewhere that many processes fill together, and of which none takes too much."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kdpipes.storage.download import ReplacedError, Shard
from kdpipes.storage.files import make_cache_folder
from kdpipes.storage.held_files import HeldFile

__all__ = ["Entry", "ShardFolder"]

_NAME = re.compile(r"([0-9a-f]{32}-([0-9]+))\.(tar|part)")
_WHOLE, _PART, _LOCK = ".tar", ".part", "lock"
_PATIENCE_S, _POLL_S = 60.0, 0.01

Download = Callable[[Shard, HeldFile], bool]
Expendable = Callable[[list["Entry"]], Iterable["Entry"]]


class Entry(NamedTuple):
    """A file in the folder.

    Args:
        path: Where it lies.
        name: The shard's.
        size: In bytes; of a part, that of the whole, for which there must be room.
        used: When it was used last.
    """

    path: Path
    name: str
    size: int
    used: float


class ShardFolder:
    """Whole shards as files, `NAME.tar`, and those that are on their way, `NAME.part`.

    Who fills a part holds it alone; who reads a shard holds it together with others; what nobody holds may be removed.
    Room is made by one at a time, who holds the file `lock`. The system lets go of what a process held that was killed,
    and the next one goes on with its part.

    Args:
        path: The folder; made when it is first needed.
        max_bytes: How much it may have; None is half of what is free where it lies, its own shards counted as free.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def max_bytes(self) -> int:
        """Return how much it may have."""
        if self._max_bytes is None:
            make_cache_folder(self.path)
            held = sum(entry.path.stat().st_size for entry in self.entries())
            self._max_bytes = (shutil.disk_usage(self.path).free + held) // 2
        return self._max_bytes

    def entries(self) -> list[Entry]:
        """Return its files."""
        found = []
        with os.scandir(self.path) as files:
            for file in files:
                match = _NAME.fullmatch(file.name)
                with suppress(FileNotFoundError):  # just removed, or made whole, by another process
                    if match is not None:
                        found.append(Entry(Path(file.path), match[1], int(match[2]), file.stat().st_mtime))
        return found

    def has(self, shard: Shard) -> bool:
        """Return whether a shard is there, as far as its name says."""
        return os.path.exists(self._path_of(shard, _WHOLE))  # noqa: PTH110 - False where nothing can be seen

    def find(self, shard: Shard) -> HeldFile | None:
        """Return the file of a shard, held together, if it is there."""
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
            with suppress(OSError):  # others may read what they may not touch
                os.utime(file.descriptor)
            return file
        file.close()
        if (broken := self._seized(file.path)) is not None:
            with broken:
                broken.remove()
        return None

    def fetch(self, shard: Shard, download: Download, expendable: Expendable, *, waits: bool) -> HeldFile | None:
        """Return the file of a shard, held together; one that is not there is downloaded, by one process alone.

        Args:
            shard: What is wanted.
            download: Fills a part, and returns whether it is whole.
            expendable: Which of the other files may go for it, those that go first in front.
            waits: Whether to wait for another one who is downloading it, as long as that goes on.

        Returns:
            None if there is no room, another one is downloading it, or the download was given up.
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
        """Write some bytes of a shard again, for all who hold it."""
        held = self.find(shard)
        if held is not None:
            with held, HeldFile(held.path, os.O_RDWR) as file:
                view = memoryview(content)
                while view.nbytes:
                    num_written = os.pwrite(file.descriptor, view, offset)
                    view, offset = view[num_written:], offset + num_written

    def _path_of(self, shard: Shard, suffix: str) -> Path:
        return self.path / f"{shard.name}{suffix}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with HeldFile(self.path / _LOCK, os.O_RDWR | os.O_CREAT) as file:
            file.hold_alone(waits=True)
            yield

    def _begin(self, shard: Shard, expendable: Expendable) -> HeldFile | None:
        """Return the part to fill, held alone if nobody else has it, or the whole that has appeared meanwhile."""
        make_cache_folder(self.path)
        with self._locked():
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
        """Remove what others need less, if that is enough for a shard, and return whether it is."""
        others = [entry for entry in self.entries() if entry.name != shard.name]
        missing = sum(entry.size for entry in others) + shard.version.size - self.max_bytes()
        seized: list[HeldFile] = []
        try:
            for entry in expendable(others) if missing > 0 else ():
                if (file := self._seized(entry.path)) is not None:
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

    def _seized(self, path: Path) -> HeldFile | None:
        """Return a file, held alone, if nobody else holds it."""
        try:
            file = HeldFile(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        if file.hold_alone() and file.is_in_place():
            return file
        file.close()
        return None

    def _is_filled(self, shard: Shard, part: HeldFile, download: Download) -> bool:
        """Download what a part lacks, and return whether it has become the whole shard, held together."""
        try:
            if not download(shard, part):
                return False
            os.fsync(part.descriptor)
            with self._locked():
                part.move(self._path_of(shard, _WHOLE))
            part.hold_together()
        except BaseException as error:
            with part:
                if isinstance(error, OSError | ReplacedError):
                    part.remove()
            raise
        return True


def _has_ended(part: HeldFile) -> bool:
    """Wait until nobody fills a part any more; return False if it does not grow: who fills it may have been stopped."""
    size, since = part.num_bytes(), time.monotonic()
    while not part.hold_together(waits=False):
        if size != part.num_bytes():
            size, since = part.num_bytes(), time.monotonic()
        if time.monotonic() - since > _PATIENCE_S:
            return False
        time.sleep(_POLL_S)
    return True
