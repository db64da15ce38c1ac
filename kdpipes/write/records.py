"""`write_records`: samples in LMDB record files, shuffled over parts, the same bytes for the same input.

A part is complete when its index is there, because that is written last. `records.json` records which input the parts
belong to.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdpipes.core.arithmetic import Permutation
from kdpipes.core.callback import Callback, call_seeded
from kdpipes.core.chain import Chain
from kdpipes.core.errors import (
    ChainError,
    DataError,
    add_note,
    check_callable,
    check_class_names,
    check_count,
    check_flag,
    check_seed,
    must_be,
)
from kdpipes.core.fingerprint import Fingerprinted, digest, digest_values
from kdpipes.core.map_pipe import MapPipe, item_at
from kdpipes.core.messages import shown_if_slow
from kdpipes.core.operation import entry_names
from kdpipes.core.pipe import gives_samples
from kdpipes.core.randomness import SampleKey, hash_key
from kdpipes.core.registry import pipe_name
from kdpipes.core.sample import Sample
from kdpipes.core.shared import PackedStrings, Shared
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.storage.access import Access, using
from kdpipes.storage.files import draft_of, read_url, replace_file
from kdpipes.storage.jobs import check_workers, run_jobs
from kdpipes.storage.records import HEADER, Header, WrittenSample, finished_index, part_name, read_header, write_part
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.storage.urls import is_local, local_folder
from kdpipes.write.copy import locked_once
from kdpipes.write.members import make_or_leave_out, prefetched

Encode = Callable[[Any], Any]
_LOCK = ".records.lock"
_LISTS = (".txt", ".csv")


class RecordsResult(NamedTuple):
    """The result of `write_records`.

    Args:
        path: The folder.
        num_samples: The number of samples in it.
        num_parts: The number of parts.
        num_written: The number of parts written by this call; the others were complete.
        num_bytes: The size of the parts in bytes.
    """

    path: Path
    num_samples: int
    num_parts: int
    num_written: int
    num_bytes: int


def write_records(
    source: MapPipe | str | os.PathLike[str] | Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    num_parts: int = 4,
    shuffle: bool = True,
    seed: int = 0,
    encode: Callable[[Any], Any] | None = None,
    class_names: Sequence[str] | None = None,
    num_workers: int = 0,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> RecordsResult:
    """Write samples into LMDB record files, which `kdp.open_records` reads.

    Each part is one LMDB file with its own index, and appears when it is complete. If the process is killed, the same
    call continues with the missing parts. In the end, every file has the same bytes for any number of workers. Fields
    are stored as the chain yields them, as plain data with checksums and without pickles. The bytes of image files and
    the images of `decode_images` stay encoded; arrays and decoded images are stored raw, which takes more space, but no
    decoding. Random operations draw the same numbers as for `chain[index]`. What `record_ctx` records is not stored.
    `on_error("skip")` and `"quarantine"` leave samples out.

    The arguments, keys and labels of the chain and the code of its functions decide whether existing records belong to
    the same input. Contents that were changed in place go unnoticed: delete the folder in that case.

    Args:
        source: An indexed chain of samples; or a data list: a `.txt` or `.csv` file with one item per line, or a
            sequence of items.
        folder: A local folder, which is created if it does not exist.
        num_parts: The number of files. If the data is larger than memory, a few parts should fit into memory.
        shuffle: Whether to shuffle samples over the parts; otherwise, they keep their order.
        seed: The seed of the shuffle.
        encode: A function that takes each sample, or each item of a data list, and returns a dictionary of its fields;
            an entry "key" becomes its key. An item is a line of a `.txt` file, the list of cells of a row of a `.csv`
            file, or an element of the sequence. Global generators are seeded for each call. By default, a line holds a
            path and a number, which become the fields `x`, the bytes of the file, and `y`.
        class_names: The names of the classes 0, 1, ...; by default those of the chain.
        num_workers: The number of processes that write; 0 writes in this process.
        executor: An executor that writes the parts instead: any one whose workers see `folder` under the same path.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}`, for the files
            of a data list. Workers get them; no `repr`, state, fingerprint or error contains them.

    Memory: In each process, 16 MiB, 28 bytes for each sample and field of a part, and the memory of the chain.

    Raises:
        DataError: The folder holds something else, or the records of another input; or a sample cannot be read.
        TypeError: A field does not hold plain data.
        OSError: The folder cannot be written.

    Example:
        >>> photos = kdp.image_folder("data/birds/train")
        >>> kdp.write_records(photos, "records", num_parts=2).num_samples
        2
        >>> kdp.open_records("records").class_names()
        ('heron', 'stork')
        >>> for sample in kdp.open_records("records"):  # and back, a folder of images
        ...     path = Path("back", sample.key)
        ...     path.parent.mkdir(parents=True)
        ...     _ = path.write_bytes(sample["x"])
        >>> list(kdp.image_folder("back").column("key")) == list(photos.column("key"))
        True
        >>> raw = photos.decode_images("x").transform("x", kdp.Resize((64, 64)))
        >>> def as_array(sample):
        ...     return {"x": np.asarray(sample["x"]), "y": sample["y"]}
        >>> _ = kdp.write_records(raw, "raw", encode=as_array)
        >>> kdp.open_records("raw")[0]["x"].shape
        (64, 64, 3)
    """
    path = local_folder(folder, "Write here, and copy the folder; or write tars: `kdp.write_shards`.")
    num_parts = check_count("num_parts", num_parts)
    check_workers(executor, num_workers)
    check_flag("shuffle", shuffle)
    if encode is not None:
        check_callable("encode", encode)
    key = hash_key("records", check_seed(seed)) if shuffle else None
    names = check_class_names(class_names)
    access = Access(storage_options=storage_options)
    items = _items_of(source, encode, access)
    if names is None and isinstance(source, MapPipe):
        names = source.class_names()
    identity = hash_key(items.fingerprint(), items.size, num_parts, key or b"", repr(names)).hex()[:32]
    writer = _PartWriter(items, Path(path).expanduser().absolute(), Header(num_parts, identity, names), key)
    with _claimed(writer.folder, writer.header):
        counts = [writer.finished(number) for number in range(num_parts)]
        missing = [number for number, count in enumerate(counts) if count is None]
        if missing:
            _remove_drafts(writer.folder)
            written = run_jobs(writer, missing, executor=executor, num_workers=num_workers, what="writing records")
            try:
                with closing(written):  # type: ignore[type-var]  # a generator
                    for number, count in zip(missing, written, strict=True):
                        counts[number] = count
            finally:
                if executor is None:
                    _remove_drafts(writer.folder)  # of workers that were killed
    samples, sizes = zip(*(count for count in counts if count is not None), strict=True)
    return RecordsResult(writer.folder, sum(samples), num_parts, len(missing), sum(sizes))


@dataclass
class _PartWriter:
    """Writes one part, in any process."""

    items: _RecordItems
    folder: Path
    header: Header
    key: bytes | None

    def __call__(self, number: int) -> tuple[int, int]:
        """Write a part, and return its number of samples and bytes."""
        name = part_name(number)
        size = self.items.size
        num_parts = self.header.num_parts
        places = np.arange(number * size // num_parts, (number + 1) * size // num_parts)
        positions = places if self.key is None else Permutation(size, key=self.key)[places]
        with draft_of(self.folder / name) as draft:
            records = self.items.records(positions, f"writing {name!r}")
            index = write_part(draft, records, self.header.tag(number))
            draft.replace(self.folder / name)
        replace_file(self.folder / f"{name}.index", index.to_bytes(), is_synced=True)
        return _counts(index)

    def finished(self, number: int) -> tuple[int, int] | None:
        """Return the number of samples and bytes of a part, or None if it is not complete."""
        try:
            index = finished_index(self.folder, self.header, number)
        except DataError:
            return None
        return None if index is None else _counts(index)


def _counts(index: ShardIndex) -> tuple[int, int]:
    return len(index.keys), index.version.size


@contextmanager
def _claimed(folder: Path, header: Header) -> Iterator[None]:
    """Make the folder one for these records, and lock it; wait for another process that writes there."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file. Pass a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    if _check_claim(folder, header) and not os.access(folder, os.W_OK):
        yield  # complete records may be in a folder that cannot be written; if they are not, the first part raises
        return
    with locked_once(folder / _LOCK):
        if not _check_claim(folder, header):
            replace_file(folder / HEADER, header.to_bytes(), is_synced=True)
        yield


def _check_claim(folder: Path, header: Header) -> bool:
    """Return whether the folder already has this header; raise if it holds something else."""
    found = read_header(folder)
    if found is None:
        other = next((path.name for path in sorted(folder.iterdir()) if not path.name.startswith(".")), None)
        # Unless a process has just begun to write.
        if other is not None and (found := read_header(folder)) is None:
            raise DataError(
                f"The folder {str(folder)!r} is not empty, and contains no kdpipes records (it contains {other!r}). "
                "Choose an empty or a new folder."
            )
    if found != header and next(folder.glob("part-*.mdb*"), None) is not None:
        raise DataError(
            f"The folder {str(folder)!r} contains records that were written from a different input: the chain, its "
            "samples or their order, the number of parts, or the code of a function has changed. Choose another "
            "folder, or delete this one to write all records again."
        )
    return found == header


def _remove_drafts(folder: Path) -> None:
    """Remove the incomplete files of processes that were killed."""
    for pattern in (".part-*.mdb*", f".{HEADER}.*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


class _RecordItems:
    """The content of records, by position: the samples of a chain, or the items of a data list."""

    def __init__(self, source: MapPipe | Sequence[Any], encode: Encode | None, place: str, access: Access) -> None:
        self._access = access
        self._chain = source if isinstance(source, MapPipe) else None
        self._items = None if isinstance(source, MapPipe) else Shared(source)
        self.size = len(source)
        self._encode = None if encode is None else Callback("encode", encode)
        self._place = place

    def fingerprint(self) -> str:
        """Return a hash of the items and of `encode`."""
        parts = [digest(None if self._encode is None else self._encode.function)]
        if self._items is not None:
            parts.append(digest(self._items))
        if self._chain is not None:
            nodes = [node for node in reversed(Chain.of(self._chain)) if not node.traits.is_transparent]
            parts += (part for node in nodes for part in (digest(node.pipe), digest_values(node.pipe)))
        return hash_key(*parts).hex()[:32]

    def records(self, positions: Any, what: str) -> Iterator[WrittenSample]:
        """Yield the records of some positions, without those that `on_error` leaves out."""
        handler = None if self._chain is None else Chain.of(self._chain).error_handler()
        listed = {} if handler is None else handler.listed()
        for position in shown_if_slow(prefetched(self._chain, positions), len(positions), what):
            make = partial(self._record, position=position, listed=listed)
            fetch = partial(self._sample, position)
            record = make_or_leave_out(fetch, make, position=position, handler=handler)
            if record is not None:
                yield record

    def _sample(self, position: int) -> Any:
        if self._chain is not None:
            return item_at(self._chain, position)
        return Sample({}, key=str(position), index=position, draw=SampleKey(position=position))

    def _record(self, sample: Sample, position: int, listed: Mapping[str, str]) -> WrittenSample | None:
        if listed and any(name in listed for name in entry_names(sample)):
            return None
        if self._encode is None:
            return WrittenSample(sample.key, dict(sample))
        item = sample if self._items is None else self._items.value[position]
        try:
            with using(self._access):
                made = call_seeded(self._encode, sample, "encode", item, ctx=None)
        except Exception as error:
            what = f"sample {sample.key!r}" if self._items is None else f"item {position} of {self._place}"
            add_note(error, f"kdpipes: while encoding {what}")
            raise
        if isinstance(made, Sample):
            return WrittenSample(made.key, dict(made))
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            what = type(made).__name__
            raise TypeError(f"`encode` must return a dictionary of fields, but returned {what} for {item!r:.80}.")
        fields = dict(made)
        return WrittenSample(str(fields.pop("key", sample.key)), fields)


def _items_of(source: Any, encode: Encode | None, access: Access) -> _RecordItems:
    """Return the items of the `source` of `write_records`."""
    if isinstance(source, MapPipe):
        return _RecordItems(gives_samples(source, "write_records"), encode, type(source).__name__, access)
    if isinstance(source, IterDataPipe | MapDataPipe):
        is_stream = isinstance(source, IterDataPipe)
        hint = (
            "Pass the chain before `.deal()`, or read shards by `kdp.open_shards`."
            if is_stream
            else "Make samples first: `.to_samples(...)`."
        )
        raise ChainError(
            f"`write_records` needs an indexed chain of samples, but `{pipe_name(source)}` is "
            f"{'a stream' if is_stream else 'none'}. {hint}"
        )
    if isinstance(source, str | os.PathLike):
        return _items_of_list(os.fspath(source), encode, access)
    rule = "an indexed chain, the path of a .txt or .csv file, or a sequence of items"
    if not isinstance(source, Sequence | np.ndarray) or isinstance(source, bytes):
        hint = "`kdp.from_dataset` makes a chain of a dataset." if hasattr(source, "__getitem__") else ""
        raise TypeError(must_be("source", rule, source, hint))
    if encode is None:
        raise TypeError(must_be("encode", "a function from an item to its fields if `source` is a sequence", encode))
    return _RecordItems(source if isinstance(source, Sequence) else list(source), encode, "the sequence", access)


def _items_of_list(path: str, encode: Encode | None, access: Access) -> _RecordItems:
    if not path.lower().endswith(_LISTS) or not is_local(path):
        raise ValueError(must_be("source", "a local .txt or .csv file, one item per line", path))
    with Path(path).expanduser().open(encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = PackedStrings([line.rstrip("\n") for line in file if line.strip()])
    is_csv = path.lower().endswith(".csv")
    if is_csv and encode is None and len(lines) > 1:
        labels = [_Rows(lines)[place][-1].strip() for place in (0, 1)]
        if [label.lstrip("-").isdecimal() for label in labels] == [False, True]:  # the first line is a header
            lines = PackedStrings(list(lines)[1:])
    return _RecordItems(_Rows(lines) if is_csv else lines, encode or _image_and_label, repr(path), access)


# The name of `_Rows` and the code of `_image_and_label`, docstring included, are part of the identity of records that
# were written from data lists: records of an earlier version could not be completed if these changed.
class _Rows(Sequence[list[str]], Fingerprinted):
    """The lines of a csv file, each as a list of its cells."""

    def __init__(self, lines: PackedStrings) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return next(csv.reader([self._lines[index]], skipinitialspace=True))

    def fingerprint(self) -> Any:
        """Return the data that identify the rule."""
        return self._lines


def _image_and_label(item: str | list[str]) -> dict[str, Any]:
    """Return the fields of a line `path/to/image.jpg 3`: the file's bytes, and the number of its class."""
    cells = item.rsplit(None, 1) if isinstance(item, str) else item
    if len(cells) != 2 or not cells[1].strip().lstrip("-").isdecimal():
        raise DataError(
            f"Each item must be a path and a class number, but is {item!r}. For other items, pass a "
            "chain, like `kdp.from_table(...)`, or `encode=` of `kdp.write_records`."
        )
    return {"key": cells[0], "x": read_url(cells[0]), "y": int(cells[1])}
