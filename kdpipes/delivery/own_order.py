"""Orders and batches of the user's: `deal(batching=kdp.own_order(...))` and `kdp.own_batches(...)`."""

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
from kdpipes.delivery.grouped import Grouped, Groups
from kdpipes.delivery.layout import Sharding

# A sampler that gives more positions than this many passes over the source, and this many more, is taken to be endless.
_MOST_PASSES = 10
_MOST_MORE = 1_000_000


@runtime_checkable
class _CountsEpochs(Protocol):
    """A sampler whose order depends on the epoch: torch's `DistributedSampler`, or one of another library."""

    def __iter__(self) -> Iterator[int]: ...
    def set_epoch(self, epoch: int) -> None: ...


class _Listing(Fingerprinted):
    """The user's function or sampler, which lists positions or batches of them, and the seed of `deal`."""

    def __init__(self, param: str, listing: Any, seed: int) -> None:
        self._param = param
        self._listing = listing
        self._seed = seed
        self._is_sampler = not isinstance(listing, Callback)

    def fingerprint(self) -> Any:
        """Return what identifies the listing: the function, or the type of a sampler, which may hold a dataset."""
        return type(self._listing).__qualname__ if self._is_sampler else self._listing

    def reject_ranks(self, num_ranks: int) -> None:
        """Raise an error if `deal` would divide the part that a distributed sampler gives to one rank once more."""
        known = vars(_innermost(self._listing)) if self._is_sampler else {}
        num_replicas = known.get("num_replicas", known.get("world_size", 1))  # torch's name, and that of others
        if num_ranks > 1 and num_replicas != 1:
            raise ChainError(
                f"`{self._param}` is a sampler for {num_replicas} ranks, but `deal` divides batches between "
                f"{num_ranks} ranks as well, so samples would be lost. Use `deal(ranks=1, ...)`, which leaves the "
                "division to the sampler, or a sampler of all samples, or `deal(shuffle=True)`."
            )

    def positions(self, epoch: int, size: int) -> NDArray[np.int64]:
        """Return the positions of an epoch in a source of `size` samples, `[n] int`; raise if one is not valid."""
        return self._checked(self._listed(epoch, size), epoch, size)

    def batches(self, epoch: int, size: int) -> list[NDArray[np.int64]]:
        """Return the positions of each batch of an epoch; raise if one is not valid, or a batch is empty."""
        batches = [self._checked(batch, epoch, size) for batch in self._listed(epoch, size)]
        if not all(map(len, batches)):
            raise ValueError(f"`{self._param}` gave an empty batch for epoch {epoch}. Leave it out.")
        return batches

    def _checked(self, listed: Any, epoch: int, size: int) -> NDArray[np.int64]:
        positions = np.asarray(listed)
        positions = positions.astype(np.int64) if positions.shape == (0,) else positions
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise TypeError(
                f"`{self._param}` must return a 1-D array of integer positions, but returned {positions.dtype} of "
                f"shape {list(positions.shape)} for epoch {epoch} instead."
            )
        wrong = np.flatnonzero((positions < 0) | (positions >= size))
        if len(wrong):
            raise IndexError(
                f"`{self._param}` gave position {positions[wrong[0]]} for epoch {epoch}. Positions begin at 0; the "
                f"source has {size} samples. Leave other positions out."
            )
        return positions.astype(np.int64)

    def _listed(self, epoch: int, size: int) -> Any:
        key = hash_key("own order", self._seed, epoch)
        with seeded_globals(key):  # in which threads take turns: they share a sampler
            if self._is_sampler:
                return self._sampled(key, epoch, size)
            return (
                self._listing(epoch, rng=generator(key)) if "rng" in self._listing.parameters else self._listing(epoch)
            )

    def _sampled(self, key: bytes, epoch: int, size: int) -> list[Any]:
        sampler = self._listing
        inner = _innermost(self._listing)
        most = _MOST_PASSES * size + _MOST_MORE
        for each in (sampler, inner):
            if isinstance(each, _CountsEpochs):
                each.set_epoch(epoch)
        own = vars(inner).get("generator")
        if isinstance(own, torch.Generator):  # or its numbers would depend on how often it was asked
            own.manual_seed(int.from_bytes(key[:7], "little"))
        listed = list(islice(sampler, most + 1))
        if len(listed) > most:
            raise ValueError(
                f"`{self._param}` must end, but is a sampler that gave more than {most:,} positions for {size:,} "
                "samples. Use `deal(num_batches=...)` for epochs of any length."
            )
        return listed


