"""The chain as type checkers and editors see it: `make names` writes it. Never imported at run time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe, MapDataPipe
from typing_extensions import Never

from kdpipes.cache.store import CacheStats, CacheStore
from kdpipes.core.map_pipe import MapPipe
from kdpipes.delivery.batching import Batching
from kdpipes.delivery.by_shard import ByShard
from kdpipes.delivery.lanes import Lanes
from kdpipes.look.peek import Peek
from kdpipes.plan.mix import SourceShare
from kdpipes.work.transform import RecordedTransform

# torch's stubs give every DataPipe any attribute at all. `Never` takes that back, so that pyright reports a misspelled
# pipe, and one of the other flavour; mypy does not look at the parameter. So torchdata's own pipes are listed by name.
_StockPipe = Callable[..., Any]

class MapChain(MapDataPipe[Any]):
    """What can follow an indexed pipe of samples."""

    in_memory_cache: _StockPipe
    to_iter_datapipe: _StockPipe
    unzip: _StockPipe
    def __getattr__(self, no_such_pipe: Never) -> Any: ...  # type: ignore[misc]
    def __len__(self) -> int: ...
    def class_names(self) -> tuple[str, ...] | None: ...
    def field_names(self) -> frozenset[str] | None: ...
    def column(self, name: str) -> NDArray[Any]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def filter_classes(
        self, *, valid: Sequence[int | str] | None = None, invalid: Sequence[int | str] | None = None
    ) -> MapChain: ...
    def filter_samples(self, *, columns: str | Sequence[str], keep: Callable[..., Any]) -> MapChain: ...
    def map_classes(
        self,
        mapping: Mapping[Any, Any],
        *,
        unmapped: Literal["drop", "keep", "raise"] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> MapChain: ...
    def oversample(self, *, mode: Literal["multiply", "exact"] = "multiply", redraw: bool = True) -> MapChain: ...
    def sample_weighted(
        self,
        weights: Sequence[float]
        | NDArray[Any]
        | Mapping[Any, float]
        | Callable[[int], Sequence[float] | NDArray[Any] | Mapping[Any, float]]
        | None = None,
        *,
        temperature: float | Callable[[int], float] | None = None,
        num_samples: int | None = None,
        replacement: bool = True,
        seed: int = 0,
        redraw: bool = True,
    ) -> MapChain: ...
    def few_shot(self, shots: int, *, seed: int = 0, rest: bool = False) -> MapChain: ...
    def take_per_class(
        self, *, num_samples: int | None = None, share: float | None = None, seed: int | None = None
    ) -> MapChain: ...
    def take_percent(
        self,
        *,
        from_percent: float = 0.0,
        to_percent: float = 1.0,
        ceil_from_index: bool = False,
        ceil_to_index: bool = False,
    ) -> MapChain: ...
    def subset(self, indices: Sequence[int] | NDArray[Any]) -> MapChain: ...
    def permute(self, seed: int) -> MapChain: ...
    def repeat_until(self, *, min_size: int | None = None, repetitions: int | None = None) -> MapChain: ...
    def mix(
        self,
        others: Any,
        *,
        weights: Sequence[float] | Callable[[int], Sequence[float]] | None = None,
        temperature: float | Callable[[int], float] | None = None,
        num_samples: int | None = None,
        per_batch: Sequence[int] | None = None,
        batches: Literal["per_source", "stratified"] | None = None,
        seed: int = 0,
        stop: Literal["first", "all"] = "first",
        redraw: bool = True,
    ) -> MixerMapChain: ...
    def join(
        self,
        other: MapPipe,
        *,
        fields: str | Sequence[str] | None = None,
        how: Literal["inner", "left"] = "inner",
        on: Callable[[str], Any] | None = None,
    ) -> MapChain: ...
    def to_samples(
        self,
        key: Callable[[Any], Any] | None = None,
        label: Callable[[Any], Any] | None = None,
        fields: str | Mapping[str, Callable[[Any], Any]] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> MapChain: ...
    def localize_files(
        self,
        local_root: str | os.PathLike[str],
        *,
        global_root: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> MapChain: ...
    def rename_fields(self, **renames: str) -> MapChain: ...
    def add_field(self, name: str, function: Callable[..., Any]) -> MapChain: ...
    def decode_images(
        self,
        field: str = "x",
        *,
        backend: Literal["auto", "turbojpeg", "simplejpeg", "pillow"] = "auto",
        exact: bool = True,
        mode: Literal["RGB", "L", "I;16", "F", "P", "unchanged"] | None = None,
        exif: bool = False,
    ) -> MapChain: ...
    def transform(
        self,
        field: str,
        *transforms: Callable[..., Any] | RecordedTransform,
        views: Sequence[Sequence[Callable[..., Any] | RecordedTransform]] | None = None,
        kinds: Mapping[str, Literal["image", "mask", "boxes", "xywh", "cxcywh", "points", "other"]] | None = None,
    ) -> MapChain: ...
    def transform_batch(self, field: str, function: Callable[..., Any]) -> MapChain: ...
    def record_ctx(self) -> MapChain: ...
    def cache_in_memory(
        self,
        *,
        name: str | None = None,
        max_bytes: int | None = None,
        keep: bool = False,
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        bytes_as_views: bool = False,
    ) -> CacheMapChain: ...
    def cache_on_disk(
        self,
        url: str | os.PathLike[str],
        *,
        layout: Literal["lmdb", "files"] | None = None,
        max_bytes: int | None = None,
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> CacheMapChain: ...
    def cache_in_redis(
        self,
        url: str,
        *,
        namespace: str = "kdpipes",
        ttl_s: float | None = None,
        on_unreachable: Literal["raise", "go_on"] = "raise",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
    ) -> CacheMapChain: ...
    def cache(
        self,
        store: CacheStore,
        *,
        verify: Literal["always", "once", "never"] = "always",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        bytes_as_views: bool = False,
    ) -> CacheMapChain: ...
    def on_error(
        self,
        action: Literal["raise", "skip", "quarantine", "substitute"] = "raise",
        *,
        path: str | os.PathLike[str] | None = None,
        max_share: float = 0.1,
        max_samples: int | None = None,
    ) -> MapChain: ...
    def select(self, mode: str, return_ctx: bool = False, *, as_dict: bool = False, bare: bool = False) -> MapChain: ...
    def deal(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        batching: Batching | None = None,
        shuffle: bool | Literal["shards"] | ByShard = False,
        num_batches: int | None = None,
        seed: int = 0,
        uneven: Literal["keep", "pad", "drop"] = "keep",
        ranks: Literal["auto", 1] = "auto",
    ) -> IterChain: ...
    def peek(self, n: int = 3) -> Peek: ...

class MixerMapChain(MapChain):
    """What can follow a `MixerMapDataPipe`, and what it can do itself."""

    def mixture(self, epoch: int = 0) -> list[SourceShare]: ...

class CacheMapChain(MapChain):
    """What can follow a `CacheMapDataPipe`, and what it can do itself."""

    def stats(self) -> CacheStats: ...
    def warm_up(
        self, *, num_threads: int = 4, num_workers: int = 0, executor: Executor | None = None, progress: bool = True
    ) -> CacheStats: ...

class IterChain(IterDataPipe[Any]):
    """What can follow a stream."""

    add_index: _StockPipe
    async_map_batches: _StockPipe
    bucketbatch: _StockPipe
    check_hash: _StockPipe
    cycle: _StockPipe
    dataframe: _StockPipe
    decompress: _StockPipe
    drop: _StockPipe
    end_caching: _StockPipe
    enumerate: _StockPipe
    extract: _StockPipe
    flatmap: _StockPipe
    flatten: _StockPipe
    fullsync: _StockPipe
    header: _StockPipe
    in_batch_shuffle: _StockPipe
    in_memory_cache: _StockPipe
    lines_to_paragraphs: _StockPipe
    list_files_by_ais: _StockPipe
    list_files_by_fsspec: _StockPipe
    list_files_by_iopath: _StockPipe
    list_files_by_s3: _StockPipe
    load_files_by_ais: _StockPipe
    load_files_by_s3: _StockPipe
    load_from_bz2: _StockPipe
    load_from_rar: _StockPipe
    load_from_tar: _StockPipe
    load_from_tfrecord: _StockPipe
    load_from_xz: _StockPipe
    load_from_zip: _StockPipe
    load_parquet_as_df: _StockPipe
    map_batches: _StockPipe
    max_token_bucketize: _StockPipe
    memory_cell: _StockPipe
    mux_longest: _StockPipe
    on_disk_cache: _StockPipe
    open_files_by_fsspec: _StockPipe
    open_files_by_iopath: _StockPipe
    parse_csv: _StockPipe
    parse_csv_as_dict: _StockPipe
    parse_json_files: _StockPipe
    pin_memory: _StockPipe
    prefetch: _StockPipe
    random_split: _StockPipe
    read_from_gdrive: _StockPipe
    read_from_http: _StockPipe
    read_from_remote: _StockPipe
    readlines: _StockPipe
    repeat: _StockPipe
    round_robin_demux: _StockPipe
    rows2columnar: _StockPipe
    save_by_fsspec: _StockPipe
    save_by_iopath: _StockPipe
    save_to_disk: _StockPipe
    set_length: _StockPipe
    shard_expand: _StockPipe
    sharding_round_robin_dispatch: _StockPipe
    shuffled_flatmap: _StockPipe
    slice: _StockPipe
    threadpool_map: _StockPipe
    to_map_datapipe: _StockPipe
    trace_as_dataframe: _StockPipe
    unzip: _StockPipe
    webdataset: _StockPipe
    zip_longest: _StockPipe
    zip_with_iter: _StockPipe
    zip_with_map: _StockPipe
    def __getattr__(self, no_such_pipe: Never) -> Any: ...  # type: ignore[misc]
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def class_names(self) -> tuple[str, ...] | None: ...
    def field_names(self) -> frozenset[str] | None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def filter_classes(
        self, *, valid: Sequence[int | str] | None = None, invalid: Sequence[int | str] | None = None
    ) -> IterChain: ...
    def filter_samples(self, *, columns: str | Sequence[str], keep: Callable[..., Any]) -> IterChain: ...
    def map_classes(
        self,
        mapping: Mapping[Any, Any],
        *,
        unmapped: Literal["drop", "keep", "raise"] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> IterChain: ...
    def oversample(
        self,
        *,
        mode: Literal["multiply", "exact"] = "multiply",
        redraw: bool = True,
        class_counts: Mapping[Any, int] | None = None,
    ) -> IterChain: ...
    def repeat_until(self, *, min_size: int | None = None, repetitions: int | None = None) -> IterChain: ...
    def mix(
        self,
        others: Any,
        *,
        weights: Sequence[float] | None = None,
        per_batch: Sequence[int] | None = None,
        seed: int = 0,
        stop: Literal["first", "all"] = "first",
    ) -> IterChain: ...
    def to_samples(
        self,
        key: Callable[[Any], Any] | None = None,
        label: Callable[[Any], Any] | None = None,
        fields: str | Mapping[str, Callable[[Any], Any]] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> IterChain: ...
    def localize_files(
        self,
        local_root: str | os.PathLike[str],
        *,
        global_root: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> IterChain: ...
    def rename_fields(self, **renames: str) -> IterChain: ...
    def add_field(self, name: str, function: Callable[..., Any]) -> IterChain: ...
    def decode_images(
        self,
        field: str = "x",
        *,
        backend: Literal["auto", "turbojpeg", "simplejpeg", "pillow"] = "auto",
        exact: bool = True,
        mode: Literal["RGB", "L", "I;16", "F", "P", "unchanged"] | None = None,
        exif: bool = False,
    ) -> IterChain: ...
    def transform(
        self,
        field: str,
        *transforms: Callable[..., Any] | RecordedTransform,
        views: Sequence[Sequence[Callable[..., Any] | RecordedTransform]] | None = None,
        kinds: Mapping[str, Literal["image", "mask", "boxes", "xywh", "cxcywh", "points", "other"]] | None = None,
    ) -> IterChain: ...
    def transform_batch(self, field: str, function: Callable[..., Any]) -> IterChain: ...
    def record_ctx(self) -> IterChain: ...
    def cache_in_memory(
        self,
        *,
        name: str | None = None,
        max_bytes: int | None = None,
        keep: bool = False,
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        bytes_as_views: bool = False,
    ) -> CacheIterChain: ...
    def cache_on_disk(
        self,
        url: str | os.PathLike[str],
        *,
        layout: Literal["lmdb", "files"] | None = None,
        max_bytes: int | None = None,
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> CacheIterChain: ...
    def cache_in_redis(
        self,
        url: str,
        *,
        namespace: str = "kdpipes",
        ttl_s: float | None = None,
        on_unreachable: Literal["raise", "go_on"] = "raise",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
    ) -> CacheIterChain: ...
    def cache(
        self,
        store: CacheStore,
        *,
        verify: Literal["always", "once", "never"] = "always",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        bytes_as_views: bool = False,
    ) -> CacheIterChain: ...
    def on_error(
        self,
        action: Literal["raise", "skip", "quarantine", "substitute"] = "raise",
        *,
        path: str | os.PathLike[str] | None = None,
        max_share: float = 0.1,
        max_samples: int | None = None,
    ) -> IterChain: ...
    def select(
        self, mode: str, return_ctx: bool = False, *, as_dict: bool = False, bare: bool = False
    ) -> IterChain: ...
    def deal(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool | Literal["shards"] | ByShard = False,
        num_batches: int | None = None,
        seed: int = 0,
        uneven: Literal["keep", "pad", "drop"] = "keep",
        split: Literal["auto", "samples"] | Lanes = "auto",
        ranks: Literal["auto", 1] = "auto",
    ) -> IterChain: ...
    def collate_samples(
        self,
        *,
        pad: Mapping[str, float] | None = None,
        memory_format: Literal["contiguous", "channels_last"] = "contiguous",
    ) -> IterChain: ...
    def mixup(
        self, alpha: float = 0.2, *, num_classes: int | None = None, image: str = "x", label: str = "y", p: float = 1.0
    ) -> IterChain: ...
    def cutmix(
        self, alpha: float = 1.0, *, num_classes: int | None = None, image: str = "x", label: str = "y", p: float = 1.0
    ) -> IterChain: ...
    def to_device(self, device: str | torch.device) -> IterChain: ...
    def peek(self, n: int = 3) -> Peek: ...

class CacheIterChain(IterChain):
    """What can follow a `CacheIterDataPipe`, and what it can do itself."""

    def stats(self) -> CacheStats: ...
    def warm_up(
        self, *, num_threads: int = 4, num_workers: int = 0, executor: Executor | None = None, progress: bool = True
    ) -> CacheStats: ...
