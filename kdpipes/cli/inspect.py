"""`kdpipes inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from kdpipes.cli._chain_of import CHAIN_HELP, chain_of, names_chain
from kdpipes.cli._commands import Answer, Command
from kdpipes.core.errors import masked, printable

if TYPE_CHECKING:
    from kdpipes.look.contents import Contents, FieldSeen, SampleSeen

__all__ = ["command"]

_MOST = 20  # of classes, and of shards without a fresh index, that are listed


@click.command(
    "inspect",
    cls=Command,
    help=f"""List what is in shards, in a folder, or in a chain.

    Lists the numbers of samples and bytes, the sizes of each field, the samples of each class, the state of each
    shard's index (fresh, stale, damaged, missing, or impossible for a compressed tar), whether the job that writes
    shards or records has finished, and the first samples. Decodes no member of a shard, opens no image, and writes
    nothing.

    PLACES are paths or fsspec URLs of tars, with brace ranges or globs; one folder; or one chain, {CHAIN_HELP}: its
    module is run, and its first samples are made as in training.

    \b
    Examples:
      kdpipes inspect "shards/photos-{{000..003}}.tar"
      kdpipes inspect shards/photos-000.tar --samples 5
      kdpipes inspect photos --json
      kdpipes inspect records
      kdpipes inspect train.py:chain
      kdpipes inspect --no-scan "s3://bucket/birds-*.tar"

    \b
    JSON:
      kind          "shards", "records", "images", "files" or "chain"
      num_samples, num_bytes, num_batches
                    null if unknown
      fields        [{{"name", "num_samples", "num_bytes", "min_bytes",
                    "median_bytes", "max_bytes", "type"}}]
      classes       [{{"label", "name", "num_samples"}}], or null
      samples       [{{"key", "fields": {{NAME: {{"bytes", "value", "type"}}}}}}]
      shards        [{{"url", "num_samples", "num_bytes", "index"}}]
      parts         of records [{{"path", "num_samples", "num_bytes"}}],
                    with null for missing ones
      jobs          of shards and records [{{"url", "num_samples", "is_complete"}}]
      pipes         names of a chain's pipes, the source first
    """,
)
@click.argument("places", nargs=-1, required=True)
@click.option("--samples", "num_samples", type=int, default=3, show_default=True, help="First samples to list.")
@click.option("--no-scan", is_flag=True, help="Skip shards without a fresh index, and the classes of a chain.")
def command(places: tuple[str, ...], num_samples: int, no_scan: bool) -> Answer:
    """List what is in shards, in a folder, or in a chain."""
    from kdpipes.core.errors import check_count
    from kdpipes.look.contents import inspect_data, look_at_chain

    check_count("samples", num_samples, minimum=0)
    if len(places) == 1 and names_chain(places[0]):
        found = look_at_chain(chain_of(places[0]), num_samples=num_samples, scan=not no_scan)
    else:
        found = inspect_data(places, num_samples=num_samples, scan=not no_scan)
    title = places[0] if len(places) == 1 else f"{places[0]} ... {places[-1]}"
    lines = (masked(line) if "://" in line else line for line in contents_lines(title, found))
    return Answer(found.as_dict(), lines)


def contents_lines(title: str, found: Contents) -> Iterator[str]:
    """Yield the lines that describe shards, a folder or a chain."""
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
        yield "an unknown number of samples"
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
    yield f"  indexes: {counts}{'; `kdpipes index` renews those that are not fresh' if is_better_made else ''}"
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
    """Yield which jobs were interrupted, and how to resume them."""
    command = "kdpipes records" if found.kind == "records" else "kdpipes pack"
    for job in found.jobs:
        if not job.is_complete:
            size = "" if job.num_samples is None else f" of {job.num_samples:,} samples"
            hint = f"run the same command (`{command} ...`, or the same script) again to resume it"
            yield f"  not finished: the job{size} described in {printable(job.url)}; {hint}"


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
    parts = [f"= {about['value']}"] if "value" in about else [about["type"]] if "type" in about else []
    size = about.get("bytes")
    return " ".join([*parts, *([] if size is None else [f"({size:,} byte{'' if size == 1 else 's'})"])])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first = row[0].ljust(widths[0])
        yield "  " + "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])


def _and_more(number: int) -> Iterator[str]:
    if number > _MOST:
        yield f"    ... and {number - _MOST:,} more"
