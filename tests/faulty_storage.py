"""A file system of fsspec that fails on a schedule, and counts requests: `faulty://`.

Importing this module registers it. Spawned processes find it by the entry point in `fsspec_plugin`.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from kdpipes.core.errors import check_seed, must_be
from kdpipes.core.randomness import hash_key
from kdpipes.storage.files import pread

FaultKind = Literal[
    "latency",
    "slow",
    "reset",
    "reset_midway",
    "timeout",
    "unavailable",
    "io_error",
    "too_many_requests",
    "missing",
    "truncate",
    "flip_bit",
    "wrong_range",
    "new_etag",
    "new_size",
]
ErrorStyle = Literal["builtin", "s3fs"]
RequestKind = Literal["info", "list", "whole", "range"]
_OF_BODIES = ("slow", "reset_midway", "truncate", "flip_bit", "wrong_range")
_OF_INFO = ("new_etag", "new_size")
_BUSY = "An error occurred (429) when calling the GetObject operation (reached max retries: 4): Too Many Requests"
BEFORE_THE_ANSWER = ("reset", "timeout", "unavailable", "io_error", "too_many_requests", "missing")
_ERRORS: dict[str, tuple[type[OSError], int, str]] = {
    "reset": (ConnectionResetError, errno.ECONNRESET, "Connection reset by peer"),
    "reset_midway": (ConnectionResetError, errno.ECONNRESET, "Connection reset by peer"),
    "timeout": (TimeoutError, errno.ETIMEDOUT, "Connection timed out"),
    "unavailable": (OSError, errno.EBUSY, "Service Unavailable"),
    "io_error": (OSError, errno.EIO, "Input/output error"),
    "too_many_requests": (OSError, errno.EIO, _BUSY),
    "missing": (FileNotFoundError, errno.ENOENT, "The specified key does not exist."),
}
_ANY = -1  # stands for any fault, where requests are numbered
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Fault:
    """A fault of storage, and the requests that it hits.

    Requests are numbered separately for each path and each kind of request, so that a schedule does not depend on the
    order of paths, on time, or on the process that reads. Give either `every` or `probability`. With neither, all
    requests are hit.

    Args:
        kind: `latency` and `slow` (needs `bytes_per_s`) take time. `reset` comes before the body, `reset_midway` in the
            middle of it; `timeout`, `unavailable` (503), `io_error` (EIO), `too_many_requests` (429) and `missing` come
            at the start. `truncate` (half of the body), `flip_bit` and `wrong_range` (bytes of another offset) give
            wrong bytes without an error. With `new_etag` and `new_size`, `info` reports that the object has been
            replaced.
        every: Hit each `every`-th request.
        probability: Hit each request with this probability, which the seed decides.
        after: Skip this many requests first.
        times: Hit at most this many requests of a path; None for no limit.
        paths: Hit only paths that match this glob, in which `*` also matches slashes.
        on: Hit only requests of this kind: `info`, `list`, or a body that is read `whole` or as a `range`; None for any
            kind to which the fault applies.
        seconds: The delay of the request before the fault, in seconds. `latency` is this delay alone.
        bytes_per_s: The speed of bodies with `slow`.
    """

    kind: FaultKind
    every: int | None = None
    probability: float | None = None
    after: int = 0
    times: int | None = None
    paths: str = "*"
    on: RequestKind | None = None
    seconds: float = 0.0
    bytes_per_s: float | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether it depends on the number of earlier requests."""
        is_scheduled = self.every is not None or self.probability is not None or self.times is not None or self.after
        return bool(is_scheduled) or self.kind in ("flip_bit", "wrong_range")

    def concerns(self, path: str, kind: str) -> bool:
        """Return whether a request is one that this fault counts."""
        is_body = kind in ("whole", "range")
        if (self.kind in _OF_BODIES and not is_body) or (self.kind in _OF_INFO and kind != "info"):
            return False
        return self.on in (None, kind) and fnmatch.fnmatchcase(path, self.paths)

    def hits(self, number: int, num_hits: int, draw: Callable[[], float]) -> bool:
        """Return whether request `number`, from 0, is hit, after `num_hits` hits of earlier ones."""
        number -= self.after
        if number < 0 or (self.times is not None and num_hits >= self.times):
            return False
        if self.probability is not None:
            return draw() < self.probability
        return self.every is None or (number + 1) % self.every == 0


