"""Encode values as tagged plain data with a checksum, and decode them exactly without executing any of the data.

An entry is a frame (mark, format, CRC-32 of the key and all following bytes, length, length of the header), a header in
MessagePack, and the raw contents of arrays, tensors and long bytes, each aligned to 64 bytes. In the header, None,
bool, int, float, str, lists and dicts with str keys are native; all other types are extensions (`_Ext`).
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext
from numpy.typing import NDArray
from PIL import Image

from kdpipes.core.errors import DataError, must_be
from kdpipes.storage.files import crc32

_MARK = b"kdp"
FORMAT = 3  # the format of entries and of their folders; formats 1 and 2 had headers in JSON
_FRAME = struct.Struct("<3sBIQQ")
_START_OF_CHECKED = 8
_ALIGNMENT = 64
_LONG = 256  # in bytes: contents from this length on are stored after the header, where they can be views
_MOST_LEVELS = 64
_NATIVE = frozenset([bool, int, float, str, type(None)])
Name = TypeVar("Name")
_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d+(\[\w+\])?")
_MOST_DIMENSIONS = 64
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")  # torch.frombuffer crashes with these dtypes
_PLAIN = (bool, int, float, str, bytes, type(None))
_BROKEN = (
    *(msgspec.DecodeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError),
    *(RuntimeError, OSError),
)
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_unpack_tagged = msgspec.msgpack.Decoder(tuple[str, memoryview]).decode
_unpack_two = msgspec.msgpack.Decoder(tuple[memoryview, memoryview]).decode


class _Ext:
    """Codes of extensions, which must never change. Contents are in MessagePack unless stated otherwise."""

    TUPLE = 1  # a list
    INT = 2  # an integer of more than 64 bits: little-endian bytes
    STR = 3  # a text with lone surrogates: UTF-8
    SHORT_BYTES = 4  # the bytes themselves
    BYTES = 5  # [offset, length]
    BYTEARRAY = 6  # bytes, encoded
    DICT = 7  # [keys, encoded; values, encoded]
    ARRAY = 8  # [dtype, shape, offset, whether it is in Fortran order]
    SCALAR = 9  # a zero-dimensional array
    TENSOR = 10  # [dtype, shape, offset]
    REGISTERED = 11  # [tag, plain value, encoded]
    PICKLE = 12  # bytes, encoded


class DamagedError(DataError):
    """An entry is damaged, truncated or in another format, and is treated as missing."""


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
    """Make values of exactly the type `kind` encodable.

    Args:
        tag: The name of the type in entries, which must never change.
        kind: The type.
        to_plain: A function that converts a value to types that `encode` supports, such as a tuple.
        from_plain: The inverse function. It must check its input, because entries may come from untrusted sources.
    """
    known = _by_tag.get(tag)
    if known is not None and (known.kind.__module__, known.kind.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(must_be("tag", "unused", tag, f"It already stands for {known.kind.__qualname__}."))
    _by_type[kind] = _by_tag[tag] = _Registered(tag, kind, to_plain, from_plain)


def encode(value: Any, *, allow_pickle: bool = False, key: bytes = b"") -> list[Any]:
    """Return an entry as a list of buffers, to be written in sequence.

    Supported are None, bool, int, float, str, bytes, bytearray, list, tuple, dict, NumPy arrays and scalars of any
    dtype but object, tensors in main memory, Pillow images and types passed to `register_type`. Subclasses are not
    supported, except those of Pillow images, and `numpy.memmap`, which becomes an array. A memoryview becomes bytes.
    Arrays and images may share memory with the buffers.

    Args:
        value: The value.
        allow_pickle: Whether to pickle values of other types.
        key: The key of the entry. With another key, `decode` reports the entry as damaged.

    Raises:
        TypeError: A type is not supported.
    """
    writer = _Writer(allow_pickle)
    try:
        header = _pack(writer.node(value))
    except (OverflowError, UnicodeEncodeError):  # MessagePack has no such integers or texts: look at each
        writer = _Writer(allow_pickle, checks_leaves=True)
        header = _pack(writer.node(value))
    lead = header + bytes(-(_FRAME.size + len(header)) % _ALIGNMENT)
    length = _FRAME.size + len(lead) + writer.end
    checked = _FRAME.pack(_MARK, FORMAT, 0, length, len(header))[_START_OF_CHECKED:]
    checksum = crc32(lead, crc32(checked, crc32(key)))
    for part in writer.parts:
        checksum = crc32(part, checksum)
    return [_FRAME.pack(_MARK, FORMAT, checksum, length, len(header)), lead, *writer.parts]


def checksum_of(entry: list[Any]) -> int:
    """Return the checksum of an entry made by `encode`: a CRC-32 of its whole content."""
    checksum: int = _FRAME.unpack_from(entry[0])[2]
    return checksum


def decode(
    buffer: Any, *, verify: bool = True, allow_pickle: bool = False, bytes_as_views: bool = False, key: bytes = b""
) -> Any:
    """Return the value of an entry. Arrays are read-only views that keep the buffer alive; all else is copied.

    Decoding takes at most a small multiple of the entry's length in memory, even for malicious entries.

    Args:
        buffer: The bytes of the entry, or a view of them.
        verify: Whether to compare the checksum. Otherwise, a damaged entry may be decoded to a wrong value.
        allow_pickle: Whether to load pickles, which can execute code.
        bytes_as_views: Whether to return bytes as read-only memoryviews of the buffer as well.
        key: The key that the entry was encoded with; it is checked only if `verify` is set.

    Raises:
        DamagedError: The entry is damaged or truncated, or belongs to another key or format.
        PickledError: The entry holds a pickle, but pickles are not allowed.
        DataError: The entry holds a type that is not registered.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    try:
        mark, number, checksum, length, size = _FRAME.unpack_from(view)
    except struct.error:
        raise DamagedError(f"The entry is truncated: it has only {len(view)} bytes.") from None
    if mark != _MARK or number != FORMAT:
        raise DamagedError(f"The entry is not in format {FORMAT}, the only one that this version of kdpipes reads.")
    if length != len(view):
        raise DamagedError(f"The entry has {len(view)} bytes, but its header says {length}.")
    if verify and crc32(view[_START_OF_CHECKED:], crc32(key)) != checksum:
        raise DamagedError(
            f"The entry of {length} bytes is damaged: its checksum differs, or it belongs to another key."
        )
    start = _FRAME.size + size
    try:
        return _Reader(view[start + -start % _ALIGNMENT :], allow_pickle, bytes_as_views).value(
            view[_FRAME.size : start]
        )
    except DataError:
        raise
    except _BROKEN as error:
        raise DamagedError(f"The entry of {length} bytes is damaged: {error}.") from error


