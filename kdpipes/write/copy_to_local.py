"""Data sets from slow storage to a disk of this machine, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kdpipes.core.errors import check_count, must_be
from kdpipes.storage.urls import identity_of, is_local, join_url
from kdpipes.write._markers import END, MARKERS, PARTIAL, PARTS, copied_parts, held_start, state_of
from kdpipes.write._source_tree import Source, find_source, is_inside
from kdpipes.write._writer import Writer

__all__ = ["CopyResult", "copy_to_local"]

_STARTED = "kdpipes copies {url} to here. While autocopy_end.txt is missing, this folder is not complete.\n{version}\n"
_ENDED = "The copy of {url} is complete.\n"


class CopyResult(NamedTuple):
    """What `copy_to_local` has done.

    Args:
        path: The local folder.
        was_copied: Whether anything was copied; not if it was there.
        was_deleted: Whether an incomplete copy of something else, or of an older state, was removed.
        was_zip: Whether zips were unpacked.
        num_files: How many files were written.
        num_bytes: How many bytes they have.
    """

    path: Path
    was_copied: bool
    was_deleted: bool = False
    was_zip: bool = False
    num_files: int = 0
    num_bytes: int = 0


def copy_to_local(
    global_root: str | os.PathLike[str],
    local_root: str | os.PathLike[str],
    *,
    relative_path: str | os.PathLike[str] | None = None,
    num_workers: int = 8,
) -> CopyResult:
    """Copy a data set from slow storage to a folder of this machine, unless it is there.

    KappaData's rules: a folder that is missing (or empty) is copied; one that was copied is used, whatever has become
    of the source; one that a user put there is used as it is; of a copy that was broken off, what is missing is copied,
    or all of it if the source has changed. Two small files, `autocopy_start.txt` and `autocopy_end.txt`, tell these
    apart. `train.zip` may stand for the folder `train`, and so may zips for the folders in it: a folder whose files are
    all zips is a folder of folders. Files appear whole, verified by their size, or by the zip's checksums.
    Processes that call this at once share one copy.

    Args:
        global_root: A folder or zip, by path or any fsspec URL.
        local_root: The folder for it.
        relative_path: Copy only this folder of both; "train.zip" is the folder "train".
        num_workers: How many files are read, or unpacked, at a time.

    Raises:
        FileNotFoundError: There is neither such a folder nor such a zip.
        DataError: The source cannot be read; or a zip has a member that would lie outside of the folder, is a link,
            is encrypted or damaged.
        OSError: The folder cannot be written, or there is too little room: says how much is needed.

    Example:
        >>> copy_to_local("data/birds", "local", relative_path="train").num_files > 0
        True
        >>> copy_to_local("data/birds", "local", relative_path="train").was_copied
        False
    """
    num_workers = check_count("num_workers", num_workers)
    root = _local_folder(local_root)
    url, relative = _source_url(global_root), _relative(relative_path)
    if is_local(url) and _below(root, relative).resolve().is_relative_to(Path(url, relative).resolve()):
        raise ValueError(must_be("local_root", "a folder outside of `global_root`", str(local_root)))
    copying = _Copying(url, root, num_workers)
    earlier = [
        copying.settle(above) for above in _above(relative) if state_of(_below(root, above), root) == "unfinished"
    ]
    result = copying.settle(relative)
    return result if result.was_copied or not earlier else earlier[0]._replace(path=result.path)


def _local_folder(local_root: str | os.PathLike[str]) -> Path:
    if not isinstance(local_root, str | os.PathLike) or not is_local(os.fspath(local_root)):
        raise TypeError(must_be("local_root", "a folder of this machine", local_root))
    return Path(local_root).expanduser().absolute()


def _source_url(global_root: str | os.PathLike[str]) -> str:
    if not isinstance(global_root, str | os.PathLike):
        raise TypeError(must_be("global_root", "a path or an fsspec URL", global_root))
    url = os.fspath(global_root)
    return str(Path(url).expanduser()) if is_local(url) else url


def _relative(relative_path: str | os.PathLike[str] | None) -> str:
    if relative_path is None:
        return ""
    text = os.fspath(relative_path).replace(os.sep, "/") if isinstance(relative_path, str | os.PathLike) else "/"
    if not is_inside(text or "."):
        raise ValueError(must_be("relative_path", "a path below both folders", relative_path))
    path = PurePosixPath(text)
    return "" if path == PurePosixPath() else str(path.with_suffix("") if path.suffix.lower() == ".zip" else path)


def _above(relative: str) -> list[str]:
    """Return the folders that a relative path lies in, the outermost first."""
    return [str(parent) if parent.name else "" for parent in reversed(PurePosixPath(relative).parents)]


def _below(root: Path, relative: str) -> Path:
    return root / relative if relative else root


class _Copying:
    """From where to where.

    Args:
        url: Of the whole source.
        root: Of the whole copy.
        num_workers: How many files at a time.
    """

    def __init__(self, url: str, root: Path, num_workers: int) -> None:
        self._url, self._root, self._num_workers = url, root, num_workers

    def settle(self, relative: str) -> CopyResult:
        """See to it that a folder is there, and return what that took."""
        folder = _below(self._root, relative)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{str(folder)!r} is a file; a folder is needed.")
        parts = self._parts(folder)
        if parts is None and state_of(folder, self._root) in ("complete", "own"):
            return CopyResult(folder, was_copied=False)
        source = find_source(join_url(self._url, relative) if relative else self._url)
        for part in parts or ():
            self.settle(part.relative_to(self._root).as_posix())
        with held_start(folder) as start:
            if (folder / END).exists():  # another one has copied it
                return CopyResult(folder, was_copied=False)
            return _copied(source, folder, start, self._num_workers)

    def _parts(self, folder: Path) -> list[Path] | None:
        """Return the folders below that were copied before, one by one, if that is all that there is."""
        return copied_parts(folder) if state_of(folder, self._root) == "own" else None


def _copied(source: Source, folder: Path, start: Path, num_workers: int) -> CopyResult:
    """Copy what a folder lacks, which is held."""
    version = source.fingerprint()
    before = start.read_text(encoding="utf-8").splitlines()[-1:] if start.exists() else []
    was_deleted = bool(before) and before != [version] and _clear(folder)
    start.write_text(_STARTED.format(url=identity_of(source.url), version=version), encoding="utf-8")
    parts = folder / PARTS
    shutil.rmtree(parts, ignore_errors=True)  # of a process that was killed
    parts.mkdir()
    writer = Writer(folder, parts, num_workers)
    try:
        writer.copy(source)
    finally:
        shutil.rmtree(parts)
    (folder / PARTIAL).unlink(missing_ok=True)
    (folder / END).write_text(_ENDED.format(url=identity_of(source.url)), encoding="utf-8")
    return CopyResult(folder, True, was_deleted, bool(source.zips), writer.num_files, writer.num_bytes)


def _clear(folder: Path) -> bool:
    """Remove what was copied, and return whether there was anything."""
    old = [entry for entry in folder.iterdir() if entry.name not in MARKERS]
    for entry in old:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return bool(old)
