"""One more field, computed from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdpipes.core.callback import Callback, call_seeded, is_seeded
from kdpipes.core.errors import must_be
from kdpipes.core.operation import Operation
from kdpipes.core.sample import Lazy, Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import Traits

__all__ = ["FieldAdder"]


@work_pipe("add_field")
class FieldAdder(Operation):
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
        self.name = name
        self._function = called = Callback("function", function)
        is_random = "rng" in called.parameters if called.declares_random is None else called.declares_random
        self.traits = Traits(
            changes=frozenset({name}),
            random=called.name if is_random else None,
            records=called.name if "ctx" in called.parameters else None,
            seeds=(called.name,) if is_seeded(called) else (),
        )
        self._place, self._what = f"add_field.{name}", f"computing field {name!r}"

    def __call__(self, sample: Sample) -> Sample:
        place, is_recorded = sample.claim_name(self._place), sample.is_recording

        def compute(view: Sample) -> Any:
            return call_seeded(self._function, view, place, view, ctx=view.ctx if is_recorded else None)

        value = Lazy(compute, what=self._what, scope=sample.scope())
        if is_recorded and "ctx" in self._function.parameters:
            sample.promise_ctx(place, value)
        sample[self.name] = value
        return sample
