"""Who gets which ordinals: pure arithmetic of epochs, global batches, ranks and workers."""

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
    """Return the ranks of torch's default process group; None without one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return None


def ranks_now() -> Ranks:
    """Return the ranks of torch's process group, else those of `RANK` and `WORLD_SIZE`, else rank 0 of 1.

    A process group can begin or end at any time, so call this when an epoch begins, not before.
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
        """Return the first batch from `batch` on that is this worker's."""
        return batch + (self.worker - batch) % self.num_workers

    def part(self) -> tuple[int, int]:
        """Return which part of how many this copy is, over all workers of all ranks."""
        return self.worker * self.num_ranks + self.rank, self.num_ranks * self.num_workers

    def ranks_here(self) -> range:
        """Return the ranks of this machine, as torchrun names their number; this one alone where nobody does."""
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
            group: For whom the shards are: `SHARDING_PRIORITIES`.
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
    """How an epoch is cut into batches.

    A global batch is the next `size_of(num_ranks)` ordinals; rank r takes its r-th slice, and worker w of W the batches
    w, w + W, ... The ordinals of a global batch do not depend on the number of ranks, if its size does not.
    """

    batch_size: int | None
    global_batch_size: int | None
    uneven: Uneven

    def __post_init__(self) -> None:
        check_one_of(batch_size=self.batch_size, global_batch_size=self.global_batch_size)
        name = "batch_size" if self.batch_size is not None else "global_batch_size"
        object.__setattr__(self, name, check_count(name, getattr(self, name)))  # an int, also of a NumPy integer
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
        """Return the ordinals of this rank's part of a batch; those from `num_samples` on are padding.

        Raises:
            ValueError: `uneven="keep"`, and the last global batch is too short to give every rank a sample.
        """
        size = self.size_of(sharding.num_ranks)
        start = batch * size
        return share_out(start, size if self.uneven == "pad" else min(size, num_samples - start), sharding)

    def fingerprint(self) -> Any:
        """Return what makes the batches what they are, but for the size of a global batch, which a state names."""
        return self.uneven

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return the numbers, besides the identity, on which the batches depend."""
        return {"global_batch_size": self.size_of(num_ranks)}


def share_out(start: int, size: int, sharding: Sharding) -> range:
    """Return this rank's slice of the `size` ordinals of a global batch that begins with `start`.

    Raises:
        ValueError: A rank would get nothing.
    """
    rank, num_ranks = sharding.rank, sharding.num_ranks
    if size < num_ranks:
        raise ValueError(
            f"The last global batch has {size} samples for {num_ranks} ranks: some would get nothing, and hang. "
            'Use `deal(uneven="pad")` or `deal(uneven="drop")`.'
        )
    return range(start + size * rank // num_ranks, start + size * (rank + 1) // num_ranks)


class EqualEpoch:
    """An epoch of an indexed source, cut into batches of one size.

    Args:
        num_samples: The size of the source.
        layout: How it is cut.
        sharding: Which rank this is, of how many.
        order: Gives the positions of samples by their ordinals; None where these are the same.
    """

    def __init__(self, num_samples: int, layout: Layout, sharding: Sharding, order: Any = None) -> None:
        self.num_samples, self._layout, self._sharding = num_samples, layout, sharding
        self._order = order
        self._blocks: deque[dict[int, NDArray[Any]]] = deque(maxlen=4)  # some batches are prefetched
        self.num_batches = layout.num_batches(num_samples, sharding.num_ranks)
        self.full_size = layout.size_of(sharding.num_ranks)

    def ordinals(self, batch: int) -> range:
        """Return the ordinals of this rank's part of a batch; those from the number of samples on are padding."""
        return self._layout.ordinals(batch, self.num_samples, self._sharding)

    def positions(self, batch: int) -> NDArray[Any]:
        """Return the positions of the samples of this rank's part of a batch."""
        block = next((block for block in self._blocks if batch in block), None)
        if block is None:
            block = self._block(batch)
            self._blocks.append(block)
        return block[batch]

    def _block(self, first: int) -> dict[int, NDArray[Any]]:
        """Return the positions of a batch and of this worker's next ones.

        A permutation of ten million takes twice as long for a thousand positions as for 32.
        """
        number = max(_BLOCK * self._sharding.num_ranks // self.full_size, 1)
        batches = range(first, self.num_batches, self._sharding.num_workers)[:number]
        parts = [self.ordinals(batch) for batch in batches]
        places = np.concatenate([np.arange(part.start, part.stop) for part in parts]) % self.num_samples
        positions = places if self._order is None else self._order[places]
        ends = np.cumsum([len(part) for part in parts])
        return dict(zip(batches, np.split(positions, ends[:-1]), strict=True))

    def windows(self, batch: int) -> Iterator[NDArray[Any]]:
        """Yield the positions that this machine needs from a batch on, if the epoch goes shard by shard; else none."""
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
