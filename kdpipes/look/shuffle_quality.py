"""`shuffle_quality`: measure how well a chain shuffles, compared with a perfect shuffle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, check_count
from kdpipes.core.map_pipe import MapPipe, has_column
from kdpipes.core.messages import counted
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.randomness import planning
from kdpipes.delivery.deal import DealerMapDataPipe
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.layout import Ranks
from kdpipes.delivery.skipping import unrecorded
from kdpipes.look.batch import dealer_of
from kdpipes.look.rendering import render

_WEAK = 0.5  # a perfect shuffle measures about 1, the order of the source about 0


@dataclass(frozen=True, repr=False)
class ShuffleQuality:
    """Measures of a chain's shuffle. In a perfect shuffle all are close to 1; with few samples they scatter more.

    Args:
        num_samples: The number of samples that were compared.
        spread: The mean distance, in the epoch, between two samples that are neighbors in the source, divided by the
            mean distance after a perfect shuffle. It is about 0 if samples keep the order of the source.
        apart: The share of neighbors in the source that are delivered in different batches, as a share of that in a
            perfect shuffle.
        class_runs: The mean length of runs of samples of the same class, divided by that of a perfect shuffle; None if
            the samples have no field `y`, or only one class.
        longest_run: The largest number of samples of the same class that follow each other; None likewise.
        renewal: How many pairs of samples that share a batch are separated in the next epoch, as a share of that in a
            perfect shuffle; 0 if every epoch has the same batches. None for batches of one sample.
    """

    num_samples: int
    spread: float
    apart: float
    class_runs: float | None
    longest_run: int | None
    renewal: float | None

    @property
    def is_good(self) -> bool:
        """Whether the order is close to that of a perfect shuffle, and is drawn anew in each epoch."""
        is_mixed = self.class_runs is None or self.class_runs < 1 / _WEAK
        return self.spread >= _WEAK and is_mixed and (self.renewal is None or self.renewal >= _WEAK)

    def lines(self) -> list[tuple[str, str, float]]:
        """Return what was measured: in words, as a number, and as a share of a perfect shuffle."""
        found = [
            ("neighbors of the source end up apart by", f"{self.spread:.0%}", self.spread),
            ("neighbors of the source in different batches", f"{self.apart:.0%}", self.apart),
        ]
        if self.class_runs is not None:
            text = f"{self.class_runs:.2f} times as long, the longest {self.longest_run}"
            found.append(("runs of one class", text, 1 / max(self.class_runs, 1)))
        if self.renewal is not None:
            found.append(("pairs of a batch that part in the next epoch", f"{self.renewal:.0%}", self.renewal))
        return found

    def _verdict(self) -> str:
        verdict = "good" if self.is_good else "weak"
        return f"The shuffle is {verdict}, compared with a perfect one ({counted(self.num_samples, 'sample')}):"

    def __repr__(self) -> str:
        width = max(len(name) for name, _, _ in self.lines())
        return "\n".join([self._verdict(), *(f"  {name:<{width}}  {text}" for name, text, _ in self.lines())])

    def _repr_html_(self) -> str:
        return render("shares", self._verdict(), self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Return the measures as plain data, fit for JSON."""
        return {**asdict(self), "is_good": self.is_good}


class _Delivered(NamedTuple):
    """The samples of an epoch in the order of delivery."""

    places: NDArray[Any]  # in the source; of a stream, the keys
    batches: NDArray[Any]
    labels: NDArray[Any] | None


def shuffle_quality(source_datapipe: Any, *, epoch: int = 0, max_samples: int = 200_000) -> ShuffleQuality:
    """Return how well a chain shuffles, compared with a perfect shuffle of the same samples.

    For an indexed chain, only the plan is read, and no samples. For a stream, samples are read but not decoded, and the
    source is assumed to be sorted by key.

    Args:
        source_datapipe: A chain with `deal`.
        epoch: The number of the epoch, from 0. It is compared with the next one.
        max_samples: The number of samples to compare, from the start of an epoch.

    Raises:
        ChainError: There is no `deal` in the chain, or an epoch has fewer than two samples.

    Example:
        >>> source = kdp.from_dataset([(n, n // 500) for n in range(1000)])
        >>> shuffle_quality(source.deal(batch_size=10, shuffle=True)).is_good
        True
        >>> print(shuffle_quality(source.deal(batch_size=10)))
        The shuffle is weak, compared with a perfect one (1,000 samples):
          neighbors of the source end up apart by       0%
          neighbors of the source in different batches  10%
          runs of one class                             250.00 times as long, the longest 500
          pairs of a batch that part in the next epoch  0%
    """
    deal: Dealer = dealer_of(source_datapipe)
    check_count("epoch", epoch, minimum=0)
    check_count("max_samples", max_samples, minimum=2)
    read: Any = _planned if isinstance(deal, DealerMapDataPipe) else _streamed
    with unrecorded(source_datapipe):
        now, later = (read(deal, number, max_samples) for number in (epoch, epoch + 1))
    if len(now.places) < 2:
        raise ChainError("The epoch has fewer than two samples to compare. Choose more samples upstream.")
    return ShuffleQuality(len(now.places), *_apart(now), *_runs(now.labels), _renewal(now, later))


