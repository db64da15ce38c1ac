"""One file from anywhere into a file of this machine: tried again, verified by its size, there whole or not at all."""

from __future__ import annotations

import errno
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from kdpipes.core.errors import DataError, as_cause
from kdpipes.core.masked import masked
from kdpipes.storage.drafts import draft_of
from kdpipes.storage.refusals import what_went_wrong
from kdpipes.storage.remote_stream import BrokenStreamError, RemoteStream
from kdpipes.storage.retries import is_missing, retried

__all__ = ["FULL", "RemoteFile", "chunks_of", "full_error", "in_parallel", "require_room", "write_whole"]

_STEP = 1 << 23
FULL = (errno.ENOSPC, errno.EDQUOT)

Item = TypeVar("Item")
Result = TypeVar("Result")


class RemoteFile(NamedTuple):
    """A file where it comes from.

    Args:
        url: Its URL.
        filesystem: Where it lies.
        path: Its path there.
        size: In bytes; -1 where that is not known.
    """

    url: str
    filesystem: Any
    path: str
    size: int


def chunks_of(file: RemoteFile) -> Iterator[bytes]:
    """Yield the content of a file, front to back.

    Raises:
        FileNotFoundError: It is not there.
        DataError: It cannot be read, or has another size.
    """
    is_large = file.size > _STEP and not isinstance(file.filesystem, LocalFileSystem)
    try:
        if file.size < 0 or is_large:
            yield from _streamed(file)
        for start in range(0, file.size, _STEP) if not is_large else ():
            yield retried(partial(_piece, file, start))
    except Exception as error:
        if is_missing(error):
            raise FileNotFoundError(errno.ENOENT, "There is no such file", masked(file.url)) from as_cause(error)
        raise DataError(f"{file.url!r} cannot be read: {what_went_wrong(file.url, error)}.") from as_cause(error)


def _streamed(file: RemoteFile) -> Iterator[bytes]:
    with RemoteStream(file.url) as stream:
        while chunk := stream.read(_STEP):
            yield chunk


def _piece(file: RemoteFile, start: int) -> bytes:
    """Return the bytes from `start` on; all of a small file without naming a range, which not every server knows."""
    stop = min(start + _STEP, file.size)
    part = {} if file.size <= _STEP else {"start": start, "end": stop}
    content: bytes = file.filesystem.cat_file(file.path, **part)
    if len(content) != stop - start:
        raise BrokenStreamError(f"{stop - start} bytes are due at offset {start}, {len(content)} came")
    return content


def write_whole(
    target: Path, part: Path | None, chunks: Iterable[bytes], size: int, advance: Callable[[int], object]
) -> int:
    """Write a file, and return how many bytes it has.

    Args:
        target: Where it is to be; there is nothing, or what was there before, until it is whole.
        part: Where it is until then, in the same file system; None is beside it, hidden.
        chunks: The content.
        size: How many bytes are due; -1 if that is not known.
        advance: Called with the number of bytes after each chunk.

    Raises:
        DataError: There are more or fewer bytes.
        OSError: It cannot be written.
    """
    num_bytes = 0
    try:
        with draft_of(target, part) as draft:
            with draft.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                    num_bytes += len(chunk)
                    advance(len(chunk))
            if size not in (-1, num_bytes):
                raise DataError(f"{str(target)!r} is to have {size} bytes, but {num_bytes} came.")
            draft.replace(target)
    except OSError as error:
        if error.errno in FULL:
            raise full_error(target.parent, max(size, num_bytes), f"{target.name!r}") from error
        raise
    return num_bytes


def require_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raise the error of a full disk if less than `num_bytes` are free where `folder` lies."""
    if num_bytes > shutil.disk_usage(folder).free:
        raise full_error(folder, num_bytes, what)


def full_error(folder: Path, num_bytes: int, what: str) -> OSError:
    """Return the error of a full disk: how much is needed there, and how much is free."""
    free = shutil.disk_usage(folder).free
    text = f"No space left on device: {what} needs {num_bytes} bytes, and {free} are free"
    return OSError(errno.ENOSPC, text, str(folder))


def in_parallel(
    action: Callable[[Item], Result], items: Iterable[Item], num_workers: int, stop: Callable[[], object]
) -> Iterator[Result]:
    """Yield what `action` returns for each item, in order; threads work a little ahead.

    After an error `stop` is called, no thread begins another item, and none is still at work when the error is raised.
    """
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(num_workers, "kdpipes-copy") as threads:
        try:
            for item in items:
                pending.append(threads.submit(action, item))
                if len(pending) >= 4 * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            stop()
            for coming in pending:
                coming.cancel()
            raise
