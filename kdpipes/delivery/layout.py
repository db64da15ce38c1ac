"""Divide epochs into global batches, and these among ranks and workers. Pure arithmetic."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed
from numpy.typing import NDArray
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from kdpipes.core.errors import check_choice, check_count, check_one_of
from kdpipes.core.order import ranges
from kdpipes.delivery.by_shard import WindowedOrder
from kdpipes.delivery.own_order import ContinuedOrder

__all__ = [
    "NEW_LOADER",
    "EqualEpoch",
    "Layout",
    "Ranks",
    "Sharding",
    "Uneven",
    "check_ranks",
    "group_ranks",
    "ranks_now",
    "share_out",
]

Uneven = Literal["keep", "pad", "drop"]
_BLOCK = 1_024
_IN_EPOCH = (
    "Call `torch.distributed.init_process_group` before the epoch begins, and destroy the group after it has ended."
)
NEW_LOADER = (
    "Make the chain and its loader after `torch.distributed.init_process_group`, or use `kdp.Loader(chain)`, whose "
    "workers start again."
)


class Ranks(NamedTuple):
    """The rank of a process, and the number of ranks."""

    rank: int = 0
    num_ranks: int = 1


def group_ranks() -> Ranks | None:
    """Return the ranks of torch's default process group; None if there is no group."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return None


def ranks_now() -> Ranks:
    """Return the ranks of torch's process group, else those of `RANK` and `WORLD_SIZE`, else rank 0 of 1.

    A process group can be created or destroyed at any time, so call this when an epoch begins, not before.
    """
    group = group_ranks()
    if group is not None:
        return group
    rank, num_ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and num_ranks.isdecimal() and int(rank) < int(num_ranks):
        return Ranks(int(rank), int(num_ranks))
    return Ranks()


def check_ranks(before: Ranks, now: Ranks, hint: str = _IN_EPOCH) -> None:
    """Raise RuntimeError with a hint if the ranks that batches are dealt to have changed."""
    if before != now:
        raise RuntimeError(
            f"Batches were dealt to rank {before.rank} of {before.num_ranks}, but this process is now rank {now.rank} "
            f"of {now.num_ranks}. {hint}"
        )


