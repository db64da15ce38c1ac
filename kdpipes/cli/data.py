"""Commands about datasets: `copy`, `index` and `inspect`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from kdpipes.cli._chain_of import names_chain
from kdpipes.cli._commands import Answer, command, spoken


@command
def copy(
    global_root: Annotated[str, "GLOBAL"],
    local_root: Annotated[str, "LOCAL"],
    *,
    relative_path: Annotated[str | None, "P"] = None,
    num_workers: int = 8,
) -> Answer:
    """Copy a dataset to a local disk, unless it is already there.

    Copies a folder, a zip or a folder of zips. A complete copy is used as it is, even if the source is gone; an
    interrupted copy is resumed.

    GLOBAL is a path or fsspec URL of the dataset; if it is the folder train and only train.zip exists, that is
    extracted. LOCAL is the folder of the copy.

    Args:
        relative_path: A folder inside GLOBAL; only this is copied, to the same place inside LOCAL.
        num_workers: The number of files copied at a time.

    Examples:
      kdpipes copy photos local
      kdpipes copy photos local-cats --relative-path cat --num-workers 2 --json
      kdpipes copy s3://bucket/birds /scratch/birds

    JSON:
      {"path": "/scratch/birds", "was_copied": true, "was_deleted": false,
       "was_zip": false, "num_files": 160, "num_bytes": 812345}
      was_deleted   whether an incomplete copy, of other data or of an older
                    version, was removed first
    """
    from kdpipes.core.messages import counted
    from kdpipes.write.copy import copy_to_local

    result = copy_to_local(global_root, local_root, relative_path=relative_path, num_workers=num_workers)
    size = f"{counted(result.num_files, 'file')}, {counted(result.num_bytes, 'byte')}"
    done = f"copied {size}" if result.was_copied else "nothing to do"
    return Answer({**result._asdict(), "path": str(result.path)}, f"{result.path}: {done}.")


@command
def index(
    urls: tuple[str, ...], *, no_checksums: bool = False, columns: Annotated[str | None, "NAMES"] = None
) -> Answer:
    """Index tar shards, so that they open at once.

    Writes NAME.tar.index beside each shard, or into the local cache if that place is read-only. An index holds the
    offsets, classes and checksums of the members, and the columns. Existing indexes are replaced; their columns are
    kept. The indexes of remote shards are also written into one object for each folder, kdpipes.index, so that
    many shards open with a few requests.

    URLS are paths or fsspec URLs of plain tars, with brace ranges or globs.

    Args:
        no_checksums: Do not read the contents of local shards, which is much faster.
        columns: Values to keep, like json.label,json.width, for plans.

    Examples:
      kdpipes index "shards/photos-{000..003}.tar"
      kdpipes index --no-checksums "shards/*.tar"
      kdpipes index --columns json.label,json.width "captions/*.tar"
      kdpipes index --json s3://bucket/birds-000.tar

    JSON:
      {"num_samples": 160, "num_shards": 4,
       "shards": [{"url": "shards/photos-000.tar", "num_samples": 40,
                   "num_bytes": 204800}, ...]}
    """
    from kdpipes.core.messages import counted
    from kdpipes.sources.index_shards import index_shards

    result = index_shards(urls, columns=columns or (), checksums=not no_checksums)
    names = ("url", "num_samples", "num_bytes")
    shards = [dict(zip(names, shard, strict=True)) for shard in zip(*result, strict=True)]
    num_samples = sum(result.num_samples)
    data = {"num_samples": num_samples, "num_shards": len(shards), "shards": shards}
    return Answer(data, f"Indexed {counted(num_samples, 'sample')} in {counted(len(shards), 'shard')}.")


@command
@spoken(urls="PLACES")
def inspect(places: tuple[str, ...], *, samples: int = 3, no_scan: bool = False) -> Answer:
    """List what is in shards, in records, or in a folder.

    Lists the numbers of samples and bytes, the sizes of each field, the samples of each class, the state of each
    shard's index (fresh, stale, damaged, missing, or impossible for a compressed tar), whether the job that writes
    shards or records has finished, and the first samples. Decodes no member of a shard, opens no image, and writes
    nothing.

    PLACES are paths or fsspec URLs of tars, with brace ranges or globs; or one folder.

    Args:
        samples: First samples to list.
        no_scan: Skip shards without a fresh index.

    Examples:
      kdpipes inspect "shards/photos-{000..003}.tar"
      kdpipes inspect shards/photos-000.tar --samples 5
      kdpipes inspect photos --json
      kdpipes inspect records
      kdpipes inspect --no-scan "s3://bucket/birds-*.tar"

    JSON:
      kind          "shards", "records", "images" or "files"
      num_samples, num_bytes
                    null if unknown
      fields        [{"name", "num_samples", "num_bytes", "min_bytes",
                    "median_bytes", "max_bytes"}]
      classes       [{"label", "name", "num_samples"}], or null
      samples       [{"key", "fields": {NAME: {"bytes", "value"}}}]
      shards        [{"url", "num_samples", "num_bytes", "index"}]
      parts         of records [{"path", "num_samples", "num_bytes"}],
                    with null for missing ones
      jobs          of shards and records [{"url", "num_samples", "is_complete"}]
    """
    from kdpipes.core.errors import check_count
    from kdpipes.look.contents import contents_lines, inspect_data

    check_count("samples", samples, minimum=0)
    for place in filter(names_chain, places):
        raise ValueError(
            f"`PLACES` must be shards or a folder, but {place!r} names a chain. In Python, print(chain) lists its "
            f"pipes and print(chain.peek()) its first samples; `kdpipes doctor {place}` reports what is wrong with it."
        )
    found = inspect_data(places, num_samples=samples, scan=not no_scan)
    title = places[0] if len(places) == 1 else f"{places[0]} ... {places[-1]}"
    return Answer(asdict(found), contents_lines(title, found))
