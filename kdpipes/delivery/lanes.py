"""Lanes: the parts into which an epoch of a stream is cut, so that each shard is read once, by one worker."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from kdpipes.core.chain import Chain, Shards
from kdpipes.core.errors import DataError, check_count
from kdpipes.core.sample import Sample
from kdpipes.delivery.layout import Sharding

_MAX_EMPTY = 16  # passes of a lane without a sample
_MAX_AGAIN = 10**8  # samples of an endless lane that are read again to resume it


@dataclass(frozen=True)
class Lanes:
    """Cut a stream of shards into lanes, each of which one worker reads: `deal(batch_size=32, split=kdp.lanes(8))`.

    Args:
        number: The number of lanes; at most the number of shards are used. It limits how many workers, over all ranks,
            have work to do. With 1, a single worker reads the shards one after the other.
        max_ranks: With `global_batch_size`: the largest number of ranks, which must divide `global_batch_size` and the
            number of lanes. A global batch has a piece from each of `max_ranks` lanes, so up to `number / max_ranks`
            workers of each rank are useful. By default, the largest of 4, 2 and 1 that divides both.

    Raises:
        ValueError: An argument is less than 1; or, when `deal` is called, `max_ranks` is given without
            `global_batch_size`, or does not divide it and the number of lanes.
        ChainError: When `deal` is called: the stream cannot be cut into lanes.

    Example:
        >>> kdp.lanes(4, max_ranks=2).number
        4
    """

    call: ClassVar[str] = "kdp.lanes"
    number: int = 16
    max_ranks: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", check_count("number", self.number))  # converts NumPy integers
        if self.max_ranks is not None:
            object.__setattr__(self, "max_ranks", check_count("max_ranks", self.max_ranks))


class Cursor(NamedTuple):
    """A position in a stream of shards.

    Args:
        shard: The number of the shard, among those of the lane; counted on from pass to pass with `num_batches`.
        place: The number of samples of that shard that have been read.
        num_samples: The number of samples that have been read in all.
        num_batches: The number of batches that the lane, or the whole stream, has yielded so far.
    """

    shard: int
    place: int
    num_samples: int
    num_batches: int


Cursors = tuple[tuple[int, Cursor], ...]  # by the number of the lane; 0 for a stream that is read whole


def merged(*cursors: Cursors) -> Cursors:
    """Return the latest cursor of each lane."""
    if not any(cursors):  # indexed chains have no lanes
        return ()
    return tuple(sorted({lane: cursor for some in cursors for lane, cursor in some}.items()))


@dataclass(frozen=True)
class LanePlan:
    """The lanes of an epoch, which depend on the chain, and with `batch_size`, on the number of ranks.

    Global batch n is the batch of group n % num_groups. A group has `num_pieces` lanes, each of which gives an equal
    piece of the batch. A rank makes neighboring pieces, and a worker whole groups.

    A stream that is not cut is a single lane, which every worker of every rank reads.
    """

    num_groups: int
    num_pieces: int  # the number of lanes in a group
    piece_size: int  # the number of samples in a piece
    is_whole: bool = False  # whether the stream is not cut

    @property
    def num_lanes(self) -> int:
        return self.num_groups * self.num_pieces

    @property
    def batch_size(self) -> int:
        """The number of samples in a global batch."""
        return self.num_pieces * self.piece_size

    def idle_text(self, num_workers: int) -> str:
        """Return a warning that some of a rank's workers have nothing to do."""
        return (
            f"{num_workers - self.num_groups} of {num_workers} workers have nothing to do: the stream has "
            f"{self.num_lanes} lanes, and each batch takes a piece from {self.num_pieces}. As many workers need "
            f"{self.num_pieces * num_workers} lanes, of at least one shard each. Use fewer workers, more shards, or "
            "`deal(split=kdp.lanes(...))`."
        )

    def groups_of(self, sharding: Sharding) -> range:
        """Return the groups of a worker."""
        return range(sharding.worker, self.num_groups, sharding.num_workers)

    def lanes_of(self, group: int, sharding: Sharding) -> range:
        """Return the lanes of a group that a rank reads."""
        first = group * self.num_pieces
        size = self.num_pieces // sharding.num_ranks
        return range(first + size * sharding.rank, first + size * (sharding.rank + 1))


class Lane:
    """One lane of an epoch: the samples of its shards, in pieces of batches.

    Args:
        number: The number of the lane.
        items: The samples from `cursor` on, not yet loaded.
        again: The samples of the lane again and again, without end, for padding.
        size: The number of samples in a piece.
        place: Returns where the items stand, as the first three numbers of a cursor; None if no cursor resumes them.
        cursor: Where `items` begin; None for the start of the lane.
        is_endless: Whether the items have no end.
    """

    def __init__(
        self,
        number: int,
        items: Iterator[Any],
        again: Iterator[Any],
        size: int,
        place: Callable[[], tuple[int, int, int] | None],
        cursor: Cursor | None,
        *,
        is_endless: bool,
    ) -> None:
        self.number = number
        self.cursor = cursor
        self._items = items
        self._again = again
        self._size = size
        self._place = place
        self.num_batches = 0 if cursor is None else cursor.num_batches
        self._num_taken = size  # of the last piece
        self._padding: list[Any] = []
        self._is_endless = is_endless

    def take(self, batch: int) -> list[Any]:
        """Return the lane's piece of its `batch`-th batch; short or empty at the end of the lane."""
        num_before = max(batch - self.num_batches, 0) * self._size
        if self._is_endless:
            _reject_far(num_before)
        deque(islice(self._items, min(num_before, sys.maxsize)), maxlen=0)  # ends with the lane, also for a huge batch
        taken = list(islice(self._items, self._size))
        self.num_batches = batch + 1
        self._num_taken = len(taken)
        if (place := self._place()) is not None:
            self.cursor = Cursor(*place, num_batches=self.num_batches)
        return taken

    def is_short(self, uneven: str) -> bool:
        """Return whether the last piece is too short for a batch."""
        return self._num_taken < (self._size if uneven == "drop" else 1)

    def close(self) -> None:
        if isinstance(self._items, Passes):
            self._items.close()

    def padding(self, number: int) -> list[Any]:
        """Return samples that pad a piece: always the first ones, so that it can be resumed at any batch."""
        self._padding += islice(self._again, max(number - len(self._padding), 0))
        return [item.fork() if isinstance(item, Sample) else item for item in self._padding[:number]]