def in_batches(entries: Iterable[tuple[Name, bytes]], num_bytes: int) -> Iterator[list[tuple[Name, bytes]]]:
    """Yield lists of entries. A list is complete once its contents have at least `num_bytes` bytes.

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
            batch = []
            size = 0
    if batch:
        yield batch


class _Writer:
    """Converts values to types of MessagePack, and collects the contents that are stored after the header."""

    def __init__(self, allow_pickle: bool, checks_leaves: bool = False) -> None:
        self.parts: list[Any] = []
        self.end = 0
        self._allow_pickle = allow_pickle
        self._checks_leaves = checks_leaves
        self._level = 0

    def add(self, content: Any) -> int:
        """Append a content, and return its offset from the end of the header."""
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
            return self._leaf(value) if self._checks_leaves else value
        write = _WRITERS.get(kind)
        if write is not None:
            return write(self, value)
        if isinstance(value, np.generic):
            return Ext(_Ext.SCALAR, _pack(_write_array(self, np.asarray(value))))
        if isinstance(value, Image.Image):
            kind = Image.Image
        if kind in _by_type:
            tag, _, to_plain, _ = _by_type[kind]
            return Ext(_Ext.REGISTERED, _pack([tag, _pack(self.nodes([to_plain(value)])[0])]))
        if self._allow_pickle:
            return Ext(_Ext.PICKLE, _pack(_write_bytes(self, pickle.dumps(value, protocol=5))))
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        hint = "Make a dict, list or array of it, or pass `allow_pickle=True`, where all that is read is trusted."
        raise TypeError(f"A value of type `{name}` cannot be kept as plain data. {hint}")

    def nodes(self, values: Any) -> Any:
        if not self._checks_leaves and _NATIVE.issuperset(map(type, values)):
            return list(values)
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise ValueError(f"A value nested more than {_MOST_LEVELS} levels deep, or in itself, cannot be kept.")
        nodes = [self.node(value) for value in values]
        self._level -= 1
        return nodes

    def _leaf(self, value: Any) -> Any:
        try:
            _pack(value)
        except OverflowError:
            return Ext(_Ext.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        except UnicodeEncodeError:
            return Ext(_Ext.STR, value.encode("utf-8", "surrogatepass"))
        return value


def _write_bytes(writer: _Writer, value: Any) -> Any:
    if len(value) < _LONG:
        return Ext(_Ext.SHORT_BYTES, bytes(value))
    return Ext(_Ext.BYTES, _pack((writer.add(value), len(value))))


def _write_dict(writer: _Writer, value: dict[Any, Any]) -> Any:
    keys = writer.nodes(value)
    nodes = writer.nodes(value.values())
    if all(type(key) is str for key in keys):
        return dict(zip(keys, nodes, strict=True))
    return Ext(_Ext.DICT, _pack((_pack(keys), _pack(nodes))))


class _Reader:
    """Decodes the header and the contents after it."""

    __slots__ = ("_left", "allow_pickle", "bytes_as_views", "memory")

    def __init__(
        self, memory: memoryview, allow_pickle: bool, bytes_as_views: bool = False, left: list[int] | None = None
    ) -> None:
        self.memory = memory
        self.allow_pickle = allow_pickle
        self.bytes_as_views = bytes_as_views
        self._left = [len(memory)] if left is None else left

    def value(self, packed: Any) -> Any:
        return msgspec.msgpack.decode(packed, ext_hook=self._extension)

    def _extension(self, code: int, content: memoryview) -> Any:
        return _READERS[code](self, content)

    def span(self, start: int, size: int) -> memoryview:
        """Return some bytes; raise if spans overlap, judging by their sum, because `encode` writes each byte once."""
        span = self.memory[start : start + size]
        if start < 0 or len(span) != size:
            raise ValueError(f"{size} bytes from offset {start} are missing")
        self._left[0] -= size
        if self._left[0] < 0:
            raise ValueError("some of its bytes are used more than once")
        return span

    def copies(self, packed: Any) -> Any:
        """Return a value in which bytes are copies instead of views."""
        return _Reader(self.memory, self.allow_pickle, left=self._left).value(packed)


def _read_bytes(reader: _Reader, content: memoryview) -> Any:
    span = reader.span(*_unpack(content))
    return span if reader.bytes_as_views else bytes(span)


def _read_dict(reader: _Reader, content: memoryview) -> dict[Any, Any]:
    keys, values = _unpack_two(content)
    return dict(zip(reader.copies(keys), reader.value(values), strict=True))


def _read_registered(reader: _Reader, content: memoryview) -> Any:
    tag, plain = _unpack_tagged(content)
    if tag not in _by_tag:
        raise DataError(
            f"The entry holds a {tag!r}, which is not registered in this process. Import the module that registers it."
        )
    return _by_tag[tag].from_plain(reader.copies(plain))


def _read_pickle(reader: _Reader, content: memoryview) -> Any:
    if not reader.allow_pickle:
        hint = "If you trust everything that is read, pass `allow_pickle=True`."
        raise PickledError(f"The entry holds a pickle, which could execute arbitrary code. {hint}")
    return pickle.loads(reader.value(content))  # noqa: S301 - which the user has asked for


def _read_array(reader: _Reader, content: memoryview) -> NDArray[Any]:
    """Return an array that is a view of the contents."""
    dtype, shape, start, is_fortran = _unpack(content)
    kind, num_bytes = _layout(dtype, tuple(shape))
    array: NDArray[Any]
    if not num_bytes:
        array = np.ndarray(shape, kind, b"")
    else:  # np.ndarray would keep only the view's owner alive
        array = np.frombuffer(reader.span(start, num_bytes), kind)
        array = array if len(shape) == 1 else array.reshape(shape, order="F" if is_fortran else "C")
    return array


@lru_cache(maxsize=256)
def _layout(dtype: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], int]:
    kind = _dtype_of(dtype)
    return kind, _num_bytes(shape, kind.itemsize)


def _read_tensor(reader: _Reader, content: memoryview) -> torch.Tensor:
    dtype, shape, start = _unpack(content)
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or dtype in _QUANTIZED or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{dtype!r} is not a dtype of torch")
    num_bytes = _num_bytes(shape, kind.itemsize)
    if not num_bytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(reader.span(start, num_bytes)), dtype=kind).reshape(shape)


_READERS: dict[int, Callable[[_Reader, memoryview], Any]] = {
    _Ext.TUPLE: lambda reader, content: tuple(reader.value(content)),
    _Ext.INT: lambda reader, content: int.from_bytes(content, "little", signed=True),
    _Ext.STR: lambda reader, content: str(content, "utf-8", "surrogatepass"),
    _Ext.SHORT_BYTES: lambda reader, content: content if reader.bytes_as_views else bytes(content),
    _Ext.BYTES: _read_bytes,
    _Ext.BYTEARRAY: lambda reader, content: bytearray(reader.value(content)),
    _Ext.DICT: _read_dict,
    _Ext.ARRAY: _read_array,
    _Ext.SCALAR: lambda reader, content: reader.value(content)[()],
    _Ext.TENSOR: _read_tensor,
    _Ext.REGISTERED: _read_registered,
    _Ext.PICKLE: _read_pickle,
}


def _write_array(writer: _Writer, array: NDArray[Any]) -> Ext:
    dtype = _text_of(array.dtype)
    is_fortran = array.flags.fnc
    contiguous = array.T if is_fortran else np.ascontiguousarray(array)
    content = contiguous.reshape(-1).view(np.uint8) if array.nbytes else b""
    return Ext(_Ext.ARRAY, _pack((dtype, array.shape, writer.add(content), is_fortran)))


def _num_bytes(shape: Sequence[int], item_size: int) -> int:
    """Return the size of an array in bytes; raise for negative numbers, with which NumPy reads before the buffer."""
    if min(shape, default=0) < 0:
        raise ValueError(f"{list(shape)} is not the shape of an array")
    return math.prod(shape) * item_size


@lru_cache(maxsize=256)
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


@lru_cache(maxsize=256)
def _dtype_of(text: str) -> np.dtype[Any]:
    if text.startswith("["):
        dtype = np.lib.format.descr_to_dtype(_checked(json.loads(text)))
    else:
        dtype = np.dtype(_checked(text))
    return dtype


def _checked(description: Any) -> Any:
    """Return the description of a dtype in the form that NumPy needs: with tuples instead of lists, and no objects."""
    if isinstance(description, str):
        if not _DTYPE.fullmatch(description):
            raise ValueError(f"{description!r} is not a dtype")
        return description
    return [
        (tuple(name) if isinstance(name, list) else name, _checked(kind), *map(tuple, shape))
        for name, kind, *shape in description
    ]


def _write_tensor(writer: _Writer, tensor: torch.Tensor) -> Ext:
    if tensor.requires_grad:
        raise TypeError("A tensor that requires gradients cannot be kept: pass what its `.detach()` returns.")
    if tensor.device.type != "cpu":
        raise TypeError(f"A tensor on {str(tensor.device)!r} cannot be kept: pass what its `.cpu()` returns.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            "A sparse or quantized tensor cannot be kept: convert it with `.to_dense()` or `.dequantize()` first."
        )
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    content = dense.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    name = str(tensor.dtype).removeprefix("torch.")
    return Ext(_Ext.TENSOR, _pack((name, tuple(tensor.shape), writer.add(content))))


_WRITERS: dict[type, Callable[[_Writer, Any], Any]] = {
    bytes: _write_bytes,
    bytearray: lambda writer, value: Ext(_Ext.BYTEARRAY, _pack(_write_bytes(writer, value))),
    memoryview: lambda writer, value: _write_bytes(writer, value.tobytes()),
    list: _Writer.nodes,
    tuple: lambda writer, value: Ext(_Ext.TUPLE, _pack(writer.nodes(value))),
    dict: _write_dict,
    np.ndarray: _write_array,
    np.memmap: lambda writer, value: _write_array(writer, np.asarray(value)),
    torch.Tensor: _write_tensor,
}


def _image_as_plain(image: Image.Image) -> tuple[Any, ...]:
    """Return mode, size, pixels, palette, and the entries of `info` that are plain data (transparency, EXIF, ...)."""
    content = image.tobytes()  # this also loads the palette from the file
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        palette = image.palette.mode, bytes(image.getpalette(image.palette.mode) or b"")
    info = {key: value for key, value in image.info.items() if type(key) is str and _is_plain(value)}
    return image.mode, image.size, content, palette, info


def _image_of(plain: tuple[Any, ...]) -> Image.Image:
    """Return the image that `_image_as_plain` converted, without the class and format of its file."""
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
