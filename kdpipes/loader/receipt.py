"""Epoch receipts: which samples of an epoch a loader has delivered, and whether several loaders delivered all of it.

Samples are identified by their positions in the plan of the epoch, those of a stream by a hash of their keys. The
digest of a set of samples is the sum of a hash of each, so that the digests of ranks, or of the parts of an epoch that
was resumed, add up to that of the epoch. A batch that is missing, or that came twice, changes the sum.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import mixed64
from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, must_be
from kdpipes.core.messages import counted
from kdpipes.delivery.clock import Position
from kdpipes.delivery.deal_stream import DealerIterDataPipe
from kdpipes.delivery.lanes import hash_of_sample
from kdpipes.delivery.layout import Ranks
from kdpipes.delivery.skipping import Skip

_VERSION = 1
_AT_ONCE = 1 << 16  # samples that are hashed together
_MOST_PARTS = 1024  # batches whose hashes are kept apart
_ALL = 2**62  # more batches than an epoch has
_MAX_KEPT = 2**16  # hashes of samples in a receipt
_UNKNOWN = np.frombuffer(b"\1" * 8, "<u8")[0]  # in place of the hash of an item that is not a sample
Receipt = Mapping[str, Any]  # what `Loader.receipt` returns
Hashes = NDArray[np.uint64]
_SAME = ("pipes", "sizes", "num_batches")  # what all receipts of an epoch have in common
_KINDS = {"epoch": int, "rank": int, "num_ranks": int, "num_samples": int, "batches": list, "planned": dict}


@dataclass
class StreamSamples:
    """The samples of a stream that a loader has delivered, by the hashes of their keys.

    Above 65,536 samples, it keeps only the hashes that `share` divides, so that a long epoch takes no more memory.
    """

    num_samples: int = 0
    num_padding: int = 0
    num_unknown: int = 0  # items that are not samples
    sums: Hashes = field(default_factory=lambda: np.zeros(2, np.uint64))
    order: bytes = b""
    share: int = 1
    kept: list[Hashes] = field(default_factory=list)
    num_kept: int = 0

    def add(self, hashes: bytes) -> None:
        """Add the samples of a batch."""
        numbers = np.frombuffer(hashes, "<u8")
        own = numbers[numbers != 0]
        self.num_unknown += int((own == _UNKNOWN).sum())
        self.num_samples, self.num_padding = self.num_samples + len(own), self.num_padding + len(numbers) - len(own)
        self.sums = self.sums + _sums(own)
        self.order = hashlib.blake2b(self.order + own.tobytes(), digest_size=16).digest()
        self._keep(own)

    def _keep(self, numbers: Hashes) -> None:
        kept = numbers[numbers % np.uint64(self.share) == 0]
        self.kept.append(kept)
        self.num_kept += len(kept)
        if self.num_kept > _MAX_KEPT:
            every = np.concatenate(self.kept)
            self.kept = []
            self.num_kept = 0
            self.share = self.share * 2
            self._keep(every)
        elif len(self.kept) > _MOST_PARTS:
            self.kept = [np.concatenate(self.kept)]

    def hashes(self) -> str:
        """Return the kept hashes as text."""
        return base64.b64encode(np.sort(np.concatenate([np.zeros(0, "<u8"), *self.kept])).tobytes()).decode()


@dataclass
class Delivered:
    """The batches of the last epoch that a loader has delivered: from `first` up to `stop`, exclusive.

    If an epoch is resumed at an earlier batch, as from a checkpoint, the batches from there on count as not delivered;
    of a stream, whose samples cannot be taken back, also those before.
    """

    epoch: int = 0
    first: int = 0
    stop: int = 0
    stream: StreamSamples = field(default_factory=StreamSamples)
    listener: Callable[[], None] | None = None  # called after each batch
    dropped: set[tuple[int, int]] = field(default_factory=set)  # epochs and numbers of batches that gave no item

    def begin(self, position: Position) -> None:
        """Note where an iteration begins."""
        self.dropped = {(epoch, number) for epoch, number in self.dropped if (epoch, number) < position[:2]}
        if position.epoch == self.epoch and self.first <= position.number <= self.stop:
            if position.number < self.stop and self.stream.order:
                self.first = position.number
                self.stream = StreamSamples()
            self.stop = position.number
        elif position.number or position.epoch == self.epoch:
            self.epoch = position.epoch
            self.first = position.number
            self.stop = position.number
            self.stream = StreamSamples()

    def note(self, position: Position) -> None:
        """Note the position after an item that was delivered."""
        if position.epoch != self.epoch:
            self.dropped = {place for place in self.dropped if place[0] == position.epoch}
            self.epoch = position.epoch
            self.first = 0
            self.stop = 0
            self.stream = StreamSamples()
        self.stop = position.number
        if position.hashes:
            self.stream.add(position.hashes)
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
        self.sums = np.zeros(2, np.uint64)
        self.order = hashlib.blake2b(digest_size=16)

    def add(self, positions: NDArray[Any]) -> None:
        """Add samples by their positions in the plan."""
        numbers = np.asarray(positions, np.uint64)
        self.num_samples += len(numbers)
        self.sums += _sums(numbers)
        self.order.update(numbers.astype("<u8").tobytes())

    def as_dict(self) -> dict[str, Any]:
        """Return the number and the digest in any order."""
        return {"num_samples": self.num_samples, "digest": _text(self.sums)}


def _sums(numbers: Hashes) -> Hashes:
    """Return two sums of hashes of the numbers, by SplitMix64."""
    seeded = (numbers[None] + np.array([[1], [2]], np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    sums: Hashes = mixed64(seeded).sum(axis=1, dtype=np.uint64)
    return sums


def _text(totals: Iterable[Any]) -> str:
    return "".join(f"{int(total):016x}" for total in totals)


def receipt_of(
    chain: Any,
    delivered: Delivered,
    skips: Iterable[Skip],
    ranks: Ranks,
    *,
    pipes: Sequence[str],
    sizes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the receipt of the last epoch of a loader: see `Loader.receipt`.

    Args:
        chain: The part of the chain that workers run.
        pipes: The fingerprints of the chain.
        sizes: The sizes of the batches, as in a state.

    Raises:
        ChainError: The chain has no `deal` that numbers its batches, or the samples of a stream have no keys.
    """
    deal = Chain.of(chain).resumable_deal()
    if deal is None:
        raise ChainError(
            "A receipt needs `.deal(...)`, which numbers the batches, without pipes after it that hold batches back."
        )
    ranks = deal.ranks_of(ranks)
    own = [skip for skip in skips if skip.epoch == delivered.epoch]
    if isinstance(deal, DealerIterDataPipe):
        samples = _samples_of_stream(deal, delivered, own)
    else:
        samples = _planned_samples(deal, delivered, own, ranks)
    return {
        "version": _VERSION,
        "pipes": list(pipes),
        "sizes": dict(sizes),
        "epoch": delivered.epoch,
        "rank": ranks.rank,
        "num_ranks": ranks.num_ranks,
        **samples,
    }


