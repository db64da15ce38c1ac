"""What kdpipes knows about the pipes of torch and torchdata. The only module that imports torchdata, and only on use.

torchdata 0.9, the last release with DataPipes, has wheels up to Python 3.12. A chain can hold its pipes only if
somebody has imported it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
import warnings
from typing import Any, Protocol, runtime_checkable

from torch.utils.data.datapipes.iter import Collator, Filter, Mapper, Shuffler, UnBatcher
from torch.utils.data.datapipes.map import Mapper as IndexedMapper

from kdpipes.core.traits import Traits

__all__ = [
    "Seeded",
    "Sharded",
    "has_own_seed",
    "is_of_torchdata",
    "is_one_to_one",
    "is_replicable",
    "keeps_items_apart",
    "load_torchdata",
    "redraws",
    "shards",
    "stock_traits",
]

_PIPES = "torchdata.datapipes.iter"
_loading = threading.RLock()


def load_torchdata(module: str = _PIPES) -> Any:
    """Import a module of torchdata, without its deprecation warning, and return it; None without torchdata 0.9.

    torchdata imports Hugging Face's `datasets`, if that is installed, for one function of one of its readers, which
    takes half a second and 60 MB: here, that import is delayed until the function is called.
    """
    if module in sys.modules:
        return sys.modules[module]
    with _loading, warnings.catch_warnings():
        # torchdata 0.10 and later, which has wheels for newer Pythons, has neither DataPipes nor DataLoader2.
        if importlib.util.find_spec("torchdata") is None or importlib.util.find_spec("torchdata.datapipes") is None:
            return None
        # The message tells every importer that DataPipes are deprecated. Users of kdpipes cannot act on it.
        warnings.filterwarnings("ignore", message=r"\s*#+\s*WARNING!\s*The 'datapipes', 'dataloader2' modules")
        delays = "datasets" not in sys.modules and importlib.util.find_spec("datasets") is not None
        if delays:
            sys.modules["datasets"] = None  # type: ignore[assignment]  # its import now fails, which torchdata handles
        try:
            reader: Any = importlib.import_module(f"{_PIPES}.load.huggingface")
        finally:
            if delays:
                del sys.modules["datasets"]
        if delays:
            reader.datasets = types.SimpleNamespace(load_dataset=_load_dataset)
        return importlib.import_module(module)


def _load_dataset(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module("datasets").load_dataset(*args, **kwargs)


def is_of_torchdata(pipe: Any, *names: str) -> bool:
    """Return whether a pipe is an instance of one of the classes of torchdata with these names."""
    module = sys.modules.get(_PIPES)
    return module is not None and isinstance(pipe, tuple(vars(module)[name] for name in names))


def keeps_items_apart(pipe: Any) -> bool:
    """Return whether a stock pipe holds no item back: what it gives depends on the item that it has read last."""
    kinds = (Mapper, IndexedMapper, Collator, Filter, UnBatcher)
    return isinstance(pipe, kinds) or is_of_torchdata(pipe, "FlatMapper")


@runtime_checkable
class Seeded(Protocol):
    """A stream that loaders seed when an epoch begins."""

    def set_seed(self, seed: int) -> Any: ...


@runtime_checkable
class Sharded(Protocol):
    """A pipe that can be told which part of the items it gives."""

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any) -> Any: ...


def shards(pipe: Any) -> bool:
    """Return whether a pipe gives each worker a part of its own."""
    return isinstance(pipe, Sharded) or is_of_torchdata(pipe, "ShardingRoundRobinDispatcher")


def is_one_to_one(pipe: Any) -> bool:
    """Return whether a stock pipe makes one item of each, before it reads the next one."""
    return isinstance(pipe, Mapper | Collator)


def has_own_seed(pipe: Any) -> bool:
    """Return whether a stock pipe was given a seed that it keeps: `.shuffle().set_seed(1)`."""
    return vars(pipe).get("_seed") is not None


@runtime_checkable
class _Bound(Protocol):
    def is_replicable(self) -> bool: ...


def is_replicable(pipe: Any) -> bool:
    """Return whether torchdata copies a pipe to worker processes."""
    return not isinstance(pipe, _Bound) or pipe.is_replicable()


def redraws(pipe: Any) -> bool:
    """Return whether loaders seed a pipe when an epoch begins, so that it may give another order in each."""
    return isinstance(pipe, Seeded)


def stock_traits(pipe: Any, *, is_source: bool) -> Traits:
    """Return what is known about a pipe that is not one of kdpipes'."""
    if is_source:
        return Traits(role="source")
    if isinstance(pipe, Shuffler) or is_of_torchdata(pipe, "Prefetcher") or shards(pipe):
        return Traits(role="order", reads=frozenset(), changes=frozenset())
    return Traits(holds_back=not keeps_items_apart(pipe), is_eager=True)
