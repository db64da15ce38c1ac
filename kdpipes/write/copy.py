"""`copy_to_local`: copy datasets from slow storage to a local disk, once.

Two markers tell a folder that was copied from one that a user made, as KappaData leaves them: `autocopy_start.txt` is
there before the first file, `autocopy_end.txt` after the last. Files are written below `.autocopy` and moved to their
places when they are complete, so every file with its final name is complete.
"""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import posixpath
import re
import shutil
import stat
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from kdpipes.core.errors import DataError, as_cause, check_count, must_be
from kdpipes.core.messages import bytes_if_slow
from kdpipes.core.secrets import masked
from kdpipes.storage.access import Access, current_access, is_missing, retried, using, what_went_wrong
from kdpipes.storage.files import draft_of, locked, naming
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.jobs import in_parallel
from kdpipes.storage.object_store import remote_reader
from kdpipes.storage.readers import LocalReader, Wanted, stat_in
from kdpipes.storage.remote import BrokenStreamError, RemoteStream
from kdpipes.storage.urls import check_roots, identity_of, is_local, join_url, split_chain

FULL = (errno.ENOSPC, errno.EDQUOT)
START = "autocopy_start.txt"
END = "autocopy_end.txt"
PARTIAL = "autocopy_partial.txt"  # in folders of `localize_files`, to which files come one by one
PARTS = ".autocopy"  # where incomplete files are
LOCK = ".autocopy.lock"
MARKERS = frozenset({START, END, PARTIAL, PARTS, LOCK})
_STARTED = "kdpipes copies {url} to here. While autocopy_end.txt is missing, this folder is not complete.\n{version}\n"
_ENDED = "The copy of {url} is complete.\n"
_STEP = 1 << 23  # bytes read at a time; larger remote files are streamed
# Over 50 ms of latency, blocks of 16 MiB are as fast as four requests in flight; blocks of 8 MiB take 30 % longer.
_ZIP_BLOCK = 1 << 24
_ZIP_STEP = 1 << 20
_ZIP = ".zip"
_ENCRYPTED = 0x1
_DRIVE = re.compile(r"[A-Za-z]:")
_UNREADABLE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, OSError)

Item = TypeVar("Item")
State = Literal["missing", "partial", "unfinished", "complete", "own"]


