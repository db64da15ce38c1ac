"""Tar shards with random access: their indexes are read, or made, once; contents when a field is read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes._map_pipe import MapPipe, as_column, is_key
from kdpipes._progress import shown_if_slow
from kdpipes.errors import DataError, check_names, refuse_field
from kdpipes.sample import Lazy, Sample
from kdpipes.storage.catalog import Catalog, open_catalog
from kdpipes.storage.descriptors import read_span
from kdpipes.storage.files import expand_urls, is_local, matching_urls, relative_names
from kdpipes.storage.ranges import RangeReader, Span, read_range
from kdpipes.storage.retries import NUM_TRIES
from kdpipes.storage.shard_index import Places
from kdpipes.storage.shared import Shared
from kdpipes.storage.tar import decode_member

__all__ = ["ShardReaderMapDataPipe"]

_KEPT = 4  # announcements that wait: where no field is ever read, there would be more and more
_AT_ONCE = 512  # how many members of a column are asked for at a time


def _is_lacking(known: Places | NDArray[np.int64], index: int) -> bool:
    return isinstance(known, Places) and bool(known.offsets[index] < 0)


class _Habit:
    """Which fields are read, as far as this process has seen, and what has been announced before it saw one."""

    def __init__(self) -> None:
        self.fields: set[str] = set()
        self._is_begun = False
        self._waiting: list[NDArray[Any]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Habit, ()

    def due(self, positions: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the positions to read ahead: the first ones whole, those that follow when the fields are known."""
        if not self.fields and self._is_begun:
            self._waiting = [*self._waiting, positions][-_KEPT:]
            return []
        self._is_begun = True
        due, self._waiting = [*self._waiting, positions], []
        return due


