"""Samples into LMDB record files: shuffled over parts, part by part, the same bytes for the same input."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError, check_callable, check_count, check_flag, check_names, check_seed, must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.randomness import hash_key
from kdpipes.selection import Permutation
from kdpipes.storage.drafts import draft_of, replace_file
from kdpipes.storage.held_files import CAN_HOLD, HeldFile
from kdpipes.storage.record_folder import (
    HEADER,
    Header,
    create_header,
    finished_index,
    part_name,
    read_header,
)
from kdpipes.storage.record_part import write_part
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.storage.urls import is_local
from kdpipes.write._items import Items, items_of
from kdpipes.write.jobs import run_jobs

__all__ = ["RecordsResult", "write_records"]


class RecordsResult(NamedTuple):
    """What `write_records` has done.

    Args:
        path: The folder.
        num_samples: How many samples it holds.
        num_parts: How many parts.
        num_written: How many of these were written now; the others were there.
        num_bytes: How many bytes the parts have.
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
    executor: concurrent.futures.Executor | None = None,
) -> RecordsResult:
    """Write samples into LMDB record files, which `kdp.open_records` reads.

    Each part is one LMDB file with an index of its own, and is there whole or not at all. If the process is killed,
    the same call goes on with the parts that are missing; in the end every file has the same bytes, whatever the
    number of workers. Fields are kept as the chain gives them, as plain data with checksums, no pickle: bytes of image
    files stay bytes, images of `decode_images` stay encoded, arrays and decoded images are kept raw: larger, but not
    to be decoded again. Random operations are drawn as for `chain[index]`. What `record_ctx` records is not kept.
    `on_error("skip")` and `"quarantine"` leave samples out.

    Whether records are those of the same input is decided by the chain's arguments, keys and labels, and the code of
    functions; contents that were changed in their place are not noticed: delete the folder.

    Args:
        source: An indexed chain of samples; or a data list: a `.txt` or `.csv` file with one item per line, or a
            sequence of items.
        folder: A folder of this machine, made if need be.
        num_parts: How many files. Of data larger than memory, some should fit into it.
        shuffle: Whether samples are shuffled over the parts; if not, they keep their order.
        seed: Of that.
        encode: Called with each sample, or item, returns a dictionary of its fields; an entry "key" becomes its key.
            An item is a line of a `.txt` file, the list of cells of one of a `.csv` file, or what the sequence holds.
            Global generators are seeded for each. By default a line is a path and a number: fields `x`, the file's
            bytes, and `y`.
        class_names: The names of the classes 0, 1, ...; by default those of the chain.
        num_workers: How many processes write; with 0, this one.
        executor: Who writes instead: any executor whose workers see `folder` under the same path.

    Memory: 16 MiB in each process, 28 bytes a sample and field of its part, and what the chain takes.

    Raises:
        DataError: The folder holds something else, or the records of another input; or a sample cannot be read.
        TypeError: A field is no plain data.
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
    target = _local_folder(folder)
    num_parts, num_workers = check_count("num_parts", num_parts), check_count("num_workers", num_workers, minimum=0)
    check_flag("shuffle", shuffle)
    if encode is not None:
        check_callable("encode", encode)
    if executor is not None and not isinstance(executor, concurrent.futures.Executor):
        raise TypeError(must_be("executor", "a `concurrent.futures.Executor`", executor))
    key = hash_key("records", check_seed(seed)) if shuffle else None
    names = check_names("class_names", class_names)
    items = items_of(source, encode)
    names = items.class_names() if names is None else names
    said = hash_key(items.fingerprint(), len(items), num_parts, key or b"", repr(names)).hex()[:32]
    writer = _PartWriter(items, target, Header(num_parts, said, names), key)
    with _held(writer):
        run = partial(run_jobs, executor=executor, num_workers=num_workers, what="writing records")
        return _written(writer, run, leaves_none=executor is None)


def _local_folder(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(must_be("folder", "a path", folder))
    text = os.fspath(folder).removeprefix("file://")
    if not is_local(text):
        way_out = "Write here, and copy the folder; or write tars: `kdp.write_shards`."
        raise ValueError(must_be("folder", "a folder of this machine", text, way_out))
    return Path(text).expanduser().absolute()


class _PartWriter:
    """Writes one part, in any process.

    Args:
        items: Of all parts.
        folder: Where to.
        header: Of the folder.
        key: Of the order; None keeps it.
    """

    def __init__(self, items: Items, folder: Path, header: Header, key: bytes | None) -> None:
        self.items, self.folder, self.header, self.key = items, folder, header, key

    def __call__(self, number: int) -> tuple[int, int]:
        """Write a part, and return how many samples and bytes it has."""
        name = part_name(number)
        with draft_of(self.folder / name) as draft:
            records = self.items.records(self._positions(number), f"writing {name!r}")
            index = write_part(draft, records, self.header.tag(number))
            draft.replace(self.folder / name)
        replace_file(self.folder / f"{name}.index", index.to_bytes(), is_synced=True)
        return _counts(index)

    def _positions(self, number: int) -> NDArray[np.int64]:
        size, num_parts = len(self.items), self.header.num_parts
        places = np.arange(number * size // num_parts, (number + 1) * size // num_parts)
        return places if self.key is None else Permutation(size, key=self.key)[places]

    def finished(self, number: int) -> tuple[int, int] | None:
        """Return how many samples and bytes a part has, if it is there."""
        try:
            index = finished_index(self.folder, self.header, number)
        except DataError:
            return None
        return None if index is None else _counts(index)


def _counts(index: ShardIndex) -> tuple[int, int]:
    return len(index.keys), index.version.size


@contextmanager
def _held(writer: _PartWriter) -> Iterator[None]:
    """Make the folder one for these records, and wait until no other process writes them."""
    folder = writer.folder
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file; a folder is needed.")
    folder.mkdir(parents=True, exist_ok=True)
    if read_header(folder) is None:
        other = next((path.name for path in sorted(folder.iterdir()) if not path.name.startswith(".")), None)
        if other is not None and read_header(folder) is None:
            raise DataError(f"{str(folder)!r} holds no records, but {other!r}. Give an empty folder, or a new one.")
        create_header(folder, writer.header)
    if read_header(folder) != writer.header and _has_parts(folder):
        raise _other_error(folder)
    if not CAN_HOLD:
        _claim(writer)
        yield
        return
    while True:
        with HeldFile(folder / HEADER) as held:
            held.hold_alone(waits=True)
            if held.is_in_place() and _claim(writer):
                yield
                return


def _claim(writer: _PartWriter) -> bool:
    """Return whether the folder is one for these records; one that has no parts yet becomes it, with a new header."""
    if read_header(writer.folder) == writer.header:
        return True
    if _has_parts(writer.folder):
        raise _other_error(writer.folder)
    replace_file(writer.folder / HEADER, writer.header.to_bytes(), is_synced=True)
    return False


def _has_parts(folder: Path) -> bool:
    return next(folder.glob("part-*.mdb*"), None) is not None


def _other_error(folder: Path) -> DataError:
    return DataError(
        f"{str(folder)!r} holds records of another input: of another chain, list, order or number of parts, or of "
        "functions that have been changed. Give another folder, or delete this one."
    )


def _written(writer: _PartWriter, run: Callable[..., Iterator[tuple[int, int]]], *, leaves_none: bool) -> RecordsResult:
    """Write the parts that are missing.

    Args:
        writer: Of a part.
        run: Calls it, for several.
        leaves_none: Whether nobody writes on after an error.
    """
    numbers = range(writer.header.num_parts)
    counts = [writer.finished(number) for number in numbers]
    missing = [number for number in numbers if counts[number] is None]
    if missing:
        _remove_drafts(writer.folder)
        try:
            with closing(run(writer, missing)) as written:  # type: ignore[type-var]  # a generator
                for number, count in zip(missing, written, strict=True):
                    counts[number] = count
        except BaseException:
            if leaves_none:
                _remove_drafts(writer.folder)  # of workers that were ended
            raise
    samples, sizes = zip(*(count for count in counts if count is not None), strict=True)
    return RecordsResult(writer.folder, sum(samples), len(counts), len(missing), sum(sizes))


def _remove_drafts(folder: Path) -> None:
    """Remove what processes have left that were killed."""
    for pattern in (".part-*.mdb*", f".{HEADER}.*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
