"""What `kdpipes inspect` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kdpipes.core.masked import printable

if TYPE_CHECKING:
    from kdpipes.look.contents import Contents, FieldSeen, SampleSeen

__all__ = ["contents_lines"]

_MOST = 20  # of classes, and of shards without a fresh index, that are listed


def contents_lines(title: str, found: Contents) -> Iterator[str]:
    """Yield what is in shards, a folder or a chain, line by line."""
    yield f"{title}: {', '.join(_totals(found))}"
    if found.pipes:
        yield f"  pipes: {' > '.join(found.pipes)}"
    yield from _shard_lines(found)
    yield from _part_lines(found)
    yield from _unfinished_lines(found)
    if found.fields:
        yield from _table(["field", "samples", "bytes", "min", "median", "max"], [_row(each) for each in found.fields])
    if found.classes is not None:
        rows = [[_class_name(each), f"{each.num_samples:,}"] for each in found.classes]
        yield from _table(["class", "samples"], rows[:_MOST])
        yield from _and_more(len(rows))
    if found.samples:
        yield "  first samples:"
    yield from (f"    {printable(sample.key)}: {_fields_of(sample)}" for sample in found.samples)


def _totals(found: Contents) -> Iterator[str]:
    what = "files" if found.kind == "files" else "samples"
    read = [shard.num_samples for shard in found.shards if shard.num_samples is not None]
    if found.num_samples is not None:
        yield f"{found.num_samples:,} {what}"
    elif found.shards:
        yield f"{sum(read):,} samples in {len(read):,} shards with fresh indexes"
    else:
        yield "nobody knows how many samples"
    if found.num_bytes is not None:
        yield f"{found.num_bytes:,} bytes"
    if found.shards:
        yield f"{len(found.shards):,} shards"
    if found.parts:
        yield f"{len(found.parts):,} parts"
    if found.num_batches is not None and found.num_batches != found.num_samples:
        yield f"{found.num_batches:,} batches"


def _shard_lines(found: Contents) -> Iterator[str]:
    states = [shard.index for shard in found.shards]
    if not states:
        return
    counts = ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))
    is_better_made = bool({"stale", "damaged", "missing"} & set(states))
    yield f"  indexes: {counts}{'; `kdpipes index` makes those that are not fresh' if is_better_made else ''}"
    others = [shard for shard in found.shards if shard.index != "fresh"]
    yield from (f"    {shard.index}: {printable(shard.url)}" for shard in others[:_MOST])
    yield from _and_more(len(others))


def _part_lines(found: Contents) -> Iterator[str]:
    missing = [part.path for part in found.parts if part.num_samples is None]
    if missing:
        yield f"  parts: {len(found.parts) - len(missing):,} complete, {len(missing):,} missing"
        yield from (f"    missing: {printable(path)}" for path in missing[:_MOST])
        yield from _and_more(len(missing))


def _unfinished_lines(found: Contents) -> Iterator[str]:
    """Yield which jobs have broken off, and how they go on."""
    command = "kdpipes records" if found.kind == "records" else "kdpipes pack"
    for job in found.jobs:
        if not job.is_complete:
            size = "" if job.num_samples is None else f" of {job.num_samples:,} samples"
            way_out = f"run the same command (`{command} ...`, or the same script) again, and it goes on"
            yield f"  not finished: the job{size} that {printable(job.url)} tells of; {way_out}"


def _row(each: FieldSeen) -> list[str]:
    name = printable(each.name) + (f" ({each.type})" if each.type else "")
    median = None if each.median_bytes is None else round(each.median_bytes)
    sizes = (each.num_bytes, each.min_bytes, median, each.max_bytes)
    return [name, f"{each.num_samples:,}", *("-" if size is None else f"{size:,}" for size in sizes)]


def _class_name(each: Any) -> str:
    return printable(str(each.label)) + (f" {printable(each.name)}" if each.name else "")


def _fields_of(sample: SampleSeen) -> str:
    return ", ".join(f"{printable(name)} {_known(about)}" for name, about in sample.fields.items())


def _known(about: dict[str, Any]) -> str:
    told = [f"= {about['value']}"] if "value" in about else [about["type"]] if "type" in about else []
    size = about.get("bytes")
    return " ".join([*told, *([] if size is None else [f"({size:,} byte{'' if size == 1 else 's'})"])])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first = row[0].ljust(widths[0])
        yield "  " + "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])


def _and_more(number: int) -> Iterator[str]:
    if number > _MOST:
        yield f"    ... and {number - _MOST:,} more"
