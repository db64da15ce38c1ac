"""Encode values as tagged plain data with a checksum, and decode them exactly; nothing that is read is executed.

An entry is a frame (mark, format, CRC-32 of all that follows, length, length of the header), a header in JSON and the
raw contents of arrays, tensors, bytes and long strings, each at a multiple of 64 bytes. In the header, JSON arrays are
tagged values, such as `["tuple", [1, 2]]` or `["array", "<f4", [2, 3], 0, 0]`; other JSON values stand for themselves.
In format 2, the CRC-32 starts with the entry's key, so that an entry under another key counts as damaged.

Record files hold entries of format 1 and must stay byte-equal, so the format is the same in caches and records.
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from kdpipes.core.errors import DataError, must_be

__all__ = ["DamagedError", "PickledError", "checksum_of", "decode", "encode", "in_batches", "register_type"]

_MARK, _FORMAT, _FORMAT_WITH_KEY = b"kdp", 1, 2
_FRAME = struct.Struct("<3sBIQI")
_START_OF_CHECKED = 8
_ALIGNMENT = 64
_LONG = 256  # characters; strings from this length on are stored after the header
_SHORT_HEADER = 256  # bytes; other entries may have the same header, so it is parsed once
_MOST_LEVELS = 64
_NATIVE = frozenset([bool, float, type(None)])
Name = TypeVar("Name")
_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d+(\[\w+\])?")
_MOST_DIMENSIONS = 64
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")  # torch.frombuffer crashes with these
_PLAIN = (bool, int, float, str, bytes, type(None))
_BROKEN = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, RuntimeError, OSError)
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_from_json = json.JSONDecoder().raw_decode


class DamagedError(DataError):
    """An entry is damaged, truncated or in another format, and counts as missing."""


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
        tag: The name of the type in entries, which must never change.
        kind: The type.
        to_plain: Converts a value to types that `encode` knows, such as a tuple.
        from_plain: Converts that back. It must check its input, because entries may come from anywhere.
    """
    known = _by_tag.get(tag)
    if known is not None and (known.kind.__module__, known.kind.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(must_be("tag", "new", tag, f"It stands for {known.kind.__qualname__} already."))
    _by_type[kind] = _by_tag[tag] = _Registered(tag, kind, to_plain, from_plain)


def encode(value: Any, *, allow_pickle: bool = False, key: bytes = b"") -> list[Any]:
    """Return an entry as a list of buffers, to be written one after the other.

    Supported are None, bool, int, float, str, bytes, bytearray, list, tuple, dict, NumPy arrays and scalars of any
    dtype but object, tensors in main memory, Pillow images and types given to `register_type`. Subclasses are not,
    except of Pillow images and `numpy.memmap`, which becomes an array. A memoryview becomes bytes. Arrays and images
    may share memory with the buffers.

    Args:
        value: The value.
        allow_pickle: Whether to pickle values of other types.
        key: The key of the entry; under another key, `decode` reports it as damaged.

    Raises:
        TypeError: A type is not supported.
    """
    writer = _NodeWriter(allow_pickle)
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
    """Return the checksum of an entry that `encode` has returned: a CRC-32 of its whole content."""
    checksum: int = _FRAME.unpack_from(entry[0])[2]
    return checksum


def decode(
    buffer: Any, *, verify: bool = True, allow_pickle: bool = False, bytes_as_views: bool = False, key: bytes = b""
) -> Any:
    """Return the value of an entry. Arrays are read-only views of the buffer, which they keep; all else is copied.

    Decoding takes at most a small multiple of the entry's length in memory, also for malicious entries.

    Args:
        buffer: The bytes of the entry, or a view of them.
        verify: Whether to compare the checksum. Without that, a damaged entry may give another value.
        allow_pickle: Whether to load pickles, which can execute code.
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
    # The checksum does not cover the format number: a damaged one must not pass as that of an entry without a key.
    lacks_key = number == _FORMAT_WITH_KEY and not key
    if verify and (lacks_key or zlib.crc32(view[_START_OF_CHECKED:], start_of_sum) != checksum):
        of_another = ", or it belongs to another key" if number == _FORMAT_WITH_KEY else ""
        raise DamagedError(f"The entry of {length} bytes is damaged: its checksum differs{of_another}.")
    start = _FRAME.size + size
    try:
        node = (_node_of if size > _SHORT_HEADER else _node_again)(bytes(view[_FRAME.size : start]))
        return _Contents(view[start + -start % _ALIGNMENT :], allow_pickle, bytes_as_views).value(node)
    except DataError:
        raise
    except _BROKEN as error:
        raise DamagedError(f"The entry of {length} bytes is damaged: {error}.") from error


def in_batches(entries: Iterable[tuple[Name, bytes]], num_bytes: int) -> Iterator[list[tuple[Name, bytes]]]:
    """Yield entries in lists, each of which is complete when its contents are `num_bytes` long or longer.

    >>> list(in_batches([("a", b"1234"), ("b", b"5"), ("c", b"6")], 5))
    [[('a', b'1234'), ('b', b'5')], [('c', b'6')]]
    """
    batch: list[tuple[Name, bytes]] = []
    size = 0
    for name, content in entries:
        batch.append((name, content))
        size += len(content)
        if size >= num_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _NodeWriter:
    """Converts values to nodes of the header, and collects the contents that are stored after it."""

    def __init__(self, allow_pickle: bool) -> None:
        self.parts: list[Any] = []
        self.end = 0
        self._allow_pickle = allow_pickle
        self._level = 0

    def add(self, content: Any) -> int:
        """Return the offset of a content from the end of the header."""
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
            hint = "Make a dict, list or array of it, or pass `allow_pickle=True`, where all that is read is trusted."
            raise TypeError(f"A value of type `{name}` cannot be kept as plain data. {hint}")
        return ["pickle", *_bytes_node(self, pickle.dumps(value, protocol=5))[1:]]


def _int_node(writer: _NodeWriter, value: int) -> Any:
    return value if -(1 << 63) <= value < 1 << 63 else ["int", hex(value)]  # decimals have a limit of digits


def _str_node(writer: _NodeWriter, value: str) -> Any:
    return value if len(value) < _LONG else ["str", *_bytes_node(writer, value.encode("utf-8", "surrogatepass"))[1:]]


def _bytes_node(writer: _NodeWriter, value: Any) -> list[Any]:
    return ["bytes", writer.add(value), len(value)]


def _dict_node(writer: _NodeWriter, value: dict[Any, Any]) -> Any:
    if all(type(key) is str for key in value):
        return dict(zip(value, writer.nodes(value.values()), strict=True))
    return ["dict", writer.nodes(value), writer.nodes(value.values())]


_WRITERS: dict[type, Callable[[_NodeWriter, Any], Any]] = {
    int: _int_node,
    str: _str_node,
    bytes: _bytes_node,
    bytearray: lambda writer, value: ["bytearray", *_bytes_node(writer, value)[1:]],
    memoryview: lambda writer, value: _bytes_node(writer, value.tobytes()),
    list: lambda writer, value: ["list", writer.nodes(value)],
    tuple: lambda writer, value: ["tuple", writer.nodes(value)],
    dict: _dict_node,
    np.ndarray: lambda writer, value: _write_array(writer, value),
    np.memmap: lambda writer, value: _write_array(writer, np.asarray(value)),
    torch.Tensor: lambda writer, value: _write_tensor(writer, value),
}


class _Contents:
    """The bytes after a header, and how to make values of the nodes in it."""

    __slots__ = ("_left", "allow_pickle", "bytes_as_views", "memory")

    def __init__(
        self, memory: memoryview, allow_pickle: bool, bytes_as_views: bool = False, left: list[int] | None = None
    ) -> None:
        self.memory = memory
        self.allow_pickle = allow_pickle
        self.bytes_as_views = bytes_as_views
        self._left = [len(memory)] if left is None else left

    def value(self, node: Any) -> Any:
        if type(node) is list:
            return _READERS[node[0]](self, *node[1:])
        if type(node) is dict:
            return dict(zip(node, self.values(node.values()), strict=True))
        return node

    def values(self, nodes: Iterable[Any]) -> list[Any]:
        return [self.value(node) if type(node) is list or type(node) is dict else node for node in nodes]

    def span(self, start: int, size: int) -> memoryview:
        """Return some bytes; raise if spans overlap, judging by their sum, because `encode` writes each byte once."""
        span = self.memory[start : start + size]
        if start < 0 or len(span) != size:
            raise ValueError(f"{size} bytes from offset {start} are missing")
        self._left[0] -= size
        if self._left[0] < 0:
            raise ValueError("some of its bytes are used more than once")
        return span

    def with_copies(self) -> _Contents:
        """Return the same contents, read as copies instead of views."""
        return _Contents(self.memory, self.allow_pickle, left=self._left) if self.bytes_as_views else self


def _node_of(header: bytes) -> Any:
    return _from_json(str(header, "utf-8", "surrogatepass"))[0]


_node_again = functools.lru_cache(maxsize=256)(_node_of)  # for arrays of one shape, for example


def _read_bytes(contents: _Contents, start: int, size: int) -> Any:
    span = contents.span(start, size)
    return span if contents.bytes_as_views else bytes(span)


def _read_dict(contents: _Contents, keys: list[Any], nodes: list[Any]) -> dict[Any, Any]:
    return dict(zip(contents.with_copies().values(keys), contents.values(nodes), strict=True))


def _read_registered(contents: _Contents, tag: str, node: Any) -> Any:
    if tag not in _by_tag:
        raise DataError(f"The entry holds a {tag!r}, which is not known here: import what registers it.")
    return _by_tag[tag].from_plain(contents.with_copies().value(node))


def _read_pickle(contents: _Contents, start: int, size: int) -> Any:
    if not contents.allow_pickle:
        hint = "If you trust everything that is read, pass `allow_pickle=True`."
        raise PickledError(f"The entry holds a pickle, which could execute arbitrary code. {hint}")
    return pickle.loads(contents.span(start, size))  # noqa: S301 - which the user has asked for


def _read_array(contents: _Contents, dtype: str, shape: list[int], start: int, is_fortran: int) -> NDArray[Any]:
    """Return an array, a view of the contents."""
    kind, num_bytes = _layout(dtype, tuple(shape))
    array: NDArray[Any]
    if not num_bytes:
        array = np.ndarray(shape, kind, b"")
    else:  # np.ndarray would keep only the view's owner alive
        array = np.frombuffer(contents.span(start, num_bytes), kind)
        array = array if len(shape) == 1 else array.reshape(shape, order="F" if is_fortran else "C")
    return array


@functools.lru_cache(maxsize=256)
def _layout(dtype: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], int]:
    kind = _dtype_of(dtype)
    return kind, _num_bytes(shape, kind.itemsize)


def _read_tensor(contents: _Contents, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or dtype in _QUANTIZED or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{dtype!r} is not a dtype of torch")
    num_bytes = _num_bytes(shape, kind.itemsize)
    if not num_bytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(contents.span(start, num_bytes)), dtype=kind).reshape(shape)


_READERS: dict[str, Callable[..., Any]] = {
    "int": lambda contents, digits: int(digits, 16),
    "str": lambda contents, start, size: str(contents.span(start, size), "utf-8", "surrogatepass"),
    "bytes": _read_bytes,
    "bytearray": lambda contents, start, size: bytearray(contents.span(start, size)),
    "list": _Contents.values,
    "tuple": lambda contents, nodes: tuple(contents.values(nodes)),
    "dict": _read_dict,
    "array": _read_array,
    "scalar": lambda contents, node: contents.value(node)[()],
    "tensor": _read_tensor,
    "of": _read_registered,
    "pickle": _read_pickle,
}


def _write_array(writer: _NodeWriter, array: NDArray[Any]) -> list[Any]:
    dtype = _text_of(array.dtype)
    is_fortran = array.flags.fnc
    contiguous = array.T if is_fortran else np.ascontiguousarray(array)
    content = contiguous.reshape(-1).view(np.uint8) if array.nbytes else b""
    return ["array", dtype, list(array.shape), writer.add(content), int(is_fortran)]


def _num_bytes(shape: Sequence[int], item_size: int) -> int:
    """Return the size of an array in bytes; raise for negative numbers, with which NumPy reads before the buffer."""
    if min(shape, default=0) < 0:
        raise ValueError(f"{list(shape)} is not the shape of an array")
    return math.prod(shape) * item_size


@functools.lru_cache(maxsize=256)
def _text_of(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject:
        raise TypeError("An array of objects cannot be kept: make it one of numbers or strings, or a list.")
    try:
        text = json.dumps(dtype.descr) if dtype.names is not None else dtype.str
        is_exact = _dtype_of(text) == dtype
    except (ValueError, TypeError):
        is_exact = False
    if not is_exact:
        raise TypeError(f"An array of dtype {dtype!r} cannot be kept: NumPy cannot describe it as plain data.")
    return text


@functools.lru_cache(maxsize=256)
def _dtype_of(text: str) -> np.dtype[Any]:
    if text.startswith("["):
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_checked(json.loads(text)))
    else:
        dtype = np.dtype(_checked(text))
    return dtype


def _checked(description: Any) -> Any:
    """Return the description of a dtype as NumPy needs it: with tuples instead of lists, and without objects."""
    if isinstance(description, str):
        if not _DTYPE.fullmatch(description):
            raise ValueError(f"{description!r} is not a dtype")
        return description
    return [
        (tuple(name) if isinstance(name, list) else name, _checked(kind), *map(tuple, shape))
        for name, kind, *shape in description
    ]


def _write_tensor(writer: _NodeWriter, tensor: torch.Tensor) -> list[Any]:
    """Pass the bytes of a tensor to `add`, and return its dtype, shape and offset."""
    if tensor.requires_grad:
        raise TypeError("A tensor that requires gradients cannot be kept: pass what its `.detach()` returns.")
    if tensor.device.type != "cpu":
        raise TypeError(f"A tensor on {str(tensor.device)!r} cannot be kept: pass what its `.cpu()` returns.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            "A sparse or quantized tensor cannot be kept: pass what `.to_dense()` or `.dequantize()` return."
        )
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    content = dense.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return ["tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), writer.add(content)]


def _image_as_plain(image: Image.Image) -> tuple[Any, ...]:
    """Return mode, size, pixels, palette and the entries of `info` that are plain data (transparency, EXIF, ...)."""
    content = image.tobytes()  # which also reads the palette of a file
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        palette = image.palette.mode, bytes(image.getpalette(image.palette.mode) or b"")
    info = {key: value for key, value in image.info.items() if type(key) is str and _is_plain(value)}
    return image.mode, image.size, content, palette, info


def _image_of(plain: tuple[Any, ...]) -> Image.Image:
    """Return the image that `_image_as_plain` has converted; the class and format of its file are lost."""
    mode, (width, height), content, palette, info = plain
    if not 0 <= width * height <= 8 * len(content):
        raise ValueError(f"{len(content)} bytes are no image of {width} x {height} pixels")
    image = Image.frombytes(mode, (width, height), content)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info = dict(info)
    return image


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(entry) in _PLAIN for entry in value))


register_type("image", Image.Image, _image_as_plain, _image_of)
