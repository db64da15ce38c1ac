"""One more field, computed from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdpipes._sample_pipe import sample_pipe
from kdpipes.callback import Callback, call_seeded, is_seeded
from kdpipes.errors import must_be
from kdpipes.sample import Lazy, Sample

__all__ = ["FieldAdder"]


@sample_pipe("add_field")
class FieldAdder:
    """Adds a field that is computed from the sample when it is read (functional name: ``add_field``).

    The function sees the fields as they are at this place of the chain, whatever transforms follow.

    Args:
        name: The new field's name; a field of that name is replaced.
        function: Called with the sample, returns the value. A parameter `rng` gets a generator of its own, `ctx` the
            sample's ctx.

    Example:
        >>> kdp.from_dataset([(3, 0)]).add_field("twice", lambda sample: 2 * sample["x"]).select("twice")[0]
        (6,)
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(must_be("name", "a name for a field", name))
        self._name = name
        self._function = Callback("function", function)
        self._place, self._what = f"add_field.{name}", f"computing field {name!r}"

    def __call__(self, sample: Sample) -> Sample:
        place, is_recorded = sample.claim_name(self._place), sample.is_recording

        def compute(view: Sample) -> Any:
            return call_seeded(self._function, view, place, view, ctx=view.ctx if is_recorded else None)

        value = Lazy(compute, what=self._what, scope=sample.scope())
        if is_recorded and "ctx" in self._function.parameters:
            sample.promise_ctx(place, value)
        sample[self._name] = value
        return sample

    def field_names(self, known: frozenset[str]) -> frozenset[str]:
        return known | {self._name}

    def draws(self) -> str | None:
        """Return the function's name if it takes a generator."""
        is_random: Any = getattr(self._function.function, "is_random", None)
        is_known = isinstance(is_random, bool)
        return self._function.name if (is_random if is_known else "rng" in self._function.parameters) else None

    def seeded(self) -> list[str]:
        """Return the function's name if global generators are seeded for it."""
        return [self._function.name] if is_seeded(self._function) else []

    def records(self) -> str | None:
        """Return the function's name if it takes the ctx."""
        return self._function.name if "ctx" in self._function.parameters else None

    def column_name(self, name: str) -> str | None:
        return None if name == self._name else name
