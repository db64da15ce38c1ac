"""Draw samples by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import by_label, class_counts, draw_weighted, missing_of
from kdpipes.core.callback import Callback
from kdpipes.core.errors import DataError, check_count, check_flag, check_one_of, check_seed, is_number, must_be
from kdpipes.core.labels import labels_of
from kdpipes.core.map_pipe import MapPipe, has_column
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import functional_pipe
from kdpipes.core.shared import Shared
from kdpipes.plan._classes import to_labels

Weights = Sequence[float] | NDArray[Any] | Mapping[Any, float]


@functional_pipe(
    "sample_weighted",
    flavour="map",
    otherwise="A stream cannot be drawn from in advance. `kdp.open_shards` is an indexed source.",
)
class WeightedSamplerMapDataPipe(PlanPipe):
    """Draws random samples by weight (functional name: ``sample_weighted``).

    Each epoch of `deal` draws different samples, which depend only on `seed` and the epoch number. Without `deal`, and
    in columns, the samples are those of epoch 0. With weights by class, only the labels, field `y`, are read.

    Args:
        source_datapipe: An indexed pipe of samples.
        weights: The weight of each sample, `[n]`, at least 0; or a dictionary from class numbers or names to the weight
            of each sample of the class, `{"heron": 3.0, "stork": 1.0}`. Other classes and unlabeled samples have
            weight 0. Or a function that takes the epoch number, from 0, and returns either of these; it is called in
            every worker, so it must depend only on the epoch.
        temperature: Instead of `weights`: class c with `n[c]` samples is drawn with a probability in proportion to
            `n[c]` to the power of 1 / temperature. With 1, all samples are equally likely; with large values, all
            classes are. May also be a function of the epoch number.
        num_samples: The number of samples to draw. By default, it is the length of the source.
        replacement: Whether a sample may be drawn more than once.
        seed: The seed of the random choice, from 0 to 2**64 - 1.
        redraw: Whether each epoch draws different samples. If False, all epochs use those of epoch 0.

    Length: `num_samples`.

    Memory: Four bytes per drawn sample in each worker; with `redraw`, also eight bytes per sample of the source, shared
        by all workers.

    Raises:
        ValueError: The number of weights differs from the number of samples, or too few weights are above 0. The error
            is raised when the plan is made.

    Source: torch's WeightedRandomSampler; `temperature` is that of multilingual language models (XLM).

    Example:
        >>> pipe = kdp.from_dataset(["a", "b"], "x", labels=[0, 1])
        >>> pipe.sample_weighted({1: 1.0}, num_samples=3).column("x")
        array(['b', 'b', 'b'], dtype='<U1')
    """

    def __init__(
        self,
        source_datapipe: MapPipe,
        weights: Weights | Callable[[int], Weights] | None = None,
        *,
        temperature: float | Callable[[int], float] | None = None,
        num_samples: int | None = None,
        replacement: bool = True,
        seed: int = 0,
        redraw: bool = True,
    ) -> None:
        super().__init__(source_datapipe, redraws=check_flag("redraw", redraw))
        check_one_of(weights=weights, temperature=temperature)
        self._weights: Shared[NDArray[Any]] | Callback | None = None
        self._classes: tuple[Any, ...] | None = None
        if callable(weights):
            self._weights = Callback("weights", weights)
        elif weights is not None:
            values, self._classes = _parsed(weights)
            self._weights = Shared(values)
        if temperature is not None:
            self._temperature = Callback("temperature", temperature) if callable(temperature) else temperature
            temperature_at(self._temperature, epoch=0)
        if not redraw and self._is_changing():
            raise ValueError(
                "`redraw` must be True if `weights` or `temperature` is a function of the epoch, but is False instead. "
                "Remove it, or pass fixed weights."
            )
        self._num_samples = None if num_samples is None else check_count("num_samples", num_samples)
        self._replacement = check_flag("replacement", replacement)
        self._choice_seed = check_seed(seed)
        self._shares: Shared[NDArray[Any]] | None = None

    computed = (*PlanPipe.computed, "_shares")
    _temperature: float | Callback | None = None  # set only if passed, so that other fingerprints do not change

    def _plans_quickly(self) -> bool:
        return has_column(self, "y")

    def plan(self, epoch: int) -> NDArray[Any]:
        if epoch and not self._is_changing():
            return self.chosen() if self._shares is None else self._drawn(len(self), self._shares.value, epoch)
        size = len(self.source)
        weights = self._weights_of_samples(size, epoch)
        number = size if self._num_samples is None else self._num_samples
        if not number:
            return np.zeros(0, dtype=np.int32)
        possible = int(np.count_nonzero(weights))
        if possible < (1 if self._replacement else number):
            hint = "Lower `num_samples`, or pass `replacement=True`."
            if self._replacement:
                hint = "Give at least one sample a weight above 0."
            raise ValueError(
                f"`sample_weighted` must draw {number} samples from a source of {size}, but only {possible} have a "
                f"weight above 0. {hint}"
            )
        weights /= weights.sum()
        self._shares = Shared(weights) if self.redraws and not self._is_changing() else None
        return self._drawn(number, weights, epoch)

    def _is_changing(self) -> bool:
        return isinstance(self._weights, Callback) or isinstance(self._temperature, Callback)

    def _drawn(self, number: int, shares: NDArray[Any], epoch: int) -> NDArray[Any]:
        # Epoch 0 draws the same samples as `default_rng(seed)`.
        seeds = np.random.SeedSequence(self._choice_seed, spawn_key=(epoch,) if epoch else ())
        return draw_weighted(np.random.default_rng(seeds), shares, number, replacement=self._replacement)

    def _weights_of_samples(self, size: int, epoch: int) -> NDArray[Any]:
        if self._temperature is not None:
            labels = labels_of(self.source, "sample_weighted")
            power = 1 / temperature_at(self._temperature, epoch) - 1
            counts = class_counts(labels)
            counts.pop(missing_of(labels), None)
            return by_label(labels, {label: float(count) ** power for label, count in counts.items()})
        if isinstance(self._weights, Shared):
            values = self._weights.value
            classes = self._classes
        else:
            assert self._weights is not None
            values, classes = _parsed(self._weights(epoch))
        weights = values.astype(np.float64)
        if classes is None:
            if len(weights) != size:
                raise ValueError(f"`weights` must have one weight for each of {size} samples, but has {len(weights)}.")
            return weights
        labels = labels_of(self.source, "sample_weighted")
        chosen = to_labels("weights", list(classes), self.source.class_names(), are_names=missing_of(labels) == "")
        of_samples = by_label(labels, dict(zip(chosen, weights.tolist(), strict=True)))
        if not of_samples.any() and size:
            raise DataError(
                "No sample belongs to a class with a weight above 0. `kdp.class_counts(pipe)` lists the classes "
                "of the source."
            )
        return of_samples


def temperature_at(temperature: Any, epoch: int) -> float:
    """Return the temperature in an epoch, which is a number or a function of the epoch."""
    made = temperature(epoch) if isinstance(temperature, Callback) else temperature
    if not is_number(made) or not 0 < made < math.inf:
        raise ValueError(must_be("temperature", "a number above 0", made))
    return float(made)


def _parsed(weights: Any) -> tuple[NDArray[Any], tuple[Any, ...] | None]:
    """Return the values of weights, and their classes if weights are given by class."""
    values = np.asarray(list(weights.values()) if isinstance(weights, Mapping) else weights)
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise TypeError(must_be("weights", "numbers, one for each sample or by class", weights))
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(must_be("weights", "finite and at least 0", weights))
    return values, tuple(weights) if isinstance(weights, Mapping) else None
