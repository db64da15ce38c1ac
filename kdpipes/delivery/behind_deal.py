"""Which `deal` the items of a chain come from, and which pipes between keep them apart."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Collator, Mapper
from torchdata.datapipes.iter import Filter, FlatMapper, UnBatcher

from kdpipes.core.chain import upstream_of
from kdpipes.core.traits import Traits
from kdpipes.delivery.batch_memory import Allocate
from kdpipes.delivery.deal import DealerIterDataPipe, DealerMapDataPipe
from kdpipes.delivery.dealer import Resumable

__all__ = ["DEALERS", "OneToOne", "dealer_of", "one_to_one_path"]

DEALERS = (DealerMapDataPipe, DealerIterDataPipe)


class OneToOne(Resumable, IterDataPipe[Any]):
    """What pipes behind `deal` have in common that make one item of each, before they read the next one."""

    traits = Traits(role="batch", gives="batches", holds_back=False)
    _allocate: Allocate | None = None  # where batches are made; None if anywhere

    def make_batches_in(self, allocate: Allocate) -> None:
        """Make batches in memory that is used again for later ones: nothing may keep them."""
        self._allocate = allocate


_ONE_TO_ONE = (OneToOne, Mapper, Collator)
_STATELESS = (*_ONE_TO_ONE, Filter, FlatMapper, UnBatcher)


def one_to_one_path(pipe: Any) -> list[Any]:
    """Return `pipe` and what is upstream of it, nearest first, up to the first pipe that is not one to one."""
    path = [pipe]
    while isinstance(path[-1], _ONE_TO_ONE) and len(sources := upstream_of(path[-1])) == 1:
        path += sources
    return path


def dealer_of(chain: Any) -> Any:
    """Return the `deal` whose batches number the items of a chain; None where behind it pipes keep items back."""
    pipe = chain
    while isinstance(pipe, _STATELESS):
        (pipe,) = upstream_of(pipe)
    return pipe if isinstance(pipe, DEALERS) else None
