"""Decode members by their extension: numbers, texts, JSON, arrays and tensors. No code in members is executed."""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
TEXTS = frozenset({"txt", "text", "transcript"})
JSON = frozenset({"json", "jsn"})
TENSORS = frozenset({"pth", "pt"})
MARKUP = frozenset({"html", "htm"})
INTEGER = re.compile(r"-?[0-9]+")
_LEAST_TENSORS = 1 << 24  # tensors may always have this many bytes, however small their file
_UNBOUNDED = re.compile(rb"\n(bytearray|encode)\n")  # functions that pickles may call under `weights_only`


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