class CopyResult(NamedTuple):
    """The result of `copy_to_local`.

    Args:
        path: The local folder.
        was_copied: Whether anything was copied; not if the folder was complete.
        was_deleted: Whether an incomplete copy of something else, or of an older state, was removed.
        was_zip: Whether zips were unpacked.
        num_files: The number of files written.
        num_bytes: The size of the files in bytes.
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
    storage_options: Mapping[str, Any] | None = None,
) -> CopyResult:
    """Copy a dataset from slow storage to a local folder, unless it is already there.

    The rules are KappaData's. A folder that is missing or empty is copied. A complete copy is used, even if the source
    has changed, and so is a folder that was not copied by this function. An interrupted copy is completed, or started
    again if the source has changed. Two small files, `autocopy_start.txt` and `autocopy_end.txt`, distinguish these
    cases. The source may be the zip file `train.zip` instead of the folder `train`. If all files of a folder are zip
    files, each of them is unpacked to a subfolder. Files appear when they are complete, and are verified by their size,
    or by the checksums of the zip. Processes that call this at the same time share one copy.

    Args:
        global_root: The path or fsspec URL of the folder or zip file to copy.
        local_root: The folder for it.
        relative_path: A path relative to both roots: only this folder is copied. "train.zip" means the folder "train".
        num_workers: The number of files that are read or unpacked at the same time.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}`, for
            `global_root`. No error contains them.

    Raises:
        FileNotFoundError: The source does not exist, neither as a folder nor as a zip file.
        DataError: The source cannot be read; or a zip has a member that would lie outside of the folder, is a link,
            is encrypted or damaged.
        OSError: The folder cannot be written, or has too little space; the error states how much is needed.

    Example:
        >>> copy_to_local("data/birds", "local", relative_path="train").num_files > 0
        True
        >>> copy_to_local("data/birds", "local", relative_path="train").was_copied
        False
    """
    num_workers = check_count("num_workers", num_workers)
    access = Access(storage_options=storage_options)
    check_roots(local_root, global_root)
    root = Path(local_root).expanduser().absolute()
    url = os.fspath(global_root)
    url = str(Path(url).expanduser()) if is_local(url) else url
    relative = _relative(relative_path)
    if is_local(url) and (root / relative).resolve().is_relative_to(Path(url, relative).resolve()):
        raise ValueError(must_be("local_root", "a folder outside of `global_root`", str(local_root)))
    above = [str(parent) if parent.name else "" for parent in reversed(PurePosixPath(relative).parents)]
    unfinished = [each for each in above if state_of(root / each, root) == "unfinished"]
    with using(access):
        earlier = [_settle(url, root, each, num_workers) for each in unfinished]
        result = _settle(url, root, relative, num_workers)
    return result if result.was_copied or not earlier else earlier[0]._replace(path=result.path)


def _relative(relative_path: str | os.PathLike[str] | None) -> str:
    if relative_path is None:
        return ""
    text = os.fspath(relative_path).replace(os.sep, "/") if isinstance(relative_path, str | os.PathLike) else "/"
    if not is_inside(text or "."):
        raise ValueError(must_be("relative_path", "a path below both folders", relative_path))
    path = PurePosixPath(text)
    return "" if path == PurePosixPath() else str(path.with_suffix("") if path.suffix.lower() == _ZIP else path)


def is_inside(name: str) -> bool:
    """Return whether a path with "/" is relative and stays below its start."""
    return ".." not in name.split("/") and not name.startswith("/") and "\0" not in name


def _settle(url: str, root: Path, relative: str, num_workers: int) -> CopyResult:
    """Copy the folder `relative` from `url` to `root` unless it is complete."""
    folder = root / relative
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file. Pass a folder.")
    state = state_of(folder, root)
    parts = _copied_parts(folder) if state == "own" else None
    if parts is None and state in ("complete", "own"):
        return CopyResult(folder, was_copied=False)
    source = _find_source(join_url(url, relative) if relative else url)
    for part in parts or ():
        _settle(url, root, part.relative_to(root).as_posix(), num_workers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / START).touch()  # first: a folder with nothing but a lock file would count as a user's own
    with locked_once(folder / LOCK):
        if (folder / END).exists():  # another process has copied it
            return CopyResult(folder, was_copied=False)
        return _copy(source, folder, num_workers)


@contextmanager
def locked_once(path: Path) -> Iterator[None]:
    """Hold a lock, and remove its file at the end. After success, the files that it protects are complete."""
    with locked(path):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes no open file
                path.unlink()


def state_of(folder: Path, root: Path) -> State:
    """Return the state of a folder; `root` is the topmost folder above it that `localize_files` may be filling."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return "missing"
    if (folder / START).exists():
        return "complete" if (folder / END).exists() else "unfinished"
    for each in (folder, *folder.parents):
        if (each / END).exists() or (each / PARTIAL).exists():
            return "own" if (each / END).exists() else "partial"
        if each == root:
            break
    return "own"


def _copied_parts(folder: Path) -> list[Path] | None:
    """Return the folders below that were copied separately, or None if there is anything else."""
    found = []
    for entry in folder.iterdir():
        below = [entry] if (entry / START).exists() else _copied_parts(entry) if entry.is_dir() else None
        if not below:
            return None
        found += below
    return found


class SourceFile(NamedTuple):
    """A file to be copied."""

    name: str  # its path below the source
    url: str
    reader: Any  # a `LocalReader` or `FsspecReader`
    size: int  # -1 if unknown
    tag: str  # changes with the content

    @classmethod
    def of(cls, name: str, url: str, filesystem: Any, path: str, info: Any) -> SourceFile:
        """Convert a file system's entry to a file."""
        is_here = isinstance(filesystem, LocalFileSystem)
        reader = LocalReader(path) if is_here else remote_reader(url, filesystem, path)
        return cls(name, url, reader, *stat_in({"size": None, **info}).version)

    @property
    def is_local(self) -> bool:
        """Whether it is on a local disk."""
        return isinstance(self.reader, LocalReader)


class _CopySource(NamedTuple):
    """A folder to be copied: all its folders, its files, and zips, each of which becomes the folder of its name."""

    url: str
    folders: list[str]
    files: list[SourceFile]
    zips: list[SourceFile]

    def version(self) -> str:
        """Return a hash that changes with the names, sizes and tags of the files."""
        entries = (("file", self.files), ("zip", self.zips))
        lines = sorted((kind, each.name, each.size, each.tag) for kind, group in entries for each in group)
        text = repr((identity_of(self.url), lines)).encode("utf-8", "surrogateescape")
        return hashlib.blake2b(text, digest_size=16).hexdigest()


def _find_source(url: str) -> _CopySource:
    """Return the folder or zip at `url`, or the zip that has the name of a missing folder."""
    first, separator, rest = split_chain(url)
    zip_url = f"{first.rstrip('/')}{_ZIP}{separator}{rest}"
    try:
        for place in (url, zip_url):
            filesystem, path = filesystem_of(place)
            filesystem.invalidate_cache()
            info = _info(filesystem, path)
            is_file = info is not None and info["type"] == "file"
            if is_file and path.lower().endswith(_ZIP):
                return _CopySource(place, [], [], [SourceFile.of("", place, filesystem, path, info)])
            if info is None or place == zip_url:
                continue
            # servers of HTTP report folders as files
            if info["type"] != "directory" and not retried(lambda: filesystem.isdir(path)):  # noqa: B023
                raise NotADirectoryError(
                    f"{masked(url)!r} is a file; a folder or a zip is needed. `.localize_files()` copies files."
                )
            return _tree(url, filesystem, path)
    except (NotADirectoryError, DataError):
        raise
    except Exception as error:
        if is_missing(error):
            raise
        raise DataError(f"{url!r} cannot be listed: {what_went_wrong(url, error)}.") from as_cause(error)
    raise FileNotFoundError(
        f"There is neither a folder {masked(url)!r} nor a file {masked(zip_url)!r}. Check the path."
    )


def _info(filesystem: Any, path: str) -> Any:
    try:
        return _status(path) if isinstance(filesystem, LocalFileSystem) else retried(lambda: filesystem.info(path))
    except FileNotFoundError as error:
        if is_missing(error):
            return None
        raise


def _status(path: str) -> dict[str, Any]:
    """Return the entry of a local file as fsspec has it; of a link, that of its target."""
    status = os.stat(path)  # noqa: PTH116 - of each of many files
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file" if stat.S_ISREG(status.st_mode) else "other"
    return {"type": kind, "size": status.st_size, "mtime": status.st_mtime_ns, "place": (status.st_dev, status.st_ino)}


def _walk(folder: str, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what lies below a local folder, by path; links are followed, unless they lead back up."""
    above = (*above, _status(folder)["place"])
    for path in sorted(entry.path for entry in os.scandir(folder)):
        info = _status(path)
        if info["type"] == "other":
            raise DataError(f"{path!r} is neither a file nor a folder. Remove it.")
        if info["place"] not in above:
            yield path, info
            yield from _walk(path, above) if info["type"] == "directory" else ()


def _tree(url: str, filesystem: Any, root: str) -> _CopySource:
    is_here = isinstance(filesystem, LocalFileSystem)
    found = dict(_walk(root)) if is_here else retried(lambda: filesystem.find(root, withdirs=True, detail=True))
    folders: set[str] = set()
    files: list[SourceFile] = []
    by_folder = defaultdict(list)  # files that are not hidden
    for path, info in sorted(found.items()):
        name = str(path).removeprefix(root).strip("/")
        if not name or MARKERS & set(name.split("/")):
            continue
        if not is_inside(name):
            raise DataError(f"{path!r} would be copied out of the folder; its name must not have '..'. Rename it.")
        folder, _, base = name.rpartition("/")
        if info["type"] == "directory" or str(path).endswith("/"):
            folders |= _with_parents(name)
            continue
        folders |= _with_parents(folder)
        files.append(SourceFile.of(name, join_url(url, name), filesystem, str(path), info))
        if not base.startswith("."):
            by_folder[folder].append(name)
    # zips stand for folders where all files of a folder are zips, and no folder of the same name is beside them
    only_zips = [names for names in by_folder.values() if all(name.lower().endswith(_ZIP) for name in names)]
    zips = {name for names in only_zips for name in names if name[: -len(_ZIP)] not in folders}
    unpacked = [file._replace(name=file.name[: -len(_ZIP)]) for file in files if file.name in zips]
    return _CopySource(url, sorted(folders), [file for file in files if file.name not in zips], unpacked)


def _with_parents(folder: str) -> set[str]:
    """Return a folder and those that it lies in, by their paths below the source; without the source itself."""
    parts = folder.split("/") if folder else []
    return {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}


def _copy(source: _CopySource, folder: Path, num_workers: int) -> CopyResult:
    """Copy what is missing in a folder, which is locked."""
    start = folder / START
    version = source.version()
    parts = folder / PARTS
    before = start.read_text(encoding="utf-8").splitlines()[-1:]
    old = [entry for entry in folder.iterdir() if entry.name not in MARKERS] if before not in ([], [version]) else []
    for entry in old:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    start.write_text(_STARTED.format(url=identity_of(source.url), version=version), encoding="utf-8")
    shutil.rmtree(parts, ignore_errors=True)  # of a process that was killed
    parts.mkdir()
    writer = _FolderWriter(folder, parts, num_workers)
    try:
        writer.copy(source)
    finally:
        shutil.rmtree(parts)
    (folder / PARTIAL).unlink(missing_ok=True)
    (folder / END).write_text(_ENDED.format(url=identity_of(source.url)), encoding="utf-8")
    return CopyResult(folder, True, bool(old), bool(source.zips), writer.num_files, writer.num_bytes)


class _StoppedError(Exception):
    """Ends the copy of a file because another one has failed."""


class _FolderWriter:
    """Writes the files that are missing in a folder, several at a time."""

    def __init__(self, folder: Path, parts: Path, num_workers: int) -> None:
        self._folder = folder
        self._parts = parts
        self._num_workers = num_workers
        self._is_stopped = False
        self._settled: list[str] = []  # folders below that were copied separately before
        for path, folders, files in os.walk(folder):
            if Path(path) != folder and START in files and END in files:
                self._settled.append(Path(path).relative_to(folder).as_posix() + "/")
                folders.clear()
        self.num_files = self.num_bytes = 0

    def copy(self, source: _CopySource) -> None:
        """Copy files, and unpack zips."""
        files = [file for file in source.files if self._lacks(file.name, file.size)]
        zips = [file for file in source.zips if not self._is_settled(f"{file.name}/")]
        num_bytes = sum(max(file.size, 0) for file in files)
        _require_room(self._folder, num_bytes, repr(source.url))
        self._make_folders(source.folders)
        total = num_bytes + sum(max(file.size, 0) for file in zips)
        with bytes_if_slow(total, f"copying {source.url!r}") as advance:
            self._write_all(files, lambda file: self._write(file.name, _chunks(file), file.size, advance))
            for file in zips:
                self._unpack(file, advance)

    def _unpack(self, file: SourceFile, advance: Callable[[int], object]) -> None:
        url = file.url
        prefix = f"{file.name}/" if file.name else ""
        with _opened_zip(file) as archive:
            folders, contents = _contents_of(archive, url)
            members = {name: info for name, info in contents.items() if self._lacks(prefix + name, info.file_size)}
            _require_room(self._folder, sum(info.file_size for info in members.values()), f"unpacking {url!r}")
            self._make_folders([file.name, *(prefix + name for name in folders)])

            def unpack(name: str) -> int:
                info = members[name]
                size = self._write(prefix + name, _unpacked(archive, info, url), info.file_size, lambda _: None)
                advance(info.compress_size)
                return size

            self._write_all(members, unpack)

    def _write_all(self, items: Iterable[Item], write: Callable[[Item], int]) -> None:
        for num_bytes in in_parallel(write, items, self._num_workers, partial(setattr, self, "_is_stopped", True)):
            self.num_files += 1
            self.num_bytes += num_bytes

    def _write(self, name: str, chunks: Iterable[bytes], size: int, advance: Callable[[int], object]) -> int:
        def report(num_bytes: int) -> None:
            if self._is_stopped:
                raise _StoppedError
            advance(num_bytes)

        return write_whole(self._folder / name, chunks, size, self._parts / f"{os.urandom(8).hex()}.part", report)

    def _make_folders(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).mkdir(parents=True, exist_ok=True)

    def _is_settled(self, name: str) -> bool:
        return any(name.startswith(part) for part in self._settled)

    def _lacks(self, name: str, size: int) -> bool:
        """Return whether a file is missing; one that exists is complete, because it was moved to its place."""
        if self._is_settled(name):
            return False
        try:
            return os.stat(self._folder / name).st_size != size  # noqa: PTH116 - of each of many files
        except FileNotFoundError:
            return True


def write_whole(
    target: Path,
    chunks: Iterable[bytes],
    size: int = -1,
    draft: Path | None = None,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> int:
    """Write a file that appears when it is complete, and return its size.

    Args:
        target: The path; an existing file stays until the new one is complete.
        chunks: The content.
        size: The expected size in bytes; -1 if it is unknown.
        draft: The path until then, on the same file system; None is hidden beside `target`.
        advance: A function that is called with the number of bytes after each chunk.
    """
    num_bytes = 0
    try:
        with draft_of(target, draft) as path:
            with path.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    num_bytes += len(chunk)
                    advance(len(chunk))
            if size not in (-1, num_bytes):
                raise DataError(
                    f"{str(target)!r} should have {size} bytes, but {num_bytes} were received. Copy it again."
                )
            path.replace(target)
    except OSError as error:
        if error.errno in FULL:
            raise disk_full_error(target.parent, max(size, num_bytes), f"{target.name!r}") from error
        raise
    return num_bytes


def copy_file(file: SourceFile, target: Path, draft: Path) -> None:
    """Copy one file, which appears when it is complete."""
    _require_room(target.parent, max(file.size, 0), repr(file.url))
    write_whole(target, _chunks(file), file.size, draft)


def _require_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raise the error of a full disk if fewer than `num_bytes` are free on the disk of `folder`."""
    if num_bytes > shutil.disk_usage(folder).free:
        raise disk_full_error(folder, num_bytes, what)


def disk_full_error(folder: str | os.PathLike[str], num_bytes: int, what: str) -> OSError:
    """Return the error of a full disk, which says how many bytes are needed and free."""
    free = shutil.disk_usage(folder).free
    text = f"No space left on device: {what} needs {num_bytes} bytes, and {free} are free"
    return OSError(errno.ENOSPC, text, str(folder))


def _chunks(file: SourceFile) -> Iterator[bytes]:
    """Yield the content of a file.

    Large remote files are streamed and not copied by fsspec's `get_file`: a stream resumes after a broken request,
    has a time limit for silent storage (aiohttp would end each file after five minutes), and can be stopped.
    """
    with naming(file.url):
        if file.is_local or not 0 <= file.size <= _STEP:
            with file.reader.stream() if file.is_local else RemoteStream(file.url) as stream:
                while chunk := stream.read(_STEP):
                    yield chunk
        elif file.size:
            yield _range(file, 0, file.size)


def _range(file: SourceFile, start: int, stop: int) -> bytes:
    """Return some bytes of a file. A whole file is read without a range, which not every server supports."""
    wanted = Wanted() if (start, stop) == (0, file.size) else Wanted(start, stop)

    def read() -> bytes:
        content = bytes(file.reader.read(wanted).content)
        if len(content) != stop - start:
            raise BrokenStreamError(f"expected {stop - start} bytes at offset {start}, but received {len(content)}")
        return content

    return retried(read)


class _RemoteZip(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A remote zip, read in blocks; fsspec keeps some of them and reads the next one ahead."""

    def __init__(self, file: SourceFile) -> None:
        options = {"maxblocks": 4}
        reader = file.reader
        super().__init__(reader.filesystem, reader.path, "rb", _ZIP_BLOCK, True, "background", options, size=file.size)
        self._source = file
        self._access = current_access()

    def _fetch_range(self, start: int, end: int) -> bytes:
        with using(self._access), naming(self._source.url):  # fsspec reads ahead in a thread of its own
            return _range(self._source, start, min(end, self._source.size))


@contextmanager
def _opened_zip(file: SourceFile) -> Iterator[zipfile.ZipFile]:
    """Open a zip, from which several threads may read."""
    with file.reader.stream() if file.is_local else cast("IO[bytes]", _RemoteZip(file)) as content:
        try:
            archive = zipfile.ZipFile(content)
        except DataError:
            raise
        except (*_UNREADABLE, ValueError) as error:
            raise DataError(f"{file.url!r} is not a readable zip file: {error}. Replace it.") from error
        with archive:
            yield archive


def _contents_of(archive: zipfile.ZipFile, url: str) -> tuple[list[str], dict[str, zipfile.ZipInfo]]:
    """Return the folders and files of a zip, by path, in the order in which they lie there."""
    folders = set[str]()
    members = dict[str, zipfile.ZipInfo]()
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        kind = stat.S_IFMT(info.external_attr >> 16)
        path = info.orig_filename
        if not is_inside(path.replace("\\", "/")) or _DRIVE.match(path):  # on any operating system
            reason = "it would lie outside of the folder"
        elif kind == stat.S_IFLNK:
            reason = "it is a symbolic link"
        elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            reason = "it is neither a file nor a folder"
        else:
            reason = "it is encrypted" if info.flag_bits & _ENCRYPTED else ""
        if reason:
            raise DataError(f"Member {path!r} of {url!r} is rejected: {reason}. Repack the zip without it.")
        name = "/".join(part for part in info.filename.split("/") if part not in ("", "."))
        if not name or MARKERS & set(name.split("/")):
            continue
        if info.is_dir():
            folders |= _with_parents(name)
        else:
            members[name] = info
            folders |= _with_parents(posixpath.dirname(name))
    conflict = next((name for name in members if name in folders), None)
    if conflict is not None:
        raise DataError(f"Member {conflict!r} of {url!r} is rejected: it is both a file and a folder. Repack the zip.")
    return sorted(folders), members


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, url: str) -> Iterator[bytes]:
    """Yield the content of a member: at most as much as the zip states, verified by its checksum."""
    try:
        with archive.open(info) as file:
            while chunk := file.read(_ZIP_STEP):
                yield chunk
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(f"Member {info.filename!r} of {url!r} cannot be unpacked: {error}. Replace the zip.") from error
