"""Epoch receipts: which samples of an epoch a loader has delivered, and whether several loaders delivered all of it.

The digest of a set of samples is the sum of a hash of each, so that the digests of ranks, or of the parts of an epoch
that was resumed, add up to that of the epoch. A batch that is missing, or that came twice, changes the sum.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, must_be
from kdpipes.delivery.deal import DealerMapDataPipe
from kdpipes.delivery.layout import Ranks
from kdpipes.delivery.skipping import Skip
from kdpipes.loader.worker import Position

__all__ = ["Delivered", "Verdict", "receipt_of", "verify_receipts"]

_VERSION = 1
_BLOCK = 1024  # batches that are hashed at a time
_ALL = 2**62  # more batches than an epoch has
_SAME = ("pipes", "sizes", "num_batches", "planned")  # what all receipts of an epoch have in common
_KINDS = {"epoch": int, "rank": int, "num_ranks": int, "num_samples": int, "batches": list, "planned": dict}


@dataclass
class Delivered:
    """Which batches of the last epoch a loader has delivered: those from `first` up to `stop`.

    If an epoch is resumed at an earlier batch, as from a checkpoint, the batches from there on count as not delivered.
    """

    epoch: int = 0
    first: int = 0
    stop: int = 0
    listener: Callable[[], None] | None = None  # called after each batch

    def begin(self, position: Position) -> None:
        """Note where an iteration begins."""
        if position.epoch == self.epoch and self.first <= position.number <= self.stop:
            self.stop = position.number
        elif position.number or position.epoch == self.epoch:
            self.epoch, self.first, self.stop = position.epoch, position.number, position.number

    def note(self, position: Position) -> None:
        """Note the position after an item that was delivered."""
        if position.epoch != self.epoch:
            self.epoch, self.first, self.stop = position.epoch, 0, 0
        self.stop = position.number
        if self.listener is not None:
            self.listener()

    def end(self, epoch: int) -> None:
        """Note the end of an epoch: its last batches count even if all of their samples were skipped."""
        if epoch == self.epoch:
            self.stop = _ALL


class _Digest:
    """The number of some samples, a digest of them in any order, and one of their order."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._sums = np.zeros(2, np.uint64)
        self._order = hashlib.blake2b(digest_size=16)

    def add(self, positions: NDArray[Any]) -> None:
        """Add samples by their positions in the plan."""
        numbers = np.asarray(positions, np.uint64)
        self.num_samples += len(numbers)
        self._sums += [_mixed(numbers, seed).sum(dtype=np.uint64) for seed in (1, 2)]
        self._order.update(numbers.astype("<u8").tobytes())

    @property
    def digest(self) -> str:
        return "".join(f"{int(total):016x}" for total in self._sums)

    @property
    def order(self) -> str:
        return self._order.hexdigest()


