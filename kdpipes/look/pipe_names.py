"""What pipes are called where they are shown, and what kind of work they do."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes._functional import registered
from kdpipes._graph import sources_of
from kdpipes._sample_pipe import SampleMapper
from kdpipes.cache.open_cache import CacheReaderMapDataPipe
from kdpipes.delivery.behind_deal import DEALERS
from kdpipes.plan.concat import ConcatenatorMapDataPipe
from kdpipes.sources.from_dataset import DatasetReaderMapDataPipe
from kdpipes.sources.from_ids import IdReaderMapDataPipe
from kdpipes.sources.from_webdataset import WebDatasetReaderIterDataPipe
from kdpipes.sources.image_folder import ImageFolderMapDataPipe
from kdpipes.sources.open_records import RecordReaderMapDataPipe
from kdpipes.sources.open_shards import ShardReaderMapDataPipe
from kdpipes.sources.stream_shards import ShardStreamerIterDataPipe

__all__ = ["Kind", "called_directly", "kind_of", "pipe_name"]

Kind = Literal["storage", "plan", "decoding", "transforms", "cache", "transfer", "device"]
called_directly: dict[type, str] = {  # as `kdp.name(...)`
    CacheReaderMapDataPipe: "open_cache",
    ConcatenatorMapDataPipe: "concat",
    DatasetReaderMapDataPipe: "from_dataset",
    IdReaderMapDataPipe: "from_ids",
    ImageFolderMapDataPipe: "image_folder",
    RecordReaderMapDataPipe: "open_records",
    ShardReaderMapDataPipe: "open_shards",
    ShardStreamerIterDataPipe: "stream_shards",
    WebDatasetReaderIterDataPipe: "from_webdataset",
}
_KINDS: dict[str, Kind] = {
    "decode_images": "decoding",
    "transform": "transforms",
    "add_field": "transforms",
    "to_device": "device",
    "pin_memory": "device",
    "collate_samples": "transfer",
    "collate": "transfer",
    "mixup": "transfer",
    "cutmix": "transfer",
    "map": "transforms",
}


def pipe_name(pipe: Any) -> str:
    """Return what a pipe is called by in a chain: its functional name, as `kdp.name`, or else its class."""
    kind = type(pipe)
    if isinstance(pipe, SampleMapper) and "_name" in vars(pipe):
        return pipe._name
    if kind in called_directly:
        return called_directly[kind]
    ours = next((name for (name, _), definition in registered().items() if definition is kind), None)
    own = kind.__name__.lstrip("_").removesuffix("DataPipe").removesuffix("Iter").removesuffix("Map")
    return ours or _stock_name(kind) or own


def _stock_name(kind: type) -> str | None:
    functions = (MapDataPipe if issubclass(kind, MapDataPipe) else IterDataPipe).functions
    for name, function in functions.items():
        if isinstance(function, functools.partial) and function.args[:1] == (kind,):
            return str(name)
    return None


def kind_of(pipe: Any) -> Kind:
    """Return what kind of work a pipe does."""
    if not sources_of(pipe):
        return "storage"
    if callable(getattr(pipe, "counted_by_cache", None)):
        return "cache"
    if isinstance(pipe, DEALERS):
        return "transfer"
    if getattr(pipe, "is_plan", False):
        return "plan"
    return _KINDS.get(pipe_name(pipe), "transforms" if isinstance(pipe, SampleMapper) else "transfer")
