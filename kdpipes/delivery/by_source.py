"""Batches with fixed shares of the sources of a `mix`, or of one source each. Pure arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import Permutation, interleave_exactly, share_exactly, smallest_int
from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, DataError
from kdpipes.core.plan_pipe import BatchShares, composition_of
from kdpipes.core.randomness import hash_key
from kdpipes.core.registry import pipe_name
from kdpipes.delivery.batching import Arguments, Epoch, EqualBatching, EqualEpoch
from kdpipes.delivery.layout import Sharding


def shares_of(source: Any) -> BatchShares | None:
    """Return how a `mix` upstream wants batches to be composed; None if it leaves that to `deal`."""
    if (asked := composition_of(source)) is not None:
        return asked.shares
    pipes = Chain.of(source).pipes
    mix = next((pipe for pipe in pipes if composition_of(pipe) is not None), None)
    if mix is not None:
        raise ChainError(
            f"`{pipe_name(mix)}` sets which sources each batch has samples of, but a pipe between it and `deal` joins "
            "several sources, or is not of kdpipes. Put such pipes before the mix."
        )
    return None


class BySource(EqualBatching):
    """Batches of equal size with fixed shares of the sources of a `mix`.

    Args:
        shares: The shares of the sources that the mix asks for.
    """

    def __init__(self, shares: BatchShares) -> None:
        self.shares = shares

    def set_up(self, source: Any, arguments: Arguments) -> None:
        super().set_up(source, arguments)
        if not isinstance(arguments.shuffle, bool) or arguments.num_batches is not None:
            raise ValueError(
                '`num_batches` and `shuffle="shards"` cannot be used after `mix(per_batch=...)` or `mix(batches=...)`, '
                "which compose the batches. Remove them."
            )

    def prepare(self, source: Any, num_ranks: int) -> Any:
        # Each batch of a rank is composed, or each global batch if its size is given.
        size = self._layout.batch_size or self._layout.size_of(num_ranks)
        asked = composition_of(source)
        assert asked is not None
        return self._once(lambda: SourceOrder(asked.numbers(), self.shares, size))

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return self._layout.num_batches(self._size(source, num_ranks), num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        order = _EpochOrder(self.prepare(source, sharding.num_ranks), self._key(seed, number))
        return EqualEpoch(self._size(source, sharding.num_ranks), self._layout, sharding, order)

    def _size(self, source: Any, num_ranks: int) -> int:
        """Return the number of samples in an epoch.

        Leftover samples are not divided among ranks, because that would change the shares.
        """
        size = len(self.prepare(source, num_ranks))
        global_size = self._layout.size_of(num_ranks)
        if 0 < size < global_size:
            raise DataError(
                f"`mix` fills fewer batches in an epoch ({size // self._layout.size_of(1)}) than there are ranks "
                f"({num_ranks}). Use fewer ranks, or smaller batches."
            )
        return size if self.uneven == "pad" else size - size % global_size


class SourceOrder:
    """The orders of epochs in which each block of `size` samples is composed as a `mix` wants it.

    Samples that do not fill a block are left out.

    Args:
        numbers: The number of the source of each sample, `[num_samples] int`.
        shares: How to compose a block.
        size: The number of samples in a block: a batch of one rank, or the global batch.
    """

    def __init__(self, numbers: NDArray[Any], shares: BatchShares, size: int) -> None:
        kind = smallest_int(len(numbers))
        self.groups = [np.flatnonzero(numbers == number).astype(kind) for number in range(len(shares.shares))]
        self.size = size
        lengths = [len(group) for group in self.groups]
        if shares.kind == "per_source":
            self.owners, self.turns = interleave_exactly([length // size for length in lengths], 0)
            self.counts = [size] * len(lengths)
            self.num_blocks = len(self.owners)
        else:
            self.counts = _counts_in_block(shares, size)
            self.num_blocks = min(length // count for length, count in zip(lengths, self.counts, strict=True) if count)
            # Samples of one source are spread over the block, so that ranks that share it get about equally many.
            self.owners, self.turns = interleave_exactly(self.counts, 0)
        self.is_per_source = shares.kind == "per_source"
        if not self.num_blocks and len(numbers):
            number, length, count = next(
                (number, length, count)
                for number, (length, count) in enumerate(zip(lengths, self.counts, strict=True))
                if length < count
            )
            raise DataError(
                f"A batch needs {count} samples of source {number} of `mix`, but an epoch has only {length} of them. "
                "Use smaller batches, or give this source a smaller weight."
            )

    def __len__(self) -> int:
        return self.num_blocks * self.size


def _counts_in_block(shares: BatchShares, size: int) -> list[int]:
    if shares.kind == "fixed":
        counts = [int(share) for share in shares.shares]
        if sum(counts) != size:
            raise ValueError(
                f"`batch_size` or `global_batch_size` must be {sum(counts)}, the sum of `mix(per_batch={counts})`, but "
                f"is {size} instead."
            )
        return counts
    counts = share_exactly(size, shares.shares)
    if not all(counts):
        raise ValueError(
            f"A batch of {size} is too small for the shares of `mix`: source {counts.index(0)} would get no sample. "
            "Use a larger batch size, or give this source a larger share."
        )
    return counts


class _EpochOrder:
    """The order of one epoch: `order[ordinals]` returns positions; without a key, in the order of the sources."""

    def __init__(self, order: SourceOrder, key: tuple[int, int] | None) -> None:
        self._order = order
        self._key = key
        self._within: dict[int, Permutation] = {}
        self._blocks: Permutation | None = None
        if key is not None:
            self._within = {
                number: Permutation(len(group), key=hash_key("source", *key, number))
                for number, group in enumerate(order.groups)
                if len(group)
            }
            self._blocks = Permutation(order.num_blocks, key=hash_key("blocks", *key))

    def __getitem__(self, ordinals: NDArray[Any]) -> NDArray[Any]:
        order = self._order
        blocks, slots = np.divmod(np.asarray(ordinals), order.size)
        if order.is_per_source:
            places = blocks if self._blocks is None else self._blocks[blocks]
            owners = order.owners[places]
            counts = order.turns[places].astype(np.int64) * order.size + slots
        else:
            owners = order.owners[slots]
            counts = blocks * np.asarray(order.counts)[owners] + order.turns[slots]
        positions = np.empty(len(owners), dtype=np.int64)
        for number in np.unique(owners).tolist():
            here = owners == number
            found = counts[here] if self._key is None else self._within[number][counts[here]]
            positions[here] = order.groups[number][found]
        return positions
