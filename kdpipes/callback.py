"""User callables: what they take, what they are called, and how they travel to workers."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from kdpipes.errors import check_callable

__all__ = ["Callback", "snake_case"]


class Callback:
    """A user's callable. Always travels by cloudpickle, so that lambdas, closures and classes of a notebook do.

    It is no collection, which keeps torch's graph traversal from pickling what it holds.
    """

    __slots__ = ("declares_random", "function", "name", "parameters")

    def __init__(self, param: str, function: Any, *, check: bool = True) -> None:
        if check:
            check_callable(param, function)
        self.function = function
        self.name = snake_case(_name_of(function))
        self.parameters = _parameters_of(function)
        declared: Any = getattr(function, "is_random", None)
        self.declares_random: bool | None = declared if isinstance(declared, bool) else None

    def with_function(self, function: Any) -> Callback:
        """Return the same for a function of the same name and parameters: a method, bound to its object."""
        made = Callback.__new__(Callback)
        made.function, made.name, made.parameters = function, self.name, self.parameters
        made.declares_random = self.declares_random
        return made

    @property
    def is_fixed(self) -> bool:
        """Whether the callable declares that it draws no random numbers."""
        return self.declares_random is False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (cloudpickle.dumps(self.function),)


def _restore(payload: bytes) -> Callback:
    return Callback("", pickle.loads(payload), check=False)  # noqa: S301 - made by __reduce__ above, never read from data


def _name_of(function: Any) -> str:
    wrapped = getattr(function, "func", function)
    name = getattr(wrapped, "__name__", None) or type(wrapped).__name__
    return "lambda" if name == "<lambda>" else str(name)


def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    called: Any = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return frozenset(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return frozenset()


def snake_case(name: str) -> str:
    """Return a class name as the words that a ctx entry is called by.

    >>> snake_case("RandomResizedCrop")
    'random_resized_crop'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
