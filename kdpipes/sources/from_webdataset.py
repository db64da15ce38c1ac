"""`from_webdataset`: read a webdataset pipeline as a stream of samples."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader
from webdataset import cache, filters, mix, shardlists
from webdataset.pipeline import DataPipeline

from kdpipes.core.errors import ChainError, check_class_names, check_type
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.randomness import current_epoch, hash_key
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Sample
from kdpipes.core.shared import Shared
from kdpipes.core.traits import Traits
from kdpipes.sources.to_samples import Recipe
from kdpipes.storage.urls import path_of, relative_names

_OPENERS = tuple(getattr(cache, name) for name in ("StreamingOpen", "FileCache") if hasattr(cache, name))  # not in 0.2
_KEPT = ("bufsize", "initial", "handler")
_SPLITTERS = (shardlists.split_by_node, shardlists.split_by_worker, shardlists.single_node_only)
_MIXED = "Pass each dataset to `from_webdataset`, and `.mix()` them"
_REJECTED_SOURCES: dict[type, str] = {
    shardlists.ResampledShards: "is seeded by the clock (`resampled=True`). Use `resampled=False` and `.repeat()`",
    shardlists.MultiShardSample: f"is seeded by the clock. {_MIXED}",
    mix.RandomMix: f"is seeded by the clock. {_MIXED}",
    mix.RoundRobin: f"hides the pipelines that it combines. {_MIXED}",
    DataLoader: "has workers of its own. Give the dataset that it reads",
}
if hasattr(shardlists, "DirectoryShardList"):  # absent in webdataset 0.2
    _REJECTED_SOURCES[shardlists.DirectoryShardList] = "draws shards by the clock. Give it the shards' names"
# webdataset's filters have only private names. Stages hold them in their attribute `f`.
_REJECTED_FILTERS: dict[Any, str] = {
    filters._rsample: "draws anew in each worker (`.rsample()`). Leave it out",
    filters._batched: "makes batches. Leave that to `.deal(batch_size=...)`",
}


@called_as("from_webdataset")
class WebDatasetReaderIterDataPipe(IterPipe):
    """Reads the samples of a webdataset pipeline in order (`kdp.from_webdataset(wds.WebDataset(...))`).

    Use it for features that only webdataset has: its decoders, its caches, and `pipe:` URLs, which run shell commands
    and which `kdp.stream_shards` does not accept. Dictionaries become samples: entries such as `__key__` are left out,
    and the key is the shard's name, a slash and `__key__`. For tuples, such as those of `.to_tuple("jpg", "cls")`, pass
    `fields`; the key is then the position in the stream.

    `deal` decides which worker gets which sample. kdpipes therefore removes webdataset's splitters (`split_by_worker`,
    `split_by_node`, `single_node_only`) from a copy of the pipeline, so that every loader delivers every sample exactly
    once. Shuffles are seeded from the seed of `deal` and the epoch. All other stages must be the same in every worker.

    Args:
        dataset: A `wds.WebDataset` or `wds.DataPipeline` of samples.
        fields: The names of a tuple's parts, or of the dictionary's entries to keep, in one string.
        class_names: The names of the classes 0, 1, ...

    Length: unknown. A pipeline that repeats itself is endless, unless `.with_epoch(n)` sets the length of an epoch.

    Memory: that of the pipeline.

    Workers: With `deal`, every worker reads all shards, and runs the whole pipeline for every sample. Therefore use
        `.decode_images()` after this pipe instead of webdataset's `.decode()`, or read the shards with
        `kdp.stream_shards`, of which each worker reads only its own shards.

    Raises:
        TypeError: `dataset` is not a pipeline of webdataset.
        ChainError: The pipeline makes batches; draws random numbers that would differ between workers
            (`resampled=True`, `.rsample()`); or contains a splitter that is not part of webdataset.

    Example:
        >>> import webdataset as wds
        >>> from kdpipes.demo import write_photo_shards
        >>> dataset = wds.WebDataset(write_photo_shards("photos"), shardshuffle=False).decode(only="cls")
        >>> pipe = kdp.from_webdataset(dataset).rename_fields(x="jpg", y="cls").select("y key")
        >>> next(iter(pipe))
        (7, 'photos-000.tar/000000')
    """

    def __init__(self, dataset: Any, fields: str | None = None, *, class_names: Sequence[str] | None = None) -> None:
        super().__init__()
        check_type("dataset", dataset, DataPipeline, "a pipeline of webdataset's")
        check_type("fields", fields, str | None, 'names in one string, like "jpg cls"')
        _reject(dataset)
        self.traits = Traits(counts_whole=dataset.repetitions != 1)
        self._dataset = Shared(dataset)
        self._names = Shared(_names_of(dataset))
        self._fields = fields
        self._class_names = check_class_names(class_names)

    def samples(self) -> Iterator[Sample]:
        seed, epoch = current_epoch() or self._renewed or (0, 0)
        recipe = Recipe(None, None, self._fields, self._class_names)
        for index, item in enumerate(_of_epoch(self._dataset.value, seed, epoch)):
            yield recipe({**item, "__key__": self._key(item, index)} if isinstance(item, dict) else item, index)

    def _key(self, item: dict[str, Any], index: int) -> str:
        key = item.get("__key__", index)
        url = item.get("__url__")
        return str(key) if url is None else f"{self._names.value.get(url, path_of(str(url)).rsplit('/', 1)[-1])}/{key}"

    def fingerprint(self) -> Any:
        stages = [_named(stage) for stage in self._dataset.value.pipeline]
        return sorted(self._names.value.values()), stages, self._fields, self._class_names

    def class_names(self) -> tuple[str, ...] | None:
        return self._class_names


def _reject(pipeline: DataPipeline) -> None:
    """Raise ChainError for stages that would lose or duplicate samples, because each worker reads the whole stream."""
    is_behind_splitters = False
    for stage in pipeline.pipeline:
        sources = (text for kind, text in _REJECTED_SOURCES.items() if isinstance(stage, kind))
        reason = _REJECTED_FILTERS.get(getattr(stage, "f", None)) or next(sources, None)
        if reason is not None:
            raise ChainError(f"Every worker must read the same stream, but {_named(stage)} {reason}.")
        is_behind_splitters |= isinstance(stage, (filters.FilterFunction, *_OPENERS))
        called = _function_of(stage)
        if inspect.isroutine(called) and not is_behind_splitters and called not in _SPLITTERS:
            raise ChainError(
                f"`deal` decides which worker gets which sample, but {_named(stage)} may split the shards as well, and "
                "samples would be lost. Make the dataset with `nodesplitter=None, workersplitter=None`."
            )
        if isinstance(stage, DataPipeline):
            _reject(stage)


def _named(stage: Any) -> str:
    function = _function_of(stage)
    return f"`{getattr(function, '__name__', type(stage).__name__).lstrip('_')}`"


def _function_of(stage: Any) -> Any:
    return stage.func if isinstance(stage, functools.partial) else getattr(stage, "f", stage)


def _names_of(pipeline: DataPipeline) -> dict[str, str]:
    """Return the names of the shards as used in keys, by URL."""
    source: Any = pipeline.pipeline[0] if pipeline.pipeline else None
    if isinstance(source, DataPipeline):
        return _names_of(source)
    urls = source.urls if isinstance(source, shardlists.SimpleShardList) else []
    return dict(zip(urls, relative_names(urls), strict=True)) if urls else {}


def _of_epoch(pipeline: DataPipeline, *place: int) -> Any:
    """Return a copy of a pipeline without splitters, with shuffles seeded by `place`: seed, epoch, ..."""
    made = copy.copy(pipeline)
    made.pipeline = []
    for number, stage in enumerate(pipeline.pipeline):
        if _function_of(stage) not in _SPLITTERS:
            made.pipeline.append(_stage_of_epoch(stage, *place, number))
        if isinstance(stage, _OPENERS):
            made.pipeline.append(_closing)
    return made


def _closing(opened: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Close files that webdataset would otherwise leave open until they are garbage-collected."""
    for shard in opened:
        try:
            yield shard
        finally:
            if isinstance(shard["stream"], io.IOBase):
                shard["stream"].close()


def _stage_of_epoch(stage: Any, *place: int) -> Any:
    if isinstance(stage, DataPipeline):
        return _of_epoch(stage, *place)
    rng = random.Random(hash_key(*place, "webdataset"))
    if isinstance(stage, filters.detshuffle):
        return filters.shuffle(stage.bufsize, initial=stage.initial, rng=rng)
    if getattr(stage, "f", None) is filters._shuffle:
        return filters.shuffle(*stage.args[:2], **{name: stage.kw[name] for name in _KEPT if name in stage.kw}, rng=rng)
    return stage
