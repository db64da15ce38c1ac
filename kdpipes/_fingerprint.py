"""Fingerprints of chains: short hashes, the same in every process, that show whether a state or a cache fits.

States of loaders depend on the code, defaults and closures of functions. Keys of caches also depend on the globals that
functions read: a stale value is worse than a miss, but a global that changes during training must not invalidate
states.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import io
import itertools
import logging
import mmap
import random
import socket
import sys
import sysconfig
import tarfile
import weakref
import zipfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import ShardingFilter

from kdpipes.callback import Callback
from kdpipes.storage.shared import PackedStrings, Shared

__all__ = [
    "MISSING",
    "Change",
    "Fingerprinted",
    "attributes_of",
    "digest",
    "digest_values",
    "digest_with_globals",
    "fingerprint",
    "globals_read",
    "is_users",
    "note_changed_attribute",
    "note_changed_global",
    "own_members",
    "settled_attributes",
    "with_first_values",
]

MISSING: Any = object()  # stands for the first value of an attribute that did not exist at first
_MOST_FOLLOWED = 10_000  # globals to follow from one value
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
_BASIC = frozenset([bytes, str, bool, int, float, complex, type(None)])  # different values have different `repr`
_PLAIN = (bytes, str, bool, int, float, complex, np.generic)
_VALUES = (*_PLAIN, tuple, list, dict, set, frozenset, np.ndarray, torch.Tensor, PurePath, torch.dtype)
_REFERENCES = (functools.partial, MethodType, BuiltinFunctionType)
_SETTLED = (*_VALUES, *_REFERENCES, *_OF_THIS_PROCESS, type, FunctionType)
_WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    type(functools.cache(len)),
)


_HANDLES = (io.IOBase, mmap.mmap, socket.socket, zipfile.ZipFile, tarfile.TarFile)


@runtime_checkable
class _UsersFingerprinted(Protocol):
    """A user's object that returns itself what identifies it, while its attributes change."""

    def fingerprinted(self) -> Any: ...


class Fingerprinted:
    """An object that returns itself what tells it from another: its attributes are not looked at."""

    def fingerprint(self) -> Any:
        """Return plain data."""
        raise TypeError(f"{type(self).__name__} must implement `fingerprint`.")

    def value_fingerprint(self) -> Any:
        """Return plain data that cached values depend on: by default, `fingerprint`."""
        return self.fingerprint()


def fingerprint(value: Any) -> str:
    """Return the short hash of one value; of a pipe, without what is upstream of it."""
    tokens = _Tokens()
    return _hash(tokens.of_pipe(value) if isinstance(value, IterDataPipe | MapDataPipe) else tokens.of(value), 4).hex()


def digest(value: Any) -> bytes:
    """Return the long hash of one value, all entries of a long sequence included; of a pipe as `fingerprint`."""
    tokens = _Tokens(limit=None)
    return _hash(tokens.of_pipe(value) if isinstance(value, IterDataPipe | MapDataPipe) else tokens.of(value), 20)


def digest_values(pipe: Fingerprinted) -> bytes:
    """Return the long hash of what the values of a pipe's samples depend on."""
    return _hash(_Tokens(limit=None).of(pipe.value_fingerprint()), 20) if isinstance(pipe, Fingerprinted) else b""


def digest_with_globals(value: Any) -> tuple[bytes, list[str]]:
    """Return the long hash of one value for cache keys, and the names of globals that could not be hashed.

    Unlike `digest`, this follows the globals that users' functions and methods read: plain values, objects, functions
    and classes, and the globals that those read in turn. Libraries count by name and version. A global that the same
    function assigns, such as a counter, does not count, nor does an attribute that is None or an open file.
    """
    tokens = _Tokens(limit=None, follows_globals=True)
    return _hash(tokens.all_of(value), 20), tokens.unhashed


def _hash(tokens: Iterator[bytes], size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=size)
    for token in tokens:
        digest.update(len(token).to_bytes(8, "little") + token)
    return digest.digest()