@dataclass(frozen=True)
class Sharding:
    """Which rank and which worker this copy of the chain is, as `apply_sharding` has said so far."""

    rank: int = 0
    num_ranks: int = 1
    worker: int = 0
    num_workers: int = 1

    def ranks(self) -> Ranks:
        """Return the rank, and the number of ranks."""
        return Ranks(self.rank, self.num_ranks)

    def first_from(self, batch: int) -> int:
        """Return the number of this worker's first batch, starting at `batch`."""
        return batch + (self.worker - batch) % self.num_workers

    def part(self) -> tuple[int, int]:
        """Return the number of this worker among all workers of all ranks, and how many there are."""
        return self.worker * self.num_ranks + self.rank, self.num_ranks * self.num_workers

    def ranks_here(self) -> range:
        """Return the ranks on this machine, counted by `LOCAL_WORLD_SIZE`, which torchrun sets.

        If it is not set, or does not divide the number of ranks, return only this rank.
        """
        number = os.environ.get("LOCAL_WORLD_SIZE", "1")
        size = int(number) if number.isdecimal() and int(number) and self.num_ranks % int(number) == 0 else 1
        first = self.rank - self.rank % size
        return range(first, first + size)

    def applied(self, count: int, index: int, group: Any, num_ranks: int) -> Sharding:
        """Return the sharding after one call of `apply_sharding`.

        torch's DataLoader gives ranks and workers as one number, `worker * num_ranks + rank`, without a group.

        Args:
            count: The number of shards.
            index: The number of this one.
            group: The level of the shards, a member of `SHARDING_PRIORITIES`; or None.
            num_ranks: The number of ranks included in `count` by torch's DataLoader.
        """
        if group == SHARDING_PRIORITIES.DISTRIBUTED:
            return replace(self, rank=index, num_ranks=count)
        if group == SHARDING_PRIORITIES.MULTIPROCESSING:
            return replace(self, worker=index, num_workers=count)
        if num_ranks == 1 or count % num_ranks:
            return replace(self, worker=index, num_workers=count)
        return Sharding(index % num_ranks, num_ranks, index // num_ranks, count // num_ranks)


@dataclass(frozen=True)
class Layout:
    """How to divide an epoch into batches of equal size.

    A global batch consists of the next `size_of(num_ranks)` ordinals. Rank r gets slice r of it, and worker w of W gets
    the batches w, w + W, ... If `global_batch_size` is given, the ordinals of a global batch do not depend on the
    number of ranks.
    """

    batch_size: int | None
    global_batch_size: int | None
    uneven: Uneven

    def __post_init__(self) -> None:
        check_one_of(batch_size=self.batch_size, global_batch_size=self.global_batch_size)
        name = "batch_size" if self.batch_size is not None else "global_batch_size"
        object.__setattr__(self, name, check_count(name, getattr(self, name)))  # converts NumPy integers
        check_choice("uneven", self.uneven, ("keep", "pad", "drop"))

    def size_of(self, num_ranks: int) -> int:
        """Return the number of samples in a global batch."""
        if self.batch_size is not None:
            return self.batch_size * num_ranks
        assert self.global_batch_size is not None
        if self.global_batch_size % num_ranks:
            raise ValueError(
                f"`global_batch_size` must be divisible by the number of ranks, {num_ranks}, "
                f"but is {self.global_batch_size} instead."
            )
        return self.global_batch_size

    def num_batches(self, num_samples: int, num_ranks: int) -> int:
        """Return the number of batches that each rank gets in an epoch."""
        size = self.size_of(num_ranks)
        return num_samples // size if self.uneven == "drop" else -(-num_samples // size)

    def ordinals(self, batch: int, num_samples: int, sharding: Sharding) -> range:
        """Return the ordinals of this rank's part of a batch. Ordinals from `num_samples` on are padding.

        Raises:
            ValueError: The last global batch has fewer samples than there are ranks, and `uneven` is "keep".
        """
        size = self.size_of(sharding.num_ranks)
        start = batch * size
        return share_out(start, size if self.uneven == "pad" else min(size, num_samples - start), sharding)

    def fingerprint(self) -> Any:
        """Return the data on which the batches depend, except for the sizes, which are a separate part of states."""
        return self.uneven

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return the sizes on which the batches depend, by name."""
        return {"global_batch_size": self.size_of(num_ranks)}


def share_out(start: int, size: int, sharding: Sharding) -> range:
    """Return this rank's slice of a global batch of `size` ordinals that begins at `start`.

    Raises:
        ValueError: A rank would get no samples.
    """
    rank, num_ranks = sharding.rank, sharding.num_ranks
    if size < num_ranks:
        raise ValueError(
            f"The last global batch has {size} samples for {num_ranks} ranks: some would get nothing, and hang. "
            'Use `deal(uneven="pad")` or `deal(uneven="drop")`.'
        )
    return range(start + size * rank // num_ranks, start + size * (rank + 1) // num_ranks)


class EqualEpoch:
    """An epoch of an indexed source in batches of equal size.

    Args:
        num_samples: The length of the source.
        layout: How to divide the epoch into batches.
        sharding: The rank and worker, and their numbers.
        order: A map from ordinals to positions, `order[ordinals]`; None if they are equal.
    """

    def __init__(self, num_samples: int, layout: Layout, sharding: Sharding, order: Any = None) -> None:
        self.num_samples, self._layout, self._sharding = num_samples, layout, sharding
        self._order = order
        self._blocks: deque[dict[int, NDArray[Any]]] = deque(maxlen=4)  # some batches are prefetched
        self.num_batches = layout.num_batches(num_samples, sharding.num_ranks)
        self.full_size = layout.size_of(sharding.num_ranks)

    def ordinals(self, batch: int) -> range:
        """Return the ordinals of this rank's part of a batch. Ordinals not below the number of samples are padding."""
        return self._layout.ordinals(batch, self.num_samples, self._sharding)

    def positions(self, batch: int) -> NDArray[Any]:
        """Return the positions of the samples of this rank's part of a batch."""
        block = next((block for block in self._blocks if batch in block), None)
        if block is None:
            block = self._block(batch)
            self._blocks.append(block)
        return block[batch]

    def _block(self, first: int) -> dict[int, NDArray[Any]]:
        """Return the positions of a batch and of this worker's next batches.

        They are computed together, because a thousand positions in a permutation of ten million take only twice as long
        as 32.
        """
        number = max(_BLOCK * self._sharding.num_ranks // self.full_size, 1)
        batches = range(first, self.num_batches, self._sharding.num_workers)[:number]
        parts = [self.ordinals(batch) for batch in batches]
        places = np.concatenate([np.arange(part.start, part.stop) for part in parts]) % self.num_samples
        positions = places if self._order is None else self._order[places]
        ends = np.cumsum([len(part) for part in parts])
        return dict(zip(batches, np.split(positions, ends[:-1]), strict=True))

    def windows(self, batch: int) -> Iterator[NDArray[Any]]:
        """Yield the positions that this machine needs from `batch` on, if the epoch goes shard by shard; else none."""
        first = batch * self.full_size
        if self._order is None:
            ranks, num_ranks = self._sharding.ranks_here(), self._sharding.num_ranks
            size = self.full_size
            for positions in ranges(first, self.num_samples):
                place = positions % size
                is_here = (place >= size * ranks.start // num_ranks) & (place < size * ranks.stop // num_ranks)
                yield positions[is_here]
        elif isinstance(self._order, WindowedOrder | ContinuedOrder):
            yield from self._order.by_shard(first)
