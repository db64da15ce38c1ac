"""What a chain is, in short hashes that are the same in every process: to tell whether a state or a cache fits it."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import itertools
import logging
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import ShardingFilter

from kdpipes._called import CALLED
from kdpipes._graph import walk
from kdpipes._pipe_name import short_name
from kdpipes.callback import Callback
from kdpipes.storage.shared import PackedStrings, Shared

__all__ = ["attributes_of", "digest", "fingerprint", "fingerprints", "is_users", "own_members"]

_MANY = 1000  # of a longer sequence of objects, the length and this many entries are hashed
_OF_THIS_PROCESS = (
    IterDataPipe,
    MapDataPipe,
    ModuleType,
    logging.Logger,
    np.random.Generator,
    random.Random,
    torch.Generator,
)
_PLAIN = (bytes, str, bool, int, float, complex, np.generic)
_VALUES = (*_PLAIN, tuple, list, dict, set, frozenset, np.ndarray, torch.Tensor, PurePath, torch.dtype)
_WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    type(functools.cache(len)),
)


@runtime_checkable
class _Fingerprinted(Protocol):
    """An object that says itself what tells it from another."""

    def fingerprinted(self) -> Any: ...


def fingerprints(pipe: Any) -> list[str]:
    """Return one `name:hash` for `pipe` and each pipe upstream of it, nearest first.

    A pipe says what it is by a method `identity()`: plain data. Otherwise it is its attributes, those of stock pipes
    without the private ones. Functions are their code, defaults and closures, not the globals that they read; other
    objects their class and attributes. Pipes that change no sample do not count.
    """
    pipes = [upstream for upstream in walk(pipe) if not getattr(_operation(upstream), "changes_no_sample", False)]
    return [f"{_name_of(upstream)}:{fingerprint(upstream)}" for upstream in pipes]


def _operation(pipe: Any) -> Any:
    operation: Any = getattr(pipe, "_operation", None)
    return operation


def fingerprint(value: Any) -> str:
    """Return the short hash of one value; of a pipe, without what is upstream of it."""
    tokens = _Tokens()
    return _hash(tokens.of_pipe(value) if isinstance(value, IterDataPipe | MapDataPipe) else tokens.of(value), 4).hex()


def digest(value: Any) -> bytes:
    """Return the long hash of one value, all entries of a long sequence included; of a pipe as `fingerprint`."""
    tokens = _Tokens(limit=None)
    return _hash(tokens.of_pipe(value) if isinstance(value, IterDataPipe | MapDataPipe) else tokens.of(value), 20)


def _hash(tokens: Iterator[bytes], size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=size)
    for token in tokens:
        digest.update(len(token).to_bytes(8, "little") + token)
    return digest.digest()


def _name_of(pipe: Any) -> str:
    name = getattr(pipe, "_name", None)
    return name if isinstance(name, str) else short_name(type(pipe))


class _Tokens:
    """Says what values are, each object once: one that is met again is the number of its first meeting."""

    def __init__(self, met: dict[int, tuple[int, Any]] | None = None, limit: int | None = _MANY) -> None:
        self._met = dict(met or {})
        self._limit = limit

    def of_pipe(self, pipe: Any) -> Iterator[bytes]:
        yield type(pipe).__qualname__.encode()
        identity: Callable[[], Any] | None = getattr(type(pipe), "identity", None)
        if identity is not None:
            yield from self.of(pipe.identity())
        elif not isinstance(pipe, ShardingFilter):  # whose attributes say which rank this is
            is_ours = type(pipe).__module__.startswith("kdpipes.")
            public = {name: value for name, value in vars(pipe).items() if is_ours or not name.startswith("_")}
            public.pop(CALLED, None)
            yield from self.of(public)

    def of(self, value: Any) -> Iterator[bytes]:
        """Yield what `value` is; nothing of what it is only for this process."""
        if isinstance(value, _OF_THIS_PROCESS):
            return
        yield type(value).__name__.encode()
        if isinstance(value, _PLAIN):
            yield value if isinstance(value, bytes) else repr(value).encode()
        elif isinstance(value, PurePath | torch.dtype | slice):
            yield str(value).encode()
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield from (str(value.dtype).encode(), str(value.shape).encode(), np.ascontiguousarray(value).tobytes())
        elif value is not None and id(value) in self._met:
            yield str(self._met[id(value)][0]).encode()
        elif value is not None:
            self._met[id(value)] = len(self._met), value  # held, so that no other object gets its address
            for part in self._parts(value):
                yield from self.of(part)

    def _hash_of(self, value: Any) -> bytes:
        return _hash(_Tokens(self._met, self._limit).of(value), 16)

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Shared):
            yield value.value
        elif isinstance(value, PackedStrings):
            yield from value.arrays()
        elif isinstance(value, torch.Tensor):
            yield from (str(value.dtype), tuple(value.shape))
            if value.layout != torch.strided:
                sparse = value.detach().to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
                yield from (str(value.layout), sparse.indices(), sparse.values())
                return
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(value, Mapping):
            yield from sorted(value.items(), key=lambda entry: self._hash_of(entry[0]))
        elif isinstance(value, Set):
            yield from sorted(value, key=self._hash_of)
        elif isinstance(value, np.ndarray):
            yield from (value.shape, value.reshape(-1).tolist()[: self._limit])
        elif isinstance(value, Sequence | deque):
            yield len(value)
            yield from itertools.islice(value, self._limit)
        elif isinstance(value, Callback):
            yield value.function
        else:
            yield from _object_parts(value)


def _object_parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield from (value.__qualname__, *_code_parts(value.__code__), value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            yield _content_of(cell)
    elif isinstance(value, BuiltinFunctionType):
        yield value.__qualname__
        yield value.__self__
    elif isinstance(value, type):
        yield value.__qualname__
    else:
        yield getattr(value, "__qualname__", type(value).__qualname__)
        yield own_members(type(value))
        yield value.fingerprinted() if isinstance(value, _Fingerprinted) else attributes_of(value) or _reduced(value)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(kind: type) -> bool:
    """Return whether a class is a user's own: its code may change while its name stays."""
    name = kind.__module__
    if name.split(".")[0] in {"builtins", "kdpipes"}:
        return False
    if name == "__main__":  # also of a notebook, and of a program that is run by one of a library
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not file.startswith(_library_folders())


