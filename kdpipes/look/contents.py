"""What is in shards, a folder or a chain, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["ClassSeen", "Contents", "FieldSeen", "JobSeen", "PartState", "SampleSeen", "ShardState", "classes_seen"]


@dataclass(frozen=True)
class FieldSeen:
    """One field, and what it takes.

    Args:
        name: "jpg".
        num_samples: How many samples have it, of those that were looked at.
        num_bytes: Of all of them; None where that is not known.
        min_bytes: Of the smallest.
        median_bytes: Of the one in the middle.
        max_bytes: Of the largest.
        type: What it is in a chain: "EncodedImage", "Tensor uint8 [3, 96, 96]".
    """

    name: str
    num_samples: int
    num_bytes: int | None = None
    min_bytes: int | None = None
    median_bytes: float | None = None
    max_bytes: int | None = None
    type: str | None = None

    @classmethod
    def of(cls, name: str, sizes: ArrayLike, type: str | None = None) -> FieldSeen:
        """Return a field of so many bytes in each sample that has it."""
        each = np.asarray(sizes, dtype=np.int64)
        if not len(each):
            return cls(name, 0, 0, type=type)
        low, middle, high = int(each.min()), float(np.median(each)), int(each.max())
        return cls(name, len(each), int(each.sum()), low, middle, high, type)


@dataclass(frozen=True)
class ClassSeen:
    """One class.

    Args:
        label: As `y` or the member `cls` has it: a number, or a name.
        name: Of a class with a number, where it is known.
        num_samples: How many samples are of it.
    """

    label: int | str
    name: str | None
    num_samples: int


@dataclass(frozen=True)
class SampleSeen:
    """One of the first samples.

    Args:
        key: Its key.
        fields: Of each field what is known: "bytes", "value" of a label, "type" in a chain.
    """

    key: str
    fields: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ShardState:
    """One shard.

    Args:
        url: Where it lies.
        num_samples: None if it was not read.
        num_bytes: Its size.
        index: "fresh", "stale", "damaged", "missing"; "impossible" for a compressed tar.
    """

    url: str
    num_samples: int | None
    num_bytes: int
    index: str


@dataclass(frozen=True)
class PartState:
    """One part of record files.

    Args:
        path: Where it lies, or is to lie.
        num_samples: None if it is missing, as are the bytes.
        num_bytes: Its size.
    """

    path: str
    num_samples: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class JobSeen:
    """A job of `write_shards` or `write_records` that has made shards or parts.

    Args:
        url: Of the file in which the job is noted.
        num_samples: How many samples the job has; None if that is not known.
        is_complete: Whether the job has been finished.
    """

    url: str
    num_samples: int | None
    is_complete: bool


@dataclass(frozen=True)
class Contents:
    """What is in shards, a folder or a chain.

    Args:
        kind: "shards", "records", "images" (one folder for each class), "files" (any other folder), or "chain".
        num_samples: How many samples, or files, there are; None if that is not known.
        num_bytes: What shards, parts, images or files take; None of a chain.
        fields: Of all samples that were read; in a chain, of the first ones.
        classes: In ascending order; None where they are not known.
        samples: The first ones.
        shards: Of shards only.
        parts: Of records only.
        jobs: That have written shards or records, as far as they are noted beside them.
        pipes: Of a chain only: the names of its pipes, the source first.
        num_batches: Of a chain only: how many items it gives an epoch; None if that is not known.
    """

    kind: Literal["shards", "records", "images", "files", "chain"]
    num_samples: int | None
    num_bytes: int | None
    fields: list[FieldSeen]
    classes: list[ClassSeen] | None
    samples: list[SampleSeen]
    shards: list[ShardState] = field(default_factory=list)
    pipes: list[str] = field(default_factory=list)
    num_batches: int | None = None
    parts: list[PartState] = field(default_factory=list)
    jobs: list[JobSeen] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, fit for JSON."""
        return asdict(self)


def classes_seen(counts: Mapping[Any, int], names: Sequence[str] | None = None) -> list[ClassSeen]:
    """Return classes with their names, where those are known."""

    def name_of(label: Any) -> str | None:
        is_known = names is not None and isinstance(label, int) and 0 <= label < len(names)
        return names[label] if names is not None and is_known else None

    return [ClassSeen(label, name_of(label), number) for label, number in counts.items()]