def _planned_samples(deal: Any, delivered: Delivered, skips: list[Skip], ranks: Ranks) -> dict[str, Any]:
    epoch = delivered.epoch
    plans = [deal.planned_epoch(epoch, Ranks(rank, ranks.num_ranks)) for rank in range(ranks.num_ranks)]
    num_batches, num_samples = plans[0].num_batches, plans[0].num_samples  # the ordinals from there on are padding
    batches = range(delivered.first, max(min(delivered.stop, num_batches), delivered.first))
    left_out = [skip.ordinal for skip in skips if not skip.is_shard]
    planned = _Digest()
    present = _Digest()
    skipped = _Digest()
    num_padding = 0
    for plan in plans:
        for _, ordinals, positions in plan.parts(range(num_batches), _AT_ONCE):
            planned.add(positions[ordinals < num_samples])
    dropped = [number for then, number in delivered.dropped if then == epoch and number in batches]
    all_dropped = np.concatenate([np.zeros(0, np.int64), *map(plans[ranks.rank].ordinals, dropped)])
    for _, ordinals, positions in plans[ranks.rank].parts(batches, _AT_ONCE):
        is_dropped = np.isin(ordinals, all_dropped)
        is_skipped = np.isin(ordinals, left_out)
        is_padding = ordinals >= num_samples
        present.add(positions[~is_skipped & ~is_padding & ~is_dropped])
        skipped.add(positions[is_skipped & ~is_padding])
        num_padding += int((is_padding & ~is_skipped & ~is_dropped).sum())
    return {
        "batches": [batches.start, batches.stop],
        "num_batches": num_batches,
        "num_samples": present.num_samples,
        "num_padding": num_padding,
        "digest": _text(present.sums),
        "order": present.order.hexdigest(),
        "skipped": skipped.as_dict(),
        "planned": planned.as_dict(),
    }