def _mixed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return a hash of 64 bits of each number: the finalizer of SplitMix64."""
    mixed: NDArray[np.uint64] = (numbers + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _sum_of(digests: Iterable[str]) -> str:
    totals = [0, 0]
    for digest in digests:
        totals = [
            (total + int(part, 16)) % 2**64 for total, part in zip(totals, (digest[:16], digest[16:]), strict=True)
        ]
    return "".join(f"{total:016x}" for total in totals)


def receipt_of(
    chain: Any,
    delivered: Delivered,
    skips: Iterable[Skip],
    ranks: Ranks,
    *,
    pipes: Sequence[str],
    sizes: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the receipt of the last epoch of a loader: see `Loader.receipt`.

    Args:
        chain: The part of the chain that workers run.
        delivered: The batches that were delivered.
        skips: The samples that `on_error` skipped.
        ranks: The ranks of the epoch.
        pipes: The fingerprints of the chain.
        sizes: The sizes of the batches.

    Raises:
        ChainError: The chain is not dealt from an indexed source, so that its epochs are not planned.
    """
    deal = Chain.of(chain).resumable_deal()
    if not isinstance(deal, DealerMapDataPipe):
        raise ChainError(
            "A receipt needs the plan of the epoch, which only indexed chains have. Use an indexed source, like "
            "`kdp.open_shards`, and `.deal(...)`, without pipes after it that hold batches back."
        )
    ranks, num_samples = Ranks() if deal.is_for_all_ranks else ranks, len(deal.source)
    plans = [deal.planned_epoch(delivered.epoch, Ranks(rank, ranks.num_ranks)) for rank in range(ranks.num_ranks)]
    num_batches = plans[0].num_batches
    batches = range(delivered.first, max(min(delivered.stop, num_batches), delivered.first))
    left_out = [skip.ordinal for skip in skips if skip.epoch == delivered.epoch and not skip.is_shard]
    planned, given, skipped, num_padding = _Digest(), _Digest(), _Digest(), 0
    for plan in plans:
        for ordinals, positions in _parts(plan, range(num_batches)):
            planned.add(positions[ordinals < num_samples])
    for ordinals, positions in _parts(plans[ranks.rank], batches):
        is_skipped, is_padding = np.isin(ordinals, left_out), ordinals >= num_samples
        given.add(positions[~is_skipped & ~is_padding])
        skipped.add(positions[is_skipped & ~is_padding])
        num_padding += int((is_padding & ~is_skipped).sum())
    return {
        "version": _VERSION,
        "pipes": list(pipes),
        "sizes": dict(sizes or {}),
        "epoch": delivered.epoch,
        "rank": ranks.rank,
        "num_ranks": ranks.num_ranks,
        "batches": [batches.start, batches.stop],
        "num_batches": num_batches,
        "num_samples": given.num_samples,
        "num_padding": num_padding,
        "digest": given.digest,
        "order": given.order,
        "skipped": {"num_samples": skipped.num_samples, "digest": skipped.digest},
        "planned": {"num_samples": planned.num_samples, "digest": planned.digest},
    }


