"""Callables applied to one field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kdpipes._sample_pipe import sample_pipe
from kdpipes.callback import Callback
from kdpipes.draw import seeded_globals
from kdpipes.errors import must_be, refuse_field
from kdpipes.sample import Lazy, Sample
from kdpipes.work.decode_images import EncodedImage

__all__ = ["RecordedTransform", "Transformer", "call_seeded"]


@runtime_checkable
class RecordedTransform(Protocol):
    """A transform in two steps, so that what it did is recorded in the ctx and can be done again.

    `draw(image, rng)` returns the parameters, plain data; `apply(image, params)` does what they say and draws nothing.
    An image from `decode_images` comes as an `EncodedImage`, of which `apply` decodes what it needs.
    """

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]: ...
    def apply(self, value: Any, params: dict[str, Any]) -> Any: ...


def call_seeded(function: Callback, sample: Sample, place: str, *args: Any, is_recorded: bool) -> Any:
    """Call a user's function with the `ctx` and `rng` that it asks for, and with the global generators seeded.

    A function that takes `rng` is trusted to draw from it alone.
    """
    given: dict[str, Any] = {}
    if "ctx" in function.parameters:
        given["ctx"] = sample.ctx if is_recorded else {}
    if "rng" in function.parameters:
        return function(*args, rng=sample.rng(place), **given)
    with seeded_globals(sample.draw.key(place)):
        return function(*args, **given)


@sample_pipe("transform")
class Transformer:
    """Applies callables to one field, in order, when the field is read (functional name: ``transform``).

    Every random number depends on (seed, epoch, ordinal, operation) alone, whatever draws it: a parameter `rng`, or the
    global generators of `random`, NumPy and torch, which are seeded for the call and restored after it (some hundred
    microseconds; a callable with a parameter `rng` saves them). An image from `decode_images` reaches a callable as a
    PIL image (RGB).

    Args:
        field: The field's name.
        transforms: Callables: called with the value, they return the new one. A parameter `ctx` gets the sample's ctx
            (an empty dictionary without `record_ctx`), a parameter `rng` a `numpy.random.Generator` of its own.
            kdpipes' own transforms, and all with the methods of `kdp.RecordedTransform`, are recorded in the ctx by
            their name. A callable returns a new value, and leaves the one that it got as it is.

    Raises:
        FieldError: There is no such field.

    Example:
        >>> def jitter(x, rng):
        ...     return x + rng.integers(10)
        >>> pipe = kdp.from_dataset([(100, 0)]).transform("x", jitter).select("x")
        >>> pipe[0] == pipe[0]
        True
    """

    def __init__(self, field: str, *transforms: Callable[..., Any] | RecordedTransform) -> None:
        if not isinstance(field, str):
            raise TypeError(must_be("field", "the name of a field", field))
        if not transforms:
            raise ValueError("`transform` must be given at least one callable, behind the name of the field.")
        self._field = field
        self._steps = [self._step(number, transform) for number, transform in enumerate(transforms, 1)]

    @staticmethod
    def _step(number: int, transform: Any) -> tuple[Callback, bool]:
        if isinstance(transform, list | tuple):
            rule = "a callable"
            raise TypeError(
                must_be(f"transforms[{number - 1}]", rule, transform, "Give the callables one after the other.")
            )
        if isinstance(transform, type) and issubclass(transform, RecordedTransform):
            rule, way_out = "a transform", f"Write `{transform.__name__}(...)` to make one."
            raise TypeError(must_be(f"transforms[{number - 1}]", rule, transform, way_out))
        has_params = isinstance(transform, RecordedTransform)
        return Callback(f"transforms[{number - 1}]", transform, check=not has_params), has_params

    def __call__(self, sample: Sample) -> Sample:
        value = sample.lazy(self._field)
        is_recorded = sample.is_recording
        for step, has_params in self._steps:
            place = sample.claim_name(step.name)
            run = _in_two_steps(step, place, is_recorded) if has_params else _in_one(step, place, is_recorded)
            value = Lazy(run, value, what=f"applying {step.name!r} to field {self._field!r}")
            if is_recorded and (has_params or "ctx" in step.parameters):
                sample.promise_ctx(place, value)
        sample[self._field] = value
        return sample

    def check(self, known: frozenset[str]) -> None:
        if self._field not in known:
            refuse_field(self._field, "The source", known)

    def field_names(self, known: frozenset[str]) -> frozenset[str]:
        return known

    def column_name(self, name: str) -> str | None:
        return None if name == self._field else name


def _in_one(step: Callback, place: str, is_recorded: bool) -> Callable[[Sample, Any], Any]:
    def run(sample: Sample, value: Any) -> Any:
        plain = value.to_pil() if isinstance(value, EncodedImage) else value
        return call_seeded(step, sample, place, plain, is_recorded=is_recorded)

    return run


def _in_two_steps(step: Callback, place: str, is_recorded: bool) -> Callable[[Sample, Any], Any]:
    transform: RecordedTransform = step.function

    def run(sample: Sample, value: Any) -> Any:
        params = transform.draw(value, sample.rng(place))
        if is_recorded:
            sample.ctx[place] = params
        return transform.apply(value, params)

    return run