def _samples_of_stream(deal: DealerIterDataPipe, delivered: Delivered, skips: list[Skip]) -> dict[str, Any]:
    stream = delivered.stream
    num_batches = len(deal) if deal.clock.continues else None
    if stream.num_unknown:
        raise ChainError(
            "A receipt of a stream needs the keys of its samples, but a stock pipe upstream of `deal` has made "
            "something else of them. Put stock pipes before `.select()`."
        )
    stop = None if delivered.stop == _ALL else delivered.stop
    if num_batches is not None:
        stop = min(delivered.stop, num_batches)
    own = [skip for skip in skips if delivered.first <= skip.batch < delivered.stop]
    keys = [skip.key for skip in own if not skip.is_shard]
    if deal.uneven == "pad":  # a sample that pads a batch may be tried, and skipped, again
        keys = sorted(set(keys))
    skipped = np.frombuffer(b"".join(map(hash_of_sample, keys)), "<u8")
    return {
        "batches": [delivered.first, stop],
        "num_batches": num_batches,
        "num_samples": stream.num_samples,
        "num_padding": stream.num_padding,
        "digest": _text(stream.sums),
        "order": stream.order.hex(),
        "skipped": {
            "num_samples": len(keys),
            "digest": _text(_sums(skipped)),
            "num_shards": len({skip.key for skip in own if skip.is_shard}),
        },
        "planned": {"num_samples": deal.num_planned(), "digest": None},
        "keys": {"may_repeat": deal.may_repeat, "share": stream.share, "hashes": stream.hashes()},
    }


class Verdict(NamedTuple):
    """The result of `verify_receipts`.

    Args:
        is_complete: Whether every planned sample was delivered exactly once, except for those that `on_error` skipped.
        num_samples: The number of delivered samples, over all receipts.
        num_skipped: The number of samples that `on_error` skipped.
        epochs: The numbers of the epochs.
        problems: What is wrong, one sentence each.
        unknown: What receipts of a stream cannot show, one sentence each; it does not count as a problem.
    """

    is_complete: bool
    num_samples: int
    num_skipped: int
    epochs: tuple[int, ...]
    problems: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.is_complete

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(self.problems)
        what = "epoch" if len(self.epochs) == 1 else "epochs"
        shown = ", ".join(map(str, self.epochs))
        skipped = f", except for {self.num_skipped:,} that `on_error` skipped" if self.num_skipped else ""
        parts = "batch" if self.unknown else "sample"
        text = (
            f"Every {parts} of {what} {shown} was delivered exactly once: {counted(self.num_samples, 'sample')}"
            f"{skipped}."
        )
        return "\n".join([text, *self.unknown])


def verify_receipts(receipts: Iterable[Receipt]) -> Verdict:
    """Return whether receipts together show that every planned sample was delivered exactly once.

    For a stream, they show that every batch was delivered once and that no sample was delivered twice. If the number of
    samples is known, from `deal(num_batches=...)` or the indexes of local shards, they also show that none is missing.

    Each epoch is verified separately. Its receipts may come from several ranks, and from several parts of a resumed
    epoch, also with different numbers of ranks for the same global batch size.

    Args:
        receipts: The return values of `Loader.receipt`, in any order.

    Raises:
        ValueError: There are no receipts, or one is not a receipt.

    Example:
        >>> chain = kdp.from_dataset([(n, 0) for n in range(10)]).select("x").deal(batch_size=4)
        >>> with kdp.Loader(chain) as loader:
        ...     batches = list(loader)
        ...     print(verify_receipts([loader.receipt()]))
        Every sample of epoch 0 was delivered exactly once: 10 samples.
    """
    by_epoch = defaultdict(list)
    for receipt in receipts:
        _check(receipt)
        by_epoch[receipt["epoch"]].append(receipt)
    if not by_epoch:
        raise ValueError("`receipts` must hold at least one receipt, but is empty.")
    problems = [f"Epoch {epoch}: {text}" for epoch in sorted(by_epoch) for text in _problems(by_epoch[epoch])]
    every = [receipt for found in by_epoch.values() for receipt in found]
    skipped = sum(receipt["skipped"]["num_samples"] for receipt in every)
    total = sum(receipt["num_samples"] for receipt in every)
    unknown = {} if problems else {text: None for found in by_epoch.values() for text in _unknown(found)}
    return Verdict(not problems, total, skipped, tuple(sorted(by_epoch)), tuple(problems), tuple(unknown))


def _check(receipt: Any) -> None:
    is_receipt = isinstance(receipt, Mapping) and all(
        isinstance(receipt.get(name), kind) for name, kind in _KINDS.items()
    )
    if not is_receipt or not {"version", *_SAME, "digest", "skipped"} <= set(receipt) or len(receipt["batches"]) != 2:
        raise ValueError(must_be("receipt", "what `receipt()` of a Loader returns", receipt))
    if receipt["version"] != _VERSION:
        raise ValueError(
            f"Receipt version {receipt['version']!r} is not {_VERSION}. Check it with the kdpipes that wrote it."
        )
    if not 0 <= receipt["rank"] < receipt["num_ranks"]:
        raise ValueError(must_be("receipt['rank']", f"from 0 to {receipt['num_ranks'] - 1}", receipt["rank"]))