def _parts(plan: Any, batches: range) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield the ordinals and positions of the samples of batches, many batches at a time."""
    for begin in range(0, len(batches), _BLOCK):
        some = batches[begin : begin + _BLOCK]
        ordinals = np.concatenate([np.asarray(plan.ordinals(batch)) for batch in some])
        yield ordinals, np.concatenate([plan.positions(batch) for batch in some])


class Verdict(NamedTuple):
    """What `verify_receipts` found.

    Args:
        is_complete: Whether every planned sample was delivered exactly once, except for those that `on_error` skipped.
        num_samples: The number of delivered samples, over all receipts.
        num_skipped: The number of samples that `on_error` skipped.
        epochs: The numbers of the epochs.
        problems: What is wrong, one sentence each.
    """

    is_complete: bool
    num_samples: int
    num_skipped: int
    epochs: tuple[int, ...]
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.is_complete

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(self.problems)
        what = "epoch" if len(self.epochs) == 1 else "epochs"
        shown = ", ".join(map(str, self.epochs))
        skipped = f", except for {self.num_skipped:,} that `on_error` skipped" if self.num_skipped else ""
        return f"Every sample of {what} {shown} was delivered exactly once: {self.num_samples:,} samples{skipped}."


def verify_receipts(receipts: Iterable[Mapping[str, Any]]) -> Verdict:
    """Return whether receipts together show that every planned sample was delivered exactly once.

    Each epoch is verified on its own. The receipts of an epoch may be those of several ranks, and of the parts of an
    epoch that was resumed, also with another number of ranks at the same global batch.

    Args:
        receipts: What `Loader.receipt` returned, in any order.

    Raises:
        ValueError: There are no receipts, or one is not a receipt.

    Example:
        >>> chain = kdp.from_dataset([(n, 0) for n in range(10)]).select("x").deal(batch_size=4)
        >>> with kdp.Loader(chain) as loader:
        ...     batches = list(loader)
        ...     print(kdp.verify_receipts([loader.receipt()]))
        Every sample of epoch 0 was delivered exactly once: 10 samples.
    """
    by_epoch: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for receipt in receipts:
        _check(receipt)
        by_epoch[receipt["epoch"]].append(receipt)
    if not by_epoch:
        raise ValueError("`receipts` must hold at least one receipt, but is empty.")
    problems = [f"Epoch {epoch}: {text}" for epoch in sorted(by_epoch) for text in _problems(by_epoch[epoch])]
    every = [receipt for found in by_epoch.values() for receipt in found]
    skipped = sum(receipt["skipped"]["num_samples"] for receipt in every)
    total = sum(receipt["num_samples"] for receipt in every)
    return Verdict(not problems, total, skipped, tuple(sorted(by_epoch)), tuple(problems))


def _check(receipt: Any) -> None:
    is_receipt = isinstance(receipt, Mapping) and all(
        isinstance(receipt.get(name), kind) for name, kind in _KINDS.items()
    )
    if not is_receipt or not {"version", *_SAME, "digest", "skipped"} <= set(receipt) or len(receipt["batches"]) != 2:
        raise ValueError(must_be("receipt", "what `receipt()` of a Loader returns", receipt))
    if receipt["version"] != _VERSION:
        raise ValueError(f"The receipt is of version {receipt['version']}, but this kdpipes reads version {_VERSION}.")
    if not 0 <= receipt["rank"] < receipt["num_ranks"]:
        raise ValueError(must_be("receipt['rank']", f"from 0 to {receipt['num_ranks'] - 1}", receipt["rank"]))


def _problems(receipts: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with the receipts of one epoch."""
    first = receipts[0]
    for name in _SAME:
        if any(receipt[name] != first[name] for receipt in receipts):
            yield f"the receipts differ in `{name}`, so they are not of the same epoch of the same chain."
            return
    found = list(_gaps(receipts))
    yield from found
    digests = [digest for receipt in receipts for digest in (receipt["digest"], receipt["skipped"]["digest"])]
    counts = [receipt["num_samples"] + receipt["skipped"]["num_samples"] for receipt in receipts]
    planned = first["planned"]
    if not found and (sum(counts), _sum_of(digests)) != (planned["num_samples"], planned["digest"]):
        number = planned["num_samples"]
        yield f"{sum(counts):,} samples were delivered or skipped, but they are not the {number:,} planned ones."


def _gaps(receipts: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield which batches are missing, and which were delivered more than once.

    Rank r of n has the share from r/n to (r+1)/n of each global batch, so receipts of different numbers of ranks fit
    together.
    """
    covered = []
    for receipt in receipts:
        rank, num_ranks = receipt["rank"], receipt["num_ranks"]
        covered.append((*receipt["batches"], Fraction(rank, num_ranks), Fraction(rank + 1, num_ranks)))
    rows = sorted({0, receipts[0]["num_batches"], *(row for each in covered for row in each[:2])})
    columns = sorted({Fraction(0), Fraction(1), *(column for each in covered for column in each[2:])})
    for left, right in pairwise(columns):
        spans: list[list[int]] = []  # begin, end and how often delivered, joined while that is the same
        for begin, end in pairwise(rows):
            times = sum(b <= begin and end <= e and x <= left and right <= y for b, e, x, y in covered)
            if spans and spans[-1][2] == times:
                spans[-1][1] = end
            else:
                spans.append([begin, end, times])
        for begin, end, times in spans:
            if times != 1:
                shown = f"batch {begin}" if end == begin + 1 else f"batches {begin} to {end - 1}"
                rank, num_ranks = left / (right - left), 1 / (right - left)
                whose = f" of rank {rank} of {num_ranks}" if num_ranks > 1 else ""
                yield f"{shown}{whose}: {f'delivered {times} times' if times else 'not delivered'}."
