"""What is in record files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdpipes.core.progress import shown_if_slow
from kdpipes.look.contents import ClassSeen, Contents, FieldSeen, JobSeen, PartState, SampleSeen, classes_seen
from kdpipes.plan.class_counts import class_counts
from kdpipes.storage.record_folder import HEADER, Header, finished_index, part_name
from kdpipes.storage.shard_index import Places, ShardIndex

__all__ = ["look_at_records"]


def look_at_records(folder: Path, header: Header, *, num_samples: int = 3) -> Contents:
    """Return what is in the parts that are there, of which no record is opened.

    Args:
        folder: Of this machine.
        header: What it says of itself.
        num_samples: How many of the first samples are listed.

    Raises:
        DataError: The index of a part is damaged or of other records, or the part has been cut.
    """
    counted = shown_if_slow(range(header.num_parts), header.num_parts, "reading", "parts")
    indexes = [finished_index(folder, header, number) for number in counted]
    parts = [_part(folder / part_name(number), index) for number, index in enumerate(indexes)]
    there = [index for index in indexes if index is not None]
    number = sum(len(index.keys) for index in there)
    is_complete = len(there) == len(parts)
    return Contents(
        "records",
        number,
        sum(part.num_bytes or 0 for part in parts),
        _fields_of(there),
        _classes_of(there, header),
        _first_samples(there, num_samples),
        parts=parts,
        jobs=[JobSeen(str(folder / HEADER), number if is_complete else None, is_complete)],
    )


def _part(path: Path, index: ShardIndex | None) -> PartState:
    if index is None:
        return PartState(str(path), None, None)
    return PartState(str(path), len(index.keys), index.version.size)


def _fields_of(indexes: Sequence[ShardIndex]) -> list[FieldSeen]:
    sizes: dict[str, list[Any]] = {}
    for index in indexes:
        for name, places in index.fields.items():
            sizes.setdefault(name, []).append(places.sizes[places.offsets >= 0])
    return [FieldSeen.of(name, np.concatenate(each)) for name, each in sorted(sizes.items())]


def _classes_of(indexes: Sequence[ShardIndex], header: Header) -> list[ClassSeen] | None:
    labels = [None if (y := index.fields.get("y")) is None else y.values for index in indexes if len(index.keys)]
    known = [each for each in labels if each is not None]
    if not known or len(known) < len(labels):
        return None
    return classes_seen(class_counts(np.concatenate(known)), header.class_names)


def _first_samples(indexes: Sequence[ShardIndex], number: int) -> list[SampleSeen]:
    found: list[SampleSeen] = []
    for index in indexes:
        for place in range(min(len(index.keys), number - len(found))):
            fields = {name: _field_of(places, place) for name, places in sorted(index.fields.items())}
            found.append(SampleSeen(index.keys[place], {name: about for name, about in fields.items() if about}))
    return found


def _field_of(places: Places, place: int) -> dict[str, Any]:
    """Return what is known of one field of a sample; nothing where it has none."""
    if places.offsets[place] < 0:
        return {}
    value = {} if places.values is None else {"value": int(places.values[place])}
    return {"bytes": int(places.sizes[place]), **value}