def _planned(deal: DealerMapDataPipe, epoch: int, max_samples: int) -> _Delivered:
    plan = deal.planned_epoch(epoch, Ranks())
    source = deal.source
    nothing = np.zeros(0, np.int64)
    batches, ordinals, places = next(plan.parts(range(plan.num_batches), max_samples), (nothing,) * 3)
    is_real = ordinals < plan.num_samples  # not padding
    batches = batches[is_real]
    places = places[is_real]
    labels = source.column("y")[places] if isinstance(source, MapPipe) and has_column(source, "y") else None
    # Go back to places in the sources, so that samples that `permute` moved apart count as moved.
    for node in Chain.of(source).path():
        if isinstance(node.pipe, PlanPipe):
            with planning(epoch):
                numbers, places = node.pipe.locate(places, epoch)
            if node.is_join:
                places = np.cumsum([0, *map(len, node.pipe.sources)])[:-1][numbers] + places
    return _Delivered(np.asarray(places), batches, labels)


def _streamed(deal: Dealer, epoch: int, max_samples: int) -> _Delivered:
    keys: list[str] = []
    batches: list[int] = []
    labels: list[Any] = []
    for number, samples in deal.whole_batches(epoch):
        keys += [sample.key for sample in samples]
        batches += [number] * len(samples)
        labels += [sample.get("y") for sample in samples]
        if len(keys) >= max_samples:
            break
    return _Delivered(np.asarray(keys), np.asarray(batches), None if None in labels else np.asarray(labels))


def _apart(epoch: _Delivered) -> tuple[float, float]:
    """Return how far apart neighbors of the source are, and how often they are in different batches."""
    order = np.argsort(epoch.places, kind="stable")  # of samples that come several times, the copies are neighbors
    distance = np.abs(np.diff(order)).mean()
    number = len(order)
    _, sizes = np.unique(epoch.batches, return_counts=True)
    together = float((sizes * (sizes - 1.0)).sum()) / (number * (number - 1.0))  # in a perfect shuffle
    parted = float((np.diff(epoch.batches[order]) != 0).mean())
    spread = (float(distance) - 1) / max((number + 1) / 3 - 1, 1e-9)
    return min(spread, 1.0), min(parted / max(1 - together, 1e-9), 1.0)


def _runs(labels: NDArray[Any] | None) -> tuple[float | None, int | None]:
    """Return how long runs of one class are compared with a perfect shuffle, and the longest one."""
    if labels is None or labels.ndim != 1 or len(_counts(labels)) < 2:
        return None, None
    ends = np.flatnonzero(np.concatenate([labels[1:] != labels[:-1], [True]]))
    shares = _counts(labels) / len(labels)
    expected = 1 / (1 - float((shares**2).sum()))
    lengths = np.diff(ends, prepend=-1)
    return float(lengths.mean()) / expected, int(lengths.max())


def _counts(labels: NDArray[Any]) -> NDArray[Any]:
    return np.unique(labels, return_counts=True)[1]


def _renewal(now: _Delivered, later: _Delivered) -> float | None:
    """Return how many pairs of samples of a batch part in the next epoch, as a share of a perfect shuffle."""
    both, in_now, in_later = np.intersect1d(now.places, later.places, return_indices=True)
    if len(both) < 2:
        return 1.0  # an epoch of other samples
    pairs = now.batches[in_now] * (int(later.batches.max()) + 1) + later.batches[in_later]
    stayed = _num_pairs(pairs)
    shared = _num_pairs(now.batches[in_now])
    if not shared:
        return None
    perfect = _num_pairs(later.batches[in_later]) / (len(both) * (len(both) - 1) / 2)
    return min((1 - stayed / shared) / max(1 - perfect, 1e-9), 1.0)


def _num_pairs(groups: NDArray[Any]) -> float:
    sizes = _counts(groups).astype(float)
    return float((sizes * (sizes - 1) / 2).sum())
