"""`kdpipes index`."""

from __future__ import annotations

from typing import Any

import click

from kdpipes.cli._commands import Answer, Command

__all__ = ["command"]


@click.command("index", cls=Command)
@click.argument("urls", nargs=-1, required=True)
@click.option("--no-checksums", is_flag=True, help="Do not read the contents of local shards, which is much faster.")
@click.option("--columns", metavar="NAMES", help="Values to keep, like json.label,json.width, for plans.")
def command(urls: tuple[str, ...], no_checksums: bool, columns: str | None) -> Answer:
    """Index tar shards, so that they open at once.

    Writes NAME.tar.index beside each shard, or into the local cache if that place is read-only. An index holds the
    offsets, classes and checksums of the members, and the columns. Existing indexes are replaced; the columns that they
    keep stay. The indexes of remote shards are also written into one object for each folder, kdpipes.index, so that
    many shards open with a few requests.

    URLS are paths or fsspec URLs of plain tars, with brace ranges or globs.

    \b
    Examples:
      kdpipes index "shards/photos-{000..003}.tar"
      kdpipes index --no-checksums "shards/*.tar"
      kdpipes index --columns json.label,json.width "captions/*.tar"
      kdpipes index --json s3://bucket/birds-000.tar

    \b
    JSON:
      {"num_samples": 160, "num_shards": 4,
       "shards": [{"url": "shards/photos-000.tar", "num_samples": 40, "num_bytes": 204800}, ...]}
    """
    from kdpipes.sources.index_shards import index_shards

    result = index_shards(urls, columns=columns or (), checksums=not no_checksums)
    names = ("url", "num_samples", "num_bytes")
    shards: list[dict[str, Any]] = [dict(zip(names, shard, strict=True)) for shard in zip(*result, strict=True)]
    data = {"num_samples": sum(result.num_samples), "num_shards": len(shards), "shards": shards}
    return Answer(data, f"{data['num_samples']} samples in {len(shards)} shards are indexed.")