def error_of(kind: str, path: str, style: ErrorStyle) -> Exception:
    """Return the error that a kind of fault raises; those of s3fs are partly classes of botocore and aiohttp."""
    if style == "s3fs" and kind in ("reset", "reset_midway", "timeout"):
        from aiohttp import ClientPayloadError
        from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

        made: dict[str, Exception] = {
            "reset": EndpointConnectionError(endpoint_url=path),
            "reset_midway": ClientPayloadError("Response payload is not completed"),
            "timeout": ReadTimeoutError(endpoint_url=path),
        }
        return made[kind]
    builtin, number, text = _ERRORS[kind]
    return builtin(number, text)


class StorageStats(NamedTuple):
    """What a `FaultyFileSystem` has counted, over all threads and processes.

    Args:
        requests: The number of requests, including listings and `info`.
        bytes_asked: The number of bytes that were requested.
        bytes_delivered: The number of bytes that came.
        bytes_repeated: The number of these bytes that had been delivered before.
        faults: The number of requests that each kind of fault has hit.
    """

    requests: int
    bytes_asked: int
    bytes_delivered: int
    bytes_repeated: int
    faults: dict[str, int]


class Request(NamedTuple):
    """One request for the bytes `start` to `stop` of `path`, of which `delivered` bytes were delivered.

    `kind` is `info`, `list`, `whole` or `range`; `faults` are the numbers of the faults that hit it.
    """

    path: str
    kind: str
    pid: int
    faults: tuple[int, ...]
    start: int = 0
    stop: int = 0
    delivered: int = 0


class _Begun(NamedTuple):
    """A request that has begun: its name in the ledger, its number for that path, and the faults that hit it."""

    name: str
    number_of_path: int
    faults: list[Fault]


class _Ledger:
    """The requests of all processes, in one file: a line when a request begins, one when its bytes are known.

    Lines are appended whole. Without a fault that has a schedule, no lock is taken.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_read = 0
        self.requests: list[Request] = []
        self._places: dict[str, int] = {}
        self._numbers: Counter[tuple[int, str]] = Counter()
        self._hits: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()
        self._names = count()
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def begin(self, faults: Sequence[Fault], seed: int, path: str, kind: str) -> _Begun:
        """Record a request, and return its name, its number and the faults that hit it."""
        concerned = [place for place, fault in enumerate(faults) if fault.concerns(path, kind)]
        name = f"{os.getpid()}-{next(self._names)}"
        if not any(faults[place].is_numbered for place in concerned):
            self._append(["begin", name, path, kind, os.getpid(), concerned, [_ANY, *concerned]])
            return _Begun(name, 0, [faults[place] for place in concerned])
        with self._locked():
            hits = [place for place in concerned if self._is_hit(place, faults[place], seed, path)]
            self._append(["begin", name, path, kind, os.getpid(), hits, [_ANY, *concerned]])
            return _Begun(name, self._numbers[_ANY, path], [faults[place] for place in hits])

    def end(self, name: str, start: int, stop: int, delivered: int) -> None:
        """Record the range of a request, and the number of delivered bytes."""
        self._append(["end", name, start, stop, delivered])

    def read(self) -> list[Request]:
        """Return all requests so far."""
        with self._locked():
            return list(self.requests)

    def _is_hit(self, place: int, fault: Fault, seed: int, path: str) -> bool:
        number = self._numbers[place, path]
        draw = hash_key(seed, place, path, number)
        return fault.hits(number, self._hits[place, path], lambda: int.from_bytes(draw[:7], "little") / (1 << 56))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the other threads and processes that number requests waiting, and read what they have written."""
        import fcntl  # imported late: Windows does not have it, but must be able to import this module

        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                self._take_new()
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing it leaves the lock to a process forked meanwhile

    def _append(self, entry: list[Any]) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def _take_new(self) -> None:
        content = b""
        while part := os.pread(self._descriptor, _CHUNK, self._num_read + len(content)):
            content += part
        lines = content.splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):  # somebody may be at the last one
                self._num_read += len(line)
                self._take(*json.loads(line))

    def _take(self, what: str, name: str, *entry: Any) -> None:
        if what == "end":
            start, stop, delivered = entry
            place = self._places[name]
            self.requests[place] = self.requests[place]._replace(start=start, stop=stop, delivered=delivered)
            return
        path, kind, pid, hits, concerned = entry
        self._places[name] = len(self.requests)
        self.requests.append(Request(path, kind, pid, tuple(hits)))
        self._numbers.update((place, path) for place in concerned)
        self._hits.update((place, path) for place in hits)


