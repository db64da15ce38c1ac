"""Balance classes by repeating the samples of rarer classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import UNLABELLED, oversample_exact, oversample_multiply
from kdpipes.core.errors import DataError, check_choice, check_count, check_flag, must_be
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.labels import labels_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe, StreamPlanPipe
from kdpipes.core.randomness import plan_epoch
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.plan._classes import class_in, to_labels

Mode = Literal["multiply", "exact"]


@functional_pipe("oversample", flavour="map")
class OversamplerMapDataPipe(PlanPipe):
    """Balances classes by repeating the samples of rarer classes (functional name: ``oversample``).

    Only the labels, field `y`, are read. Each repetition of a sample is augmented differently. Samples without a label
    (-1 or None) do not count as a class: "multiply" keeps them once, "exact" leaves them out. In "exact" mode, if the
    size of the largest class is not a multiple of a class's size, some samples of the class are repeated once more than
    the others. In each epoch, these are different samples.

    On a stream, the repetitions of a sample directly follow it. Shuffle after this pipe to spread them.

    Args:
        source_datapipe: A pipe of samples, indexed or a stream.
        mode: "multiply": all samples, followed by further whole repetitions of each rarer class, as long as it does not
            become larger than the largest class. A class with more than half as many samples is not repeated. "exact":
            one class after the other, each repeated to exactly the size of the largest class.
        redraw: In "exact" mode, whether different samples get the extra repetition in each epoch. If False, the same
            samples get it in every epoch.
        class_counts: For streams only, because their samples cannot be counted in advance: a dictionary from class
            numbers, or names if the source has class names, to the number of samples.

    Length: "exact": the number of classes times the size of the largest class; "multiply": at most that, and more than
        half of it. Unknown for a stream.

    Raises:
        DataError: The class of a stream's sample is not in `class_counts`.

    Source: KappaData's OversamplingWrapper. "multiply" yields exactly the samples of KappaData 1.0.7.

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
        if epoch == 0 and self.redraws:  # there is no redraw if every class is repeated in whole rounds
            self.redraws = not np.array_equal(positions, oversample_exact(labels, epoch=1))
        return positions

    def redrawn_by(self, *, of_labels: bool) -> str | None:
        redrawn = super().redrawn_by(of_labels=of_labels)
        return None if of_labels and self.redraws else redrawn  # labels are the same at all positions


@functional_pipe("oversample", flavour="iter", doc_of=OversamplerMapDataPipe)
class OversamplerIterDataPipe(StreamPlanPipe):
    _redraw = False  # set only if it changes the order, so that other fingerprints do not change

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
                "An indexed source, such as `kdp.open_shards`, does not need it."
            )
        if not isinstance(class_counts, Mapping) or not class_counts:
            raise TypeError(must_be("class_counts", "a dictionary of counts by class", class_counts))
        self._mode = mode
        self.traits = replace(self.traits, counts_whole=mode == "exact")
        if check_flag("redraw", redraw) and mode == "exact":
            self._redraw = True
        self._counts = {label: check_count(f"class_counts[{label!r}]", count) for label, count in class_counts.items()}

    def samples(self) -> Iterator[Sample]:
        largest = max(self._counts.values())
        epoch = plan_epoch() if self._redraw else 0

        @cache
        def counts_by(are_names: bool) -> dict[Any, int]:
            labels = to_labels("class_counts", list(self._counts), self.class_names(), are_names=are_names)
            return dict(zip(labels, self._counts.values(), strict=True))

        seen: Counter[Any] = Counter()
        for sample in samples_of(self.source, "oversample"):
            label = class_in(sample, "oversample")
            if label == UNLABELLED:
                if self._mode == "multiply":
                    yield sample
                continue
            counts = counts_by(isinstance(label, str))
            if label not in counts:
                raise DataError(f"Sample {sample.key!r} has class {label!r}, which is not in `class_counts`: add it.")
            times = self._times(seen[label], counts[label], largest, epoch)
            seen[label] += 1
            for _ in range(times):
                yield sample.fork()

    def _times(self, seen: int, count: int, largest: int, epoch: int) -> int:
        if self._mode == "multiply":
            return largest // count
        start = epoch * largest % count  # different samples get the extra repetition in each epoch
        return ((seen + 1) * largest + start) // count - (seen * largest + start) // count
