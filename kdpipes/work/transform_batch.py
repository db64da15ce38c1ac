"""Apply a function to the values of many samples in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdpipes.core.callback import Callback, call_seeded
from kdpipes.core.column import Column
from kdpipes.core.errors import must_be
from kdpipes.core.operation import Step
from kdpipes.core.sample import Block, Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import Traits

_INSTEAD = {
    "rng": "Name it `rngs`: a list with one `numpy.random.Generator` for each value.",
    "ctx": "Use `transform`, which calls a function for each sample.",
}


@work_pipe("transform_batch")
class BatchTransformer(Step):
    """Applies a function to one field of many samples at once (functional name: ``transform_batch``).

    Use it for functions that are faster for many values than for one: tokenizers, NumPy expressions, lookups in tables.
    The result for a value must not depend on the other values in the call, because a call may get any number of them:
    many samples of a batch of `deal` if the chain ends in `select`, otherwise a single sample. Batches are then the
    same for any number of workers, in caches and after a resume.

    Args:
        field: The name of the field.
        function: A function of a list of values that returns as many new values: a list, an array or a tensor with a
            row for each. If it has a parameter `rngs`, it gets a list with one `numpy.random.Generator` for each value,
            which depends on the seed, the epoch, the sample and this operation. If a call for many samples draws from
            the global generators of `random`, NumPy or torch, its result is dropped, and from then on the function is
            called for each sample alone, with seeds.

    Raises:
        FieldError: The field does not exist.
        TypeError: The function did not return one result per value, or returned None for one of them.

    Example:
        >>> import numpy as np
        >>> pipe = kdp.from_dataset([(n, 0) for n in range(100)]).transform_batch("x", np.sqrt)
        >>> float(pipe.select("x", bare=True)[81])
        9.0
    """

    def __init__(self, field: str, function: Callable[..., Any]) -> None:
        if not isinstance(field, str) or len(field.split()) != 1:
            raise TypeError(must_be("field", "the name of one field", field))
        self.field = field
        self._function = called = Callback("function", function)
        for name, hint in _INSTEAD.items():
            if name in called.parameters:
                raise TypeError(must_be("function", f"a function without a parameter `{name}`", called.name, hint))
        self._takes_rngs = "rngs" in called.parameters
        is_random = self._takes_rngs or called.is_random
        used = frozenset({field})
        self.traits = Traits(
            needs=used,
            reads=used,
            changes=used,
            random=called.name if is_random else None,
            records=called.name if self._takes_rngs else None,
            seeds=() if self._takes_rngs or called.is_fixed else (called.name,),
        )
        self._what = f"applying {called.name!r} to field {field!r}"

    def change(self, block: Block) -> None:
        called = self._function
        is_recorded = block.is_recording
        place = block.claim_name(called.name)

        def run(view: Sample, value: Any) -> Any:
            if self._takes_rngs:
                made = called([value], rngs=[view.record_key(place, is_recorded=is_recorded)])
            else:
                made = call_seeded(called, view, place, [value], ctx=None, is_recorded=is_recorded)
            return self._checked(made, [value])[0]

        def run_together(block: Block, values: Sequence[Any]) -> Sequence[Any] | None:
            values = list(values)
            if self._takes_rngs:
                samples = block.samples()
                made = called(values, rngs=[each.record_key(place, is_recorded=is_recorded) for each in samples])
            elif called.is_fixed:
                made = called(values)
            elif is_recorded or (made := called.globals.call_for_many(called.function, values)) is None:
                return None
            return self._checked(made, values)

        column = Column(run, block.column(self.field), what=self._what, many=run_together)
        if is_recorded:
            block.promises[place] = column
        block.fields[self.field] = column

    def _checked(self, made: Any, values: list[Any]) -> Sequence[Any]:
        """Return the results of a call after checking that their number equals that of the values."""
        name = self._function.name
        try:
            number = len(made)
        except TypeError:
            number = -1
        if number != len(values) or isinstance(made, str | bytes | dict):
            shown = f"{number} of them" if number >= 0 and number != len(values) else type(made).__name__
            raise TypeError(
                f"`{name}` must return a list, an array or a tensor with one value for each of {len(values)} values, "
                f"but returned {shown}."
            )
        for result, value in zip(made, values, strict=True) if isinstance(made, list | tuple) else ():
            if result is None and value is not None:
                raise TypeError(f"`{name}` must return the new values, but returned None for one of them.")
        return made  # type: ignore[no-any-return]

    def drawing(self) -> tuple[str, ...]:
        return self._function.drawing

    def fingerprint(self) -> Any:
        return {"field": self.field, "function": self._function}
