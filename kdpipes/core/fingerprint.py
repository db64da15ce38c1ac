"""Compute hashes that are equal in all processes, to check whether a state or a cache entry still fits a chain.

The hash of a value combines the hashes of its parts. Each object is visited once, without recursion, so that hashing
takes time linear in the size of the value. Hashes depend neither on hash seeds and memory addresses nor on the order in
which dictionaries, sets and reference cycles happen to be visited.

States of loaders depend on the code, defaults and closures of functions. Keys of caches also depend on the globals that
functions read: a stale value is worse than a miss, but a global that changes during training must not invalidate
states.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import io
import itertools
import logging
import mmap
import queue
import random
import re
import socket
import sys
import tarfile
import threading
import weakref
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from datetime import date
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.core.callback import Callback
from kdpipes.core.shared import PackedStrings, Shared
from kdpipes.core.stock import upstream_of
from kdpipes.core.torch_pipes import PIPES, ShardingFilter
from kdpipes.core.user_code import (
    VALUES,
    attributes_of,
    closure_of,
    content_of,
    global_values,
    is_kdpipes,
    is_users,
    is_users_module,
    library_of,
    own_members,
    with_first_values,
)

_MANY = 1000  # of longer sequences, states depend on the length and on this many entries
_SIZE = 20  # bytes of a hash
_MOST_ROUNDS = 16  # rounds for telling apart the objects of a reference cycle
_BLOCK = 1 << 20  # entries per block of an array whose memory is not contiguous
_ATTRIBUTES = "\0attributes of "  # marks a dictionary of attributes
_OF_THIS_PROCESS = (
    *PIPES,
    ModuleType,
    logging.Logger,
    np.random.Generator,
    random.Random,
    torch.Generator,
)
_BASIC = frozenset([bytes, str, bool, int, float, complex, type(None)])  # the texts of different values differ
_REFERENCES = (functools.partial, MethodType, BuiltinFunctionType)
_SETTLED = (*VALUES, *_REFERENCES, *_OF_THIS_PROCESS, type, FunctionType)
_LEAVES = (type(None), int, float, complex, bytes, np.generic, Enum, date)
_first_sketches: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_SEPARATOR = re.compile(r"[/\\]")
# Types whose instances have no value of their own.
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.local, queue.SimpleQueue, ContextVar, weakref.ref)
_HANDLES = (io.IOBase, mmap.mmap, socket.socket, zipfile.ZipFile, tarfile.TarFile)


class Fingerprinted:
    """An object that returns the data that identify it. Its attributes are not hashed."""

    def fingerprint(self) -> Any:
        """Return plain data."""
        raise TypeError(f"{type(self).__name__} must implement `fingerprint`.")

    def value_fingerprint(self) -> Any:
        """Return the plain data on which cached values depend: by default, `fingerprint`."""
        return self.fingerprint()


@runtime_checkable
class _UsersFingerprinted(Protocol):
    """A user's object that returns its own identifying data, because its attributes change."""

    def fingerprinted(self) -> Any: ...


def hash_value(value: Any, *, globals: bool, most: int = sys.maxsize) -> tuple[bytes, list[str]]:
    """Return a 20-byte hash of a value, and the names of closure variables and globals that cannot be hashed.

    A pipe is hashed without the pipes upstream of it. Pipes held by functions and objects are hashed together with all
    pipes that they read from.

    Args:
        value: Any object.
        globals: Whether to include the globals that users' functions and methods read: values, objects, functions and
            classes, and the globals that those read in turn. Libraries are then included by name and version. A global
            that the same function assigns, such as a counter, is ignored, as is an attribute that is None or an open
            file.
        most: The number of entries that are hashed of a longer sequence, in addition to its length.
    """
    hasher = _Hasher(follows_globals=globals, most=most)
    if isinstance(value, PIPES):
        hasher.upstream = set(map(id, upstream_of(value)))
        value = list(_pipe_parts(value, globals))
    return hasher.hash(value), hasher.unhashed


class _Read(NamedTuple):
    """A part of a function, with the name by which warnings refer to it."""

    name: str
    value: Any


