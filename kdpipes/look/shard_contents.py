"""What is in tar shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.progress import shown_if_slow
from kdpipes.look.contents import Contents, FieldSeen, JobSeen, SampleSeen, ShardState, classes_seen
from kdpipes.plan.class_counts import class_counts
from kdpipes.storage.decoding import decode_member
from kdpipes.storage.descriptors import read_span
from kdpipes.storage.shard_index import Places, ShardIndex
from kdpipes.storage.shard_notes import Seen, class_names_of, notes_beside, notes_places
from kdpipes.storage.survey import ShardSeen, survey_shards
from kdpipes.storage.urls import is_local, relative_names

__all__ = ["look_at_shards"]

_CLASSES = ("cls", "class")  # the member that is the label
_LONGEST_NAME = 256


def look_at_shards(urls: Sequence[str], *, num_samples: int = 3, scan: bool = True) -> Contents:
    """Return what is in tar shards, of which no member is decoded and nothing is written.

    Args:
        urls: Of tars, which may be compressed.
        num_samples: How many of the first samples are listed.
        scan: Whether to read shards that have no fresh index.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard cannot be read.
    """
    tally = _Tally(num_samples)
    seen = survey_shards(urls, scan=scan)
    for name, shard in zip(relative_names(urls), shown_if_slow(seen, len(urls), "reading", "shards"), strict=True):
        tally.add(name, shard)
    return tally.contents()


def _jobs_of(shards: Sequence[ShardState]) -> tuple[list[JobSeen], tuple[str, ...] | None]:
    """Return which jobs have written shards, as far as is noted beside them, and what the classes of all are called."""
    places = notes_places([shard.url for shard in shards])
    found = [(place, notes) for place in places if (notes := notes_beside(place)) is not None]
    jobs = [JobSeen(place.url, notes.job.get("num_samples"), notes.shards is not None) for place, notes in found]
    known = {shard.url: Seen(shard.num_bytes, shard.num_samples) for shard in shards}
    names = {class_names_of(notes, place, known) for place, notes in found}
    is_all = sum(len(place.numbers) for place, _ in found) == len(shards)
    return jobs, names.pop() if is_all and len(names) == 1 else None


class _Tally:
    """Adds up what is in shards.

    Args:
        num_wanted: How many of the first samples are listed.
    """

    def __init__(self, num_wanted: int) -> None:
        self._num_wanted = num_wanted
        self._shards: list[ShardState] = []
        self._sizes = defaultdict[str, list[NDArray[np.int64]]](list)
        self._labels: list[NDArray[Any]] | None = []
        self._samples: list[SampleSeen] = []

    def add(self, name: str, shard: ShardSeen) -> None:
        """Count one shard, of which keys begin with `name`."""
        index = shard.index
        number = None if index is None else len(index.keys)
        self._shards.append(ShardState(shard.url, number, shard.num_bytes, shard.state))
        if index is None or not len(index.keys):
            return
        for field, places in index.fields.items():
            self._sizes[field].append(places.sizes[places.offsets >= 0])
        if self._labels is not None:
            labels = _labels_of(shard, index)
            self._labels = None if labels is None else [*self._labels, labels]
        for place in range(min(len(index.keys), self._num_wanted - len(self._samples))):
            self._samples.append(_sample_of(name, index, place))

    def contents(self) -> Contents:
        """Return what was counted."""
        numbers = [shard.num_samples for shard in self._shards if shard.num_samples is not None]
        jobs, class_names = _jobs_of(self._shards)
        return Contents(
            "shards",
            sum(numbers) if len(numbers) == len(self._shards) else None,
            sum(shard.num_bytes for shard in self._shards),
            [FieldSeen.of(field, np.concatenate(sizes)) for field, sizes in sorted(self._sizes.items())],
            classes_seen(class_counts(_joined(self._labels)), class_names) if self._labels else None,
            self._samples,
            shards=self._shards,
            jobs=jobs,
        )


def _joined(labels: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return labels of several shards as one array: of names, if some are."""
    if any(each.dtype.kind == "U" for each in labels):
        labels = [each.astype(str) for each in labels]
    return np.concatenate(labels)


def _labels_of(shard: ShardSeen, index: ShardIndex) -> NDArray[Any] | None:
    """Return the labels of a shard; those that are names are read, where the tar is plain and of this machine."""
    places = next((index.fields[field] for field in _CLASSES if field in index.fields), None)
    if places is None or bool((places.offsets < 0).any()):
        return None
    if places.values is not None:
        return places.values
    is_readable = is_local(shard.url) and shard.state != "impossible" and int(places.sizes.max()) <= _LONGEST_NAME
    return np.asarray([_name_at(shard.url, places, place) for place in range(len(index.keys))]) if is_readable else None


def _name_at(url: str, places: Places, place: int) -> str:
    offset = int(places.offsets[place])
    try:
        return str(decode_member("cls", read_span(url, offset, int(places.sizes[place]))))
    except ValueError as error:
        raise DataError(f"The class in {url!r} at offset {offset} cannot be decoded: {error}.") from error


def _sample_of(name: str, index: ShardIndex, place: int) -> SampleSeen:
    fields = {
        field: _field_of(places, place) for field, places in sorted(index.fields.items()) if places.offsets[place] >= 0
    }
    return SampleSeen(f"{name}/{index.keys[place]}", fields)


def _field_of(places: Places, place: int) -> dict[str, Any]:
    value = {} if places.values is None else {"value": int(places.values[place])}
    return {"bytes": int(places.sizes[place]), **value}