class _Tokens:
    """Says what values are, each object once: one that is met again is the number of its first meeting."""

    def __init__(
        self,
        met: dict[int, tuple[int, Any]] | None = None,
        limit: int | None = _MANY,
        *,
        follows_globals: bool = False,
    ) -> None:
        self.unhashed: list[str] = []
        self._met = dict(met or {})
        self._limit = limit
        self._follows_globals = follows_globals
        # Globals wait in a queue: following them at once would recurse as deeply as functions call each other.
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._waiting: deque[tuple[str, Any]] = deque()
        self._read_as = ""

    def all_of(self, value: Any) -> Iterator[bytes]:
        """Yield the tokens of `value`, then those of each global that it reads, directly or not, once."""
        yield from self.of_pipe(value) if isinstance(value, IterDataPipe | MapDataPipe) else self.of(value)
        while self._waiting:
            self._read_as, followed = self._waiting.popleft()
            yield from self.of(followed)

    def of_pipe(self, pipe: Any) -> Iterator[bytes]:
        yield type(pipe).__qualname__.encode()
        if self._follows_globals:
            yield from self.of(own_members(type(pipe)))
        if isinstance(pipe, Fingerprinted):
            yield from self.of(pipe.value_fingerprint() if self._follows_globals else pipe.fingerprint())
        elif not isinstance(pipe, ShardingFilter):  # whose attributes say which rank this is
            yield from self.of({name: value for name, value in vars(pipe).items() if not name.startswith("_")})

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
        elif self._follows_globals and (text := _text_of_basic(value)) is not None:
            yield text.encode()
        elif value is not None and id(value) in self._met:
            yield str(self._met[id(value)][0]).encode()
        elif value is not None:
            self._met[id(value)] = len(self._met), value  # held, so that no other object gets its address
            for part in self._parts(value):
                yield from self.of(part)

    def _hash_of(self, value: Any) -> bytes:
        if isinstance(value, _PLAIN):  # most dictionary keys; their hash does not depend on objects met before
            return _hash(_Tokens().of(value), 16)
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
        elif not self._follows_globals:
            yield from _object_parts(value)
        elif isinstance(value, FunctionType):
            yield from self._function_parts(value)
        elif isinstance(value, type):
            yield value.__qualname__
            yield own_members(value) if is_users(value) else _library_of(value)
        elif isinstance(value, Fingerprinted):
            yield from (type(value).__qualname__, own_members(type(value)), value.value_fingerprint())
        elif isinstance(value, (*_REFERENCES, _UsersFingerprinted)):
            yield from _object_parts(value)
        else:
            yield from (getattr(value, "__qualname__", type(value).__qualname__), own_members(type(value)))
            kind: Any = type(value)
            attributes = settled_attributes(value)
            # A plain object of a user's class without attributes has no state besides its class.
            is_plain = (kind.__reduce_ex__, kind.__reduce__) == (object.__reduce_ex__, object.__reduce__)
            yield attributes if attributes or (is_plain and is_users(kind)) else self._reduced(value)

    def _function_parts(self, function: FunctionType) -> Iterator[Any]:
        """Yield the parts of a function, as `_object_parts` does, and the globals that a user's function reads."""
        before = self._read_as
        yield from (function.__qualname__, *_code_parts(function.__code__))
        yield from (function.__defaults__, function.__kwdefaults__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._read_as = f"`{name}` of `{function.__qualname__}`"
            yield _content_of(cell)
        self._read_as = before
        if _is_users_module(function.__globals__.get("__name__") or ""):
            yield from self._globals_of(function)

    def _reduced(self, value: Any) -> Any:
        reduced = _reduced(value)
        is_input = type(value).__module__ != "_thread" and not (isinstance(value, io.IOBase) and not _reads(value))
        if reduced is None and self._read_as and is_input:
            self.unhashed.append(f"{self._read_as} ({type(value).__name__})")
        return reduced

    def _globals_of(self, function: FunctionType) -> Iterator[Any]:
        """Yield the globals that a function reads, by name: libraries and plain values directly, others by number."""
        for path in _paths_read(function.__code__):
            if path[0] not in function.__globals__:  # a built-in function
                continue
            length, value = _resolved(function.__globals__, path)
            name = ".".join(path[:length])
            library = _library_of(value)
            if library is not None:
                yield name, library
            elif value is None or isinstance(value, _PLAIN):
                yield name, value
            else:
                yield name, self._number_of(f"`{name}` of `{function.__qualname__}`", value)

    def _number_of(self, name: str, value: Any) -> int:
        known = self._numbers.get(id(value))
        if known is not None:
            return known[0]
        number = len(self._numbers)
        if number < _MOST_FOLLOWED:
            self._numbers[id(value)] = number, value
            self._waiting.append((name, value))
        elif number == _MOST_FOLLOWED:
            self.unhashed.append(f"{name} and others ({_MOST_FOLLOWED:,} globals were followed)")
        return number


def _text_of_basic(value: Any) -> str | None:
    """Return the text of a collection of strings, numbers and None; hashing it is faster than hashing each entry."""
    kind = type(value)
    if kind is dict and set(map(type, value)) <= {str} and _is_basic(value.values()):
        return repr(sorted(value.items()))
    return repr(value) if kind in (list, tuple) and _is_basic(value) else None


def _is_basic(values: Collection[Any], depth: int = 4) -> bool:
    kinds = set(map(type, values)) - _BASIC
    if not kinds <= {list, tuple}:
        return False
    return not kinds or (depth > 0 and all(type(each) in _BASIC or _is_basic(each, depth - 1) for each in values))


def _reads(file: io.IOBase) -> bool:
    try:
        return file.readable()
    except ValueError:  # it is closed
        return False


def _resolved(namespace: Mapping[str, Any], path: tuple[str, ...]) -> tuple[int, Any]:
    """Return how many names of a path such as `config.image.size` can be resolved, and the value found there.

    Attributes are followed only if looking them up runs no code: in users' modules, and in the `__dict__` of objects.
    """
    changed = _changed_globals.get((namespace.get("__name__") or "", path[0]))
    value = namespace[path[0]] if changed is None else changed.known_by(namespace[path[0]])
    for length, name in enumerate(path[1:], 1):
        held = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
        kind: Any = type(value)
        is_plain = kind.__getattribute__ in (object.__getattribute__, ModuleType.__getattribute__)
        is_library = isinstance(value, ModuleType) and not _is_users_module(value.__name__)
        if name not in held or not is_plain or is_library or hasattr(getattr(kind, name, None), "__set__"):
            return length, value
        value = held[name]
    return len(path), value


def _library_of(value: Any) -> tuple[str, ...] | None:
    """Return name and version of a library's module, function or class; None for values and users' code."""
    if isinstance(value, ModuleType):
        name, inner = value.__name__, ""
    elif isinstance(value, type | FunctionType | BuiltinFunctionType) and getattr(value, "__self__", None) is None:
        if getattr(value, "__closure__", None) is not None:  # perhaps a library's decorator around users' code
            return None
        name, inner = value.__module__ or "", value.__qualname__
    elif isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType):
        name, inner = value.__self__.__name__, value.__qualname__
    else:
        return None
    if _is_users_module(name):
        return (name,) if isinstance(value, ModuleType) else None
    root = name.split(".")[0]
    version = getattr(sys.modules.get(root), "__version__", "") if root != "kdpipes" else ""  # see `identity._FORMAT`
    return name, inner, str(version).split("+")[0]


