"""Convert recorded parameters to plain data for JSON, and restore them exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

_MOST = 1000
_NATIVE = (bool, int, float, str, type(None))


class _NotPlainError(Exception):
    """A value is not plain data, or there are too many values."""


def as_plain(params: dict[str, Any]) -> dict[str, Any] | None:
    """Return `params` in types of JSON, and the `kinds` of other types; None if `params` are not plain data.

    `kinds` maps the path of a value to its type: tuples are `tuple`, NumPy numbers such as `float32`, arrays such as
    `int64[2, 4]`, tensors such as `tensor float32[3]`. The result is None for more than 1,000 values.

    Example:
        >>> as_plain({"size": (2, 3), "holes": [np.array([1.5])]})
        {'params': {'size': [2, 3], 'holes': [[1.5]]}, 'kinds': {'size': 'tuple', 'holes/0': 'float64[1]'}}
    """
    encoder = _Encoder()
    try:
        return {"params": encoder.plain(params, ""), "kinds": encoder.kinds}
    except _NotPlainError:
        return None


class _Encoder:
    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self._num_values = 0

    def plain(self, value: Any, path: str) -> Any:
        self._count(1)
        if type(value) in _NATIVE:
            return value
        if isinstance(value, np.str_) or (isinstance(value, np.generic) and _is_exact(value.dtype)):
            self.kinds[path] = type(value).__name__
            return value.item()
        if type(value) is np.ndarray and _is_exact(value.dtype):
            return self._numbers(value, path, str(value.dtype))
        if type(value) is torch.Tensor and not value.is_complex() and value.layout == torch.strided:
            return self._numbers(value, path, f"tensor {value.dtype}".replace("torch.", ""))
        if type(value) is tuple:
            self.kinds[path] = "tuple"
        if type(value) in (list, tuple):
            return [self.plain(entry, _joined(path, number)) for number, entry in enumerate(value)]
        if type(value) is dict and all(type(key) is str and "/" not in key for key in value):
            return {key: self.plain(entry, _joined(path, key)) for key, entry in value.items()}
        raise _NotPlainError

    def _numbers(self, value: Any, path: str, kind: str) -> Any:
        self._count(math.prod(value.shape))
        self.kinds[path] = f"{kind}{list(value.shape)}"
        return value.tolist()

    def _count(self, number: int) -> None:
        self._num_values += number
        if self._num_values > _MOST:
            raise _NotPlainError


def _is_exact(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def restored(value: Any, kinds: dict[str, str], path: str = "") -> Any:
    """Return the original value, given the `params` and `kinds` returned by `as_plain`."""
    if isinstance(value, dict):
        value = {key: restored(entry, kinds, _joined(path, key)) for key, entry in value.items()}
    elif isinstance(value, list):
        value = [restored(entry, kinds, _joined(path, number)) for number, entry in enumerate(value)]
    kind = kinds.get(path)
    if kind is None:
        return value
    if kind == "tuple":
        return tuple(value)
    return _array_of(value, kind) if "[" in kind else getattr(np, kind)(value)


def _array_of(value: Any, kind: str) -> Any:
    dtype, _, sizes = kind.removeprefix("tensor ").removesuffix("]").partition("[")
    shape = [int(size) for size in sizes.split(",") if size]
    if kind.startswith("tensor "):
        return torch.tensor(value, dtype=getattr(torch, dtype)).reshape(shape)
    return np.array(value, dtype=dtype).reshape(shape)


def _joined(path: str, part: object) -> str:
    return f"{path}/{part}" if path else str(part)
