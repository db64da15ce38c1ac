"""Tar shards with random access: the headers of all members are read once, contents when a field is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes._map_pipe import MapPipe, as_column, is_key
from kdpipes._progress import shown_if_slow
from kdpipes.errors import DataError, check_names, must_be, refuse_field
from kdpipes.sample import Lazy, Sample
from kdpipes.storage.descriptors import read_span
from kdpipes.storage.files import expand_urls, is_local, relative_names
from kdpipes.storage.shared import Shared
from kdpipes.storage.tar import TarIndex, decode_member, index_tars

__all__ = ["ShardReaderMapDataPipe"]


class ShardReaderMapDataPipe(MapPipe):
    """The samples of plain webdataset tars, by position (`kdp.open_shards(urls)`).

    A field is one member, called by its extension: `0001.jpg` and `0001.cls` are fields `jpg` and `cls` of sample
    `0001`; `.rename_fields(x="jpg;png", y="cls")` gives them the usual names. Classes, texts and JSON are decoded as
    webdataset does; all else is bytes. The key is the shard's name, a slash and the sample's. Members without an
    extension are left out, as in webdataset. The headers are read when they are first needed, once for all workers.

    Args:
        urls: Paths of uncompressed tars on this machine, with brace ranges: `"birds-{000..127}.tar"`.
        class_names: The names of the classes 0, 1, ...

    Memory: the length of the keys, 12 bytes a sample and 16 bytes a member, shared by all workers. Each process keeps
    up to 64 shards open.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard is truncated, compressed, or no tar; it names the shard, the member and the offset.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self._urls = Shared(expand_urls(urls))
        remote = next((url for url in self._urls.value if not is_local(url)), None)
        if remote is not None:
            raise ValueError(
                must_be("urls", "paths on this machine", remote, "`kdp.stream_shards` reads from anywhere.")
            )
        self._class_names = check_names("class_names", class_names)
        self._index: Shared[TarIndex] | None = None

    def __len__(self) -> int:
        return len(self._indexed().keys)

    def fetch(self, index: int) -> Sample:
        table = self._indexed()
        present = [field for field, offsets in table.offsets.items() if offsets[index] >= 0]
        fields = {field: self._lazy(index, field) for field in present}
        return Sample(fields, key=table.keys[index], index=index)

    def identity(self) -> Any:
        table = self._indexed()
        return table.keys, table.sizes, self._class_names

    def read_column(self, name: str) -> NDArray[Any]:
        table = self._indexed()
        if is_key(name, table.offsets):
            return np.asarray([table.keys[index] for index in range(len(self))])
        if name not in table.offsets:
            refuse_field(name, "`open_shards`", table.offsets)
        lacking = np.flatnonzero(table.offsets[name] < 0)
        if len(lacking):
            raise DataError(
                f"Sample {table.keys[int(lacking[0])]!r} has no member {name!r}; {len(lacking)} samples have none."
            )
        return as_column(
            [self._read(index, name) for index in shown_if_slow(range(len(self)), len(self), f"reading {name!r}")]
        )

    def class_names(self) -> tuple[str, ...] | None:
        return self._class_names

    def field_names(self) -> frozenset[str] | None:
        return None if self._index is None else frozenset(self._index.value.offsets)

    def _indexed(self) -> TarIndex:
        if self._index is None:
            urls = self._urls.value
            self._index = Shared(index_tars(urls, relative_names(urls)))
        return self._index.value

    def _lazy(self, index: int, field: str) -> Lazy:
        return Lazy(lambda sample: self._read(index, field), what=f"reading member {field!r}")

    def _read(self, index: int, field: str) -> Any:
        table = self._indexed()
        url = self._urls.value[int(table.shards[index])]
        offset, size = int(table.offsets[field][index]), int(table.sizes[field][index])
        content = read_span(url, offset, size)
        if len(content) < size:
            raise DataError(
                f"Shard {url!r} is truncated: {size} bytes are due at offset {offset}, {len(content)} are there."
            )
        try:
            return decode_member(field, content)
        except ValueError as error:
            place = f"member {field!r} of sample {table.keys[index]!r} in {url!r} at offset {offset}"
            raise DataError(f"{place} cannot be decoded: {error}.") from error
