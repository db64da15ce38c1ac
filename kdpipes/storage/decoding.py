"""Decode members by their extension, open images, and collect columns of members for indexes.

Members are numbers, texts, JSON, arrays, tensors and images. No code in them is executed. A column holds one number,
boolean, string or null per sample.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from kdpipes.core.column import as_column
from kdpipes.core.entries import entry_of, field_of
from kdpipes.core.errors import DataError, FieldError, is_sequence
from kdpipes.core.shared import PackedStrings

NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
TEXTS = frozenset({"txt", "text", "transcript"})
JSON = frozenset({"json", "jsn"})
TENSORS = frozenset({"pth", "pt"})
MARKUP = frozenset({"html", "htm"})
INTEGER = re.compile(r"-?[0-9]+")
_LEAST_TENSORS = 1 << 24  # tensors may always have this many bytes, however small their file
_UNBOUNDED = re.compile(rb"\n(bytearray|encode)\n")  # functions that pickles may call under `weights_only`


MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "<missing>"})()
# An array if all values are numbers of one type; otherwise the values in JSON, with an empty text for a missing one.
Column: TypeAlias = NDArray[Any] | PackedStrings
# The formats of Pillow that are read, the most frequent ones first. EPS is excluded because Pillow runs it as a program
# in Ghostscript, WMF, BUFR, GRIB, HDF5 and MPEG because they have no decoder, and the others because they are too rare
# to accept in untrusted data.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"),
    *("DDS", "DIB", "ICO", "PCX", "QOI", "SGI", "SUN", "TGA"),
)
_PROGRAMS = (b"%!PS", b"\xc5\xd0\xd3\xc6")  # marks of PostScript: plain, and in an EPS with a preview


def decode_member(field: str, content: bytes, *, decode: bool = True) -> Any:
    """Return the value of a member: a number, text, JSON, an array or tensors; for other extensions, the bytes.

    A `.cls` member that is not a number is a class name.

    Args:
        field: The extension, of which only the last part is used.
        content: The bytes of the member.
        decode: False returns the bytes of all members except numbers.

    Raises:
        ValueError: The bytes do not match the extension.
    """
    kind = _kind_of(field)
    if kind in NUMBERS:
        text = content.decode("utf-8").strip()
        return int(text) if INTEGER.fullmatch(text) else text
    if not decode:
        return content
    if kind in TEXTS or kind in MARKUP:
        return content.decode("utf-8")
    if kind in JSON:
        try:
            return json.loads(content)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error
    return decode_array(kind, content) if kind == "npy" or kind in TENSORS else content


def decode_array(kind: str, content: bytes) -> Any:
    """Return the array in a `.npy` file, or the tensors in a `.pth` or `.pt` file, loaded with `weights_only`.

    Raises:
        ValueError: The bytes have another format, need pickle, or would take much more memory than their size.
    """
    try:
        return _npy(content) if kind == "npy" else _pth(content)
    except (Exception, RecursionError) as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=1_000)
def _kind_of(field: str) -> str:
    return field.rsplit(".", 1)[-1].lower()


def _npy(content: bytes) -> NDArray[Any]:
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    # Headers of version 3 differ from version 2 only in the encoding of names, which does not affect the size.
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("the array holds objects, which only pickle could load")
    # NumPy allocates the declared size before it checks the number of bytes.
    num_there = len(content) - file.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * max(dtype.itemsize, 1) > num_there:
        raise ValueError(f"the header declares an array of {dtype} {list(shape)}, but {num_there} bytes follow it")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _pth(content: bytes) -> Any:
    # torch stores tensors uncompressed, so a file whose contents exceed its size was not written by torch.
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
        num_bytes = sum(entry.file_size for entry in entries)
        if num_bytes > len(content):
            raise ValueError(f"the file of {len(content)} bytes declares {num_bytes} bytes of contents")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("the file is compressed, which torch does not do")
    if _UNBOUNDED.search(content):
        raise ValueError("the file holds bytes, which can take any size when they are loaded; store a uint8 tensor")
    value = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    tensors = [tensor for tensor in _tensors_in(value) if tensor.layout == torch.strided]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if num_bytes > max(len(content), _LEAST_TENSORS):
        raise ValueError(
            f"the file of {len(content)} bytes holds tensors that take {num_bytes} bytes once they are copied; store "
            "them as they are before `expand`"
        )
    return value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, each once."""
    waiting = [value]
    seen = set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, list | tuple | set):
            waiting.extend(part)


def column_of(values: Sequence[Any]) -> Column:
    """Return the column of the given values, where `MISSING` marks a missing value."""
    kinds = set(map(type, values))
    if kinds in ({int}, {float}, {bool}):
        return np.array(values, dtype={int: np.int64, float: np.float64, bool: np.bool_}[kinds.pop()])
    return PackedStrings(["" if value is MISSING else json.dumps(value) for value in values])


def joined_column(parts: Sequence[Column]) -> Column:
    """Return the values of several columns, concatenated."""
    parts = [part for part in parts if len(part)] or parts[:1]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({part.dtype for part in arrays}) == 1:
        return np.concatenate(arrays)
    texts = (
        PackedStrings(list(map(json.dumps, part.tolist()))) if isinstance(part, np.ndarray) else part for part in parts
    )
    return PackedStrings.joined(list(texts))


def missing_in(column: Column) -> NDArray[np.intp]:
    """Return the positions of the samples without the value."""
    ends = np.arange(1, len(column) + 1) if isinstance(column, np.ndarray) else column.arrays()[0]
    return np.flatnonzero(np.diff(ends, prepend=0) == 0)