def _innermost(sampler: Any) -> Any:
    """Return the sampler of samples that a sampler of batches reads; else the sampler itself."""
    inner = vars(sampler).get("sampler")
    return inner if isinstance(inner, Sampler | _CountsEpochs) else sampler


def _listed_by(param: str, listing: Any) -> Any:
    """Return a sampler unchanged, and a function as a `Callback`; raise TypeError for other objects."""
    return listing if isinstance(listing, Sampler | _CountsEpochs) else Callback(param, listing)


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
                "`order` must be a sampler of samples, not of batches: `deal(batch_size=...)` makes these. "
                "`kdp.own_batches(sampler)` takes a sampler of batches."
            )
        self._listing = _listed_by("order", order)

    def set_up(self, source: Any, arguments: Arguments) -> None:
        super().set_up(source, arguments)
        self._order = _Listing("order", self._listing, check_seed(arguments.seed))

    def source_fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return ((self._order, self._positions(source, num_ranks, 0)),)

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return self._layout.num_batches(len(self._positions(source, num_ranks, 0)), num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        positions = self._positions(source, sharding.num_ranks, number)
        return EqualEpoch(len(positions), self._layout, sharding, positions)

    def _positions(self, source: Any, num_ranks: int, epoch: int) -> NDArray[Any]:
        """Return the positions of an epoch; raise if epochs differ in length."""
        self._order.reject_ranks(num_ranks)
        first: NDArray[Any] = self._once(lambda: self._order.positions(0, len(source)))
        positions = self._order.positions(epoch, len(source)) if epoch else first
        if len(positions) != len(first):
            raise ValueError(
                f"`order` must return the same number of positions in every epoch, but returned {len(first)} for epoch "
                f"0 and {len(positions)} for epoch {epoch}. `deal(num_batches=...)` makes epochs of any length."
            )
        return positions


class OwnBatches(Grouped):
    """Batches of your own: `deal(batching=kdp.own_batches(lambda epoch, rng: ...))`.

    Each is a batch of all ranks together, which share it out evenly. Otherwise, it is as with `kdp.own_order`: each
    worker lists all batches when an epoch begins.

    Args:
        batches: Either a function that takes the epoch number, and `rng` if it has a parameter of that name, and
            returns the positions of each batch, as lists or arrays `[n] int`; or a sampler of batches. Epochs must have
            equally many batches.

    Raises:
        TypeError: `batches` is no function or sampler.
        IndexError: When an epoch begins: a position lies outside the source.
        ValueError: When an epoch begins: a batch is empty, has fewer samples than there are ranks, or epochs differ in
            their number of batches.

    Example:
        >>> letters = kdp.from_dataset(["a", "b", "c"], "x").select("x")
        >>> list(letters.deal(batching=kdp.own_batches(lambda epoch: [[2], [0, 1]])))
        [[('c',)], [('a',), ('b',)]]
    """

    call = "kdp.own_batches"
    rejects = ("batch_size", "global_batch_size", "shuffle", "num_batches", "uneven")
    fixed_by = "kdp.own_batches(...)"

    def __init__(self, batches: Any) -> None:
        self._listing = _listed_by("batches", batches)

    def set_up(self, source: Any, arguments: Arguments) -> None:
        self._batches = _Listing("batches", self._listing, check_seed(arguments.seed))

    def prepare(self, source: Any, num_ranks: int) -> Any:
        self.fix(source)
        self._batches.reject_ranks(num_ranks)
        return self._once(lambda: self._batches.batches(0, len(source)))

    def source_fingerprint(self, source: Any, num_ranks: int) -> tuple[Any, ...]:
        return self._batches, *self.prepare(source, num_ranks)

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        return {"batching": self.call}

    def groups(self, source: Any, num_ranks: int, number: int) -> Groups:
        first = self.prepare(source, num_ranks)
        batches = self._batches.batches(number, len(source)) if number else first
        if len(batches) != len(first):
            raise ValueError(
                f"`batches` must return the same number of batches in every epoch, but returned {len(first)} for epoch "
                f"0 and {len(batches)} for epoch {number}."
            )
        sizes = np.asarray([len(batch) for batch in batches], dtype=np.int64)
        positions = np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)
        return Groups(positions, np.cumsum([0, *sizes]), sizes)
