"""Balance classes by repeating the rarer ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe

from kdpipes.core.errors import DataError, check_choice, check_count, check_flag, must_be
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe, StreamPlanPipe
from kdpipes.core.randomness import plan_epoch
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.plan._classes import label_of, labels_of, to_labels
from kdpipes.selection import UNLABELLED, oversample_exact, oversample_multiply

__all__ = ["OversamplerIterDataPipe", "OversamplerMapDataPipe"]

Mode = Literal["multiply", "exact"]


@functional_pipe("oversample", flavour="map")
class OversamplerMapDataPipe(PlanPipe):
    """Balances classes by repeating the samples of the rarer ones (functional name: ``oversample``).

    Reads the labels, field `y`, and nothing else. A repeated sample is augmented anew. Samples without a label (-1 or
    None) do not count as a class: "multiply" gives them once, "exact" leaves them out. In "exact" mode, the samples of
    a class that an epoch repeats once more than the others change from epoch to epoch.

    On a stream, the repetitions of a sample follow it directly; a shuffle after this pipe spreads them.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        mode: "multiply": all samples, then each rarer class again as often as it fits into the largest, by whole
            numbers: not one that has more than half as many. "exact": class after class, each repeated up to exactly
            the size of the largest.
        redraw: In "exact" mode, whether other samples get the extra repetition in each epoch. False: the same samples
            get it in every epoch.
        class_counts: On a stream only, which cannot count ahead: the number of samples of each class, by number, or by
            name where the source knows names.

    Length: "exact": number of classes times the size of the largest; "multiply": at most that, more than half of it.
        Not known on a stream.

    Raises:
        DataError: The class of a stream's sample is not in `class_counts`.

    Source: KappaData's OversamplingWrapper; "multiply" is that of KappaData 1.0.7, sample for sample.

    Example:
        >>> pipe = kdp.from_dataset([("a", 0), ("b", 1), ("c", 0)])
        >>> pipe.oversample().column("x")
        array(['a', 'b', 'c', 'b'], dtype='<U1')
    """

    goes_by = "labels"

    def __init__(self, source_datapipe: MapPipe, *, mode: Mode = "multiply", redraw: bool = True) -> None:
        check_choice("mode", mode, ("multiply", "exact"))
        super().__init__(source_datapipe, redraws=check_flag("redraw", redraw) and mode == "exact")
        self._mode = mode

    def plan(self, epoch: int) -> NDArray[Any]:
        labels = labels_of(self.source, "oversample")
        if self._mode == "multiply":
            return oversample_multiply(labels)
        positions = oversample_exact(labels, epoch)
        if epoch == 0 and self.redraws:  # not if every class is repeated in whole rounds
            self.redraws = not np.array_equal(positions, oversample_exact(labels, epoch=1))
        return positions

    def redrawn_by(self, *, of_labels: bool = False) -> str | None:
        redrawn = super().redrawn_by(of_labels=of_labels)
        return None if of_labels and self.redraws else redrawn  # each class keeps its positions


@functional_pipe("oversample", flavour="iter", doc_of=OversamplerMapDataPipe)
class OversamplerIterDataPipe(StreamPlanPipe):
    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        mode: Mode = "multiply",
        redraw: bool = True,
        class_counts: Mapping[Any, int] | None = None,
    ) -> None:
        super().__init__(source_datapipe)
        check_choice("mode", mode, ("multiply", "exact"))
        if class_counts is None:
            raise ValueError(
                "`class_counts` must be given for a stream, which cannot count ahead: `{class: number of samples}`. "
                "An indexed source (`kdp.open_shards`) needs none."
            )
        if not isinstance(class_counts, Mapping) or not class_counts:
            raise TypeError(must_be("class_counts", "a dictionary of counts by class", class_counts))
        self._mode = mode
        self.traits = replace(self.traits, counts_whole=mode == "exact")
        self._redraw = check_flag("redraw", redraw)
        self._counts = {label: check_count(f"class_counts[{label!r}]", count) for label, count in class_counts.items()}

    def _counts_of(self, *, are_names: bool) -> dict[Any, int]:
        labels = to_labels("class_counts", list(self._counts), self.class_names(), are_names=are_names)
        return dict(zip(labels, self._counts.values(), strict=True))

    def samples(self) -> Iterator[Sample]:
        largest, epoch = max(self._counts.values()), plan_epoch() if self._redraw else 0
        by_kind: dict[bool, dict[Any, int]] = {}
        seen: Counter[Any] = Counter()
        for sample in samples_of(self.source, "oversample"):
            label = label_of(sample["y"])
            if label is None or label == UNLABELLED:
                if self._mode == "multiply":
                    yield sample
                continue
            is_name = isinstance(label, str)
            if is_name not in by_kind:
                by_kind[is_name] = self._counts_of(are_names=is_name)
            counts = by_kind[is_name]
            if label not in counts:
                raise DataError(f"Sample {sample.key!r} has class {label!r}, which is not in `class_counts`.")
            times = self._times(seen[label], counts[label], largest, epoch)
            seen[label] += 1
            for _ in range(times):
                yield sample.fork()

    def _times(self, seen: int, count: int, largest: int, epoch: int) -> int:
        if self._mode == "multiply":
            return largest // count
        start = epoch * largest % count  # each epoch, other samples get the extra repetition
        return ((seen + 1) * largest + start) // count - (seen * largest + start) // count

    def fingerprint(self) -> Any:
        changes_order = self._redraw and self._mode == "exact"
        return [entry for entry in super().fingerprint() if entry[0] != "_redraw" or changes_order]