class ShardReaderMapDataPipe(MapPipe):
    """The samples of plain webdataset tars, by position (`kdp.open_shards(urls)`).

    A field is one member, called by its extension: `0001.jpg` and `0001.cls` are fields `jpg` and `cls` of sample
    `0001`; `.rename_fields(x="jpg;png", y="cls")` gives them the usual names. Classes, texts and JSON are decoded as
    webdataset does; all else is bytes. The key is the shard's name, a slash and the sample's. Members without an
    extension are left out, as in webdataset. A member that a sample lacks, but others have, is damage of that sample:
    an error that `.on_error("skip")` leaves out.

    Each shard has an index, `NAME.tar.index`, with the place of each member and the classes. It is read from beside the
    shard; where there is none, or one of another version of the shard, the shard is indexed once, and the index kept
    beside it, or in the local cache (`KDPIPES_CACHE_DIR`, `~/.cache/kdpipes`) where nothing can be written there. Of
    shards elsewhere, only the members that are read are fetched: what the next batches of `deal` need, ahead of time,
    neighbours in one request, with retries, and verified if the index has checksums.

    Args:
        urls: Paths or fsspec URLs of uncompressed tars, with brace ranges, `"s3://bucket/birds-{000..127}.tar"`, or
            globs, `"birds-*.tar"`. `pipe:` is refused.
        class_names: The names of the classes 0, 1, ...

    Memory: the length of the keys, 12 bytes a sample and 16 to 28 bytes a member, shared by all workers; with
        shards elsewhere, up to 256 MB of what was read ahead in each worker.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard is truncated, compressed, or no tar, cannot be reached, or a member is not what it was when
            it was indexed; it names the shard, the member and the offset.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self._urls = Shared(expand_urls(urls))
        self._class_names = check_names("class_names", class_names)
        self._catalog: Shared[Catalog] | None = None
        self._reader = RangeReader()
        self._habit = _Habit()
        self.is_elsewhere = not all(map(is_local, self._urls.value))

    def __len__(self) -> int:
        return len(self._indexed())

    def fetch(self, index: int) -> Sample:
        catalog = self._indexed()
        present = [field for field, known in catalog.fields.items() if not _is_lacking(known, index)]
        fields = {field: self._lazy(index, field) for field in present}
        sample = Sample(fields, key=partial(catalog.key, index), index=index)
        if len(present) < len(catalog.fields):
            sample.lack(catalog.fields.keys() - set(present), self._place_of(index, present))
        return sample

    def _place_of(self, index: int, present: Sequence[str]) -> str:
        """Return where a sample begins, as far as that is known."""
        catalog = self._indexed()
        url = self._urls.value[int(catalog.shards[index])]
        known = (catalog.fields[field] for field in present)
        begins = [int(places.offsets[index]) for places in known if isinstance(places, Places)]
        return f"{url!r} at offset {min(begins)}" if begins else repr(url)

    def identity(self) -> Any:
        catalog = self._indexed()
        contents = {
            field: known.sizes if isinstance(known, Places) else known for field, known in catalog.fields.items()
        }
        return catalog.names, catalog.shards, catalog.short_keys, contents, self._class_names

    def announce(self, positions: NDArray[Any]) -> None:
        if self.is_elsewhere:
            for due in self._habit.due(positions):
                fields = self._habit.fields or set(self._indexed().fields)
                self._reader.announce(span for index in due.tolist() for span in self._spans(index, fields))

    def shard_numbers(self) -> NDArray[Any]:
        return self._indexed().shards

    def read_column(self, name: str) -> NDArray[Any]:
        catalog = self._indexed()
        if is_key(name, catalog.fields):
            return np.asarray([catalog.key(index) for index in range(len(self))])
        if name not in catalog.fields:
            refuse_field(name, "`open_shards`", catalog.fields)
        known = catalog.fields[name]
        if not isinstance(known, Places):
            return known
        lacking = np.flatnonzero(known.offsets < 0)
        if len(lacking):
            raise DataError(
                f"Sample {catalog.key(int(lacking[0]))!r} has no member {name!r}; {len(lacking)} samples have none."
            )
        return as_column(list(shown_if_slow(self._all_of(name), len(self), f"reading {name!r}")))

    def class_names(self) -> tuple[str, ...] | None:
        return self._class_names

    def field_names(self) -> frozenset[str] | None:
        return None if self._catalog is None else frozenset(self._catalog.value.fields)

    def _indexed(self) -> Catalog:
        if self._catalog is None:
            urls = matching_urls(self._urls.value)
            self._urls.value[:] = urls
            self._catalog = Shared(open_catalog(urls, relative_names(urls)))
        return self._catalog.value

    def _all_of(self, field: str) -> Any:
        indices = iter(range(len(self)))
        while part := list(islice(indices, _AT_ONCE)):
            if self.is_elsewhere:
                self._reader.announce(span for index in part for span in self._spans(index, {field}))
            yield from (self._read(index, field) for index in part)

    def _lazy(self, index: int, field: str) -> Lazy:
        def load(sample: Sample) -> Any:
            self._habit.fields.add(field)
            return self._read(index, field)

        return Lazy(load, what=f"reading member {field!r}")

    def _spans(self, index: int, fields: set[str]) -> list[Span]:
        catalog = self._indexed()
        url = self._urls.value[int(catalog.shards[index])]
        places = [known for field in fields if isinstance(known := catalog.fields[field], Places)]
        starts = [(int(place.offsets[index]), int(place.sizes[index])) for place in places]
        return [Span(url, start, start + size) for start, size in starts if start >= 0 and not is_local(url)]

    def _read(self, index: int, field: str) -> Any:
        catalog = self._indexed()
        places = catalog.fields[field]
        if not isinstance(places, Places):
            return int(places[index])
        url = self._urls.value[int(catalog.shards[index])]
        offset, size = int(places.offsets[index]), int(places.sizes[index])
        if is_local(url):
            content = read_span(url, offset, size)
        else:
            content = self._fetched(Span(url, offset, offset + size), places.checksums, index)
        if len(content) < size:
            raise DataError(
                f"Shard {url!r} is truncated: {size} bytes are due at offset {offset}, {len(content)} are there."
            )
        try:
            return decode_member(field, content)
        except ValueError as error:
            place = f"member {field!r} of sample {catalog.key(index)!r} in {url!r} at offset {offset}"
            raise DataError(f"{place} cannot be decoded: {error}.") from error

    def _fetched(self, span: Span, checksums: NDArray[np.uint32] | None, index: int) -> bytes:
        content = self._reader.read(span)
        for _ in range(NUM_TRIES):
            if checksums is None or zlib.crc32(content) == checksums[index]:
                return content
            content = read_range(span)  # damage on the way is not there every time
        raise DataError(
            f"Sample {self._indexed().key(index)!r} is not what was indexed: {len(content)} bytes at offset "
            f"{span.start} of {span.url!r} have another checksum. Index the shard again: `kdpipes index`."
        )
