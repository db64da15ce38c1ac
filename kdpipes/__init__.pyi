"""The names of the package, for type checkers and editors: `make names` writes it."""

from kdpipes._version import __version__ as __version__
from kdpipes.cache.open_cache import CacheReaderMapDataPipe as open_cache
from kdpipes.core.errors import ChainError as ChainError
from kdpipes.core.errors import DataError as DataError
from kdpipes.core.errors import FieldError as FieldError
from kdpipes.core.errors import KdpipesError as KdpipesError
from kdpipes.core.errors import WorkerError as WorkerError
from kdpipes.core.iter_pipe import IterPipe as IterPipe
from kdpipes.core.map_pipe import MapPipe as MapPipe
from kdpipes.core.operation import Operation as Operation
from kdpipes.core.plan_pipe import PlanPipe as PlanPipe
from kdpipes.core.randomness import SampleKey as SampleKey
from kdpipes.core.registry import functional_pipe as functional_pipe
from kdpipes.core.sample import Sample as Sample
from kdpipes.core.sample_pipe import sample_pipe as sample_pipe
from kdpipes.core.traits import Traits as Traits
from kdpipes.delivery.batch_pipe import BatchPipe as BatchPipe
from kdpipes.delivery.by_class import ByClass as by_class
from kdpipes.delivery.by_shard import ByShard as by_shard
from kdpipes.delivery.grouped import ByLength as by_length
from kdpipes.delivery.grouped import ByValue as by_value
from kdpipes.delivery.lanes import Lanes as lanes
from kdpipes.delivery.own_order import OwnBatches as own_batches
from kdpipes.delivery.own_order import OwnOrder as own_order
from kdpipes.delivery.packed import Packed as packed
from kdpipes.loader.find import find as find
from kdpipes.loader.loader import Loader as Loader
from kdpipes.loader.services import ProcessReadingService as ProcessReadingService
from kdpipes.loader.services import ThreadReadingService as ThreadReadingService
from kdpipes.look.batch import show_batch as show_batch
from kdpipes.look.doctor.examine import doctor as doctor
from kdpipes.look.doctor.rules import doctor_rule as doctor_rule
from kdpipes.look.figures import plot_classes as plot_classes
from kdpipes.look.profile import profile as profile
from kdpipes.plan.class_counts import class_counts as class_counts
from kdpipes.plan.concat import ConcatenatorMapDataPipe as concat
from kdpipes.plan.split import split as split
from kdpipes.sources.from_dataset import DatasetReaderMapDataPipe as from_dataset
from kdpipes.sources.from_dataset import SampleSource as SampleSource
from kdpipes.sources.from_ids import IdReaderMapDataPipe as from_ids
from kdpipes.sources.from_table import TableReaderMapDataPipe as from_table
from kdpipes.sources.from_webdataset import WebDatasetReaderIterDataPipe as from_webdataset
from kdpipes.sources.image_folder import ImageFolderMapDataPipe as image_folder
from kdpipes.sources.index_shards import index_shards as index_shards
from kdpipes.sources.open_records import RecordReaderMapDataPipe as open_records
from kdpipes.sources.open_shards import ShardReaderMapDataPipe as open_shards
from kdpipes.sources.stream_shards import ShardStreamerIterDataPipe as stream_shards
from kdpipes.work.replay import replay as replay
from kdpipes.work.transforms import CenterCrop as CenterCrop
from kdpipes.work.transforms import ColorJitter as ColorJitter
from kdpipes.work.transforms import HorizontalFlip as HorizontalFlip
from kdpipes.work.transforms import Normalize as Normalize
from kdpipes.work.transforms import RandomResizedCrop as RandomResizedCrop
from kdpipes.work.transforms import Resize as Resize
from kdpipes.work.transforms import ToTensor as ToTensor
from kdpipes.write.records import write_records as write_records
from kdpipes.write.shards import write_shards as write_shards

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
    "by_class",
    "by_length",
    "by_shard",
    "by_value",
    "class_counts",
    "concat",
    "doctor",
    "doctor_rule",
    "find",
    "from_dataset",
    "from_ids",
    "from_table",
    "from_webdataset",
    "functional_pipe",
    "image_folder",
    "index_shards",
    "lanes",
    "open_cache",
    "open_records",
    "open_shards",
    "own_batches",
    "own_order",
    "packed",
    "plot_classes",
    "profile",
    "replay",
    "sample_pipe",
    "show_batch",
    "split",
    "stream_shards",
    "write_records",
    "write_shards",
]