@functools.lru_cache(maxsize=4096)
def _paths_read(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that code reads, inner functions included, as sorted paths: `config.size`, `helper`.

    Globals that the code itself assigns are left out: they are its state, not its input.
    """
    read, assigned = set[tuple[str, ...]](), set[str]()
    waiting = [code]
    while waiting:
        current = waiting.pop()
        waiting += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
        path: tuple[str, ...] = ()
        for instruction in dis.get_instructions(current):
            if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                path = (*path, instruction.argval)
            elif instruction.opname != "EXTENDED_ARG":
                read |= {path} if path else set()
                path = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                assigned.add(instruction.argval)
    return tuple(sorted(path for path in read if path[0] not in assigned))


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
        if isinstance(value, Fingerprinted):
            yield value.fingerprint()
        elif isinstance(value, _UsersFingerprinted):
            yield value.fingerprinted()
        else:
            yield attributes_of(value) or _reduced(value)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(kind: type) -> bool:
    """Return whether a class is a user's own: its code may change while its name stays."""
    return _is_users_module(kind.__module__)


def _is_users_module(name: str) -> bool:
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


class Change(NamedTuple):
    """A value that reading a sample has changed.

    Args:
        before: The value before the change; `MISSING` if there was none.
        first: The first known value: `before`, or a copy of it, because collections may be changed in place.
        last: The value after the change.
    """

    before: Any
    first: Any
    last: Any

    def known_by(self, value: Any) -> Any:
        """Return the value to hash: the first one, unless the user has since assigned another object."""
        return self.first if value is self.last or value is MISSING or isinstance(value, _PLAIN) else value

    def after(self, known: Change | None) -> Change:
        """Return this change, merged with an earlier one: it then starts at the first value of that."""
        is_first = known is None or known.known_by(self.before) is self.before
        return self if known is None or is_first else self._replace(first=known.first)


_changed_attributes: dict[int, tuple[weakref.ref[Any], dict[str, Change]]] = {}  # by the identity of the object
_changed_globals: dict[tuple[str, str], Change] = {}  # by module and name


def note_changed_attribute(holder: Any, name: str, change: Change) -> None:
    """Make caches identify an object by the value that an attribute had before reading from the object changed it."""
    key = id(holder)
    try:
        known = _changed_attributes.get(key) or (weakref.ref(holder, lambda _: _changed_attributes.pop(key, None)), {})
    except TypeError:  # its class does not support weak references
        return
    changed = _changed_attributes.setdefault(key, known)[1]
    changed[name] = change.after(changed.get(name))


def note_changed_global(namespace: dict[str, Any], name: str, change: Change) -> None:
    """Make caches identify a function by the value that a global had before calling the function changed it."""
    key = namespace.get("__name__") or "", name
    _changed_globals[key] = change.after(_changed_globals.get(key))


def globals_read(function: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the globals that a user's function reads and does not assign, each as a namespace and a name."""
    namespace = getattr(function, "__globals__", {}) if isinstance(function, FunctionType) else {}
    if not _is_users_module(namespace.get("__name__") or "kdpipes"):
        return []
    return [(namespace, name) for name in dict.fromkeys(path[0] for path in _paths_read(function.__code__))]


def with_first_values(holder: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object, with the first values of those that reading from it has changed."""
    known = _changed_attributes.get(id(holder))
    if known is None or known[0]() is not holder:
        return attributes
    first = {name: changed.known_by(attributes.get(name, MISSING)) for name, changed in known[1].items()}
    return {name: value for name, value in {**attributes, **first}.items() if value is not MISSING}


def settled_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes by which caches identify an object, without those that change while it is read.

    An attribute that is None or an open file is left out, because a dataset may open its file on the first read.
    """
    attributes = with_first_values(value, attributes_of(value))
    return {name: each for name, each in attributes.items() if not _is_unsettled(each)}


def _is_unsettled(value: Any) -> bool:
    if value is None or isinstance(value, _HANDLES):
        return True
    if isinstance(value, _SETTLED) or is_users(type(value)):
        return False
    return not type(value).__module__.startswith("kdpipes.") and _reduced(value) is None


def _reduced(value: Any) -> Any:
    """Return what an object of a C type would pickle; nothing where it would not."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(2)
    except Exception:
        return None
    return reduced if isinstance(reduced, str) else [part for part in reduced[1:3] if not hasattr(part, "__next__")]
