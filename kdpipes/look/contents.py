"""List what shards, records or a folder contain, as plain data."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kdpipes.cache.folder import layout_in
from kdpipes.core.errors import DataError, check_count
from kdpipes.core.messages import counted, shown_if_slow
from kdpipes.core.secrets import masked, printable
from kdpipes.look.rendering import class_name, table_lines
from kdpipes.plan.class_counts import class_counts
from kdpipes.sources.image_folder import ImageFolderMapDataPipe
from kdpipes.storage.catalog import ShardSeen, survey_shards
from kdpipes.storage.decoding import decode_member, image_suffixes
from kdpipes.storage.files import forget_listings, list_files, list_versions, matching_urls, version_of
from kdpipes.storage.index_home import Seen, class_names_of, notes_beside, notes_places
from kdpipes.storage.readers import read_span
from kdpipes.storage.records import HEADER, Header, finished_index, part_name, read_header
from kdpipes.storage.shard_index import ShardIndex
from kdpipes.storage.urls import TAR_SUFFIX, expand_urls, is_local, join_url, relative_names

_TAR = re.compile(f"{TAR_SUFFIX}$", re.I)
_SHARDS = re.compile(rf"{TAR_SUFFIX}\b|[*{{]", re.I)  # a remote place without these is a folder
_CLASSES = ("cls", "class")  # the member that is the label
_LONGEST_NAME = 256  # bytes of a class's name
_MOST = 20  # of classes, and of shards without a fresh index, that are listed


@dataclass(frozen=True)
class FieldSeen:
    """One field, and its size in all samples that have it, among those that were read; None if that is unknown."""

    name: str
    num_samples: int
    num_bytes: int | None = None
    min_bytes: int | None = None
    median_bytes: float | None = None
    max_bytes: int | None = None

    @classmethod
    def of(cls, name: str, sizes: ArrayLike) -> FieldSeen:
        """Return a field with its size in each sample that has it."""
        each = np.asarray(sizes, dtype=np.int64)
        if not len(each):
            return cls(name, 0, 0)
        low = int(each.min())
        middle = float(np.median(each))
        high = int(each.max())
        return cls(name, len(each), int(each.sum()), low, middle, high)


@dataclass(frozen=True)
class ClassSeen:
    """One class: its value in `y` or in the member `cls`, the name of a number if that is known, and its samples."""

    label: int | str
    name: str | None
    num_samples: int


@dataclass(frozen=True)
class SampleSeen:
    """One of the first samples, with the "bytes" of its fields and the "value" of its label."""

    key: str
    fields: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ShardState:
    """One shard."""

    url: str
    num_samples: int | None  # None if it was not read
    num_bytes: int
    index: str  # "fresh", "stale", "damaged", "missing"; "impossible" for a compressed tar


@dataclass(frozen=True)
class PartState:
    """One part of record files; sizes are None if it is missing."""

    path: str
    num_samples: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class JobSeen:
    """A job of `write_shards` or `write_records`, and the file that describes it."""

    url: str
    num_samples: int | None  # None if it is unknown
    is_complete: bool


@dataclass(frozen=True)
class Contents:
    """The contents of shards, records or a folder; None where unknown."""

    kind: Literal["shards", "records", "images", "files"]
    num_samples: int | None  # or files
    num_bytes: int | None
    fields: list[FieldSeen]  # the fields of all samples read
    classes: list[ClassSeen] | None  # in ascending order
    samples: list[SampleSeen]  # the first ones
    shards: list[ShardState] = field(default_factory=list)
    parts: list[PartState] = field(default_factory=list)
    jobs: list[JobSeen] = field(default_factory=list)  # that wrote shards or records, if they are known


def _classes_seen(counts: Mapping[Any, int], names: Sequence[str] | None = None) -> list[ClassSeen]:
    """Return classes with their names, if these are known."""
    return [ClassSeen(label, class_name(label, names), number) for label, number in counts.items()]


def inspect_data(places: Sequence[str], *, num_samples: int = 3, scan: bool = True) -> Contents:
    """Return what is in shards, or in a folder. No member is decoded, no image is opened, and nothing is written.

    Args:
        places: One folder, or paths or fsspec URLs of tars, with brace ranges or globs.
        num_samples: The number of samples to list, from the first.
        scan: Whether to read shards without a fresh index: the headers of plain local tars, the whole of all others.
    """
    check_count("num_samples", num_samples, minimum=0)
    given = [Path(places[0]).expanduser().as_posix()] if len(places) == 1 and is_local(places[0]) else list(places)
    is_folder = Path(given[0]).is_dir() if is_local(given[0]) else not _SHARDS.search(given[0])
    if len(given) == 1 and is_folder:
        return _look_at_folder(given[0], num_samples, scan=scan)
    urls = expand_urls(given)
    forget_listings(urls)
    return _look_at_shards(matching_urls(urls), num_samples, scan=scan)


def _look_at_folder(root: str, num_samples: int, *, scan: bool) -> Contents:
    """Return the records in a folder, or else its shards, or else its files."""
    if layout_in(root) is not None:
        raise ValueError(masked(f"{root!r} holds a cache: `kdpipes cache ls {root}` shows what is in it."))
    header = read_header(Path(root)) if is_local(root) else None
    if header is not None:
        return _look_at_records(Path(root), header, num_samples)
    sizes = _sizes_in(root)
    if not sizes:
        raise FileNotFoundError(f"{masked(root)!r} contains no files. Check the path.")
    tars = [path for path in sizes if _TAR.search(path)]
    if tars:
        return _look_at_shards([join_url(root, path) for path in tars], num_samples, scan=scan)
    suffixes = image_suffixes()
    images = {path: size for path, size in sizes.items() if path.lower().endswith(suffixes)}
    if images and all("/" in path for path in images):
        return _look_at_images(root, images, num_samples)
    by_suffix = defaultdict[str, list[int]](list)
    for path, size in sizes.items():
        by_suffix[PurePosixPath(path).suffix.lower() or "without suffix"].append(size)
    fields = [FieldSeen.of(suffix, each) for suffix, each in sorted(by_suffix.items())]
    samples = [SampleSeen(path, {"file": {"bytes": size}}) for path, size in islice(sizes.items(), num_samples)]
    return Contents("files", len(sizes), sum(sizes.values()), fields, None, samples)


def _sizes_in(root: str) -> dict[str, int]:
    """Return the size of each file below a folder, sorted by its path there."""
    paths = list_files(root, ("",))
    if is_local(root):
        counted = shown_if_slow(paths, len(paths), "reading sizes", "file")
        return {path: version_of(join_url(root, path)).size for path in counted}
    versions = list_versions(root)
    return {path: versions[path].size for path in paths if path in versions}


def _look_at_images(root: str, sizes: Mapping[str, int], num_samples: int) -> Contents:
    folder = ImageFolderMapDataPipe(root)
    paths = sorted(sizes, key=lambda path: path.split("/", 1))  # the order of the pipe
    numbers = {name: number for number, name in enumerate(folder.class_names())}
    samples = [
        SampleSeen(path, {"x": {"bytes": sizes[path]}, "y": {"value": numbers[path.split("/", 1)[0]]}})
        for path in paths[:num_samples]
    ]
    fields = [FieldSeen.of("x", list(sizes.values())), FieldSeen("y", len(sizes))]
    classes = _classes_seen(class_counts(folder), folder.class_names())
    return Contents("images", len(sizes), sum(sizes.values()), fields, classes, samples)


def _look_at_records(folder: Path, header: Header, num_samples: int) -> Contents:
    counted = shown_if_slow(range(header.num_parts), header.num_parts, "reading", "part")
    parts = list[PartState]()
    found = list[tuple[str, ShardIndex]]()
    for number in counted:
        index = finished_index(folder, header, number)
        path = str(folder / part_name(number))
        if index is None:
            parts.append(PartState(path, None, None))
            continue
        parts.append(PartState(path, len(index.keys), index.version.size))
        found.append(("", index))
    labels = [None if (y := index.fields.get("y")) is None else y.values for _, index in found if len(index.keys)]
    total = sum(len(index.keys) for _, index in found)
    is_complete = len(found) == len(parts)
    return Contents(
        "records",
        total,
        sum(part.num_bytes or 0 for part in parts),
        _fields_in(index for _, index in found),
        _classes_in(labels, header.class_names),
        _first_samples(found, num_samples),
        parts=parts,
        jobs=[JobSeen(str(folder / HEADER), total if is_complete else None, is_complete)],
    )


def _look_at_shards(urls: Sequence[str], num_samples: int, *, scan: bool) -> Contents:
    shards = list[ShardState]()
    found = list[tuple[str, ShardIndex]]()
    labels: list[NDArray[Any] | None] = []
    seen = shown_if_slow(survey_shards(urls, scan=scan), len(urls), "reading", "shard")
    for name, shard in zip(relative_names(urls), seen, strict=True):
        index = shard.index
        shards.append(ShardState(shard.url, None if index is None else len(index.keys), shard.num_bytes, shard.state))
        if index is not None and len(index.keys):
            found.append((f"{name}/", index))
            is_known = all(each is not None for each in labels)  # otherwise, no names of classes need to be read
            labels.append(_labels_of(shard, index) if is_known else None)
    numbers = [shard.num_samples for shard in shards if shard.num_samples is not None]
    jobs, class_names = _jobs_of(shards)
    return Contents(
        "shards",
        sum(numbers) if len(numbers) == len(shards) else None,
        sum(shard.num_bytes for shard in shards),
        _fields_in(index for _, index in found),
        _classes_in(labels, class_names),
        _first_samples(found, num_samples),
        shards=shards,
        jobs=jobs,
    )


def _jobs_of(shards: Sequence[ShardState]) -> tuple[list[JobSeen], tuple[str, ...] | None]:
    """Return the jobs described beside shards, and the names of the classes if all jobs agree on them."""
    places = notes_places([shard.url for shard in shards])
    found = [(place, notes) for place in places if (notes := notes_beside(place)) is not None]
    jobs = [JobSeen(place.url, notes.job.get("num_samples"), notes.shards is not None) for place, notes in found]
    known = {shard.url: Seen(shard.num_bytes, shard.num_samples) for shard in shards}
    names = {class_names_of(notes, place, known) for place, notes in found}
    is_all = sum(len(place.numbers) for place, _ in found) == len(shards)
    return jobs, names.pop() if is_all and len(names) == 1 else None


def _labels_of(shard: ShardSeen, index: ShardIndex) -> NDArray[Any] | None:
    """Return the labels of a shard. Names of classes are read if the tar is plain and local."""
    places = next((index.fields[name] for name in _CLASSES if name in index.fields), None)
    if places is None or bool((places.offsets < 0).any()):
        return None
    if places.values is not None:
        return places.values
    if not is_local(shard.url) or shard.state == "impossible" or int(places.sizes.max()) > _LONGEST_NAME:
        return None
    names = []
    for offset, size in zip(places.offsets.tolist(), places.sizes.tolist(), strict=True):
        try:
            names.append(str(decode_member("cls", read_span(shard.url, offset, size))))
        except ValueError as error:
            text = f"The class in {shard.url!r} at offset {offset} cannot be decoded: {error}."
            raise DataError(text) from error
    return np.asarray(names)


def _classes_in(labels: Sequence[NDArray[Any] | None], names: Sequence[str] | None) -> list[ClassSeen] | None:
    """Return the classes of several shards or parts; None if the labels of one are unknown."""
    known = [each for each in labels if each is not None]
    if not known or len(known) < len(labels):
        return None
    if any(each.dtype.kind == "U" for each in known):
        known = [each.astype(str) for each in known]
    return _classes_seen(class_counts(np.concatenate(known)), names)


def _fields_in(indexes: Iterator[ShardIndex]) -> list[FieldSeen]:
    sizes = defaultdict[str, list[NDArray[np.int64]]](list)
    for index in indexes:
        for name, places in index.fields.items():
            sizes[name].append(places.sizes[places.offsets >= 0])
    return [FieldSeen.of(name, np.concatenate(each)) for name, each in sorted(sizes.items())]


def _first_samples(indexes: Sequence[tuple[str, ShardIndex]], number: int) -> list[SampleSeen]:
    """Return the first samples of some shards or parts, each with what its keys begin with."""
    found: list[SampleSeen] = []
    for start, index in indexes:
        for place in range(min(len(index.keys), number - len(found))):
            known = {name: places for name, places in sorted(index.fields.items()) if places.offsets[place] >= 0}
            fields: dict[str, dict[str, Any]] = {}
            for name, places in known.items():
                fields[name] = {"bytes": int(places.sizes[place])}
                if places.values is not None:
                    fields[name]["value"] = int(places.values[place])
            found.append(SampleSeen(f"{start}{index.keys[place]}", fields))
    return found


def contents_lines(title: str, found: Contents) -> Iterator[str]:
    """Yield the lines that describe shards, records or a folder."""
    yield f"{title}: {', '.join(_totals(found))}"
    if states := [shard.index for shard in found.shards]:
        counts = ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))
        is_better_made = bool({"stale", "damaged", "missing"} & set(states))
        yield f"  indexes: {counts}{'; `kdpipes index` renews those that are not fresh' if is_better_made else ''}"
        others = [shard for shard in found.shards if shard.index != "fresh"]
        yield from (f"    {shard.index}: {printable(shard.url)}" for shard in others[:_MOST])
        yield from _left_out(len(others))
    if missing := [part for part in found.parts if part.num_samples is None]:
        yield f"  parts: {len(found.parts) - len(missing):,} complete, {len(missing):,} missing"
        yield from (f"    missing: {printable(part.path)}" for part in missing[:_MOST])
        yield from _left_out(len(missing))
    command = "kdpipes records" if found.kind == "records" else "kdpipes pack"
    for job in found.jobs:
        if not job.is_complete:
            size = "" if job.num_samples is None else f" of {counted(job.num_samples, 'sample')}"
            hint = f"run the same command (`{command} ...`, or the same script) again to resume it"
            yield f"  not finished: the job{size} described in {printable(job.url)}; {hint}"
    if found.fields:
        rows = [["field", "samples", "bytes", "min", "median", "max"]]
        for one in found.fields:
            sizes = (one.num_bytes, one.min_bytes, one.median_bytes, one.max_bytes)
            shown = ("-" if size is None else f"{size:,.0f}" for size in sizes)
            rows.append([printable(one.name), f"{one.num_samples:,}", *shown])
        yield from (f"  {line}" for line in table_lines(rows))
    if found.classes is not None:
        rows = [["class", "samples"]]
        for each in found.classes[:_MOST]:
            name = f"{printable(str(each.label))} {printable(each.name or '')}".rstrip()
            rows.append([name, f"{each.num_samples:,}"])
        yield from (f"  {line}" for line in table_lines(rows))
        yield from _left_out(len(found.classes))
    if found.samples:
        yield "  first samples:"
    for sample in found.samples:
        fields = ", ".join(f"{printable(name)} {_known(about)}" for name, about in sample.fields.items())
        yield f"    {printable(sample.key)}: {fields}"


def _left_out(number: int) -> list[str]:
    """Return a line for the entries of a list that are not shown, if there are any."""
    return [f"    ... and {number - _MOST:,} more"] if number > _MOST else []


def _totals(found: Contents) -> Iterator[str]:
    what = "files" if found.kind == "files" else "samples"
    read = [shard.num_samples for shard in found.shards if shard.num_samples is not None]
    if found.num_samples is not None:
        yield f"{found.num_samples:,} {what}"
    elif found.shards:
        yield f"{counted(sum(read), 'sample')} in {counted(len(read), 'shard')} with fresh indexes"
    else:
        yield "an unknown number of samples"
    if found.num_bytes is not None:
        yield f"{counted(found.num_bytes, 'byte')}"
    if found.shards:
        yield f"{counted(len(found.shards), 'shard')}"
    if found.parts:
        yield f"{counted(len(found.parts), 'part')}"


def _known(about: dict[str, Any]) -> str:
    parts = [f"= {about['value']}"] if "value" in about else []
    return " ".join([*parts, *([f"({counted(about['bytes'], 'byte')})"] if "bytes" in about else [])])