def own_members(kind: type) -> list[Any]:
    """Return the methods and plain attributes of a class and of those that it inherits, as far as they are a user's."""
    return [
        [name, part]
        for each in kind.__mro__
        if is_users(each)
        for name, member in sorted(vars(each).items())
        for part in _code_or_value(name, member)
    ]


def _is_pythons(name: str) -> bool:
    return name.startswith("_") and name.endswith("_")


def _code_or_value(name: str, member: Any) -> Iterator[Any]:
    for attribute in ("__func__", "fget", "func", "__wrapped__"):  # of methods of classes, properties, caches
        member = getattr(member, attribute, member) if isinstance(member, _WRAPPERS) else member
    if isinstance(member, FunctionType) or (isinstance(member, _VALUES) and not _is_pythons(name)):
        yield member


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a function that calls itself, seen while it is being made
        return None


def _code_parts(code: CodeType) -> Iterator[Any]:
    yield from (code.co_code, code.co_names, code.co_varnames)
    for constant in code.co_consts:
        yield list(_code_parts(constant)) if isinstance(constant, CodeType) else constant


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if mangled not in {"__dict__", "__weakref__"} and hasattr(value, mangled):
                found[mangled] = getattr(value, mangled)
    return found


def _reduced(value: Any) -> Any:
    """Return what an object of a C type would pickle; nothing where it would not."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(2)
    except Exception:
        return None
    return reduced if isinstance(reduced, str) else [part for part in reduced[1:3] if not hasattr(part, "__next__")]