def values_of(column: Column) -> NDArray[Any]:
    """Return the values in the form of `as_column`, with None for missing ones."""
    if isinstance(column, np.ndarray) and len(column):
        return column
    return as_column([json.loads(text) if text else None for text in column])


class ColumnBuilder:
    """Collects the columns of one shard, sample by sample.

    Args:
        url: The URL of the shard, for errors.
        names: The names of the columns: fields, "cls", or entries of fields, "json.width" and "jpg.width".
    """

    def __init__(self, url: str, names: Iterable[str]) -> None:
        self._url = url
        self._values: dict[str, list[Any]] = {name: [] for name in names}
        self._there: set[str] = set()  # entries to suggest for a column that no sample has

    def needs(self, field: str) -> bool:
        """Return whether the content of a field is needed."""
        return any(name == field or name.startswith(f"{field}.") for name in self._values)

    def add(self, key: str, contents: Mapping[str, bytes], number: int | None = None) -> None:
        """Add a sample, or members of an earlier one, given the contents of the members by field.

        Fields that are not needed may be missing. `number` is the number of the sample; None adds a new one.

        Raises:
            DataError: A member cannot be decoded, or a value cannot be stored.
        """
        decoded: dict[str, Any] = {}
        for name, values in self._values.items():
            field = name if name in contents else field_of(name, contents)
            try:
                if field is not None and field not in decoded:
                    decoded[field] = decode_member(field, contents[field])
                    if name != field and isinstance(decoded[field], bytes):
                        with suppress(DataError):  # then the value is missing
                            decoded[field] = image_header(decoded[field], name)
                value = MISSING if field is None else self._entry(decoded[field], name, field)
                if value is not MISSING and type(value) not in (type(None), bool, int, float, str):
                    raise ValueError(f"it is a {type(value).__name__}")
                if type(value) is int and not -(1 << 63) <= value < 1 << 63:
                    raise ValueError("the integer does not fit into 64 bits")
                if type(value) is str:
                    value.encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates
            except ValueError as error:
                raise DataError(
                    f"Column {name!r} of sample {key!r} in {self._url!r} cannot be kept in the index: {error}. Columns "
                    "hold numbers, booleans, texts and null."
                ) from error
            if number is None or number == len(values):
                values.append(value)
            elif value is not MISSING:
                values[number] = value

    def _entry(self, value: Any, name: str, field: str) -> Any:
        if name == field:
            return value
        try:
            return entry_of(value, name[len(field) + 1 :], name)
        except (DataError, FieldError):
            if isinstance(value, dict):
                self._there.update(f"{field}.{entry}" for entry in value)
            return MISSING

    def columns(self) -> dict[str, Column]:
        """Return the columns.

        Raises:
            FieldError: No sample has a value of a column.
        """
        for name, values in self._values.items():
            if values and all(value is MISSING for value in values):
                hint = f" It has {', '.join(map(repr, sorted(self._there)[:20]))}." if self._there else ""
                raise FieldError(f"No sample of shard {self._url!r} has a value for the column {name!r}.{hint}")
        return {name: column_of(values) for name, values in self._values.items()}


def check_columns(columns: Any) -> tuple[str, ...]:
    """Return the column names without duplicates.

    Raises:
        TypeError: They are not names.
    """
    names = columns.split(",") if isinstance(columns, str) else columns
    if not is_sequence(names) or not all(isinstance(name, str) and name.strip(". ") for name in names):
        raise TypeError(
            f'`columns` must be the names of columns, like "json.label,json.width" or a list, but is {columns!r} '
            "instead."
        )
    return tuple(dict.fromkeys(name.strip() for name in names))


def open_image(content: bytes | bytearray | memoryview) -> Image.Image:
    """Open an image of a format that contains only pixels, or that a plugin outside of Pillow has registered.

    Raises:
        UnidentifiedImageError: The content is not such an image.
    """
    Image.preinit()
    try:
        return Image.open(io.BytesIO(content), formats=_formats(len(Image.OPEN)))
    except UnidentifiedImageError as error:
        if bytes(content[:4]) in _PROGRAMS:
            raise UnidentifiedImageError("it is PostScript, a program, which is not run; convert it to PNG") from error
        if not Image.init():  # False: all plugins, also those for rare formats, are already loaded
            raise
        return Image.open(io.BytesIO(content), formats=_formats(len(Image.OPEN)))


def image_header(content: bytes, column: str) -> dict[str, Any]:
    """Return width and height in pixels, channels, format ("JPEG") and number of bytes of an image file.

    No pixel is decoded. An orientation tag (EXIF) is ignored.

    Raises:
        DataError: The bytes of the column are not an image.
    """
    try:
        image = open_image(content)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"Column {column!r} needs the bytes of an image file, but found others: {error}.") from error
    return {
        "width": image.width,
        "height": image.height,
        "channels": len(image.getbands()),
        "format": image.format,
        "bytes": len(content),
    }


def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes of the formats that `open_image` reads, in lower case: ".jpg", ".png", ..."""
    Image.init()
    formats = {*_formats(len(Image.OPEN)), "MPO"}  # the JPEG reader opens MPO
    return tuple(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


@lru_cache(maxsize=1)
def _formats(num_registered: int) -> list[str]:
    others = [name for name in Image.OPEN if name not in _FORMATS and not is_pillows(name)]
    return [name for name in _FORMATS if name in Image.OPEN] + others


def is_pillows(name: str) -> bool:
    """Return whether Pillow itself has registered the reader of a format."""
    factory, _ = Image.OPEN[name]
    return getattr(factory, "__module__", "").startswith("PIL.")
