"""Wrap users' functions: their names and parameters, pickling, and seeded calls."""

from __future__ import annotations

import inspect
import pickle
import re
from functools import cached_property
from typing import Any

import torch

from kdpipes.core import pickling
from kdpipes.core.errors import check_callable
from kdpipes.core.randomness import GlobalUse, SampleKey, seeded_globals
from kdpipes.core.sample import Sample
from kdpipes.core.user_code import draws_nothing


class Callback:
    """A user's callable, pickled by cloudpickle, so that lambdas, closures and classes of a notebook can be sent.

    It is not a collection, so torch's graph traversal does not pickle its contents.

    Args:
        param: The name of the parameter that the callable was passed as, for errors.
        function: The callable.
        check: Whether to raise TypeError if `function` cannot be called.
    """

    def __init__(self, param: str, function: Any, *, check: bool = True) -> None:
        if check:
            check_callable(param, function)
        self.function = function
        named: Any = getattr(function, "func", function)  # of a partial
        name = getattr(named, "__name__", None) or type(named).__name__
        self.name = snake_case("lambda" if name == "<lambda>" else str(name))
        try:
            called: Any = function.forward if isinstance(function, torch.nn.Module) else function
            self.parameters = frozenset(inspect.signature(called).parameters)
        except (TypeError, ValueError):
            self.parameters = frozenset()
        declared: Any = getattr(function, "is_random", None)
        self.declares_random: bool | None = declared if isinstance(declared, bool) else None
        self.globals = GlobalUse(is_seen=self.declares_random is True)

    def with_function(self, function: Any) -> Callback:
        """Return a copy for another function of the same name and parameters, such as a bound method."""
        made = Callback.__new__(Callback)
        made.__dict__.update(self.__dict__)
        made.function = function
        return made

    @property
    def is_random(self) -> bool:
        """Whether the callable declares that it draws random numbers, or takes `rng`."""
        return "rng" in self.parameters if self.declares_random is None else self.declares_random

    @cached_property
    def is_fixed(self) -> bool:
        """Whether the callable declares that it draws no random numbers, or its code shows it."""
        return not self.is_random and (self.declares_random is False or draws_nothing(self.function))

    @property
    def seeds(self) -> tuple[str, ...]:
        """The name of the callable, if `call_seeded` seeds the global generators for it."""
        return () if "rng" in self.parameters or self.is_fixed else (self.name,)

    @property
    def drawing(self) -> tuple[str, ...]:
        """The name of the callable, if it was seen to draw from the global generators."""
        return self.seeds if self.globals.is_seen else ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (pickling.dumps(self.function),)


def _restore(payload: bytes) -> Callback:
    return Callback("", pickle.loads(payload), check=False)  # noqa: S301 - made by __reduce__ above, never read from data


def call_seeded(
    function: Callback,
    sample: Sample,
    place: str,
    *args: Any,
    ctx: dict[str, Any] | None,
    is_recorded: bool | None = None,
) -> Any:
    """Call a user's function for a sample, with seeded global generators and with `ctx` and `rng` if it takes them.

    The global generators are not seeded if the function takes `rng`, if its attribute `is_random` is False, or if its
    code shows that it draws nothing.

    Args:
        function: The function.
        sample: The sample from whose key the random numbers derive.
        place: The name of the operation, unique for the sample.
        args: The arguments of the function.
        ctx: The dictionary that the function may write to. With None, it writes to a temporary one.
        is_recorded: Whether to record the sample's key if the function draws random numbers. By default, it is recorded
            if there is a `ctx`.
    """
    is_recorded = ctx is not None if is_recorded is None else is_recorded
    given: dict[str, Any] = {} if "ctx" not in function.parameters else {"ctx": {} if ctx is None else ctx}
    if "rng" in function.parameters:
        return function(*args, rng=sample.record_key(place, is_recorded=is_recorded), **given)
    if function.is_fixed:
        return function(*args, **given)
    is_watched = is_recorded or sample.is_watched
    value, is_random = function.globals.call(
        sample.key_of(place), function.function, *args, is_watched=is_watched, **given
    )
    if is_random and is_watched:
        sample.record_key(place, is_recorded=is_recorded)
    return value


def call_with_key(function: Callback, sample_key: SampleKey, place: str, *args: Any) -> Any:
    """Call a user's function for an item that is not a sample, such as a batch, as `call_seeded` does for samples.

    `place` is the name of the operation, which must be unique for the item.
    """
    if "rng" in function.parameters:
        return function(*args, rng=sample_key.rng(place))
    if function.is_fixed:
        return function(*args)
    with seeded_globals(sample_key.key(place)):
        return function(*args)


def snake_case(name: str) -> str:
    """Return a class name as the words that a ctx entry is called by.

    >>> snake_case("RandomResizedCrop")
    'random_resized_crop'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
