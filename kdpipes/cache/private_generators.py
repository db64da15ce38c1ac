"""Random generators that functions upstream of a cache keep for themselves, and whether they have drawn."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Set
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.callback import Callback
from kdpipes.core.fingerprint import attributes_of
from kdpipes.core.user_code import is_users

__all__ = ["PrivateGenerator", "private_generators", "reached_from"]

_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_PIPES = (IterDataPipe, MapDataPipe)
_MANY = 1000  # of a longer collection, this many entries are looked at
_MOST = 20_000  # objects, of which each is looked at once


class PrivateGenerator(NamedTuple):
    """A generator that is none of the global ones.

    Args:
        name: As the function names it: `rng`, `augment.rng`.
        generator: NumPy's, torch's or Python's.
    """

    name: str
    generator: Any

    def state(self) -> Any:
        """Return what differs when it has drawn since."""
        generator = self.generator
        if isinstance(generator, np.random.Generator):
            return repr(generator.bit_generator.state)
        if isinstance(generator, np.random.RandomState):
            return repr(generator.get_state(legacy=False))
        return generator.getstate() if isinstance(generator, random.Random) else generator.get_state().numpy().tobytes()


def private_generators(value: Any) -> list[PrivateGenerator]:
    """Return the generators that a pipe, an operation or a function reaches, without calling anything.

    Looked at are closures, defaults, globals that the code names, arguments of `functools.partial`, collections, and
    attributes of objects of the user's own classes; no attributes of modules, and no other pipes.
    """
    return [
        PrivateGenerator(name or type(part).__name__, part)
        for name, part in reached_from(value)
        if isinstance(part, _KINDS) and part is not np.random.mtrand._rand and part is not torch.default_generator
    ]


def reached_from(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each object that a pipe, an operation or a function reaches, once, with the name that users know it by."""
    seen: dict[int, Any] = {}
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting and len(seen) < _MOST:
        name, part = waiting.pop()
        if id(part) in seen or (isinstance(part, _PIPES) and part is not value):
            continue
        seen[id(part)] = part  # held, so that no other object gets its address
        yield name, part
        if not isinstance(part, _KINDS):
            waiting += ((inner or name, each) for inner, each in _parts(name, part))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value reaches, by the names that a user knows it by."""
    if isinstance(value, Callback):
        yield "", value.function
    elif isinstance(value, functools.partial):
        yield from (("", value.func), *(("", each) for each in value.args), *value.keywords.items())
    elif isinstance(value, MethodType):
        yield from (("", value.__func__), ("", value.__self__))
    elif isinstance(value, FunctionType):
        yield from _named_in(value)
    elif isinstance(value, Mapping):
        yield from ((str(key), each) for key, each in itertools.islice(value.items(), _MANY))
    elif isinstance(value, list | tuple | Set):
        yield from (("", each) for each in itertools.islice(value, _MANY))
    elif is_users(type(value)):
        attributes = {**dict(_of_class(type(value))), **attributes_of(value)}
        yield from ((f"{name}.{attribute}".lstrip("."), each) for attribute, each in attributes.items())
    elif type(value).__module__.startswith("kdpipes."):
        yield from (("", each) for each in attributes_of(value).values())


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for each in kind.__mro__:
        if is_users(each):
            yield from ((name, part) for name, part in vars(each).items() if isinstance(part, (FunctionType, *_KINDS)))


def _named_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a function that calls itself, seen while it is being made
            continue
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in _global_names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> set[str]:
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
