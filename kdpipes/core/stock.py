"""What kdpipes knows about the pipes of torch and torchdata."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch.utils.data.datapipes.iter import Collator, Mapper, Shuffler
from torch.utils.data.datapipes.map import Mapper as IndexedMapper
from torchdata.datapipes.iter import (
    Cycler,
    Filter,
    FlatMapper,
    Prefetcher,
    Repeater,
    SampleMultiplexer,
    ShardingRoundRobinDispatcher,
    UnBatcher,
)

from kdpipes.core.traits import Traits

__all__ = ["KEEPS_ITEMS_APART", "Seeded", "Sharded", "is_one_to_one", "redraws", "shards", "stock_traits"]

KEEPS_ITEMS_APART = (Mapper, IndexedMapper, Collator, Filter, FlatMapper, UnBatcher)  # they hold no item back
_ORDER_ALONE = (Shuffler, Prefetcher)
_FIT_FOR_PARTS = (*KEEPS_ITEMS_APART, Cycler, Repeater, SampleMultiplexer)  # they work on any part of a stream


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
    return isinstance(pipe, Sharded | ShardingRoundRobinDispatcher)


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
    if isinstance(pipe, _ORDER_ALONE) or shards(pipe):
        return Traits(role="order", reads=frozenset(), changes=frozenset())
    holds_back, counts_whole = not isinstance(pipe, KEEPS_ITEMS_APART), not isinstance(pipe, _FIT_FOR_PARTS)
    return Traits(holds_back=holds_back, counts_whole=counts_whole, is_eager=True)
