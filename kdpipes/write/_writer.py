"""What is missing in a folder that is copied: files, and the members of zips."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from kdpipes.core.progress import bytes_if_slow
from kdpipes.write._files import chunks_of, in_parallel, require_room, write_whole
from kdpipes.write._markers import END, START
from kdpipes.write._source_tree import Entry, Source
from kdpipes.write._unzip import content_of, contents_of, opened_zip

__all__ = ["Writer"]

Item = TypeVar("Item")


class _StoppedError(Exception):
    """A copy that is given up since another one has failed."""


class Writer:
    """Writes what is missing in a folder.

    Args:
        folder: Where to.
        parts: Where files are until they are whole.
        num_workers: How many at a time.
    """

    def __init__(self, folder: Path, parts: Path, num_workers: int) -> None:
        self._folder, self._parts, self._num_workers = folder, parts, num_workers
        self._is_stopped = False
        self._settled = [part.relative_to(folder).as_posix() + "/" for part in _copied_below(folder)]
        self.num_files = self.num_bytes = 0

    def copy(self, source: Source) -> None:
        """Copy files, and unpack zips."""
        files = [each for each in source.files if self._lacks(each.name, each.file.size)]
        zips = [each for each in source.zips if not self._is_settled(f"{each.name}/")]
        num_bytes = sum(max(each.file.size, 0) for each in files)
        require_room(self._folder, num_bytes, repr(source.url))
        self._make_folders(source.folders)
        total = num_bytes + sum(max(each.file.size, 0) for each in zips)
        with bytes_if_slow(total, f"copying {source.url!r}") as advance:
            self._write_all(files, lambda each: self._copy_file(each, advance))
            for each in zips:
                self._unpack(each, advance)

    def _copy_file(self, each: Entry, advance: Callable[[int], object]) -> int:
        return self._write(each.name, chunks_of(each.file), each.file.size, advance)

    def _unpack(self, each: Entry, advance: Callable[[int], object]) -> None:
        url, prefix = each.file.url, f"{each.name}/" if each.name else ""
        with opened_zip(each.file) as archive:
            contents = contents_of(archive, url)
            members = {
                name: info for name, info in contents.members.items() if self._lacks(prefix + name, info.file_size)
            }
            require_room(self._folder, contents._replace(members=members).num_bytes(), f"unpacking {url!r}")
            self._make_folders([each.name, *(prefix + name for name in contents.folders)])

            def unpack(name: str) -> int:
                info = members[name]
                size = self._write(prefix + name, content_of(archive, info, url), info.file_size, lambda _: None)
                advance(info.compress_size)
                return size

            self._write_all(members, unpack)

    def _write_all(self, items: Iterable[Item], write: Callable[[Item], int]) -> None:
        for num_bytes in in_parallel(write, items, self._num_workers, self._stop):
            self.num_files += 1
            self.num_bytes += num_bytes

    def _stop(self) -> None:
        self._is_stopped = True

    def _write(self, name: str, chunks: Iterator[bytes], size: int, advance: Callable[[int], object]) -> int:
        def tell(num_bytes: int) -> None:
            if self._is_stopped:
                raise _StoppedError
            advance(num_bytes)

        part = self._parts / f"{os.urandom(8).hex()}.part"
        return write_whole(self._folder / name, part, chunks, size, tell)

    def _make_folders(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).mkdir(parents=True, exist_ok=True)

    def _is_settled(self, name: str) -> bool:
        return any(name.startswith(part) for part in self._settled)

    def _lacks(self, name: str, size: int) -> bool:
        """Return whether a file is to be written; those that are there are whole, as they were moved there."""
        if self._is_settled(name):
            return False
        try:
            status = os.stat(self._folder / name)  # noqa: PTH116 - of each of many files
        except FileNotFoundError:
            return True
        return status.st_size != size


def _copied_below(folder: Path) -> list[Path]:
    """Return the folders below that have been copied on their own before."""
    found = []
    for path, folders, files in os.walk(folder):
        if Path(path) != folder and START in files and END in files:
            found.append(Path(path))
            folders.clear()
    return found
