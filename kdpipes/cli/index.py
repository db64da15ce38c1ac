"""`kdpipes index`."""

from __future__ import annotations

from typing import Any

import click

from kdpipes.cli._commands import Answer, Command

__all__ = ["command"]


@click.command("index", cls=Command)
@click.argument("urls", nargs=-1, required=True)
@click.option("--no-checksums", is_flag=True, help="Do not read the contents of local shards, which is much faster.")
def command(urls: tuple[str, ...], no_checksums: bool) -> Answer:
    """Index tar shards, so that they open at once.

    Writes NAME.tar.index beside each shard, or into the local cache if that place is read-only. An index holds the
    offsets, classes and checksums of the members. Existing indexes are replaced. The indexes of remote shards are also
    written into one object for each folder, kdpipes.index, so that many shards open with a few requests.

    URLS are paths or fsspec URLs of plain tars, with brace ranges or globs.

    \b
    Examples:
      kdpipes index "shards/photos-{000..003}.tar"
      kdpipes index --no-checksums "shards/*.tar"
      kdpipes index --json s3://bucket/birds-000.tar

    \b
    JSON:
      {"num_samples": 160, "num_shards": 4,
       "shards": [{"url": "shards/photos-000.tar", "num_samples": 40, "num_bytes": 204800}, ...]}
    """
    from kdpipes.core.progress import shown_if_slow
    from kdpipes.storage.catalog import make_index
    from kdpipes.storage.catalog_file import write_data_set_indexes
    from kdpipes.storage.files import forget_listings, matching_urls
    from kdpipes.storage.urls import expand_urls

    given = expand_urls(urls)
    forget_listings(given)
    shards: list[dict[str, Any]] = []
    indexes = {}
    for url in shown_if_slow(found := matching_urls(given), len(found), "indexing", "shards"):
        index = indexes[url] = make_index(url, with_checksums=not no_checksums)
        shards.append({"url": url, "num_samples": len(index.keys), "num_bytes": index.version.size})
    write_data_set_indexes(indexes)
    num_samples = sum(shard["num_samples"] for shard in shards)
    data = {"num_samples": num_samples, "num_shards": len(shards), "shards": shards}
    return Answer(data, f"{num_samples} samples in {len(shards)} shards are indexed.")