def _problems(receipts: list[Receipt]) -> Iterator[str]:
    """Yield what is wrong with the receipts of one epoch."""
    first = receipts[0]
    for name in _SAME if "keys" in first else (*_SAME, "planned"):
        if any(receipt[name] != first[name] for receipt in receipts):
            yield f"the receipts differ in `{name}`, so they are not of the same epoch of the same chain."
            return
    found = list(_gaps(receipts))
    yield from found
    if "keys" in first:
        yield from [] if found else _problems_of_stream(receipts)
        return
    digests = [digest for receipt in receipts for digest in (receipt["digest"], receipt["skipped"]["digest"])]
    counts = [receipt["num_samples"] + receipt["skipped"]["num_samples"] for receipt in receipts]
    planned = first["planned"]
    total = _text(sum(int(digest[at : at + 16], 16) for digest in digests) % 2**64 for at in (0, 16))
    if not found and (sum(counts), total) != (planned["num_samples"], planned["digest"]):
        number = planned["num_samples"]
        yield f"{sum(counts):,} samples were delivered or skipped, but they are not the {number:,} planned ones."


def _problems_of_stream(receipts: list[Receipt]) -> Iterator[str]:
    """Yield which samples of a stream are missing, or were delivered more than once, although no batch was."""
    number = sum(receipt["num_samples"] + receipt["skipped"]["num_samples"] for receipt in receipts)
    # Shards may be indexed meanwhile.
    planned = {receipt["planned"]["num_samples"] for receipt in receipts} - {None}
    num_lost = sum(receipt["skipped"]["num_shards"] for receipt in receipts)
    if planned and planned != {number}:
        lost = f" The rest of {num_lost} damaged shards was left out." if num_lost else ""
        yield f"{number:,} samples were delivered or skipped, but the stream has {max(planned):,}.{lost}"
    if not any(receipt["keys"]["may_repeat"] for receipt in receipts):
        share = max(receipt["keys"]["share"] for receipt in receipts)
        hashes = [np.frombuffer(base64.b64decode(receipt["keys"]["hashes"]), "<u8") for receipt in receipts]
        kept = np.concatenate(hashes)
        kept = kept[kept % np.uint64(share) == 0]
        if twice := len(kept) - len(np.unique(kept)):
            yield (
                f"{'about ' if share > 1 else ''}{counted(twice * share, 'sample')} came more than once, or have the "
                "keys of others: keys must be unique."
            )


def _unknown(receipts: list[Receipt]) -> Iterator[str]:
    """Yield what the receipts of one epoch of a stream cannot show."""
    if "keys" not in receipts[0]:
        return
    share = max(receipt["keys"]["share"] for receipt in receipts)
    may_repeat = any(receipt["keys"]["may_repeat"] for receipt in receipts)
    is_counted = any(receipt["planned"]["num_samples"] is not None for receipt in receipts)
    if may_repeat:
        yield "The chain may give a sample more than once, so samples were not compared."
    elif share > 1:
        yield f"No sample came twice among those that were compared, 1 of {share}."
    elif not is_counted:
        yield "No sample came twice."
    if not is_counted:
        yield "How many samples the stream has is not known."


def _gaps(receipts: list[Receipt]) -> Iterator[str]:
    """Yield which batches are missing, and which were delivered more than once.

    Rank r of n has the share from r/n to (r+1)/n of each global batch, so receipts of different numbers of ranks fit
    together.
    """
    covered = []
    end = receipts[0]["num_batches"]
    if end is None:  # of a stream: after the last batch that is known
        end = 1 + max(number or 0 for receipt in receipts for number in receipt["batches"])
    for receipt in receipts:
        rank = receipt["rank"]
        num_ranks = receipt["num_ranks"]
        begin, stop = receipt["batches"]
        stop = end if stop is None else stop
        covered.append((begin, stop, Fraction(rank, num_ranks), Fraction(rank + 1, num_ranks)))
    rows = sorted({0, end, *(row for each in covered for row in each[:2])})
    columns = sorted({Fraction(0), Fraction(1), *(column for each in covered for column in each[2:])})
    for left, right in pairwise(columns):
        counts = [
            (sum(b <= begin and end <= e and x <= left and right <= y for b, e, x, y in covered), begin, end)
            for begin, end in pairwise(rows)
        ]
        for times, group in groupby(counts, itemgetter(0)):
            spans = list(group)
            begin = spans[0][1]
            end = spans[-1][2]
            if times != 1:
                shown = f"batch {begin}" if end == begin + 1 else f"batches {begin} to {end - 1}"
                if receipts[0]["num_batches"] is None and end == rows[-1]:
                    shown = f"batches from {begin} on"
                rank = left / (right - left)
                num_ranks = 1 / (right - left)
                whose = f" of rank {rank} of {num_ranks}" if num_ranks > 1 else ""
                yield f"{shown}{whose}: {f'delivered {times} times' if times else 'not delivered'}."
