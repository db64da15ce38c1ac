"""Record files with random access: labels and keys from their indexes, contents from the files, without a copy."""

from __future__ import annotations

import mmap
import os
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError, check_choice, check_count, must_be, refuse_field
from kdpipes.core.map_pipe import MapPipe, is_key
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Lazy, Sample
from kdpipes.storage.codec import checksum_of, decode
from kdpipes.storage.memory import MappedFiles
from kdpipes.storage.records import Records, read_records
from kdpipes.storage.shard_index import Places
from kdpipes.storage.shared import Shared
from kdpipes.storage.urls import is_local

__all__ = ["RecordReaderMapDataPipe"]

Verify = Literal["always", "once", "never"]


@called_as("open_records")
class RecordReaderMapDataPipe(MapPipe):
    """The samples of record files, by position (`kdp.open_records(folder)`).

    `kdp.write_records` has written them: keys, fields and class names are those of its input. Labels, and all fields
    that are integers, are known without opening a record, as are keys. A field is read alone, when it is read. Nothing
    is written or locked: folders may be read-only, and any number of processes share one copy in memory.

    Arrays are read-only views of the files (those of a page and more; small ones, and all else, are copies): what is
    not looked at is not read from the disk. Views may be kept for any time, but files must not be cut meanwhile.

    Data larger than memory: `deal(shuffle="shards", window=10_000)` goes part by part, each epoch in another order, and
    shuffles samples within pools of 10,000; only parts being read need memory. (Without `window`, a pool has the
    samples of 8 parts: of 4, all.) The writer has put samples into parts at random. With `block_size`, stretches of
    that many samples take the place of parts: from one epoch to the next, more of them meet others.

    Args:
        folder: A folder of this machine; `kdp.copy_to_local` brings one here.
        verify: When checksums are compared: "always", at every read; "once" per process and field; or "never".
        block_size: How many neighbouring samples of a part `deal(shuffle="shards")` takes for a shard; None is a part.

    Memory: the length of the keys, 12 bytes a sample, 16 a field and 8 an integer, shared by all workers. Of the files,
        about 64 MiB of what a process has just read count as its memory; more remain in the page cache.

    Raises:
        FileNotFoundError: There is no such folder.
        DataError: It holds no records, not all parts, or those of another version; a part has been cut; or a record is
            damaged: names the file, the key and the offset.

    Example:
        >>> _ = kdp.write_records(kdp.from_dataset([("heron", 0), ("stork", 1)]), "birds", num_parts=1)
        >>> birds = kdp.open_records("birds")
        >>> sorted((sample.key, sample["x"]) for sample in birds.filter_classes(valid=[1]))
        [('1', 'stork')]
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, verify: Verify = "always", block_size: int | None = None
    ) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(must_be("folder", "a path", folder))
        text = os.fspath(folder).removeprefix("file://")
        if not is_local(text):
            way_out = "Copy it: `kdp.copy_to_local(url, folder)`."
            raise ValueError(must_be("folder", "a folder of this machine", text, way_out))
        check_choice("verify", verify, get_args(Verify))
        self._folder = str(Path(text).expanduser().absolute())
        if not Path(self._folder).is_dir():
            raise FileNotFoundError(must_be("folder", "a folder that exists", text))
        self._verify = verify
        self._block_size = None if block_size is None else check_count("block_size", block_size)
        self._records: Shared[Records] | None = None
        self._files, self._verified = MappedFiles(), _Verified()

    def __len__(self) -> int:
        return len(self._opened())

    def fetch(self, index: int) -> Sample:
        records = self._opened()
        fields: dict[str, Any] = {}
        lacking = []
        for name, known in records.fields.items():
            if not isinstance(known, Places):
                fields[name] = int(known[index])
            elif known.offsets[index] < 0:
                lacking.append(name)
            else:
                fields[name] = Lazy(partial(self._load, index, name), what=f"reading field {name!r}")
        key, version = partial(records.keys.__getitem__, index), partial(records.version, index)
        sample = Sample(fields, key=key, index=index, version=version)
        if lacking:
            sample.lack(lacking, repr(records.paths[int(records.parts[index])]))
        return sample

    def fingerprint(self) -> Any:
        records = self._opened()
        return records.keys, records.contents(), records.class_names, self._block_size

    def value_fingerprint(self) -> Any:
        """Return what caches tell it by, besides the samples' own versions: nothing."""
        return ()

    def prepare_for_workers(self) -> None:
        """Called before workers start."""
        self._opened()

    def shard_numbers(self) -> NDArray[Any]:
        parts = self._opened().parts
        if self._block_size is None:
            return parts
        places = np.arange(len(parts)) - np.searchsorted(parts, parts)  # of samples in their parts
        is_next = (np.diff(parts) != 0) | (np.diff(places // self._block_size) != 0)
        return np.cumsum(np.concatenate([np.zeros(min(len(parts), 1), dtype=np.int64), is_next]))

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._records is not None

    def has_column(self, name: str) -> bool:
        known = {} if self._records is None else self._records.value.fields
        return name in known and not isinstance(known[name], Places)

    def read_column(self, name: str) -> NDArray[Any]:
        records = self._opened()
        if is_key(name, records.fields):
            return np.asarray(list(records.keys))
        if name not in records.fields:
            refuse_field(name, f"The records in {self._folder!r}", records.fields)
        known = records.fields[name]
        return super().read_column(name) if isinstance(known, Places) else known

    def class_names(self) -> tuple[str, ...] | None:
        return self._opened().class_names

    def field_names(self) -> frozenset[str] | None:
        return None if self._records is None else frozenset(self._records.value.fields)

    def _opened(self) -> Records:
        if self._records is None:
            self._records = Shared(read_records(Path(self._folder)))
        return self._records.value

    def _load(self, index: int, name: str, sample: Sample) -> Any:
        records = self._opened()
        places: Any = records.fields[name]
        part, offset, size = int(records.parts[index]), int(places.offsets[index]), int(places.sizes[index])
        path = records.paths[part]
        try:
            view = self._files.view(path, offset, size, records.sizes[part])
            return self._decoded(view, name, index, int(places.checksums[index]))
        except DataError as error:
            where = f"Field {name!r} of sample {records.keys[index]!r} in {path!r} at offset {offset}"
            raise DataError(f"{where}: {error}") from error

    def _decoded(self, view: memoryview, name: str, index: int, checksum: int) -> Any:
        is_due = self._verify == "always" or (self._verify == "once" and not self._verified.has(name, index))
        content = bytes(view) if len(view) < mmap.PAGESIZE else view  # LMDB aligns large ones alone
        if is_due and checksum_of([content]) != checksum:
            raise DataError("it is not what the index of the part says.")
        value = decode(content, verify=is_due)
        if is_due and self._verify == "once":
            self._verified.add(name, index, len(self))
        return value


class _Verified:
    """Which fields of which samples this process has verified; a copy knows of none."""

    def __init__(self) -> None:
        self._flags: dict[str, bytearray] = {}

    def __reduce__(self) -> tuple[type[_Verified], tuple[()]]:
        return _Verified, ()

    def has(self, name: str, index: int) -> bool:
        return name in self._flags and bool(self._flags[name][index])

    def add(self, name: str, index: int, number: int) -> None:
        self._flags.setdefault(name, bytearray(number))[index] = 1
