"""Values as tagged plain data with a checksum, from which they come back exactly; nothing that is read is executed.

An entry is a frame (mark, format, CRC-32 of all that follows, length, length of the header), a header in JSON and the
raw contents of arrays, tensors, bytes and long strings, each at a multiple of 64 bytes. In the header, JSON's own
values stand for themselves and its arrays for all else: `["tuple", [1, 2]]`, `["array", "<f4", [2, 3], 0, 0]`. In
format 2, the CRC-32 begins with the entry's key, so that an entry under another key counts as damaged.
"""

from __future__ import annotations

import functools
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from kdpipes.core.errors import DataError, must_be
from kdpipes.storage.codec_arrays import read_array, read_tensor, write_array, write_tensor
from kdpipes.storage.codec_images import image_as_plain, image_of

__all__ = ["DamagedError", "PickledError", "checksum_of", "decode", "encode", "register_type"]

_MARK, _FORMAT, _FORMAT_WITH_KEY = b"kdp", 1, 2
_FRAME = struct.Struct("<3sBIQI")
_START_OF_CHECKED = 8
_ALIGNMENT = 64
_LONG = 256  # characters, from which on a string stands outside of the header
_SHORT_HEADER = 256  # bytes, up to which it may be that of other entries as well
_MOST_LEVELS = 64
_NATIVE = frozenset([bool, float, type(None)])
_BROKEN = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, RuntimeError, OSError)
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_from_json = json.JSONDecoder().raw_decode


class DamagedError(DataError):
    """An entry that is not what was written, or was written in another format: as good as none."""


class PickledError(DataError):
    """An entry holds a pickle, and pickles are not allowed."""


class _Registered(NamedTuple):
    tag: str
    kind: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


_by_type: dict[type, _Registered] = {}
_by_tag: dict[str, _Registered] = {}


