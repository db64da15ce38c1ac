"""What a chain is, in short hashes that are the same in every process: to tell whether a state or a cache fits it."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes._graph import walk
from kdpipes.callback import Callback
from kdpipes.storage.shared import PackedStrings, Shared

__all__ = ["fingerprint", "fingerprints"]

_MANY = 1000  # of a longer sequence of objects, the length and this many entries are hashed
_DEEP = 20


def fingerprints(pipe: Any) -> list[str]:
    """Return one `name:hash` for `pipe` and each pipe upstream of it, nearest first.

    A pipe says what it is by a method `identity()`: plain data. Otherwise it is its attributes, those of stock pipes
    without the private ones. Functions are their code, defaults and closures; other objects their class and attributes.
    """
    return [f"{_name_of(upstream)}:{fingerprint(upstream)}" for upstream in walk(pipe)]


def fingerprint(value: Any) -> str:
    """Return the short hash of one value; of a pipe, without what is upstream of it."""
    digest = hashlib.blake2b(digest_size=4)
    for token in _pipe(value) if isinstance(value, IterDataPipe | MapDataPipe) else _tokens(value, 0):
        digest.update(len(token).to_bytes(8, "little") + token)
    return digest.hexdigest()


def _name_of(pipe: Any) -> str:
    name = getattr(pipe, "_name", None)
    return name if isinstance(name, str) else type(pipe).__name__.removesuffix("DataPipe").removesuffix("Iter")


def _pipe(pipe: Any) -> Iterator[bytes]:
    yield type(pipe).__qualname__.encode()
    identity: Callable[[], Any] | None = getattr(type(pipe), "identity", None)
    if identity is not None:
        yield from _tokens(pipe.identity(), 0)
        return
    is_ours = type(pipe).__module__.startswith("kdpipes.")
    for name, value in sorted(vars(pipe).items()):
        if is_ours or not name.startswith("_"):
            yield name.encode()
            yield from _tokens(value, 0)


def _tokens(value: Any, depth: int) -> Iterator[bytes]:
    """Yield what `value` is; of what it is only for this process (generators, locks, pipes upstream), nothing."""
    if isinstance(value, IterDataPipe | MapDataPipe | random.Random | np.random.Generator | ModuleType):
        return
    yield type(value).__name__.encode()
    if depth == _DEEP or value is None:
        return
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield from (str(value.dtype).encode(), str(value.shape).encode(), np.ascontiguousarray(value).tobytes())
    elif isinstance(value, torch.Tensor):
        yield from _tokens(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), depth + 1)
    elif isinstance(value, bytes | str | bool | int | float | complex | np.generic):
        yield value if isinstance(value, bytes) else repr(value).encode()
    else:
        yield from _compound(value, depth + 1)


def _compound(value: Any, depth: int) -> Iterator[bytes]:
    parts: Any
    if isinstance(value, Shared):
        parts = [value.value]
    elif isinstance(value, PackedStrings):
        parts = value.arrays()
    elif isinstance(value, Mapping):
        parts = [part for entry in sorted(value.items(), key=lambda item: str(item[0])) for part in entry]
    elif isinstance(value, Set):
        parts = sorted(map(repr, value))
    elif isinstance(value, Sequence | np.ndarray):
        parts = [len(value), *value[:_MANY]]
    elif isinstance(value, Callback):
        parts = [value.function]
    else:
        parts = list(_object_parts(value))
    for part in parts:
        yield from _tokens(part, depth)


def _object_parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield from (value.__qualname__, *_code_parts(value.__code__), value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            yield _content_of(cell)
    elif isinstance(value, BuiltinFunctionType | type):
        yield value.__qualname__
    else:
        yield from (type(value).__qualname__, _attributes(value))


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a function that calls itself, seen while it is being made
        return None


def _code_parts(code: CodeType) -> Iterator[Any]:
    yield from (code.co_code, code.co_names, code.co_varnames)
    for constant in code.co_consts:
        yield list(_code_parts(constant)) if isinstance(constant, CodeType) else constant


def _attributes(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    slots = {name: getattr(value, name) for name in names if not name.startswith("__")}
    return slots | getattr(value, "__dict__", {})
