"""Facts about pipes of torch and torchdata, and the pipes that any pipe reads from.

Only this module imports torchdata, and only on use.

torchdata 0.9, the last release with DataPipes, has wheels up to Python 3.12. A chain can contain its pipes only if they
were imported before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from kdpipes.core.processes import ForkLock
from kdpipes.core.torch_pipes import (
    Collator,
    Filter,
    IndexedMapper,
    IterDataPipe,
    MapDataPipe,
    Mapper,
    ShardingFilter,
    Shuffler,
    UnBatcher,
)
from kdpipes.core.traits import Traits

_PIPES = "torchdata.datapipes.iter"
# The functional names of torchdata's pipes; those of the last release will not change.
# fmt: off
NAMES_OF_TORCHDATA = frozenset({
    "add_index", "async_map_batches", "bucketbatch", "check_hash", "cycle", "dataframe", "decompress", "drop",
    "end_caching", "enumerate", "extract", "flatmap", "flatten", "fullsync", "header", "in_batch_shuffle",
    "in_memory_cache", "lines_to_paragraphs", "list_files_by_ais", "list_files_by_fsspec", "list_files_by_iopath",
    "list_files_by_s3", "load_files_by_ais", "load_files_by_s3", "load_from_bz2", "load_from_rar",
    "load_from_tar", "load_from_tfrecord", "load_from_xz", "load_from_zip", "load_parquet_as_df", "map_batches",
    "max_token_bucketize", "memory_cell", "mux_longest", "on_disk_cache", "open_files_by_fsspec",
    "open_files_by_iopath", "parse_csv", "parse_csv_as_dict", "parse_json_files", "pin_memory", "prefetch",
    "random_split", "read_from_gdrive", "read_from_http", "read_from_remote", "readlines", "repeat",
    "round_robin_demux", "rows2columnar", "save_by_fsspec", "save_by_iopath", "save_to_disk", "set_length",
    "shard_expand", "sharding_round_robin_dispatch", "shuffled_flatmap", "slice", "threadpool_map",
    "to_iter_datapipe", "to_map_datapipe", "unzip", "webdataset", "zip_longest", "zip_with_iter", "zip_with_map",
})
# fmt: on
_loading = ForkLock()
_loaded: dict[str, Any] = {}


def load_torchdata(module: str = _PIPES) -> Any:
    """Import a module of torchdata, without its deprecation warning, and return it; None without torchdata 0.9.

    torchdata imports Hugging Face's `datasets`, if installed, for one function of one reader, which takes half a second
    and 60 MB. This import is delayed until that function is called.
    """
    if module in _loaded:  # `sys.modules` may hold a module that another thread is still importing
        return _loaded[module]
    with _loading.lock, warnings.catch_warnings():
        # torchdata 0.10 and later, with wheels for newer Pythons, has neither DataPipes nor DataLoader2.
        if importlib.util.find_spec("torchdata") is None or importlib.util.find_spec("torchdata.datapipes") is None:
            return None
        # Each import prints that DataPipes are deprecated. Users of kdpipes cannot act on it.
        warnings.filterwarnings("ignore", message=r"\s*#+\s*WARNING!\s*The 'datapipes', 'dataloader2' modules")
        delays = "datasets" not in sys.modules and importlib.util.find_spec("datasets") is not None
        if delays:
            sys.modules["datasets"] = None  # type: ignore[assignment]  # its import now fails, which torchdata handles
        try:
            reader: Any = importlib.import_module(f"{_PIPES}.load.huggingface")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("torchdata"):  # later releases have no DataPipes
                return None
            raise
        finally:
            if delays:
                del sys.modules["datasets"]
        if delays:

            def load_dataset(*args: Any, **kwargs: Any) -> Any:
                return importlib.import_module("datasets").load_dataset(*args, **kwargs)

            reader.datasets = types.SimpleNamespace(load_dataset=load_dataset)
        _loaded[module] = importlib.import_module(module)
        return _loaded[module]


def is_of_torchdata(pipe: Any, *names: str) -> bool:
    """Return whether a pipe is an instance of one of the classes of torchdata with these names."""
    module = sys.modules.get(_PIPES)
    found = {} if module is None else vars(module)
    return isinstance(pipe, tuple(found[name] for name in names if name in found))  # it may still be importing


def passes_on(pipe: Any) -> Any:
    """Return the source of a stock pipe that passes on all or some samples unchanged; None for other pipes."""
    if isinstance(pipe, Shuffler | ShardingFilter):
        return vars(pipe).get("source_datapipe") or vars(pipe).get("datapipe")
    return vars(pipe).get("source_datapipe") if is_of_torchdata(pipe, "Prefetcher") else None


def keeps_items_apart(pipe: Any) -> bool:
    """Return whether a stock pipe is unbuffered: its output depends only on the item read last."""
    kinds = (Mapper, IndexedMapper, Collator, Filter, UnBatcher)
    return isinstance(pipe, kinds) or is_of_torchdata(pipe, "FlatMapper")


@runtime_checkable
class Seeded(Protocol):
    """A stream that loaders seed when an epoch begins."""

    def set_seed(self, seed: int) -> Any: ...


@runtime_checkable
class Sharded(Protocol):
    """A pipe that can be restricted to a part of the items."""

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any) -> Any: ...


def shards(pipe: Any) -> bool:
    """Return whether a pipe distributes items to workers, so that each gets different ones."""
    return isinstance(pipe, Sharded) or is_of_torchdata(pipe, "ShardingRoundRobinDispatcher")


def is_one_to_one(pipe: Any) -> bool:
    """Return whether a stock pipe is one-to-one and unbuffered."""
    return isinstance(pipe, Mapper | Collator)


def has_own_seed(pipe: Any) -> bool:
    """Return whether a stock pipe has a fixed seed of its own: `.shuffle().set_seed(1)`."""
    return vars(pipe).get("_seed") is not None


@runtime_checkable
class _Bound(Protocol):
    def is_replicable(self) -> bool: ...


def is_replicable(pipe: Any) -> bool:
    """Return whether torchdata copies a pipe to worker processes."""
    return not isinstance(pipe, _Bound) or pipe.is_replicable()


def stock_traits(pipe: Any, *, is_source: bool) -> Traits:
    """Return the traits of a pipe that is not one of kdpipes'."""
    if is_source:
        return Traits(role="source")
    if isinstance(pipe, Shuffler) or is_of_torchdata(pipe, "Prefetcher") or shards(pipe):
        return Traits(role="order")
    is_apart = keeps_items_apart(pipe)
    fits_parts = is_apart or is_of_torchdata(pipe, "Cycler", "Repeater", "SampleMultiplexer")
    return Traits(holds_back=not is_apart, counts_whole=not fits_parts, is_eager=True)


