"""What a value is, in a line: its kind, shape, dtype and range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from kdpipes.core.call_text import shown_value
from kdpipes.work.decode import DecodedImage, EncodedImage

__all__ = ["summary"]

_MANY = 20_000_000  # values whose range is not looked for
_FEW = 6


def summary(value: Any) -> str:
    """Return what a value is.

    Example:
        >>> summary(torch.arange(6.0).reshape(2, 3)), summary(b"abc"), summary("heron")
        ('tensor float32 [2, 3], 0 … 5', '3 bytes', "'heron'")
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, EncodedImage):
        return f"encoded image {value.size[0]}x{value.size[1]}, {len(value.content):,} bytes"
    if isinstance(value, Image.Image | DecodedImage):
        return f"image {value.mode} {value.size[0]}x{value.size[1]}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value):,} bytes"
    if isinstance(value, list | tuple) and len(value) > _FEW:
        kinds = sorted({type(entry).__name__ for entry in value})
        return f"{type(value).__name__} of {len(value):,}: {', '.join(kinds[:3])}{', …' if len(kinds) > 3 else ''}"
    if isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return f"{opening}{', '.join(map(summary, value))}{closing}"
    if isinstance(value, Mapping):
        entries = [f"{name}: {summary(entry)}" for name, entry in list(value.items())[:_FEW]]
        return f"{{{', '.join([*entries, *(['…'] if len(value) > _FEW else [])])}}}"
    return shown_value(value)


def _array(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    dtype = str(value.dtype).removeprefix("torch.")
    text = f"{'tensor' if is_tensor else 'array'} {dtype} {list(value.shape)}"
    size = value.numel() if is_tensor else value.size
    if is_tensor and value.device.type != "cpu":
        return f"{text} on {value.device}"
    if not size or size > _MANY or "complex" in dtype or (not is_tensor and value.dtype.kind not in "biuf"):
        return text
    if not value.shape:
        return f"{text}: {_number(value.item())}"
    low, high = (value.min().item(), value.max().item()) if dtype != "bool" else (False, True)
    if dtype == "bool":
        return f"{text}, {(value.sum() / size).item():.0%} True"
    return f"{text}, {_number(low)} … {_number(high)}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