class _Node:
    """An object whose hash needs the hashes of its parts."""

    __slots__ = ("hash", "hashes", "low", "num_together", "parts", "place", "read_as", "value")

    def __init__(self, value: Any, read_as: str, place: int, parts: Iterator[Any]) -> None:
        self.value = value  # keeps the object alive, so that no other object gets its address
        self.read_as = read_as  # the name of the closure variable or global through which the object was reached
        self.place = self.low = place  # the number of objects found before this one
        self.parts = parts
        # The number of parts of each entry if the order of entries is irrelevant.
        self.num_together = 2 if isinstance(value, Mapping) else 1 if isinstance(value, Set) else 0
        self.hashes: list[bytes | _Node] = []
        self.hash = b""  # empty until it is computed

    def combined(self) -> bytes:
        """Return the hash of the type and the hashes of the parts."""
        hashes = [part if isinstance(part, bytes) else part.hash for part in self.hashes]
        if self.num_together:
            size = self.num_together
            hashes = sorted(b"".join(hashes[start : start + size]) for start in range(0, len(hashes), size))
        return _hash(f"of parts: {type(self.value).__name__}", b"".join(hashes))


class _Hasher:
    """Hashes a value and everything it contains, each object once."""

    def __init__(self, *, follows_globals: bool, most: int) -> None:
        self.unhashed: list[str] = []
        self.upstream: set[int] = set()  # identities of pipes to ignore
        self._follows_globals = follows_globals
        self._most = most
        self._nodes: dict[int, _Node] = {}
        self._open: list[_Node] = []  # objects without a hash yet, in order of discovery
        self._members: dict[type, list[Any]] = {}

    def hash(self, value: Any) -> bytes:
        """Return the hash of a value.

        This is Tarjan's algorithm for strongly connected components: a depth-first search that finishes objects that
        refer to each other together, and every other object after its parts.
        """
        known = self._known_hash(value, "")
        if known is not None:
            return known
        first = self._begin(value, "")
        path = [first]
        while path:
            node = path[-1]
            for part in node.parts:
                read_as, part = part if isinstance(part, _Read) else (node.read_as, part)
                known = self._known_hash(part, read_as)
                if known is not None:
                    node.hashes.append(known)
                    continue
                found = self._nodes.get(id(part))
                if found is None:
                    path.append(self._begin(part, read_as))
                    node.hashes.append(path[-1])
                    break
                node.hashes.append(found.hash or found)
                if not found.hash:
                    node.low = min(node.low, found.place)
            else:
                path.pop()
                if path:
                    path[-1].low = min(path[-1].low, node.low)
                if node.low == node.place:
                    self._finish(node)
        return first.hash

    def _begin(self, value: Any, read_as: str) -> _Node:
        node = self._nodes[id(value)] = _Node(value, read_as, len(self._nodes), self._parts(value, read_as))
        self._open.append(node)
        return node

    def _finish(self, head: _Node) -> None:
        """Hash an object together with all objects in the same reference cycles.

        In a cycle, a hash cannot wait for those of its parts. As in the Weisfeiler-Leman graph test, each round
        combines the hashes of the previous round, until no more objects can be told apart. A difference anywhere in a
        cycle changes the hashes of all its objects.
        """
        cycle = [self._open.pop()]
        while cycle[-1] is not head:
            cycle.append(self._open.pop())
        for node in cycle:
            node.hash = bytes(_SIZE)
        if len(cycle) == 1:
            head.hash = head.combined()
        else:
            num_different = 0
            for _ in range(_MOST_ROUNDS):
                hashes = [node.combined() for node in cycle]
                for node, known in zip(cycle, hashes, strict=True):
                    node.hash = known
                if len(set(hashes)) == num_different:
                    break
                num_different = len(set(hashes))
            whole = _hash("cycle", *sorted(hashes))
            for node in cycle:
                node.hash = _hash("of cycle", node.hash, whole)
        for node in cycle:
            node.hashes = []  # they take up most of the memory

    def _known_hash(self, value: Any, read_as: str) -> bytes | None:
        """Return the hash of a value that has no parts or cannot be hashed; None if its parts must be hashed."""
        try:
            if (read_as or self._follows_globals) and isinstance(value, PIPES) and id(value) not in self.upstream:
                return None
            return self._hash_of_leaf(value)
        except Exception:  # such as a dead `weakref.proxy`
            self._note_unhashed(value, read_as)
            return bytes(_SIZE)

    def _note_unhashed(self, value: Any, read_as: str) -> None:
        kind = type(value).__name__
        self.unhashed.append(f"{read_as} ({kind})" if read_as else kind)

    def _hash_of_leaf(self, value: Any) -> bytes | None:
        """Return the hash of a value that is hashed as a whole; None if its parts must be hashed."""
        kind = type(value)
        text_of = _TEXT_OF.get(kind)
        if text_of is None:
            if kind in (dict, list, tuple, set, frozenset):
                text = self._text_of_basic(value)
                return None if text is None else _hash(kind.__name__, text.encode())
            if isinstance(value, _OF_THIS_PROCESS):
                return bytes(_SIZE)
            if isinstance(value, np.ndarray | np.generic):
                what = f"{kind.__name__} {value.dtype} {value.shape}"
                return None if value.dtype.hasobject else _hash(what, *_blocks_of(np.asarray(value)))
            if isinstance(value, bytes | bytearray | memoryview):
                return _hash(kind.__name__, bytes(value))
            text_of = next((text_of for base, text_of in _TEXT_OF.items() if isinstance(value, base)), None)
        return None if text_of is None else _hash(kind.__name__, text_of(value).encode("utf-8", "surrogatepass"))

    def _text_of_basic(self, value: Any) -> str | None:
        """Return the text of a collection of plain values: ten times as fast as hashing its entries one by one."""
        is_mapping = isinstance(value, dict)
        is_short = is_mapping or isinstance(value, Set) or len(value) <= self._most
        if not (is_short and self._is_basic(value) and (not is_mapping or self._is_basic(value.values()))):
            return None
        try:
            if isinstance(value, list | tuple):
                return ascii(value)
            return "\n".join(sorted(map(ascii, value.items() if is_mapping else value)))
        except ValueError:  # Python does not convert integers of more than 4,300 digits to text
            return None

    def _is_basic(self, values: Collection[Any]) -> bool:
        for _ in range(4):
            kinds = set(map(type, values)) - _BASIC
            if not kinds:
                return True
            if not kinds <= {list, tuple}:
                return False
            nested = [value for value in values if type(value) in kinds]
            if max(map(len, nested)) > self._most:
                return False
            values = list(itertools.chain.from_iterable(nested))
        return False

    def _parts(self, value: Any, read_as: str) -> Iterator[Any]:
        """Yield the parts that distinguish an object from others of its type."""
        if isinstance(value, Fingerprinted) and not isinstance(
            value, PIPES
        ):  # its errors are those of the data, such as a missing file
            yield from (type(value).__qualname__, self._members_of(type(value)))
            yield value.value_fingerprint() if self._follows_globals else value.fingerprint()
            return
        try:
            yield from self._parts_of_other(value, read_as)
        except Exception:  # attribute access on a library's object may run any code
            self._note_unhashed(value, read_as)

    def _parts_of_other(self, value: Any, read_as: str) -> Iterator[Any]:
        if isinstance(value, PIPES):
            yield from _pipe_parts(value, self._follows_globals)
            yield value.fingerprint() if isinstance(value, Fingerprinted) else None
            yield from (_Read(read_as, source) for source in upstream_of(value))
        elif read_as.startswith(_ATTRIBUTES):
            for name, held in value.items():
                yield from (name, _Read(f"`{name}` of `{read_as.removeprefix(_ATTRIBUTES)}`", held))
        elif isinstance(value, Mapping):
            yield from itertools.chain.from_iterable(value.items())
        elif isinstance(value, Set):
            yield from value
        elif isinstance(value, Shared):
            yield value.value
        elif isinstance(value, PackedStrings):
            yield from value.arrays()
        elif isinstance(value, torch.Tensor):
            yield from (str(value.dtype), tuple(value.shape))
            if value.layout == torch.strided:
                plain = value.detach().cpu().resolve_conj().resolve_neg()
                # Compare bytes, because NumPy lacks some dtypes of torch.
                yield plain.contiguous().reshape(-1).view(torch.uint8).numpy()
            else:
                sparse = value.detach().to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
                yield from (str(value.layout), sparse.indices(), sparse.values())
        elif isinstance(value, np.ndarray):
            yield from (value.shape, value.reshape(-1)[: self._most].tolist())
        elif isinstance(value, np.generic):
            yield value.item()
        elif isinstance(value, slice):
            yield from (value.start, value.stop, value.step)
        elif isinstance(value, Sequence | deque):
            yield len(value)
            yield from itertools.islice(value, self._most)
        elif isinstance(value, Callback):
            yield value.function
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, BuiltinFunctionType):
            yield from (value.__qualname__, value.__self__)
        elif isinstance(value, CellType):
            yield content_of(value)
        elif isinstance(value, CodeType):
            yield from (value.co_code, value.co_names, value.co_varnames, *value.co_consts)
        elif isinstance(value, FunctionType):
            yield from (value.__qualname__, value.__code__)
            for defaults in (value.__defaults__, value.__kwdefaults__):
                yield _Read(f"a default of `{value.__qualname__}`", defaults)
            for name, content in closure_of(value):
                yield _Read(f"`{name}` of `{value.__qualname__}`", content)
            if self._follows_globals and is_users_module(value.__globals__.get("__name__") or ""):
                for name, held in global_values(value):
                    yield from (name, _Read(f"`{name}` of `{value.__qualname__}`", library_of(held) or held))
        elif isinstance(value, type):
            yield value.__qualname__
            if self._follows_globals:
                yield self._members_of(value) if is_users(value) else library_of(value)
        else:
            yield from (getattr(value, "__qualname__", type(value).__qualname__), self._members_of(type(value)))
            yield from self._state_of(value, read_as)

    def _members_of(self, kind: type) -> list[Any]:
        if kind not in self._members:
            self._members[kind] = own_members(kind)
        return self._members[kind]

    def _state_of(self, value: Any, read_as: str) -> Iterator[Any]:
        """Yield the data that identifies an object besides its class."""
        kind: Any = type(value)
        if isinstance(value, _UsersFingerprinted):
            yield value.fingerprinted()
            return
        attributes = attributes_of(value)
        attributes = with_first_values(value, attributes) if self._follows_globals else attributes
        reduced = _reduced(value) if _pickles_itself(kind) else None
        if isinstance(reduced, list) and not is_users(kind) and any(map(_is_lost, attributes.values())):
            yield reduced  # for example an image, whose pixels are stored in a C object
            return
        if self._follows_globals:
            for name in _lost_names(attributes, reduced):
                self._note_unhashed(attributes[name], f"`{name}` of `{kind.__qualname__}`")
            attributes = {name: held for name, held in attributes.items() if not _is_unsettled(held)}
        # A plain object of a user's class without attributes has no state besides its class.
        if attributes or (self._follows_globals and not _pickles_itself(kind) and is_users(kind)):
            yield _Read(_ATTRIBUTES + kind.__qualname__, attributes) if self._follows_globals else attributes
            return
        reduced = _reduced(value)
        is_output = isinstance(value, io.IOBase)
        with suppress(ValueError):  # fails for a detached file
            is_output = is_output and (value.closed or not value.readable())
        if reduced is None and not is_output and not isinstance(value, _LOCKS):
            self._note_unhashed(value, read_as)
        yield reduced


