"""Samples of any chain as plain webdataset tars with their indexes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.chain import Chain
from kdpipes.core.errors import check_count, must_be, refuse_field
from kdpipes.core.fingerprint import fingerprint
from kdpipes.core.pipe import class_names_of, fields_of, gives_samples
from kdpipes.core.sample import Sample
from kdpipes.write._members import MemberEncoder
from kdpipes.write._shard_job import Limits, Recipe
from kdpipes.write._shard_notes import ShardNotes
from kdpipes.write._shard_places import ShardPlaces
from kdpipes.write._shard_run import ShardRun, ShardsResult
from kdpipes.write.jobs import check_workers

__all__ = ["ShardsResult", "write_shards"]


def write_shards(
    pipe: MapDataPipe[Any] | IterDataPipe[Any],
    urls: str | os.PathLike[str],
    *,
    max_samples: int | None = None,
    max_bytes: int | None = None,
    fields: str | None = None,
    encode: Mapping[str, Callable[[Any], bytes] | str] | None = None,
    extensions: Mapping[str, str] | None = None,
    key: Callable[[Sample], str] | None = None,
    num_workers: int = 0,
    executor: Executor | None = None,
) -> ShardsResult:
    """Write the samples of a chain as plain webdataset tars, each with its index, and return what was done.

    Samples come in the chain's order (`.permute(seed)` mixes them for good). `wds.WebDataset` and `kdp.open_shards`
    read the tars; the index beside each (`NAME.tar.index`) is the one that `kdpipes index` makes, checksums included.
    The bytes depend on the chain and the arguments alone: not on workers, machines, dates or users.

    A shard appears whole, and then its index. A run that was broken off, even killed, is called again in the same way
    and goes on: shards that are there with their indexes are not written again. `train-shards.json`, beside
    `train-000000.tar`, says which job they are of, and names the classes; another chain, or other arguments, are
    refused there. Files of the source that were changed in their place are not noticed: delete the shards. One run at a
    time.

    The type of a value decides its format: bytes and encoded images are written unchanged; integers become `.cls`,
    strings `.txt`, dictionaries, lists and other numbers `.json`, arrays and tensors `.npy`. `kdp.open_shards` and
    `kdp.stream_shards` turn all of these back into values (tensors into arrays, tuples into lists). Pixels need
    `encode=`. A field whose name is the extension keeps it (`jpg`, `cls`); `x` and `y` are replaced by the extension,
    `.jpg` and `.cls`; it is added to other names, `mask.png`, `caption.txt`. A field that is None has no member.

    Keys are the samples', as webdataset can hold them: a file's extension is left out (`heron/0001.jpg` gives
    `heron/0001`), other dots in the file name become underscores, slashes stay. No two samples may have the same.

    With `max_samples` alone, the split of an indexed chain is known at once. With `max_bytes`, shards are filled up in
    order: one process writes them as samples come; workers make the samples twice, first to find out their sizes.

    Args:
        pipe: A chain of samples: not behind `select` or `deal`. A stream is written by this process, front to back,
            as its epoch 0 gives it, wherever it stands.
        urls: A path or fsspec URL with the number's place, `"s3://bucket/train-%06d.tar"`. Folders on this machine are
            made.
        max_samples: How many samples a shard has; the last one may have fewer. This or `max_bytes` must be given.
        max_bytes: How large a tar may be. A sample that is larger is alone in its shard.
        fields: The names of the fields to write, in one string; by default all.
        encode: By field, what it is written as: "png", "jpg" (at quality 95), "webp" (lossless), "npy", "pth", "json",
            "txt", ...; or a function that returns bytes. What is encoded that way already stays as it is.
        extensions: By field, its extension, where the rules above do not fit.
        key: Called with a sample, returns its key: taken as it is, or refused.
        num_workers: How many processes write shards; 0 writes in this one. With an executor, how many jobs it does at a
            time, where it does not say so itself.
        executor: Who writes the shards instead: a process pool, Dask's `client.get_executor()`, mpi4py's
            `MPIPoolExecutor`, or any other of `concurrent.futures`. It must reach the chain's files and `urls`.

    `.on_error("skip")` and `"quarantine"` hold here as well: samples that cannot be made are left out, logged and
    counted. With `max_samples`, their shard is the smaller for it.

    Memory: a sample for each worker, and 12 bytes a sample here. Shards elsewhere take their size in the system's
        folder for temporary files, one for each worker.

    Raises:
        FileExistsError: The shards that are there are of another job, or of none that is known.
        RuntimeError: Another call is writing these shards at the same time.
        ChainError: A field has no encoding; or the chain gives no samples.
        DataError: Two samples have the same key, or one cannot stand in a tar; or a sample cannot be read.
        OSError: A shard cannot be written; a full disk says how much is free.

    Example:
        >>> result = kdp.write_shards(kdp.image_folder("data/birds/train"), "shards/birds-%06d.tar", max_samples=4)
        >>> birds = kdp.open_shards(result.urls, class_names=result.class_names).rename_fields(x="jpg", y="cls")
        >>> len(birds) == result.num_samples, birds.class_names()
        (True, ('heron', 'stork'))
    """
    places = ShardPlaces(urls)
    limits = _limits(max_samples, max_bytes)
    recipe = Recipe(_source(pipe), MemberEncoder(_field_names(pipe, fields), encode, extensions), key)
    is_stream = isinstance(pipe, IterDataPipe)
    check_workers(executor, num_workers)
    if is_stream and (num_workers or executor is not None):
        value = num_workers or executor
        name = "num_workers" if num_workers else "executor"
        way_out = "An indexed source is written by many: `kdp.open_shards`."
        raise ValueError(must_be(name, "left out for a stream, which one process reads front to back", value, way_out))
    size = None if is_stream else len(recipe.pipe)
    job = {
        "pipes": Chain.of(pipe).fingerprints(),
        "num_samples": size,
        "max_samples": max_samples,
        "max_bytes": max_bytes,
        "arguments": fingerprint(recipe.fingerprint()),
    }
    with places.held():
        notes, was_begun = ShardNotes.begin(places, job, _class_names(pipe))
        return ShardRun(recipe, places, limits, notes, was_begun, size).do(num_workers, executor)


def _limits(max_samples: int | None, max_bytes: int | None) -> Limits:
    if max_samples is None and max_bytes is None:
        raise ValueError("`max_samples` or `max_bytes` must be given: how large is a shard to be?")
    return Limits(
        None if max_samples is None else check_count("max_samples", max_samples),
        None if max_bytes is None else check_count("max_bytes", max_bytes),
    )


def _source(pipe: Any) -> Any:
    return gives_samples(pipe, "write_shards")


def _field_names(pipe: Any, fields: str | None) -> tuple[str, ...] | None:
    if fields is None:
        return None
    if not isinstance(fields, str) or not fields.split():
        raise TypeError(must_be("fields", 'names in one string, like "x y"', fields))
    known = fields_of(pipe)
    names = tuple(dict.fromkeys(fields.split()))
    stranger = None if known is None else next((name for name in names if name not in known), None)
    if stranger is not None:
        refuse_field(stranger, "The chain", known or ())
    return names


def _class_names(pipe: Any) -> tuple[str, ...] | None:
    names = class_names_of(pipe)
    return None if names is None else tuple(names)
