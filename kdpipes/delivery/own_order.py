"""Batches in an order of the user's: `deal(batching=kdp.own_order(...))`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler

from kdpipes.core.callback import Callback
from kdpipes.core.errors import ChainError, check_seed
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.randomness import generator, hash_key, seeded_globals
from kdpipes.delivery.batching import Arguments, Epoch, EqualBatching, EqualEpoch
from kdpipes.delivery.layout import Sharding

# A sampler that gives more positions than this many passes over the source, and this many more, is taken to be endless.
_MOST_PASSES, _MOST_MORE = 10, 1_000_000


@runtime_checkable
class _CountsEpochs(Protocol):
    """A sampler whose order depends on the epoch: torch's `DistributedSampler`, or one of another library."""

    def __iter__(self) -> Iterator[int]: ...
    def set_epoch(self, epoch: int) -> None: ...


class _Order(Fingerprinted):
    """The user's function or sampler, and the seed of `deal`."""

    def __init__(self, order: Any, seed: int) -> None:
        self._is_sampler, self._order, self._seed = not isinstance(order, Callback), order, seed

    def fingerprint(self) -> Any:
        """Return what identifies the order: the function, or the type of a sampler, which may hold a whole dataset."""
        return type(self._order).__qualname__ if self._is_sampler else self._order

    def reject_ranks(self, num_ranks: int) -> None:
        """Raise an error if `deal` would divide the part that a distributed sampler gives to one rank once more."""
        known = vars(self._order) if self._is_sampler else {}
        num_replicas = known.get("num_replicas", known.get("world_size", 1))  # torch's name, and that of others
        if num_ranks > 1 and num_replicas != 1:
            raise ChainError(
                f"`order` is a sampler for {num_replicas} ranks, but `deal` divides batches between {num_ranks} ranks "
                "as well, so samples would be lost. Use `deal(ranks=1, ...)`, which leaves the division to "
                "the sampler, or a sampler of all samples, or `deal(shuffle=True)`."
            )

    def positions(self, epoch: int, size: int) -> NDArray[np.int64]:
        """Return the positions of an epoch in a source of `size` samples, `[n] int`; raise if one is not valid."""
        key = hash_key("own order", self._seed, epoch)
        given = self._sampled(key, epoch, size) if self._is_sampler else self._called(key, epoch)
        positions = np.asarray(given)
        positions = positions.astype(np.int64) if positions.shape == (0,) else positions
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise TypeError(
                f"`order` must return a 1-D array of integer positions, but returned {positions.dtype} of shape "
                f"{list(positions.shape)} for epoch {epoch} instead."
            )
        wrong = np.flatnonzero((positions < 0) | (positions >= size))
        if len(wrong):
            raise IndexError(
                f"`order` gave position {positions[wrong[0]]} for epoch {epoch}. Positions begin at 0; the source has "
                f"{size} samples."
            )
        return positions.astype(np.int64)

    def _called(self, key: bytes, epoch: int) -> Any:
        with seeded_globals(key):
            if "rng" in self._order.parameters:
                return self._order(epoch, rng=generator(key))
            return self._order(epoch)

    def _sampled(self, key: bytes, epoch: int, size: int) -> list[int]:
        sampler: Any = self._order
        most = _MOST_PASSES * size + _MOST_MORE
        with seeded_globals(key):  # in which threads take turns: they share the sampler
            if isinstance(sampler, _CountsEpochs):
                sampler.set_epoch(epoch)
            own = vars(sampler).get("generator")
            if isinstance(own, torch.Generator):  # or its numbers would depend on how often it was asked
                own.manual_seed(int.from_bytes(key[:7], "little"))
            positions = list(islice(sampler, most + 1))
        if len(positions) > most:
            raise ValueError(
                f"`order` must end, but is a sampler that gave more than {most:,} positions for {size:,} samples. Use "
                "`deal(num_batches=...)` for epochs of any length."
            )
        return positions


class OwnOrder(EqualBatching):
    """Batches of equal size in an order of your own: `deal(batch_size=32, batching=kdp.own_order(sampler))`.

    Each worker computes the whole order when an epoch begins, so it must be finite, and depend only on the arguments
    and on the global random generators, which are seeded for it. Positions may be repeated or left out.

    Args:
        order: Either a function that takes the epoch number, and `rng` if it has a parameter of that name, and returns
            positions in the source, `[n] int`, with the same n in every epoch; or a sampler of torch, or one with
            `set_epoch`, which is called. A sampler for several ranks needs `deal(ranks=1)`.

    Raises:
        TypeError: `order` is no function or sampler, or a sampler of batches.
        IndexError: When an epoch begins: a position lies outside the source.
        ChainError: When an epoch begins: `order` is a sampler for several ranks, without `deal(ranks=1)`.

    Example:
        >>> letters = kdp.from_dataset(["a", "b", "c"], "x").select("x")
        >>> list(letters.deal(batch_size=2, batching=kdp.own_order(lambda epoch: [2, 0])))
        [[('c',), ('a',)]]
    """

    call = "kdp.own_order"
    rejects = ("shuffle", "num_batches")

    def __init__(self, order: Any) -> None:
        if isinstance(order, BatchSampler):
            raise TypeError(
                "`order` must be a sampler of samples, not of batches: `deal(batch_size=...)` makes these. If its "
                "batches are of one size, use `lambda epoch: [place for batch in sampler for place in batch]`."
            )
        is_sampler = isinstance(order, Sampler | _CountsEpochs)
        self._user_order = order if is_sampler else Callback("order", order)

    def set_up(self, source: Any, arguments: Arguments) -> None:
        super().set_up(source, arguments)
        self._positions_of = _Order(self._user_order, check_seed(arguments.seed))

    def source_fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return ((self._positions_of, self._positions(source, num_ranks, 0)),)

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return self._layout.num_batches(len(self._positions(source, num_ranks, 0)), num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        positions = self._positions(source, sharding.num_ranks, number)
        return EqualEpoch(len(positions), self._layout, sharding, positions)

    def _positions(self, source: Any, num_ranks: int, epoch: int) -> NDArray[Any]:
        """Return the positions of an epoch; raise if epochs differ in length."""
        self._positions_of.reject_ranks(num_ranks)
        first: NDArray[Any] = self._once(lambda: self._positions_of.positions(0, len(source)))
        positions = self._positions_of.positions(epoch, len(source)) if epoch else first
        if len(positions) != len(first):
            raise ValueError(
                f"`order` must return the same number of positions in every epoch, but returned {len(first)} for epoch "
                f"0 and {len(positions)} for epoch {epoch}. `deal(num_batches=...)` makes epochs of any length."
            )
        return positions