def _reject_far(num_samples: int) -> None:
    """Raise DataError if resuming would read so many samples again that it would seem to hang."""
    if num_samples > _MAX_AGAIN:
        raise DataError(
            f"To resume the stream, {num_samples:,} samples of one lane would have to be read again. Load a state that "
            "`state_dict()` returned, unchanged. If the epoch or the batch is right, begin with another epoch."
        )


class Passes(Iterator[Any]):
    """The samples of a lane, pass after pass, without end.

    Args:
        begin: Returns the items of a pass by its number, from a cursor on (None is the start), and the shards whose
            cursor can resume them; None if a pipe holds samples back.
        num_shards: The number of the lane's shards, by which a cursor counts on from pass to pass.
        cursor: Where to begin.
    """

    def __init__(
        self,
        begin: Callable[[int, Cursor | None], tuple[Iterator[Any], Shards | None]],
        num_shards: int,
        cursor: Cursor | None,
    ) -> None:
        self._begin_pass = begin
        self._num_shards = num_shards
        self._pass, shard = (0, 0) if cursor is None else divmod(cursor.shard, num_shards)
        self._items, self._shards = begin(self._pass, None if cursor is None else cursor._replace(shard=shard))
        self._num_taken = 0  # of this pass, where no shards count them
        if self._shards is None and cursor is not None:  # read again, to fill the buffers with the same samples
            _reject_far(cursor.num_samples)
            self._num_taken = sum(1 for _ in islice(self._items, cursor.num_samples))
        self._num_empty = int(cursor is None) - 1  # the pass of a cursor may have nothing left
        self._is_empty = True

    def close(self) -> None:
        """Close the shard that is being read."""
        if isinstance(self._items, Generator):
            self._items.close()
        self._items = iter(())

    def place(self) -> tuple[int, int, int]:
        """Return where the items stand, as the first three numbers of a cursor."""
        if self._shards is None:
            return self._pass * self._num_shards, 0, self._num_taken
        shard, place, number = self._shards.cursor
        return self._pass * self._num_shards + shard, place, number

    def __next__(self) -> Any:
        while True:
            for item in self._items:
                self._num_taken = self._num_taken + 1
                self._num_empty = 0
                self._is_empty = False
                return item
            self._num_empty = self._num_empty + 1 if self._is_empty else 0
            if self._num_empty > _MAX_EMPTY:
                raise DataError(
                    f"A lane of the stream gave no sample in {self._num_empty} passes, so `deal(num_batches=...)` "
                    "cannot fill its batches. Use fewer `lanes`."
                )
            self._pass = self._pass + 1
            self._num_taken = 0
            self._is_empty = True
            self._items, self._shards = self._begin_pass(self._pass, None)


class KeptLanes:
    """The lanes of an epoch with `num_batches`, kept for the next one, which continues them.

    A copy is empty, since open files and filled buffers belong to one pipe (`owner`) in one process. After an error,
    or an epoch that was left early, only the cursors are kept.
    """

    def __init__(
        self,
        owner: Any = None,
        plan: LanePlan | None = None,
        lanes: dict[int, Lane] | None = None,
        cursors: dict[int, Cursor] | None = None,
    ) -> None:
        self._of = id(owner), os.getpid(), plan
        self._lanes = lanes or {}
        self._cursors = cursors or {}

    def __reduce__(self) -> Any:
        return KeptLanes, ()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the files of the lanes; the next epoch resumes the lanes at their cursors."""
        lanes = self._lanes
        self._lanes = {}
        if self._of[1] == os.getpid():  # a process that was forked does not read them
            for lane in lanes.values():
                lane.close()

    def of(self, owner: Any, plan: LanePlan) -> tuple[dict[int, Lane], dict[int, Cursor]]:
        """Return the lanes and cursors, if they are those of a pipe and a plan."""
        if self._of != (id(owner), os.getpid(), plan):
            return {}, {}
        lanes = self._lanes
        self._lanes = {}
        return lanes, self._cursors


def shards_behind(pipe: Any) -> Any:
    """Return the stream of shards that a chain reads, if it reads one and nothing else."""
    found = Chain.of(pipe).sources
    return found[0].pipe if len(found) == 1 and isinstance(found[0].pipe, Shards) else None


def resumable_shards(pipe: Any) -> Any:
    """Return the stream of shards that a chain reads, if no pipe on the way holds samples back; else None."""
    shards = shards_behind(pipe)
    held_back = any(node.traits.holds_back for node in Chain.of(pipe) if node.pipe is not shards)
    return None if held_back else shards


def hash_of_sample(key: str) -> bytes:
    """Return 8 bytes that stand for a sample in receipts; no sample has eight zeros, which stand for padding."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()