_TEXT_OF: dict[type, Callable[[Any], str]] = {
    str: str.__str__,
    int: hex,  # unlike `repr`, it has no limit on digits
    bool: hex,
    float: float.__repr__,
    complex: complex.__repr__,
    type(None): repr,
    range: repr,
    PurePath: str,
    torch.dtype: str,
}


def _hash(what: str, *parts: Any) -> bytes:
    hashed = hashlib.blake2b(f"{len(what)} {what}".encode(), digest_size=_SIZE)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _blocks_of(array: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of an array in C order, without a copy of more than a block."""
    if not array.nbytes:
        return
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8)
        return
    how: Any = {"flags": ["external_loop", "buffered"], "op_flags": [["readonly", "contig"]], "order": "C"}
    blocks: Any = np.nditer(array, buffersize=_BLOCK, **how)
    yield from (block.view(np.uint8) for block in blocks)


def settled_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes by which caches identify an object, except those that reading from it may change.

    Attributes that are None or an open file are left out, because a dataset may open its file on the first read.
    """
    attributes = with_first_values(value, attributes_of(value))
    return {name: each for name, each in attributes.items() if not _is_unsettled(each)}


def lost_attributes(value: Any) -> list[str]:
    """Return the names of an object's attributes that cannot be hashed, as shown in warnings."""
    kind = type(value)
    attributes = with_first_values(value, attributes_of(value))
    names = _lost_names(attributes, _reduced(value) if _pickles_itself(kind) else None)
    return [f"`{name}` of `{kind.__qualname__}` ({type(attributes[name]).__name__})" for name in names]


def _lost_names(attributes: dict[str, Any], reduced: Any) -> list[str]:
    """Return the names of attributes that cannot be hashed, except those that the object does not pickle either."""
    state = next((part for part in reversed(reduced or []) if isinstance(part, dict)), attributes)
    lost = [name for name, held in attributes.items() if _is_lost(held) and not isinstance(held, _LOCKS)]
    return [name for name in lost if state.get(name) is not None]


def _is_unsettled(value: Any) -> bool:
    return value is None or isinstance(value, _HANDLES) or _is_lost(value)


def _is_lost(value: Any) -> bool:
    """Return whether an attribute cannot be hashed."""
    if value is None or isinstance(value, (*_SETTLED, *_HANDLES)) or is_users(type(value)):
        return False
    return not is_kdpipes(type(value)) and _reduced(value) is None


def _pickles_itself(kind: Any) -> bool:
    """Return whether a class customizes pickling."""
    names = "__reduce_ex__", "__reduce__", "__getstate__"
    return any(getattr(kind, name, None) is not getattr(object, name, None) for name in names)


def _reduced(value: Any) -> Any:
    """Return the pickled state of an object whose type is written in C; None if it cannot be pickled."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(2)
    except Exception:
        return None
    return reduced if isinstance(reduced, str) else [part for part in reduced[1:3] if not hasattr(part, "__next__")]


def fingerprint(value: Any) -> str:
    """Return a short hash of a value, as used in the states of loaders."""
    return hash_value(value, globals=False, most=_MANY)[0][:4].hex()


def digest(value: Any) -> bytes:
    """Return a hash of a value, including all entries of long sequences, but without globals."""
    return hash_value(value, globals=False)[0]


def digest_values(pipe: Any) -> bytes:
    """Return a hash of the data that determines the values of a pipe, without globals; empty for a stock pipe."""
    return hash_value(pipe.value_fingerprint(), globals=False)[0] if isinstance(pipe, Fingerprinted) else b""


def sketch(value: Any, budget: int = 256) -> Any:
    """Return plain data that distinguishes values in memory: sizes, and about `budget` entries spread over them.

    Folders in paths are ignored, because files may be moved. Of other objects, only data sets and dataclasses are
    included, through the values that they hold.
    """
    if isinstance(value, str | PurePath):
        return _SEPARATOR.split(str(value))[-1]
    if isinstance(value, _LEAVES):
        return value
    if budget and not callable(value):
        # Attribute access on a library's object may run any code.
        with suppress(Exception):
            return _sketch_of_entries(value, budget)
    return None


def _sketch_of_entries(value: Any, budget: int) -> Any:
    entries = value
    what = type(value).__qualname__
    if isinstance(value, np.ndarray | torch.Tensor):
        entries = value.reshape(-1)
        what = f"{value.dtype} {tuple(value.shape)}"
        entries = entries[_spread(len(entries), budget)].tolist()
    elif hasattr(value, "iloc"):
        rows = value.iloc[_spread(len(value), budget // 8)]
        entries = [len(value), np.asarray(rows)]
    elif hasattr(value, "with_format"):
        entries = value.with_format("arrow")[_spread(len(value), budget // 8)].to_pylist()
    elif isinstance(value, dict) or is_dataclass(value):
        entries = [*(value if isinstance(value, dict) else attributes_of(value)).items()]
    elif not isinstance(value, list | tuple | range | deque):
        return sketch_of_attributes(value) if hasattr(value, "__getitem__") else None
    chosen = _spread(len(entries), budget)
    share = max(budget // max(len(chosen), 2), min(budget // 2, 8))
    return what, len(entries), [sketch(entries[position], share) for position in chosen]


def sketch_of_attributes(value: Any) -> Any:
    """Return the sketch of a data set's attributes at the first call, because reading may fill caches in them."""
    sketches = _first_sketches.get(value)
    if sketches is None:
        # A data set may refer to itself.
        sketches = _first_sketches[value] = {}
        for name, held in attributes_of(value).items():
            if not isinstance(held, (str, PurePath, *_LEAVES)):
                sketches[name] = sketch(held)
    return type(value).__qualname__, sketches


def _spread(size: int, number: int) -> list[int]:
    """Return at most `number` positions below `size`, always the same ones."""
    return list(range(size)) if size <= number else random.Random(size).choices(range(size), k=number)


def _pipe_parts(pipe: Any, follows_globals: bool) -> Iterator[Any]:
    yield type(pipe).__qualname__
    if follows_globals:
        yield own_members(type(pipe))
    if isinstance(pipe, Fingerprinted):
        yield pipe.value_fingerprint() if follows_globals else pipe.fingerprint()
    elif not isinstance(pipe, ShardingFilter):  # its attributes depend on the rank
        yield stock_fingerprint(pipe)


def stock_fingerprint(pipe: Any) -> dict[str, Any]:
    """Return the data that identifies a pipe of torch.

    Pipes of kdpipes that replace one of torch's return the same data, so that states fit both.
    """
    return {name: value for name, value in vars(pipe).items() if not name.startswith("_")}
