"""Arrays and tensors as a few words in a header and their raw bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["read_array", "read_tensor", "write_array", "write_tensor"]

Span = Callable[[int, int], memoryview]
_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d+(\[\w+\])?")
_MOST_DIMENSIONS = 64
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")  # of which plain bytes make no tensor, but a crash


def write_array(add: Callable[[Any], int], array: NDArray[Any]) -> list[Any]:
    """Return dtype, shape, place and whether columns lie together, of an array whose bytes are given to `add`.

    Raises:
        TypeError: The array holds objects, or is of a dtype that NumPy itself does not know.
    """
    dtype = _text_of(array.dtype)
    is_fortran = array.flags.fnc
    contiguous = array.T if is_fortran else np.ascontiguousarray(array)
    content = contiguous.reshape(-1).view(np.uint8) if array.nbytes else b""
    return [dtype, list(array.shape), add(content), int(is_fortran)]


def read_array(dtype: str, shape: list[int], start: int, is_fortran: int) -> Callable[[Span], NDArray[Any]]:
    """Return a function that makes the array, a view of the bytes that `span(start, size)` returns."""
    kind, lengths = _dtype_of(dtype), tuple(shape)
    order: Any = "F" if is_fortran else "C"
    num_bytes = _num_bytes(shape, kind.itemsize, start)
    if not num_bytes:
        return lambda span: np.ndarray(lengths, kind, b"")

    def read(span: Span) -> NDArray[Any]:
        flat = np.frombuffer(span(start, num_bytes), kind)  # np.ndarray would keep the view's owner alone
        array: NDArray[Any] = flat.reshape(lengths, order=order)
        return array

    return read


def _num_bytes(shape: list[int], item_size: int, start: int) -> int:
    """Return how many bytes an array has, whatever the header says: NumPy would read in front of the buffer."""
    if start < 0 or min(shape, default=0) < 0:
        raise ValueError(f"an array of {shape} from {start} on is none")
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
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_checked(json.loads(text)))
    else:
        dtype = np.dtype(_checked(text))
    return dtype


def _checked(description: Any) -> Any:
    """Return what describes a dtype, as NumPy has it: tuples in place of lists, nothing that could be an object."""
    if isinstance(description, str):
        if not _DTYPE.fullmatch(description):
            raise ValueError(f"{description!r} is no dtype")
        return description
    return [
        (tuple(name) if isinstance(name, list) else name, _checked(kind), *map(tuple, shape))
        for name, kind, *shape in description
    ]


def write_tensor(add: Callable[[Any], int], tensor: torch.Tensor) -> list[Any]:
    """Return dtype, shape and place of a tensor whose bytes are given to `add`.

    Raises:
        TypeError: The tensor is not in main memory, sparse, quantized or part of a graph of gradients.
    """
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
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), add(content)]


def read_tensor(span: Span, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    """Return a copy of the bytes that `span(start, size)` returns, as a tensor."""
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or dtype in _QUANTIZED or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{dtype!r} is no dtype of torch's")
    num_bytes = _num_bytes(shape, kind.itemsize, start)
    if not num_bytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(span(start, num_bytes)), dtype=kind).reshape(shape)