def _num_repeated(requests: Sequence[Request]) -> int:
    """Return the number of bytes that were delivered more than once: the total minus the union of the ranges."""
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for request in requests:
        ranges[request.path].append((request.start, request.start + request.delivered))
    repeated = 0
    for places in ranges.values():
        end = 0
        for start, stop in sorted(places):
            repeated += max(min(end, stop) - start, 0)
            end = max(end, stop)
    return repeated


_ledgers: dict[tuple[int, str], _Ledger] = {}  # by process: a forked one reads the file for itself


def _opened(target: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path there, or that of the JSON of a file system."""
    if target.startswith("{"):
        return AbstractFileSystem.from_json(target), ""
    filesystem, root = fsspec.core.url_to_fs(target)
    return filesystem, str(root).rstrip("/")


def _passing(name: str) -> Callable[..., Any]:
    """Return a method that calls that of the inner file system with the path there."""

    def method(self: FaultyFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
        filesystem, root = self._opened()
        return getattr(filesystem, name)(_joined(root, self._strip_protocol(path)), *args, **kwargs)

    return method


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Another file system with faults: `faulty://` in fsspec.

    It counts all requests, and applies its faults to them. Bodies are read by `cat_file`, `cat_ranges`, `get_file` and
    `open`. Writing is not disturbed. `faulty_storage` makes it available to pipes as a URL.

    Args:
        target: The URL below which the files are (`"s3://bucket/photos"`), or a file system, with its own paths.
        faults: The faults: `Fault` objects, or their arguments as mappings.
        seed: The seed of probabilities, of the bits that are flipped, and of the offsets of wrong ranges.
        errors: The classes of errors: `builtin` ones, or those that `s3fs` raises after its own retries (needs s3fs).
            Connection resets are then not OSErrors.
        sleep: The function that waits for `latency`, `slow` and `timeout`.
        ledger: A file in which all processes record their requests; None for a temporary file.
        mounted: The arguments used if `target` is not given, as for `faulty://`; `faulty_storage` sets it.

    Example:
        >>> files = fsspec.filesystem("memory")
        >>> files.pipe("/birds/a.txt", b"heron")
        >>> storage = FaultyFileSystem("memory://birds", faults=[Fault("reset", every=2)])
        >>> storage.cat_file("a.txt")
        b'heron'
        >>> storage.cat_file("a.txt")
        Traceback (most recent call last):
        ConnectionResetError: [Errno 104] Connection reset by peer
        >>> storage.stats().faults
        {'reset': 1}
    """

    protocol = "faulty"
    cachable = False  # two that look alike are not to count together

    def __init__(
        self,
        target: str | AbstractFileSystem = "",
        faults: Sequence[Fault | Mapping[str, Any]] = (),
        seed: int = 0,
        errors: ErrorStyle = "builtin",
        sleep: Callable[[float], object] = time.sleep,
        ledger: str | None = None,
        mounted: Mapping[str, Any] | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        given: dict[str, Any] = {"target": target, "faults": faults, "seed": seed, "errors": errors}
        given.update(sleep=sleep, ledger=ledger)
        if not target and mounted is not None:
            given.update(mounted)
        if not given["target"] or not isinstance(given["target"], str | AbstractFileSystem):
            raise TypeError(must_be("target", "a URL or an fsspec file system", given["target"]))
        self._target: str = given["target"] if isinstance(given["target"], str) else given["target"].to_json()
        self._faults = [fault if isinstance(fault, Fault) else Fault(**fault) for fault in given["faults"]]
        self._seed = check_seed(given["seed"])
        self._errors = given["errors"]
        self._sleep = given["sleep"]
        self._inner: tuple[int, Any, str] | None = None
        self._ledger_path = given["ledger"] or self._new_ledger()

    def options(self) -> dict[str, Any]:
        """Return the arguments for another one, also in another process, that counts together with this one."""
        named = {"target": self._target, "seed": self._seed, "errors": self._errors, "ledger": self._ledger_path}
        return {**named, "faults": [asdict(fault) for fault in self._faults]}

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_options, (self.options(),)

    def requests(self) -> list[Request]:
        """Return every request so far, of all threads and processes, in the order in which they began."""
        return self._ledger.read()

    def stats(self, since: int = 0) -> StorageStats:
        """Return what has been counted, leaving out the first `since` requests."""
        requests = self.requests()[since:]
        return StorageStats(
            requests=len(requests),
            bytes_asked=sum(request.stop - request.start for request in requests),
            bytes_delivered=sum(request.delivered for request in requests),
            bytes_repeated=_num_repeated(requests),
            faults=dict(Counter(self._faults[place].kind for request in requests for place in request.faults)),
        )

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        begun = self._begin(path, "info")
        filesystem, root = self._opened()
        entry = _renamed(filesystem.info(_joined(root, path), **kwargs), root)
        entry.setdefault("ETag", f'"{hash_key(*sorted(entry.items()))[:16].hex()}-1"')
        for fault in begun.faults:
            if fault.kind == "new_etag":
                entry["ETag"] = f'"{hash_key(entry["ETag"])[:16].hex()}-1"'
            elif fault.kind == "new_size":
                entry["size"] += 1
        return entry

    def exists(self, path: str, **kwargs: Any) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.info(path, **kwargs)
            return True
        return False

    def isdir(self, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(self.info(path)["type"] == "directory")
        return False

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        self._begin(path, "list")
        filesystem, root = self._opened()
        found = [_renamed(entry, root) for entry in filesystem.ls(_joined(root, path), detail=True, **kwargs)]
        return found if detail else [entry["name"] for entry in found]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        path = self._strip_protocol(path)
        self._begin(path, "list")
        filesystem, root = self._opened()
        found = filesystem.find(_joined(root, path), maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        entries = [_renamed(entry, root) for entry in found.values()]
        names = {entry["name"]: entry for entry in entries}
        return names if detail else sorted(names)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        content, error = self._body(self._strip_protocol(path), start, end)
        if error is not None:
            raise error
        return content

    def get_file(self, rpath: str, lpath: Any, callback: Any = None, **kwargs: Any) -> None:
        if self.isdir(rpath):
            Path(lpath).mkdir(parents=True, exist_ok=True)
            return
        content, error = self._body(self._strip_protocol(rpath), None, None)
        Path(lpath).write_bytes(content)  # what came before the error stays in the file, as with s3fs
        if error is not None:
            raise error

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        if mode == "rb":
            return _FaultyFile(self, path, mode, block_size or "default", **kwargs)
        filesystem, root = self._opened()
        return filesystem.open(_joined(root, path), mode, block_size=block_size, **kwargs)

    pipe_file = _passing("pipe_file")
    mkdir = _passing("mkdir")
    makedirs = _passing("makedirs")
    rm_file = _passing("rm_file")
    rmdir = _passing("rmdir")

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        filesystem, root = self._opened()
        filesystem.cp_file(*(_joined(root, self._strip_protocol(path)) for path in (path1, path2)), **kwargs)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        filesystem, root = self._opened()
        for each in [path] if isinstance(path, str) else path:
            filesystem.rm(_joined(root, self._strip_protocol(each)), recursive=recursive, maxdepth=maxdepth)

    def _opened(self) -> tuple[Any, str]:
        """Return the inner file system and its root; each process opens its own, since many outlive no fork."""
        if self._inner is None or self._inner[0] != os.getpid():
            self._inner = os.getpid(), *_opened(self._target)
        return self._inner[1:]

    def _new_ledger(self) -> str:
        file, path = tempfile.mkstemp(prefix="kdpipes-faulty-")
        os.close(file)
        weakref.finalize(self, _forget_ledger, path, os.getpid())
        return path

    @property
    def _ledger(self) -> _Ledger:
        place = os.getpid(), self._ledger_path
        return _ledgers.get(place) or _ledgers.setdefault(place, _Ledger(self._ledger_path))

    def _begin(self, path: str, kind: str) -> _Begun:
        """Record a request, and apply the faults that come before its answer."""
        begun = self._ledger.begin(self._faults, self._seed, path, kind)
        for fault in begun.faults:
            if fault.seconds:
                self._sleep(fault.seconds)
            if fault.kind in BEFORE_THE_ANSWER:
                raise error_of(fault.kind, path, self._errors)
        return begun

    def _body(self, path: str, start: int | None, end: int | None) -> tuple[bytes, Exception | None]:
        """Return what comes of a body, and the error with which it breaks off."""
        begun = self._begin(path, "whole" if start is None and end is None else "range")
        size = self._size(path)
        begin, stop, _ = slice(start, end).indices(size)
        content, error = self._read(path, begin, max(stop, begin)), None
        for fault in begun.faults:
            draw = int.from_bytes(hash_key(self._seed, path, begun.number_of_path)[:8], "little")
            if fault.kind == "wrong_range" and size > 1:
                content = self._read_around(path, (begin + 1 + draw % (size - 1)) % size, len(content))
            elif fault.kind == "reset_midway":
                error = error_of(fault.kind, path, self._errors)
            content = _harmed(fault, content, draw)
            if fault.bytes_per_s:
                self._sleep(len(content) / fault.bytes_per_s)
        self._ledger.end(begun.name, begin, max(stop, begin), len(content))
        return content, error

    def _size(self, path: str) -> int:
        filesystem, root = self._opened()
        if type(filesystem) is LocalFileSystem:
            return Path(_joined(root, path)).stat().st_size
        return int(filesystem.info(_joined(root, path))["size"])

    def _read(self, path: str, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        filesystem, root = self._opened()
        if type(filesystem) is LocalFileSystem:
            return _part_of_file(_joined(root, path), start, stop)
        content: bytes = filesystem.cat_file(_joined(root, path), start=start, end=stop)
        return content

    def _read_around(self, path: str, start: int, length: int) -> bytes:
        """Return bytes from an offset on, and from the file's beginning where it ends."""
        content = self._read(path, start, start + length)
        return content + self._read(path, 0, length - len(content))


def _part_of_file(path: str, start: int, stop: int) -> bytes:
    """Return a part of a local file. This is fast, so that the file system adds little time of its own."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return pread(descriptor, stop - start, start)
    finally:
        os.close(descriptor)


def _harmed(fault: Fault, content: bytes, draw: int) -> bytes:
    if fault.kind in ("truncate", "reset_midway"):
        return content[: len(content) // 2]
    if fault.kind == "flip_bit" and content:
        place, bit = divmod(draw % (8 * len(content)), 8)
        return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
    return content


def _renamed(entry: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return an entry of the inner file system under the path that it has here."""
    name = str(entry["name"])
    return {**entry, "name": name[len(root) :].lstrip("/") if root else name}


class _FaultyFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content


def _joined(root: str, path: str) -> str:
    return f"{root}/{path}" if root and path else root or path


def _from_options(options: dict[str, Any]) -> FaultyFileSystem:
    return FaultyFileSystem(**options)


def _forget_ledger(path: str, owner: int) -> None:
    if os.getpid() == owner:
        Path(path).unlink(missing_ok=True)
    _ledgers.pop((os.getpid(), path), None)


@contextmanager
def faulty_storage(
    target: str | AbstractFileSystem,
    *,
    faults: Sequence[Fault | Mapping[str, Any]] = (),
    seed: int = 0,
    errors: ErrorStyle = "builtin",
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[FaultyFileSystem]:
    """Make the files below `target` available as `faulty://PATH`, with faults, for all pipes and their workers.

    Worker processes count and number requests together with this one. Spawned ones wait with `time.sleep`.

    Args:
        target: See `FaultyFileSystem`.
        faults: See `FaultyFileSystem`.
        seed: See `FaultyFileSystem`.
        errors: See `FaultyFileSystem`.
        sleep: See `FaultyFileSystem`.

    Example:
        >>> with faulty_storage("data/birds/train", faults=[Fault("latency", seconds=0.001)]) as storage:
        ...     names = kdp.image_folder("faulty://").class_names()
        >>> names, storage.stats().requests
        (('heron', 'stork'), 3)
    """
    storage = FaultyFileSystem(target, faults, seed, errors, sleep)
    options = storage.options()
    conf, name = fsspec.config.conf, "FSSPEC_FAULTY"  # fsspec's own means: the latter is read by spawned processes
    before, before_named = conf.get("faulty"), os.environ.get(name)
    conf["faulty"], os.environ[name] = {"mounted": {**options, "sleep": sleep}}, json.dumps({"mounted": options})
    try:
        yield storage
    finally:
        _put_back(conf, "faulty", before)
        _put_back(os.environ, name, before_named)


def _put_back(table: Any, name: str, value: Any) -> None:
    if value is None:
        del table[name]
    else:
        table[name] = value


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
sys.path.insert(0, str(Path(__file__).parent / "fsspec_plugin"))  # the first entry point of a name counts
