"""Read record files by position: labels and keys from their indexes, contents from memory-mapped files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.column import Column, filled
from kdpipes.core.errors import DataError, check_flag, must_be, reject_field
from kdpipes.core.labels import LABEL_FIELDS, numbered
from kdpipes.core.map_pipe import MapPipe, is_key
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.shared import Shared
from kdpipes.storage.codec import checksum_of, decode
from kdpipes.storage.readers import MappedFiles
from kdpipes.storage.records import Records, read_records
from kdpipes.storage.shard_index import Places, by_gaps
from kdpipes.storage.urls import local_folder


@called_as("open_records")
class RecordReaderMapDataPipe(MapPipe):
    """Reads the samples of record files by position (`kdp.open_records(folder)`).

    `kdp.write_records` writes such files. Keys, labels and other integer fields are known without opening a record, and
    each field is loaded separately when it is read. Nothing is written or locked, so folders may be read-only.

    Arrays of at least a page are read-only views of the files, so only the parts that you use are read from the disk.
    Smaller arrays and other values are copies. You may keep views, but must not truncate the files meanwhile.

    For data larger than memory, use `deal(shuffle=kdp.by_shard(...))`: only the parts of a window need memory. The
    writer distributes samples over the parts at random.

    Args:
        folder: A local folder; `kdpipes.write.copy_to_local` copies a remote one.
        verify: Whether to compare each field with its checksum when it is read. 100 KB take about 50 microseconds.

    Memory: the keys, 12 bytes per sample, 16 per field and 8 per integer; up to 64 MiB of the files in each process.

    Raises:
        FileNotFoundError: The folder does not exist.
        DataError: The folder lacks parts of the dataset, or is of another format; a part is truncated; or a record is
            damaged. The message names the file, the key and the offset.

    Example:
        >>> _ = kdp.write_records(kdp.from_dataset([("heron", 0), ("stork", 1)]), "birds", num_parts=1)
        >>> birds = kdp.open_records("birds")
        >>> sorted((sample.key, sample["x"]) for sample in birds.filter_classes(valid=[1]))
        [('1', 'stork')]
    """

    def __init__(self, folder: str | os.PathLike[str], *, verify: bool = True) -> None:
        text = local_folder(folder, "Copy it: `kdpipes.write.copy_to_local(url, folder)`.")
        self._folder = str(Path(text).expanduser().absolute())
        if not Path(self._folder).is_dir():
            raise FileNotFoundError(must_be("folder", "a folder that exists", text))
        self._verify = check_flag("verify", verify)
        self._records: Shared[Records] | None = None
        self._files = MappedFiles()

    def __len__(self) -> int:
        return len(self._opened())

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        records = self._opened()
        blocks = []
        for numbers, lacking in by_gaps(records.fields, rows.positions):
            block = self._block(records, rows.part(numbers), lacking)
            if lacking:
                block.lacking = lacking, repr(records.paths[int(records.parts[block.positions[0]])])
            blocks.append(block)
        return blocks

    def _block(self, records: Records, rows: Rows, lacking: Collection[str]) -> Block:
        fields: dict[str, Column] = {}
        for name, known in records.fields.items():
            if not isinstance(known, Places):
                fields[name] = filled(known[rows.positions].tolist())
            elif name not in lacking:
                fields[name] = Column(partial(self._load, name), what=f"reading field {name!r}")
                if name in LABEL_FIELDS and records.class_names is not None:
                    fields[name] = numbered(fields[name], records.class_names, are_given=False)
        return Block(fields, rows, key=records.keys.__getitem__, version=records.version)

    def fingerprint(self) -> Any:
        records = self._opened()
        return records.keys, records.contents(), records.class_names

    def value_fingerprint(self) -> Any:
        """Return an empty tuple, because the versions of the samples identify the values."""
        return ()

    def prepare_for_workers(self) -> None:
        """Read the indexes before workers start."""
        self._opened()

    def shard_numbers(self) -> NDArray[Any]:
        return self._opened().parts

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
            reject_field(name, f"The records in {self._folder!r}", records.fields)
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

    def _load(self, name: str, sample: Sample) -> Any:
        records = self._opened()
        index = sample.position
        places: Any = records.fields[name]
        part = int(records.parts[index])
        offset = int(places.offsets[index])
        size = int(places.sizes[index])
        path = records.paths[part]
        try:
            view = self._files.view(path, offset, size, records.sizes[part])
            content = bytes(view) if len(view) < mmap.PAGESIZE else view  # LMDB aligns only large values
            if self._verify and checksum_of([content]) != int(places.checksums[index]):
                raise DataError("its bytes differ from the checksum of the index.")
            return decode(content, verify=self._verify)
        except DataError as error:
            where = f"Field {name!r} of sample {records.keys[index]!r} in {path!r} at offset {offset}"
            raise DataError(f"{where}: {str(error).rstrip('.')}. Copy or write the records again.") from error
