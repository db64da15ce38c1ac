"""`write_shards`: the samples of a chain as plain webdataset tars, each with its index.

A call finds the shards of an earlier run, writes those that are missing, and reports both. Each tar, and then its
index, appears as a whole, so a shard with a valid index is complete. `train-shards.json` beside the shards records
which job they belong to.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.callback import Callback
from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError, as_cause, check_count, check_type, must_be, reject_field
from kdpipes.core.fingerprint import fingerprint
from kdpipes.core.iter_pipe import seed_streams
from kdpipes.core.map_pipe import MapPipe, item_at
from kdpipes.core.messages import shown_if_slow
from kdpipes.core.pipe import class_names_of, fields_of, gives_samples, prepare_for_workers
from kdpipes.core.registry import shown_name
from kdpipes.core.sample import Sample, as_sample
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.storage.access import Access, retried, using
from kdpipes.storage.catalog import index_beside
from kdpipes.storage.files import create_url, list_folder, locked, read_url, version_of, write_url
from kdpipes.storage.filesystems import filesystem_of, parent_of
from kdpipes.storage.index_home import SavedNotes, index_url
from kdpipes.storage.jobs import check_workers, in_parallel, run_jobs
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.storage.urls import folder_of, is_local, split_chain
from kdpipes.write.copy import FULL, disk_full_error, write_whole
from kdpipes.write.members import (
    END_MARK,
    MemberEncoder,
    TarSample,
    TarShard,
    as_tar_key,
    as_tar_sample,
    check_tar_key,
    duplicate_error,
    make_or_leave_out,
    prefetched,
)

Made = TypeVar("Made")
Coming = tuple[int, Callable[[], Sample]]  # a position in the chain, and a function that makes the sample, or fails
_NUMBER = re.compile(r"%(?:0\d+)?d")
_NUM_THREADS = 16
_MEASURED = 512  # samples that one job measures
_PATIENCE_S = 0.5  # for the lock: workers of a killed run may hold it until they notice, after some milliseconds
_END: Any = object()


class ShardsResult(NamedTuple):
    """The result of `write_shards`.

    Args:
        urls: The shards, in order.
        num_samples: The number of samples in them.
        num_bytes: The size of the shards in bytes.
        num_found: The number of shards that an earlier run had written.
        num_left_out: The number of samples that `on_error` has left out in this run.
        class_names: The names of the classes 0, 1, ..., if the chain knows them: `kdp.open_shards(class_names=...)`.
    """

    urls: list[str]
    num_samples: int
    num_bytes: int
    num_found: int = 0
    num_left_out: int = 0
    class_names: tuple[str, ...] | None = None


def write_shards(
    pipe: MapDataPipe[Any] | IterDataPipe[Any],
    urls: str | os.PathLike[str],
    *,
    max_samples: int | None = None,
    max_bytes: int | None = None,
    fields: str | None = None,
    encode: Mapping[str, Callable[[Any], bytes] | str] | None = None,
    extensions: Mapping[str, str] | None = None,
    key: Callable[[Sample], str] | None = None,
    num_workers: int = 0,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardsResult:
    """Write the samples of a chain as plain webdataset tars, each with its index, and return what was done.

    Samples are written in the order of the chain; `.permute(seed)` shuffles them once and for all. `wds.WebDataset` and
    `kdp.open_shards` read the tars. The index beside each (`NAME.tar.index`) is the one that `kdpipes index` makes,
    including checksums. The bytes depend only on the chain and the arguments, not on workers, machines, dates or users.

    A shard appears when it is complete, followed by its index. If a run was interrupted or killed, make the same call
    again: shards that exist with their indexes are not written again. The file `train-shards.json`, beside
    `train-000000.tar`, identifies the job and names the classes. A different chain, or different arguments, are an
    error there. Source files that were changed in place go unnoticed: delete the shards in that case. On local disks, a
    second run at the same time is an error. On remote storage, it is an error for a different job; two runs of the same
    job do the work twice and write the same bytes.

    The type of a value decides its format: bytes and encoded images are written unchanged; integers become `.cls`,
    strings `.txt`, dictionaries, lists and other numbers `.json`, arrays and tensors `.npy`. `kdp.open_shards` and
    `kdp.stream_shards` turn all of these back into values (tensors into arrays, tuples into lists). Pixels need
    `encode=`. A field whose name is the extension keeps it (`jpg`, `cls`); `x` and `y` are replaced by the extension,
    `.jpg` and `.cls`; it is added to other names, `mask.png`, `caption.txt`. A field that is None has no member.

    Keys are those of the samples, in the form that webdataset can hold: the extension of a file is left out
    (`heron/0001.jpg` becomes `heron/0001`), other dots in the file name become underscores, and slashes stay. No two
    samples may have the same key.

    With only `max_samples`, it is known in advance which samples of an indexed chain each shard holds. With
    `max_bytes`, shards are filled in order. A single process writes them as samples arrive; several workers make each
    sample twice, the first time to find its size.

    Args:
        pipe: A chain of samples, without `select` or `deal`. A stream is written by this process, front to back, as in
            its epoch 0.
        urls: A path or fsspec URL with a place for the number of the shard, `"s3://bucket/train-%06d.tar"`. Missing
            local folders are created.
        max_samples: The number of samples in a shard; the last shard may have fewer. Pass this or `max_bytes`.
        max_bytes: The maximum size of a tar. A larger sample gets a shard of its own.
        fields: The names of the fields to write, in one string; by default all.
        encode: The format of fields by name: "png", "jpg" (at quality 95), "webp" (lossless), "avif" (at quality 90),
            "jp2" (JPEG 2000, lossless), "npy", "pth", "json", "txt", ...; or a function that returns bytes. Values that
            have the format already are written unchanged.
        extensions: The extensions of fields by name, if the rules above do not fit.
        key: A function that takes a sample and returns its key, which is not changed. An invalid key is an error.
        num_workers: The number of processes that write shards; 0 writes in this process. With an executor that does not
            report its size, the number of jobs that it gets at a time.
        executor: An executor that writes the shards instead: a process pool, Dask's `client.get_executor()`, mpi4py's
            `MPIPoolExecutor`, or any other `concurrent.futures` executor. Its workers must be able to read the files of
            the chain and write to `urls`.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}`, for `urls`.
            Workers get them; no `repr`, state, fingerprint or error contains them.

    `.on_error("skip")` and `"quarantine"` apply here as well: samples that cannot be made are left out, logged and
    counted. With `max_samples`, their shards have fewer samples.

    Memory: One sample in each worker, and 24 bytes for each sample in this process. Remote shards are first written to
        the system's folder for temporary files, one for each worker.

    Raises:
        FileExistsError: The existing shards belong to another job, or to an unknown one; or another job has begun to
            write there.
        RuntimeError: Another call is writing these shards at the same time.
        ChainError: A field has no encoding; or the chain gives no samples.
        DataError: Two samples have the same key, or a key is not valid in a tar; or a sample cannot be read.
        OSError: A shard cannot be written; if the disk is full, the error states how much is free.

    Example:
        >>> result = kdp.write_shards(kdp.image_folder("data/birds/train"), "shards/birds-%06d.tar", max_samples=4)
        >>> birds = kdp.open_shards(result.urls, class_names=result.class_names).rename_fields(x="jpg", y="cls")
        >>> len(birds) == result.num_samples, birds.class_names()
        (True, ('heron', 'stork'))
    """
    target = ShardPlaces(urls, storage_options)
    if max_samples is None and max_bytes is None:
        raise ValueError(
            "`max_samples` or `max_bytes` must be given. Pass the size of a shard, such as `max_samples=1000`."
        )
    if max_samples is not None:
        check_count("max_samples", max_samples)
    if max_bytes is not None:
        check_count("max_bytes", max_bytes)
    source = gives_samples(pipe, "write_shards")
    encoder = MemberEncoder(_field_names(pipe, fields), encode, extensions)
    recipe = _Recipe(source, encoder, None if key is None else Callback("key", key))
    is_stream = isinstance(pipe, IterDataPipe)
    check_workers(executor, num_workers)
    if is_stream and (num_workers or executor is not None):
        value = num_workers or executor
        name = "num_workers" if num_workers else "executor"
        hint = "An indexed source is written by many: `kdp.open_shards`."
        raise ValueError(must_be(name, "left out for a stream, which one process reads front to back", value, hint))
    size = None if is_stream else len(recipe.pipe)
    job = {
        "pipes": Chain.of(pipe).fingerprints(),
        "num_samples": size,
        "max_samples": max_samples,
        "max_bytes": max_bytes,
        "arguments": fingerprint((recipe.encoder, recipe.key)),
    }
    names = class_names_of(pipe)
    with target.locked():
        notes, was_begun = _begin_notes(target, job, None if names is None else tuple(names))
        run = _Run(recipe, target, max_samples, max_bytes, notes, was_begun, size, num_workers, executor)
        if was_begun:
            target.remove_drafts()
        try:
            return run.finish()
        except BaseException:
            if executor is None:
                target.remove_drafts()  # of workers that were killed
                if not was_begun:
                    target.remove_unused_notes(notes)
            raise


def _field_names(pipe: Any, fields: str | None) -> tuple[str, ...] | None:
    if fields is None:
        return None
    if not isinstance(fields, str) or not fields.split():
        raise TypeError(must_be("fields", 'names in one string, like "x y"', fields))
    known = fields_of(pipe)
    names = tuple(dict.fromkeys(fields.split()))
    unknown = None if known is None else next((name for name in names if name not in known), None)
    if unknown is not None:
        reject_field(unknown, "The chain", known or ())
    return names


class _Report(NamedTuple):
    """A shard that is complete."""

    number: int
    hashes: NDArray[np.uint64]
    num_bytes: int
    num_left_out: int = 0


class ShardPlaces:
    """The URLs of the shards and of the files beside them; `pattern` has a `%06d` for the number of the shard."""

    def __init__(self, pattern: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self.access = Access(storage_options=storage_options)
        check_type("urls", pattern, str | os.PathLike, "a path or URL")
        text = os.path.expanduser(os.fspath(pattern).removeprefix("file://"))  # noqa: PTH111
        folder, slash, name = text.rpartition("/")
        found = list(_NUMBER.finditer(name))
        if len(found) != 1 or not name.endswith(".tar") or split_chain(text)[1] or text.startswith("pipe:"):
            rule = 'a path or URL of tars with one number in the file name, like "train-%06d.tar"'
            hint = ""
            if name.lower().endswith((".gz", ".bz2", ".xz", ".zst", ".tgz", ".taz", ".tbz", ".tbz2", ".txz", ".tzst")):
                hint = "Shards are plain tars, because samples in compressed ones cannot be read by position."
            elif "{" in name:
                hint = "Braces name shards to read. To write, put `%06d` in place of the number."
            elif not found and not name.endswith(".tar"):
                hint = f'Try "{text.rstrip("/")}/%06d.tar".'
            raise ValueError(must_be("urls", rule, pattern, hint))
        self._folder = folder + slash
        self._head = name[: found[0].start()]
        self._tail = name[found[0].end() :]
        self._number = found[0][0]
        self.is_local = is_local(text)
        self._pattern = re.escape(self._head) + r"\d+" + re.escape(self._tail)  # of the shards of all jobs
        self.notes_url = f"{self._folder}{self._head}shards{self._tail.removesuffix('.tar')}.json"

    def url(self, number: int) -> str:
        """Return the URL of a shard."""
        return f"{self._folder}{self._head}{self._number % number}{self._tail}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and lock the shards against other jobs, which would remove the drafts of this one.

        Folders that cannot be written have no lock, and neither has remote storage, which has no drafts: there, the
        notes alone keep other jobs out.
        """
        if not self.is_local:
            yield
            return
        Path(self._folder or ".").mkdir(parents=True, exist_ok=True)
        path = Path(f"{self._folder}.{self._head}shards{self._tail}.lock").absolute()
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with ExitStack() as stack:
            is_free = True
            with suppress(OSError):  # folders that cannot be written
                is_free = stack.enter_context(locked(path, timeout_s=_PATIENCE_S))
                if is_free:
                    path.write_text(holder)
            if not is_free:
                with suppress(OSError):  # it has just been released, or cannot be read while it is locked
                    found = path.read_text(errors="replace")
                    holder = "this process" if found == holder else found or "another process"
                raise RuntimeError(
                    f"These shards are already being written by {holder} (lock {str(path)!r}). Call `write_shards` in "
                    "one process, with `num_workers=`, not on every rank; or wait for the other call."
                )
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def existing(self) -> list[str]:
        """Return the names of the shards in the folder, of this job or of others."""
        return sorted(name for name in self._names() if re.fullmatch(self._pattern, name))

    def remove_drafts(self) -> None:
        """Remove the incomplete files of processes that were killed."""
        draft = rf"\.{self._pattern}(\.index)?\.\w+\.part"
        for name in self._names() if self.is_local else ():
            if re.fullmatch(draft, name):
                Path(self._folder, name).unlink(missing_ok=True)

    def remove_unused_notes(self, notes: SavedNotes) -> None:
        """Remove the notes of a remote job that has failed before its first shard: they would keep others out."""
        # Another run of the same job may write its first shard between the listing and the removal. Then both put the
        # notes back: this run if it sees the shard in a second listing, the other one after it has written the shard
        # (see `_Run`). One of the two comes last.
        with suppress(Exception):  # the error of the job is the one to report
            if not self.is_local and not self.existing():
                with using(self.access):
                    filesystem, path = filesystem_of(self.notes_url)
                    filesystem.rm_file(path)
                if self.existing():
                    _kept_notes(self, notes)

    def _names(self) -> list[str]:
        if self.is_local:
            folder = Path(self._folder or ".")
            return [path.name for path in folder.iterdir()] if folder.is_dir() else []
        with using(self.access), suppress(FileNotFoundError):
            return list(list_folder(folder_of(self.notes_url)))
        return []

    def index(self, number: int) -> ShardIndex | None:
        """Return the index of a shard; None if the shard is not complete."""
        with using(self.access):
            return index_beside(self.url(number))

    def keys_of(self, number: int) -> Sequence[str]:
        """Return the keys in a shard; none if the shard is not complete."""
        index = self.index(number)
        return [] if index is None else index.keys

    def finished(self, num_shards: int) -> Iterator[_Report]:
        """Yield a report for each of the first `num_shards` shards that is complete, in order."""
        found = in_parallel(self.index, range(num_shards), _NUM_THREADS)
        with closing(found):  # type: ignore[type-var]  # a generator
            for number, index in enumerate(found):
                if index is not None:
                    yield _Report(number, _hashes_of(index.keys), index.version.size)

    def write(self, number: int, samples: Iterable[TarSample]) -> _Report:
        """Write a shard, and then its index."""
        url = self.url(number)
        shard = TarShard(url)
        if self.is_local:
            write_whole(Path(url), shard.chunks(samples))
        else:
            _upload(url, shard, samples, self.access)
        with using(self.access):
            version = version_of(url)
            if version.size not in (-1, shard.num_bytes):
                raise DataError(
                    f"{url!r} should have {shard.num_bytes} bytes, but has {version.size}. Another process may be "
                    "writing it: stop that one, delete the file, and call `write_shards` again."
                )
            write_url(index_url(url), shard.builder.index(version).to_bytes())
        return _Report(number, _hashes_of(shard.keys), shard.num_bytes)


def _upload(url: str, shard: TarShard, samples: Iterable[TarSample], access: Access) -> None:
    """Write a remote tar from an unnamed local file, so that requests that fail can be made again."""
    with using(access):  # the samples are made without it: their sources have options of their own
        filesystem, path = filesystem_of(url)
    with tempfile.TemporaryFile(prefix="kdpipes-") as file:
        try:
            file.writelines(shard.chunks(samples))
            file.flush()
        except OSError as error:
            if error.errno in FULL:
                raise disk_full_error(tempfile.gettempdir(), shard.num_bytes, f"{url!r}, on its way,") from error
            raise
        try:
            retried(lambda: filesystem.put_file(f"/dev/fd/{file.fileno()}", path))
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
                raise
            raise DataError(f"{url!r} cannot be written: {str(error) or type(error).__name__}.") from as_cause(error)
    filesystem.invalidate_cache(parent_of(filesystem, path))


def _begin_notes(
    target: ShardPlaces, job: dict[str, Any], class_names: Sequence[str] | None
) -> tuple[SavedNotes, bool]:
    """Return the notes of a job, and whether an earlier run has written them.

    The notes also keep two jobs from writing the same remote shards, where no lock is possible: one request creates
    them, and those of another job are never replaced. Two runs of one job are harmless: they write the same bytes.
    """
    found = _read_notes(target)
    existing = target.existing()
    if found is None and existing:
        raise FileExistsError(
            f"There are shards already, such as {existing[0]!r}, but {target.notes_url!r}, which would name their "
            "job, is missing. Write to another place, or delete them."
        )
    new = SavedNotes(job, class_names)
    if target.is_local and not existing and (found is None or found.job != job):  # this job holds the lock
        return _write_notes(target, new), False
    notes = _kept_notes(target, new) if found is None else found
    _check_job(target, notes, job, has_shards=bool(existing))
    return notes, found is not None


def _read_notes(target: ShardPlaces) -> SavedNotes | None:
    """Return the notes beside some shards; None if they are missing."""
    with using(target.access), suppress(FileNotFoundError):
        return SavedNotes.from_bytes(read_url(target.notes_url), target.notes_url)
    return None


def _kept_notes(target: ShardPlaces, notes: SavedNotes) -> SavedNotes:
    """Return the notes beside some remote shards; missing ones are written."""
    found = _read_notes(target)
    if found is None:
        with using(target.access):
            found = SavedNotes.from_bytes(create_url(target.notes_url, notes.to_bytes()), target.notes_url)
    return found


def _check_job(target: ShardPlaces, notes: SavedNotes, job: dict[str, Any], *, has_shards: bool) -> None:
    """Raise FileExistsError if the notes belong to another job."""
    differing = [name for name in job if notes.job.get(name) != job[name]]
    if not differing:
        return
    differences = "; ".join(_difference(name, notes.job.get(name), job[name]) for name in differing)
    if has_shards:
        raise FileExistsError(
            f"According to {target.notes_url!r}, the shards beside it belong to another job: {differences}. To "
            "continue that job, pass the same arguments; otherwise write to another place, or delete the shards and "
            "that file."
        )
    raise FileExistsError(
        f"According to {target.notes_url!r}, another job has begun to write here: {differences}. Write to another "
        "place; or, if that job is not running, delete this file."
    )


def _difference(name: str, then: Any, now: Any) -> str:
    if name == "arguments":
        return "`fields`, `encode`, `extensions` or `key` has changed"
    if name != "pipes":
        return f"`{name}` was {then!r}, and is {now!r}"
    then = then if isinstance(then, list) else []
    changed = [entry for entry in now if entry not in then] or then
    return f"the chain has changed at {', '.join(shown_name(entry.rpartition(':')[0]) for entry in reversed(changed))}"


def _write_notes(target: ShardPlaces, notes: SavedNotes) -> SavedNotes:
    with using(target.access):
        write_url(target.notes_url, notes.to_bytes())
    return notes


class _Span(NamedTuple):
    """Positions of the chain that one job measures, or writes as a shard."""

    start: int
    stop: int
    number: int = -1
    url: str = ""

    def __str__(self) -> str:
        shard = f"shard {self.url!r}, " if self.url else ""
        return f"{shard}samples {self.start} to {self.stop - 1}"


class _Recipe(NamedTuple):
    """The way in which samples become members."""

    pipe: Any
    encoder: MemberEncoder
    key: Callback | None

    def samples(self, start: int, stop: int) -> Iterator[Coming]:
        """Yield the samples of an indexed chain."""
        return ((index, partial(self._sample, index)) for index in prefetched(self.pipe, np.arange(start, stop)))

    def _sample(self, index: int) -> Sample:
        return _as_sample(item_at(self.pipe, index), index)

    def stream(self) -> Iterator[Coming]:
        """Yield the samples of epoch 0 of a stream, wherever it stands."""
        copied = Chain.of(self.pipe).copy_streams()
        seed_streams(reversed(Chain.of(copied)), 0, 0, keeps_own_seeds=True)
        return ((index, partial(_as_sample, item, index)) for index, item in enumerate(copied))

    def key_of(self, sample: Sample) -> str:
        """Return the key of a sample in its tar."""
        return as_tar_key(sample.key) if self.key is None else check_tar_key(self.key(sample))

    def tar_sample(self, sample: Sample) -> TarSample:
        """Return a sample as it is written."""
        return as_tar_sample(self.key_of(sample), self.encoder(sample))

    def made(self, samples: Iterable[Coming], make: Callable[[Sample], Made]) -> Iterator[Made | None]:
        """Yield what `make` makes of each sample, and None for those that `on_error` leaves out."""
        handler = Chain.of(self.pipe).error_handler()
        is_indexed = isinstance(self.pipe, MapPipe)
        for position, fetch in samples:
            yield make_or_leave_out(fetch, make, position=position, handler=handler, is_indexed=is_indexed)

    def tar_samples(self, start: int, stop: int) -> Iterator[TarSample | None]:
        """Yield the samples of an indexed chain as they are written."""
        return self.made(self.samples(start, stop), self.tar_sample)


def _as_sample(item: Any, index: int) -> Sample:
    return item if isinstance(item, Sample) else as_sample(item, index, "write_shards")


def _write_span(recipe: _Recipe, target: ShardPlaces, span: _Span) -> _Report:
    """Write a shard, in any process."""
    samples = recipe.tar_samples(span.start, span.stop)
    report = target.write(span.number, (sample for sample in samples if sample is not None))
    return report._replace(num_left_out=span.stop - span.start - len(report.hashes))


def _measure_span(recipe: _Recipe, span: _Span) -> NDArray[np.int64]:
    """Return how many bytes samples take in a tar; 0 for those that are left out."""
    samples = recipe.tar_samples(span.start, span.stop)
    sizes = (0 if sample is None else sample.num_bytes for sample in samples)
    return np.fromiter(sizes, dtype=np.int64, count=span.stop - span.start)


@dataclass
class _Run:
    """One call of `write_shards`: finds the shards that exist, writes those that are missing, and counts both."""

    recipe: _Recipe
    target: ShardPlaces
    max_samples: int | None
    max_bytes: int | None
    notes: SavedNotes
    was_begun: bool
    size: int | None
    num_workers: int
    executor: Executor | None

    def __post_init__(self) -> None:
        self._reports: dict[int, _Report] = {}
        self._num_found = self._num_left_out = 0
        self._num_checked = self._num_unchecked = 0  # keys

    def finish(self) -> ShardsResult:
        """Write the missing shards and the notes, and return the result."""
        stops = self._stops()
        if stops is None:
            self._write_in_order()
        else:
            self._write_spans(stops)
        self._check_keys()
        reports = [self._reports[number] for number in range(len(self._reports))]
        shards = [(len(report.hashes), report.num_bytes) for report in reports]
        found = None if self.target.is_local else _read_notes(self.target)
        if found is not None:  # on storage where several jobs can create the notes at the same time
            _check_job(self.target, found, self.notes.job, has_shards=True)
        if self.notes.shards != shards:
            _write_notes(self.target, replace(self.notes, shards=shards))
        names = self.notes.class_names
        return ShardsResult(
            urls=[self.target.url(report.number) for report in reports],
            num_samples=sum(len(report.hashes) for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
            num_found=self._num_found,
            num_left_out=self._num_left_out + sum(report.num_left_out for report in reports),
            class_names=None if names is None else tuple(names),
        )

    def _stops(self) -> list[int] | None:
        """Return the stop position of each shard, or None if only writing them shows that."""
        size = self.size
        if size is None:
            return None
        if self.max_bytes is None:
            step = self.max_samples or 1
            return [min(start + step, size) for start in range(0, size, step)]
        if self.notes.stops is not None:
            return list(self.notes.stops)
        if not self.num_workers and self.executor is None:
            return None
        spans = [_Span(start, min(start + _MEASURED, size)) for start in range(0, size, _MEASURED)]
        with self._run(partial(_measure_span, self.recipe), spans, "measuring samples") as measured:
            sizes = np.concatenate([np.zeros(0, dtype=np.int64), *measured])
        kept = np.flatnonzero(sizes)
        numbers = [number for number, _ in self._numbered(sizes[kept].tolist(), int)]
        stops = [*kept[1:][np.diff(numbers) > 0].tolist(), size] if numbers else []
        self._num_left_out = 0 if stops else size
        self.notes = _write_notes(self.target, replace(self.notes, stops=stops))
        return stops

    def _run(self, function: Callable[[_Span], Any], spans: Sequence[_Span], what: str) -> Any:
        if self.num_workers or self.executor is not None:
            for pipe in Chain.of(self.recipe.pipe).pipes:
                prepare_for_workers(pipe)
        return closing(run_jobs(function, spans, executor=self.executor, num_workers=self.num_workers, what=what))

    def _write_spans(self, stops: list[int]) -> None:
        for report in self.target.finished(len(stops) if self.was_begun else 0):
            self._add(report)
        self._num_found = len(self._reports)
        shards = enumerate(zip([0, *stops], stops, strict=False))
        spans = [_Span(start, stop, number, self.target.url(number)) for number, (start, stop) in shards]
        missing = [span for span in spans if span.number not in self._reports]
        with self._run(partial(_write_span, self.recipe, self.target), missing, "writing shards") as reports:
            for report in reports:
                self._add_written(report)

    def _add(self, report: _Report) -> None:
        self._reports[report.number] = report
        self._num_unchecked += len(report.hashes)
        if 2 * self._num_unchecked >= self._num_checked:  # at growing intervals: n log n in all
            self._check_keys()

    def _all_hashes(self) -> NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, dtype=np.uint64), *(report.hashes for report in self._reports.values())])

    def _check_keys(self) -> None:
        """Raise an error if two samples so far have the same key; 64 bits of each are compared."""
        hashes = np.sort(self._all_hashes())
        self._num_checked = len(hashes)
        self._num_unchecked = 0
        equal = hashes[1:][hashes[1:] == hashes[:-1]]
        if len(equal):
            first, second, *_ = [
                number for number, report in self._reports.items() for _ in np.flatnonzero(report.hashes == equal[0])
            ]
            keys = self.target.keys_of(first)
            key = keys[int(np.flatnonzero(_hashes_of(keys) == equal[0])[0])]
            raise duplicate_error(key, f"shards {first} and {second}")

    def _add_written(self, report: _Report) -> None:
        # A run of the same job that failed may have removed the notes, if it saw no shard.
        if not self.target.is_local and len(self._reports) == self._num_found:
            _check_job(self.target, _kept_notes(self.target, self.notes), self.notes.job, has_shards=True)
        self._add(report)

    def _write_in_order(self) -> None:
        """Write shards as the samples come, after the ones that exist."""
        found = self.target.finished(len(self.target.existing()) if self.was_begun else 0)
        with closing(found):  # type: ignore[type-var]  # a generator
            for report in found:
                if report.number != len(self._reports):  # one before it is missing
                    break
                self._add(report)
        self._num_found = len(self._reports)
        samples = self.recipe.stream() if self.size is None else self.recipe.samples(0, self.size)
        samples = shown_if_slow(samples, self.size, "writing shards")
        self._skip_written(samples)
        numbered = self._numbered(self.recipe.made(samples, self.recipe.tar_sample), attrgetter("num_bytes"))
        for number, group in groupby(numbered, key=itemgetter(0)):
            self._add_written(self.target.write(number, map(itemgetter(1), group)))

    def _numbered(self, samples: Iterable[Made | None], size_of: Callable[[Made], int]) -> Iterator[tuple[int, Made]]:
        """Yield the number of the shard of each sample, and the sample. One above the limit gets its own shard."""
        number = self._num_found
        num_samples = 0
        num_bytes = len(END_MARK)
        for sample in samples:
            if sample is None:
                self._num_left_out += 1
                continue
            size = size_of(sample)
            is_full = num_samples == self.max_samples or num_bytes + size > (self.max_bytes or math.inf)
            if is_full and num_samples:
                number += 1
                num_samples = 0
                num_bytes = len(END_MARK)
            num_samples += 1
            num_bytes += size
            yield number, sample

    def _skip_written(self, samples: Iterator[Coming]) -> None:
        """Take from `samples` those of existing shards, and those in between that `on_error` leaves out."""
        due = self._all_hashes()
        place = 0
        keys = self.recipe.made(samples, self.recipe.key_of)
        while place < len(due):
            key = next(keys, _END)
            if key is _END:
                known = (key for number in self._reports for key in self.target.keys_of(number))
                raise DataError(
                    f"The chain does not yield the same samples as before: sample {next(islice(known, place, None))!r} "
                    "of an existing shard is missing, or comes at another position. Pass a seed to random pipes, or "
                    "delete the shards to start over."
                )
            place += key is not None and bool(_hashes_of([key])[0] == due[place])


def _hashes_of(keys: Iterable[str]) -> NDArray[np.uint64]:
    """Return 64 bits of each key."""
    digests = b"".join(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(digests, dtype=np.uint64)