AnyPipe = IterDataPipe[Any] | MapDataPipe[Any]
_LOOKED_AT = 8  # if none of the first entries of a collection is a pipe, the collection holds data


def edges_from(pipe: AnyPipe) -> list[tuple[AnyPipe, list[AnyPipe]]]:
    """Return all pipes of the chain ending with `pipe`, that pipe first, each with the pipes that it reads from."""
    edges: dict[int, tuple[AnyPipe, list[AnyPipe]]] = {}
    waiting = deque([pipe])
    while waiting:
        reader = waiting.popleft()
        if id(reader) not in edges:
            edges[id(reader)] = reader, upstream_of(reader)
            waiting.extend(edges[id(reader)][1])
    return list(edges.values())


def upstream_of(pipe: Any) -> list[AnyPipe]:
    """Return the pipes that `pipe` reads from: attributes, and entries of collections in attributes.

    Only collections that begin with pipes are searched, because others hold users' data.
    """
    held = vars(pipe) if hasattr(pipe, "__dict__") else {}
    return [source for value in held.values() for source in _pipes_in(value)]


def _pipes_in(value: Any, depth: int = 0) -> Iterator[AnyPipe]:
    if isinstance(value, IterDataPipe | MapDataPipe):
        yield value
    elif type(value) in (list, tuple, dict, set) and depth < 3:
        parts = (value.values(), value) if isinstance(value, dict) else (value,)
        first = [entry for part in parts for entry in islice(part, _LOOKED_AT)]
        if any(next(_pipes_in(entry, depth + 1), None) is not None for entry in first):
            for part in parts:
                for entry in part:
                    yield from _pipes_in(entry, depth + 1)
