"""From here on, what transforms did is recorded."""

from __future__ import annotations

from kdpipes.core.operation import Operation
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import Traits

__all__ = ["CtxRecorder"]


@work_pipe("record_ctx")
class CtxRecorder(Operation):
    """Records the parameters of the transforms that follow in `sample.ctx` (functional name: ``record_ctx``).

    An entry is plain data under the operation's name: `ctx["random_resized_crop"] == {"top": 3, ...}`; the second
    operation of a name is `random_resized_crop_2`. It is written when the transform runs, so when its field is read.
    For callables that draw random numbers of their own, an entry `draw` says which: seed, epoch and ordinal.

    Source: KappaData's ctx.

    Example:
        >>> def shift(x, ctx, rng):
        ...     ctx["shift"] = int(rng.integers(5))
        ...     return x + ctx["shift"]
        >>> x, ctx = kdp.from_dataset([(10, 0)]).record_ctx().transform("x", shift).select("x", return_ctx=True)[0]
        >>> x[0] == 10 + ctx["shift"]
        True
    """

    traits = Traits(reads=frozenset(), changes=frozenset())

    def __call__(self, sample: Sample) -> Sample:
        sample.record()
        return sample