def register_type(tag: str, kind: type, to_plain: Callable[[Any], Any], from_plain: Callable[[Any], Any]) -> None:
    """Let values of exactly the type `kind` be encoded.

    Args:
        tag: What the type is called in entries: once and for all.
        kind: The type.
        to_plain: Returns of a value what `encode` knows, such as a tuple.
        from_plain: Returns the value of that again. It must trust nothing: an entry may come from anywhere.
    """
    known = _by_tag.get(tag)
    if known is not None and (known.kind.__module__, known.kind.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(must_be("tag", "new", tag, f"It stands for {known.kind.__qualname__} already."))
    _by_type[kind] = _by_tag[tag] = _Registered(tag, kind, to_plain, from_plain)


def encode(value: Any, *, allow_pickle: bool = False, key: bytes = b"") -> list[Any]:
    """Return an entry as a list of buffers, to be written one after the other.

    Known are None, bool, int, float, str, bytes, bytearray, list, tuple, dict, NumPy's arrays and scalars of any dtype
    but object, tensors in main memory, images of Pillow's and what `register_type` was told; no subclasses of these,
    but for Pillow's images and `numpy.memmap`, which becomes an array. A memoryview becomes bytes. Arrays and images
    may be shared with the buffers until they are written.

    Args:
        value: What is to be kept.
        allow_pickle: Whether to pickle what is not known.
        key: The key of the entry; under another key, `decode` reports it as damaged.

    Raises:
        TypeError: A type is not known.
    """
    writer = _Writer(allow_pickle)
    header = _to_json(writer.node(value)).encode("utf-8", "surrogatepass")
    lead = header + bytes(-(_FRAME.size + len(header)) % _ALIGNMENT)
    length = _FRAME.size + len(lead) + writer.end
    number = _FORMAT_WITH_KEY if key else _FORMAT
    checked = _FRAME.pack(_MARK, number, 0, length, len(header))[_START_OF_CHECKED:]
    checksum = zlib.crc32(lead, zlib.crc32(checked, zlib.crc32(key)))
    for part in writer.parts:
        checksum = zlib.crc32(part, checksum)
    return [_FRAME.pack(_MARK, number, checksum, length, len(header)), lead, *writer.parts]


def checksum_of(entry: list[Any]) -> int:
    """Return the checksum of an entry, as `encode` has made it: a CRC-32 of all that it says."""
    checksum: int = _FRAME.unpack_from(entry[0])[2]
    return checksum


def decode(
    buffer: Any, *, verify: bool = True, allow_pickle: bool = False, bytes_as_views: bool = False, key: bytes = b""
) -> Any:
    """Return the value of an entry. Arrays are read-only views of the buffer, which they keep; all else is copied.

    Whatever the entry says, decoding takes at most a small multiple of its length in memory.

    Args:
        buffer: The bytes of the entry, or a view of them.
        verify: Whether to compare the checksum. Without it a damaged entry may give another value, but no more.
        allow_pickle: Whether to read what was pickled, and so to execute what the entry says.
        bytes_as_views: Whether bytes come as read-only memoryviews of the buffer, too.
        key: The key of the entry; ignored for entries that were encoded without a key.

    Raises:
        DamagedError: The entry is damaged or truncated, or belongs to another key or format.
        PickledError: It holds a pickle, which is not allowed.
        DataError: It holds a type that is not registered.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    try:
        mark, number, checksum, length, size = _FRAME.unpack_from(view)
    except struct.error:
        raise DamagedError(f"The entry has been cut: it has {len(view)} bytes.") from None
    if mark != _MARK or number not in (_FORMAT, _FORMAT_WITH_KEY):
        raise DamagedError(
            f"The entry is not of format {_FORMAT} or {_FORMAT_WITH_KEY}, which this version of kdpipes reads."
        )
    if length != len(view):
        raise DamagedError(f"The entry has {len(view)} bytes instead of {length}.")
    start_of_sum = zlib.crc32(key) if number == _FORMAT_WITH_KEY else 0
    if verify and zlib.crc32(view[_START_OF_CHECKED:], start_of_sum) != checksum:
        of_another = ", or it belongs to another key" if number == _FORMAT_WITH_KEY else ""
        raise DamagedError(f"The entry of {length} bytes is damaged: its checksum differs{of_another}.")
    start = _FRAME.size + size
    try:
        make = (_plan_of if size > _SHORT_HEADER else _plan_again)(bytes(view[_FRAME.size : start]))
        return make(_Contents(view[start + -start % _ALIGNMENT :], allow_pickle, bytes_as_views))
    except DataError:
        raise
    except _BROKEN as error:
        raise DamagedError(f"The entry of {length} bytes is damaged: {error}.") from error


class _Writer:
    """Makes nodes of values, and collects what stands outside of the header."""

    def __init__(self, allow_pickle: bool) -> None:
        self.parts: list[Any] = []
        self.end = 0
        self._allow_pickle = allow_pickle
        self._level = 0

    def add(self, content: Any) -> int:
        """Return where a content will stand, counted from the end of the header."""
        padding = -self.end % _ALIGNMENT
        if padding:
            self.parts.append(bytes(padding))
        start = self.end + padding
        self.parts.append(content)
        self.end = start + len(content)
        return start

    def node(self, value: Any) -> Any:
        kind = type(value)
        if kind in _NATIVE:
            return value
        write = _WRITERS.get(kind)
        if write is not None:
            return write(self, value)
        if isinstance(value, np.generic):
            return ["scalar", self.node(np.asarray(value))]
        if isinstance(value, Image.Image):
            kind = Image.Image
        if kind in _by_type:
            return ["of", _by_type[kind].tag, self.nodes([_by_type[kind].to_plain(value)])[0]]
        return self._unknown(value)

    def nodes(self, values: Any) -> list[Any]:
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise ValueError(f"A value nested more than {_MOST_LEVELS} levels deep, or in itself, cannot be kept.")
        nodes = [self.node(value) for value in values]
        self._level -= 1
        return nodes

    def _unknown(self, value: Any) -> list[Any]:
        if not self._allow_pickle:
            name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            way_out = (
                "Make a dict, list or array of it, or pass `allow_pickle=True`, where all that is read is trusted."
            )
            raise TypeError(f"A value of type `{name}` cannot be kept as plain data. {way_out}")
        return ["pickle", *_bytes_node(self, pickle.dumps(value, protocol=5))[1:]]


def _int_node(writer: _Writer, value: int) -> Any:
    return value if -(1 << 63) <= value < 1 << 63 else ["int", hex(value)]  # which has no limit, unlike decimals


def _str_node(writer: _Writer, value: str) -> Any:
    return value if len(value) < _LONG else ["str", *_bytes_node(writer, value.encode("utf-8", "surrogatepass"))[1:]]


def _bytes_node(writer: _Writer, value: Any) -> list[Any]:
    return ["bytes", writer.add(value), len(value)]


def _dict_node(writer: _Writer, value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value):
        return dict(zip(value, writer.nodes(value.values()), strict=True))
    return ["dict", writer.nodes(value), writer.nodes(value.values())]


_WRITERS: dict[type, Callable[[_Writer, Any], Any]] = {
    int: _int_node,
    str: _str_node,
    bytes: _bytes_node,
    bytearray: lambda writer, value: ["bytearray", *_bytes_node(writer, value)[1:]],
    memoryview: lambda writer, value: _bytes_node(writer, value.tobytes()),
    list: lambda writer, value: ["list", writer.nodes(value)],
    tuple: lambda writer, value: ["tuple", writer.nodes(value)],
    dict: _dict_node,
    np.ndarray: lambda writer, value: ["array", *write_array(writer.add, value)],
    np.memmap: lambda writer, value: ["array", *write_array(writer.add, np.asarray(value))],
    torch.Tensor: lambda writer, value: ["tensor", *write_tensor(writer.add, value)],
}


class _Contents:
    """The bytes after a header, and how they may be read."""

    __slots__ = ("_left", "allow_pickle", "bytes_as_views", "memory")

    def __init__(self, memory: memoryview, allow_pickle: bool, bytes_as_views: bool = False) -> None:
        self.memory = memory
        self.allow_pickle = allow_pickle
        self.bytes_as_views = bytes_as_views
        self._left = [len(memory)]

    def span(self, start: int, size: int) -> memoryview:
        """Return some bytes; raise if all spans together exceed the contents, as `encode` writes each byte once."""
        span = self.memory[start : start + size]
        if start < 0 or len(span) != size:
            raise ValueError(f"{size} bytes from offset {start} are missing")
        self._left[0] -= size
        if self._left[0] < 0:
            raise ValueError("some of its bytes are used more than once")
        return span

    def with_copies(self) -> _Contents:
        """Return the same contents, read as copies instead of views."""
        if not self.bytes_as_views:
            return self
        copying = _Contents(self.memory, self.allow_pickle)
        copying._left = self._left
        return copying


_Plan = Callable[[_Contents], Any]


def _plan(node: Any) -> _Plan:
    """Return what makes the value of a node of the contents: worked out once for entries with the same header."""
    if type(node) is list:
        return _PLANS[node[0]](*node[1:])
    if type(node) is dict:
        if not any(type(entry) in (list, dict) for entry in node.values()):
            return lambda contents: dict(node)
        parts = {key: _plan(entry) for key, entry in node.items()}
        return lambda contents: {key: make(contents) for key, make in parts.items()}
    return lambda contents: node


def _plan_of(header: bytes) -> _Plan:
    return _plan(_from_json(str(header, "utf-8", "surrogatepass"))[0])


_plan_again = functools.lru_cache(maxsize=256)(_plan_of)  # of arrays of one shape, say


def _list_plan(nodes: list[Any]) -> _Plan:
    if not any(type(node) in (list, dict) for node in nodes):  # a thousand numbers are quicker copied
        return lambda contents: list(nodes)
    parts = [_plan(node) for node in nodes]
    return lambda contents: [make(contents) for make in parts]


def _tuple_plan(nodes: list[Any]) -> _Plan:
    make_list = _list_plan(nodes)
    return lambda contents: tuple(make_list(contents))


def _dict_plan(keys: list[Any], nodes: list[Any]) -> _Plan:
    make_keys, make_values = _list_plan(keys), _list_plan(nodes)
    return lambda contents: dict(zip(make_keys(contents.with_copies()), make_values(contents), strict=True))


def _bytes_plan(start: int, size: int) -> _Plan:
    def make(contents: _Contents) -> Any:
        span = contents.span(start, size)
        return span if contents.bytes_as_views else bytes(span)

    return make


def _array_plan(*place: Any) -> _Plan:
    read = read_array(*place)
    return lambda contents: read(contents.span)


def _scalar_plan(node: Any) -> _Plan:
    make = _plan(node)
    return lambda contents: make(contents)[()]


def _registered_plan(tag: str, node: Any) -> _Plan:
    make = _plan(node)

    def make_registered(contents: _Contents) -> Any:
        if tag not in _by_tag:
            raise DataError(f"The entry holds a {tag!r}, which is not known here: import what registers it.")
        return _by_tag[tag].from_plain(make(contents.with_copies()))

    return make_registered


def _pickle_plan(start: int, size: int) -> _Plan:
    def make(contents: _Contents) -> Any:
        if not contents.allow_pickle:
            way_out = "If you trust everything that is read, pass `allow_pickle=True`."
            raise PickledError(f"The entry holds a pickle, which could execute arbitrary code. {way_out}")
        return pickle.loads(contents.span(start, size))  # noqa: S301 - which the user has asked for

    return make


_PLANS: dict[str, Callable[..., _Plan]] = {
    "int": lambda digits: lambda contents: int(digits, 16),
    "str": lambda start, size: lambda contents: str(contents.span(start, size), "utf-8", "surrogatepass"),
    "bytes": _bytes_plan,
    "bytearray": lambda start, size: lambda contents: bytearray(contents.span(start, size)),
    "list": _list_plan,
    "tuple": _tuple_plan,
    "dict": _dict_plan,
    "array": _array_plan,
    "scalar": _scalar_plan,
    "tensor": lambda *place: lambda contents: read_tensor(contents.span, *place),
    "of": _registered_plan,
    "pickle": _pickle_plan,
}


register_type("image", Image.Image, image_as_plain, image_of)
