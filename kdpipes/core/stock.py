"""What kdpipes knows about the pipes of torch and torchdata."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch.utils.data.datapipes.iter import Collator, Mapper, Shuffler
from torch.utils.data.datapipes.map import Mapper as IndexedMapper
from torchdata.datapipes.iter import Filter, FlatMapper, Prefetcher, ShardingRoundRobinDispatcher, UnBatcher

from kdpipes.core.traits import Traits

__all__ = ["KEEPS_ITEMS_APART", "Seeded", "Sharded", "is_one_to_one", "redraws", "shards", "stock_traits"]

KEEPS_ITEMS_APART = (Mapper, IndexedMapper, Collator, Filter, FlatMapper, UnBatcher)  # these hold no items back
_ORDER_ALONE = (Shuffler, Prefetcher)


@runtime_checkable
class Seeded(Protocol):
    """A stream that loaders seed when an epoch begins."""

    def set_seed(self, seed: int) -> Any: ...


@runtime_checkable
class Sharded(Protocol):
    """A pipe that can be restricted to one part of the items."""

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any) -> Any: ...


def shards(pipe: Any) -> bool:
    """Return whether a pipe gives each worker a different part of the items."""
    return isinstance(pipe, Sharded | ShardingRoundRobinDispatcher)


def is_one_to_one(pipe: Any) -> bool:
    """Return whether a stock pipe makes one item of each item before it reads the next one."""
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
    """Return whether loaders seed a pipe when an epoch begins, so that its order may differ between epochs."""
    return isinstance(pipe, Seeded)


def stock_traits(pipe: Any, *, is_source: bool) -> Traits:
    """Return what is known about a pipe that is not one of kdpipes'."""
    if is_source:
        return Traits(role="source")
    if isinstance(pipe, _ORDER_ALONE) or shards(pipe):
        return Traits(role="order", reads=frozenset(), changes=frozenset())
    return Traits(holds_back=not isinstance(pipe, KEEPS_ITEMS_APART), is_eager=True)
