"""A composition layer over torchdata DataPipes: one chain from files and tar shards to batches.

Importing it registers every pipe as a method of all DataPipes. All else is imported when it is first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from kdpipes._version import __version__ as __version__
from kdpipes.cache.cache import CacheIterDataPipe, CacheMapDataPipe, CacherInMemory, CacherInRedis, CacherOnDisk
from kdpipes.cache.store import CacheStats
from kdpipes.core.errors import ChainError, DataError, FieldError, KdpipesError, WorkerError
from kdpipes.core.errors import closest as _closest
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.operation import Operation
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.randomness import SampleKey as Draw
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import sample_pipe
from kdpipes.core.traits import Traits
from kdpipes.delivery.batch_memory import empty_batch
from kdpipes.delivery.batch_pipe import BatchPipe
from kdpipes.delivery.collate_samples import SampleCollatorIterDataPipe, collate, split_ctx
from kdpipes.delivery.cutmix import CutMixerIterDataPipe
from kdpipes.delivery.deal import DealerMapDataPipe
from kdpipes.delivery.deal_stream import DealerIterDataPipe
from kdpipes.delivery.mixup import MixerUpIterDataPipe
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe
from kdpipes.loader import torch_loaders as _torch_loaders  # noqa: F401  # how torch's DataLoader holds chains
from kdpipes.look.peek import Peek
from kdpipes.plan.class_counts import class_counts
from kdpipes.plan.concat import ConcatenatorMapDataPipe as concat
from kdpipes.plan.few_shot import FewShotTakerMapDataPipe
from kdpipes.plan.filter_classes import ClassFilterIterDataPipe, ClassFilterMapDataPipe
from kdpipes.plan.filter_samples import SampleFilterIterDataPipe, SampleFilterMapDataPipe
from kdpipes.plan.join import JoinerMapDataPipe
from kdpipes.plan.map_classes import ClassMapperIterDataPipe, ClassMapperMapDataPipe
from kdpipes.plan.mix import MixerIterDataPipe, MixerMapDataPipe
from kdpipes.plan.oversample import OversamplerIterDataPipe, OversamplerMapDataPipe
from kdpipes.plan.permute import PermuterMapDataPipe
from kdpipes.plan.repeat_until import RepeaterUntilIterDataPipe, RepeaterUntilMapDataPipe
from kdpipes.plan.sample_weighted import WeightedSamplerMapDataPipe
from kdpipes.plan.split import split
from kdpipes.plan.subset import SubsetterMapDataPipe
from kdpipes.plan.take_per_class import PerClassTakerMapDataPipe
from kdpipes.plan.take_percent import PercentTakerMapDataPipe
from kdpipes.sources.from_dataset import DatasetReaderMapDataPipe as from_dataset
from kdpipes.sources.from_dataset import SampleSource
from kdpipes.sources.to_samples import SampleMakerIterDataPipe, SampleMakerMapDataPipe
from kdpipes.work.decode import DecodedImage, EncodedImage, ImageDecoder
from kdpipes.work.fields import CtxRecorder, FieldAdder, FieldRenamer, Selector
from kdpipes.work.on_error import OnError as ErrorHandler
from kdpipes.work.transform import RecordedTransform, Transformer
from kdpipes.work.transforms import (
    CenterCrop,
    ColorJitter,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from kdpipes.write.localize import FileLocalizer

if _TYPE_CHECKING:
    from kdpipes.cache.open_cache import CacheReaderMapDataPipe as open_cache
    from kdpipes.loader.loader import Loader
    from kdpipes.loader.rebuild_batch import rebuild_batch
    from kdpipes.loader.receipt import Verdict, verify_receipts
    from kdpipes.loader.services import ProcessReadingService, ThreadReadingService
    from kdpipes.look.batch import replay_grid, show_batch
    from kdpipes.look.classes import plot_classes
    from kdpipes.look.doctor.examine import Report, doctor
    from kdpipes.look.draw import draw
    from kdpipes.look.pictures import crop_boxes, image_grid
    from kdpipes.look.profile import Profile, profile
    from kdpipes.look.shuffle_quality import ShuffleQuality, shuffle_quality
    from kdpipes.sources.from_ids import IdReaderMapDataPipe as from_ids
    from kdpipes.sources.from_table import TableReaderMapDataPipe as from_table
    from kdpipes.sources.from_webdataset import WebDatasetReaderIterDataPipe as from_webdataset
    from kdpipes.sources.image_folder import ImageFolderMapDataPipe as image_folder
    from kdpipes.sources.index_shards import index_shards
    from kdpipes.sources.open_records import RecordReaderMapDataPipe as open_records
    from kdpipes.sources.open_shards import ShardReaderMapDataPipe as open_shards
    from kdpipes.sources.stream_shards import ShardStreamerIterDataPipe as stream_shards
    from kdpipes.work.replay import replay
    from kdpipes.write.copy import CopyResult, copy_to_local
    from kdpipes.write.records import RecordsResult, write_records
    from kdpipes.write.shards import ShardsResult, write_shards

_ON_USE = {  # the modules and the names in them that `__getattr__` imports; the same as above
    "CopyResult": ("kdpipes.write.copy", "CopyResult"),
    "Loader": ("kdpipes.loader.loader", "Loader"),
    "ProcessReadingService": ("kdpipes.loader.services", "ProcessReadingService"),
    "Profile": ("kdpipes.look.profile", "Profile"),
    "RecordsResult": ("kdpipes.write.records", "RecordsResult"),
    "Report": ("kdpipes.look.doctor.examine", "Report"),
    "ShardsResult": ("kdpipes.write.shards", "ShardsResult"),
    "ShuffleQuality": ("kdpipes.look.shuffle_quality", "ShuffleQuality"),
    "ThreadReadingService": ("kdpipes.loader.services", "ThreadReadingService"),
    "Verdict": ("kdpipes.loader.receipt", "Verdict"),
    "copy_to_local": ("kdpipes.write.copy", "copy_to_local"),
    "crop_boxes": ("kdpipes.look.pictures", "crop_boxes"),
    "doctor": ("kdpipes.look.doctor.examine", "doctor"),
    "draw": ("kdpipes.look.draw", "draw"),
    "from_ids": ("kdpipes.sources.from_ids", "IdReaderMapDataPipe"),
    "from_table": ("kdpipes.sources.from_table", "TableReaderMapDataPipe"),
    "from_webdataset": ("kdpipes.sources.from_webdataset", "WebDatasetReaderIterDataPipe"),
    "image_folder": ("kdpipes.sources.image_folder", "ImageFolderMapDataPipe"),
    "image_grid": ("kdpipes.look.pictures", "image_grid"),
    "index_shards": ("kdpipes.sources.index_shards", "index_shards"),
    "open_cache": ("kdpipes.cache.open_cache", "CacheReaderMapDataPipe"),
    "open_records": ("kdpipes.sources.open_records", "RecordReaderMapDataPipe"),
    "open_shards": ("kdpipes.sources.open_shards", "ShardReaderMapDataPipe"),
    "plot_classes": ("kdpipes.look.classes", "plot_classes"),
    "profile": ("kdpipes.look.profile", "profile"),
    "rebuild_batch": ("kdpipes.loader.rebuild_batch", "rebuild_batch"),
    "replay": ("kdpipes.work.replay", "replay"),
    "replay_grid": ("kdpipes.look.batch", "replay_grid"),
    "show_batch": ("kdpipes.look.batch", "show_batch"),
    "shuffle_quality": ("kdpipes.look.shuffle_quality", "shuffle_quality"),
    "stream_shards": ("kdpipes.sources.stream_shards", "ShardStreamerIterDataPipe"),
    "verify_receipts": ("kdpipes.loader.receipt", "verify_receipts"),
    "write_records": ("kdpipes.write.records", "write_records"),
    "write_shards": ("kdpipes.write.shards", "write_shards"),
}

__all__ = [
    "BatchPipe",
    "CacheIterDataPipe",
    "CacheMapDataPipe",
    "CacheStats",
    "CacherInMemory",
    "CacherInRedis",
    "CacherOnDisk",
    "CenterCrop",
    "ChainError",
    "ClassFilterIterDataPipe",
    "ClassFilterMapDataPipe",
    "ClassMapperIterDataPipe",
    "ClassMapperMapDataPipe",
    "ColorJitter",
    "CopyResult",
    "CtxRecorder",
    "CutMixerIterDataPipe",
    "DataError",
    "DealerIterDataPipe",
    "DealerMapDataPipe",
    "DecodedImage",
    "DeviceMoverIterDataPipe",
    "Draw",
    "EncodedImage",
    "ErrorHandler",
    "FewShotTakerMapDataPipe",
    "FieldAdder",
    "FieldError",
    "FieldRenamer",
    "FileLocalizer",
    "HorizontalFlip",
    "ImageDecoder",
    "IterPipe",
    "JoinerMapDataPipe",
    "KdpipesError",
    "Loader",
    "MapPipe",
    "MixerIterDataPipe",
    "MixerMapDataPipe",
    "MixerUpIterDataPipe",
    "Normalize",
    "Operation",
    "OversamplerIterDataPipe",
    "OversamplerMapDataPipe",
    "Peek",
    "PerClassTakerMapDataPipe",
    "PercentTakerMapDataPipe",
    "PermuterMapDataPipe",
    "PlanPipe",
    "ProcessReadingService",
    "Profile",
    "RandomResizedCrop",
    "RecordedTransform",
    "RecordsResult",
    "RepeaterUntilIterDataPipe",
    "RepeaterUntilMapDataPipe",
    "Report",
    "Resize",
    "Sample",
    "SampleCollatorIterDataPipe",
    "SampleFilterIterDataPipe",
    "SampleFilterMapDataPipe",
    "SampleMakerIterDataPipe",
    "SampleMakerMapDataPipe",
    "SampleSource",
    "Selector",
    "ShardsResult",
    "ShuffleQuality",
    "SubsetterMapDataPipe",
    "ThreadReadingService",
    "ToTensor",
    "Traits",
    "Transformer",
    "Verdict",
    "WeightedSamplerMapDataPipe",
    "WorkerError",
    "class_counts",
    "collate",
    "concat",
    "copy_to_local",
    "crop_boxes",
    "doctor",
    "draw",
    "empty_batch",
    "from_dataset",
    "from_ids",
    "from_table",
    "from_webdataset",
    "functional_pipe",
    "image_folder",
    "image_grid",
    "index_shards",
    "open_cache",
    "open_records",
    "open_shards",
    "plot_classes",
    "profile",
    "rebuild_batch",
    "replay",
    "replay_grid",
    "sample_pipe",
    "show_batch",
    "shuffle_quality",
    "split",
    "split_ctx",
    "stream_shards",
    "verify_receipts",
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
