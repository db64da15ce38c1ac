"""The DataPipes of torch. Only this module imports them, so that they can be replaced in one place."""

from __future__ import annotations

from torch.utils.data import IterDataPipe, MapDataPipe, datapipes, graph_settings
from torch.utils.data.datapipes._hook_iterator import _SnapshotState
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper
from torch.utils.data.datapipes.iter import (
    Batcher,
    Collator,
    Filter,
    IterableWrapper,
    Mapper,
    ShardingFilter,
    Shuffler,
    UnBatcher,
)
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.datapipes.map import Batcher as IndexedBatcher
from torch.utils.data.datapipes.map import Concater as IndexedConcater
from torch.utils.data.datapipes.map import Mapper as IndexedMapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.datapipes.map import Shuffler as IndexedShuffler
from torch.utils.data.datapipes.map.callable import default_fn

PIPES = (IterDataPipe, MapDataPipe)

__all__ = [
    "PIPES",
    "SHARDING_PRIORITIES",
    "Batcher",
    "Collator",
    "Filter",
    "IndexedBatcher",
    "IndexedConcater",
    "IndexedMapper",
    "IndexedShuffler",
    "IterDataPipe",
    "IterableWrapper",
    "MapDataPipe",
    "Mapper",
    "SequenceWrapper",
    "ShardingFilter",
    "Shuffler",
    "UnBatcher",
    "_IterDataPipeSerializationWrapper",
    "_SnapshotState",
    "datapipes",
    "default_fn",
    "graph_settings",
]
