"""What users of torch's DataLoader write, and what says the same here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from kdpipes.core.errors import closest

__all__ = ["refuses_foreign_arguments"]

Given = ParamSpec("Given")

_INSTEAD = {  # arguments of torch's DataLoader, and what says the same here
    "batch_size": "end the chain with `.deal(batch_size=...).collate_samples()`",
    "shuffle": "the chain says so: `.deal(batch_size=..., shuffle=True)`",
    "sampler": "the chain says so: `.deal(batch_size=..., shuffle=True)`, `.sample_weighted(...)`",
    "batch_sampler": "the chain says so: `.deal(batch_size=...)`",
    "drop_last": 'the chain says so: `.deal(batch_size=..., uneven="drop")`',
    "collate_fn": "end the chain with `.collate_samples()`, or with `.map(function)` behind `.deal()`",
    "pin_memory": 'end the chain with `.to_device("cuda")`',
    "timeout": "write `timeout_s=...`",
    "prefetch_factor": "write `prefetch=...`",
    "persistent_workers": "its workers always are",
    "worker_init_fn": "the chain says so: `.deal(batch_size=..., seed=...)`",
    "generator": "the chain says so: `.deal(batch_size=..., seed=...)`",
    "multiprocessing_context": "write `start_method=...`",
}


def refuses_foreign_arguments(construct: Callable[Given, None]) -> Callable[Given, None]:
    """Let a constructor say what to write in place of an argument that only torch's DataLoader has."""
    known = [name for name in inspect.signature(construct).parameters if name != "self"]

    @functools.wraps(construct)
    def constructed(*args: Given.args, **kwargs: Given.kwargs) -> None:
        unknown = next((name for name in kwargs if name not in known), None)
        if unknown is not None:
            instead = _INSTEAD.get(unknown)
            way_out = f": {instead}." if instead is not None else f".{closest(unknown, known)}"
            raise TypeError(f"`Loader` takes no argument `{unknown}`{way_out}")
        construct(*args, **kwargs)

    return constructed
