"""A composition layer over torchdata DataPipes: one chain from files and tar shards to batches.

Importing it registers every pipe as a method of all DataPipes. Functions and classes that few chains need are imported
when they are first used.
"""

import gc as _gc
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

_PIPES = [
    "cache.cache",
    "delivery.collate_samples",
    "delivery.cutmix",
    "delivery.deal",
    "delivery.deal_stream",
    "delivery.mixup",
    "delivery.to_device",
    "look.peek",
    "plan.few_shot",
    "plan.filter_classes",
    "plan.filter_samples",
    "plan.join",
    "plan.map_classes",
    "plan.mix",
    "plan.oversample",
    "plan.permute",
    "plan.repeat_until",
    "plan.sample_weighted",
    "plan.subset",
    "plan.take_per_class",
    "plan.take_percent",
    "sources.to_samples",
    "work.fields",
    "work.on_error",
    "work.transform",
    "work.transform_batch",
    "write.localize",
]

# The garbage collector is off during the import. Otherwise it visits all objects that torch has made, which takes a
# quarter of the time: 80 of 350 ms of CPU.
_collects = _gc.isenabled()
_gc.disable()
try:
    from kdpipes._version import __version__ as __version__
    from kdpipes.core.display import show_by as _show_by
    from kdpipes.core.errors import ChainError, DataError, FieldError, KdpipesError, WorkerError
    from kdpipes.core.errors import closest as _closest
    from kdpipes.core.iter_pipe import IterPipe
    from kdpipes.core.map_pipe import MapPipe
    from kdpipes.core.operation import Operation
    from kdpipes.core.plan_pipe import PlanPipe
    from kdpipes.core.randomness import SampleKey
    from kdpipes.core.registry import functional_pipe
    from kdpipes.core.sample import Sample
    from kdpipes.core.sample_pipe import sample_pipe
    from kdpipes.core.traits import Traits
    from kdpipes.delivery.batch_pipe import BatchPipe
    from kdpipes.loader import torch_loaders as _torch_loaders  # noqa: F401  # how torch's DataLoader holds chains
    from kdpipes.plan.class_counts import class_counts
    from kdpipes.plan.concat import ConcatenatorMapDataPipe as concat
    from kdpipes.plan.split import split
    from kdpipes.sources.from_dataset import DatasetReaderMapDataPipe as from_dataset
    from kdpipes.sources.from_dataset import SampleSource
    from kdpipes.work.transforms import (
        CenterCrop,
        ColorJitter,
        HorizontalFlip,
        Normalize,
        RandomResizedCrop,
        Resize,
        ToTensor,
    )

    for _name in _PIPES:  # a pipe is registered when its module is imported
        _import_module(f"kdpipes.{_name}")
    _show_by("kdpipes.look.show", "chain_html", "chain_text")
    _show_by("kdpipes.look.profile", "loader_html", "show_live")
finally:
    if _collects:
        _gc.enable()

if _TYPE_CHECKING:
    from kdpipes.cache.open_cache import CacheReaderMapDataPipe as open_cache
    from kdpipes.loader.loader import Loader
    from kdpipes.loader.rebuild_batch import rebuild_batch
    from kdpipes.loader.services import ProcessReadingService, ThreadReadingService
    from kdpipes.look.batch import show_batch
    from kdpipes.look.doctor.examine import doctor
    from kdpipes.look.figures import draw, plot_classes
    from kdpipes.look.profile import profile
    from kdpipes.sources.from_ids import IdReaderMapDataPipe as from_ids
    from kdpipes.sources.from_table import TableReaderMapDataPipe as from_table
    from kdpipes.sources.from_webdataset import WebDatasetReaderIterDataPipe as from_webdataset
    from kdpipes.sources.image_folder import ImageFolderMapDataPipe as image_folder
    from kdpipes.sources.index_shards import index_shards
    from kdpipes.sources.open_records import RecordReaderMapDataPipe as open_records
    from kdpipes.sources.open_shards import ShardReaderMapDataPipe as open_shards
    from kdpipes.sources.stream_shards import ShardStreamerIterDataPipe as stream_shards
    from kdpipes.work.replay import replay
    from kdpipes.write.records import write_records
    from kdpipes.write.shards import write_shards

_ON_USE = {  # the modules and the names in them that `__getattr__` imports; the same as above
    "Loader": ("kdpipes.loader.loader", "Loader"),
    "ProcessReadingService": ("kdpipes.loader.services", "ProcessReadingService"),
    "ThreadReadingService": ("kdpipes.loader.services", "ThreadReadingService"),
    "doctor": ("kdpipes.look.doctor.examine", "doctor"),
    "draw": ("kdpipes.look.figures", "draw"),
    "from_ids": ("kdpipes.sources.from_ids", "IdReaderMapDataPipe"),
    "from_table": ("kdpipes.sources.from_table", "TableReaderMapDataPipe"),
    "from_webdataset": ("kdpipes.sources.from_webdataset", "WebDatasetReaderIterDataPipe"),
    "image_folder": ("kdpipes.sources.image_folder", "ImageFolderMapDataPipe"),
    "index_shards": ("kdpipes.sources.index_shards", "index_shards"),
    "open_cache": ("kdpipes.cache.open_cache", "CacheReaderMapDataPipe"),
    "open_records": ("kdpipes.sources.open_records", "RecordReaderMapDataPipe"),
    "open_shards": ("kdpipes.sources.open_shards", "ShardReaderMapDataPipe"),
    "plot_classes": ("kdpipes.look.figures", "plot_classes"),
    "profile": ("kdpipes.look.profile", "profile"),
    "rebuild_batch": ("kdpipes.loader.rebuild_batch", "rebuild_batch"),
    "replay": ("kdpipes.work.replay", "replay"),
    "show_batch": ("kdpipes.look.batch", "show_batch"),
    "stream_shards": ("kdpipes.sources.stream_shards", "ShardStreamerIterDataPipe"),
    "write_records": ("kdpipes.write.records", "write_records"),
    "write_shards": ("kdpipes.write.shards", "write_shards"),
}

__all__ = [
    "BatchPipe",
    "CenterCrop",
    "ChainError",
    "ColorJitter",
    "DataError",
    "FieldError",
    "HorizontalFlip",
    "IterPipe",
    "KdpipesError",
    "Loader",
    "MapPipe",
    "Normalize",
    "Operation",
    "PlanPipe",
    "ProcessReadingService",
    "RandomResizedCrop",
    "Resize",
    "Sample",
    "SampleKey",
    "SampleSource",
    "ThreadReadingService",
    "ToTensor",
    "Traits",
    "WorkerError",
    "class_counts",
    "concat",
    "doctor",
    "draw",
    "from_dataset",
    "from_ids",
    "from_table",
    "from_webdataset",
    "functional_pipe",
    "image_folder",
    "index_shards",
    "open_cache",
    "open_records",
    "open_shards",
    "plot_classes",
    "profile",
    "rebuild_batch",
    "replay",
    "sample_pipe",
    "show_batch",
    "split",
    "stream_shards",
    "write_records",
    "write_shards",
]

if not _TYPE_CHECKING:  # with it, type checkers would accept any attribute of the package

    def __getattr__(name: str) -> object:
        if name not in _ON_USE:
            raise AttributeError(f"`kdpipes` has no attribute {name!r}.{_closest(name, __all__)}")
        module, member = _ON_USE[name]
        found = globals()[name] = getattr(_import_module(module), member)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
