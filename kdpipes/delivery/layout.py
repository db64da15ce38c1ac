"""Divide epochs into global batches, and these among ranks and workers. Pure arithmetic."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch.distributed

from kdpipes.core.errors import check_choice, check_count, check_one_of
from kdpipes.core.messages import counted
from kdpipes.core.torch_pipes import SHARDING_PRIORITIES

Uneven = Literal["keep", "pad", "drop"]
_IN_EPOCH = (
    "Call `torch.distributed.init_process_group` before the epoch begins, and destroy the group after it has ended."
)
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
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
    rank = os.environ.get("RANK", "")
    num_ranks = os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and num_ranks.isdecimal() and int(rank) < int(num_ranks):
        return Ranks(int(rank), int(num_ranks))
    return Ranks()


def unknown_rank() -> tuple[str, str, str] | None:
    """Return what is wrong, why that is bad and what to do, if there are several processes, but no rank is known."""
    named = {name: os.environ.get(name, "") for name in _OF_LAUNCHERS}
    rank, num_ranks, *sizes = named.values()
    is_single = (num_ranks == "1" and rank in ("", "0")) or (not rank + num_ranks and {"", "1"}.issuperset(sizes))
    if is_single or group_ranks() is not None or ranks_now().num_ranks > 1:
        return None
    shown = ", ".join(f"{name}={value!r}" for name, value in named.items() if value)
    return (
        f"The environment has {shown}, but not a rank and the number of ranks, and there is no process group.",
        "This process takes itself for the only one, so every rank gets all samples.",
        "Start it with torchrun; or set RANK, from 0, and WORLD_SIZE; or call `torch.distributed.init_process_group` "
        "before the epoch. For a single process, set RANK=0 and WORLD_SIZE=1.",
    )


def check_ranks(before: Ranks, now: Ranks, hint: str = _IN_EPOCH) -> None:
    """Raise RuntimeError with a hint if the ranks that batches are dealt to have changed."""
    if before != now:
        raise RuntimeError(
            f"Batches were dealt to rank {before.rank} of {before.num_ranks}, but this process is now rank {now.rank} "
            f"of {now.num_ranks}. {hint}"
        )


@dataclass(frozen=True)
class Sharding:
    """The rank and worker of this copy of the chain, as set by `apply_sharding` so far."""

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

    def ranks_here(self) -> range:
        """Return the ranks on this machine, counted by `LOCAL_WORLD_SIZE`, which torchrun sets.

        If it is not set, or does not divide the number of ranks, return only this rank.
        """
        number = os.environ.get("LOCAL_WORLD_SIZE", "1")
        size = int(number) if number.isdecimal() and int(number) and self.num_ranks % int(number) == 0 else 1
        first = self.rank - self.rank % size
        return range(first, first + size)

    def applied(self, count: int, index: int, group: Any, num_ranks: int) -> Sharding:
        """Return the sharding after a call of `apply_sharding(count, index, group)`.

        torch's DataLoader gives ranks and workers as one number, `worker * num_ranks + rank`, without a group.
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
    """Divides an epoch into batches of equal size.

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
                f"but is {self.global_batch_size} instead. Choose a multiple, or set `batch_size`, which is per rank."
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

    def batch_size_of(self, num_ranks: int) -> int:
        """Return the number of samples in a full batch of one rank."""
        return self.size_of(num_ranks) // num_ranks

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return the sizes on which the batches depend, by name."""
        return {"global_batch_size": self.size_of(num_ranks)}


def share_out(start: int, size: int, sharding: Sharding) -> range:
    """Return this rank's slice of a global batch of `size` ordinals that begins at `start`.

    Raises:
        ValueError: A rank would get no samples.
    """
    rank = sharding.rank
    num_ranks = sharding.num_ranks
    if size < num_ranks:
        raise ValueError(
            f"A global batch has {counted(size, 'sample')} for {num_ranks} ranks: some would get nothing, and "
            'hang. Use `deal(uneven="pad")` or `deal(uneven="drop")`, or larger batches.'
        )
    return range(start + size * rank // num_ranks, start + size * (rank + 1) // num_ranks)
