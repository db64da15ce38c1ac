"""Transforms that make tensors of images, and numbers that a model takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kdpipes.core.errors import is_number, must_be
from kdpipes.work._images import Fixed, as_image

__all__ = ["Normalize", "ToTensor"]

_MODES = ("L", "LA", "RGB", "RGBA", "I;16", "F", "P")


class ToTensor(Fixed):
    """The image as a tensor `[C, H, W] float32` from 0 to 1. Recorded as `{}`.

    8-bit values are divided by 255, 16-bit values of mode "I;16" by 65,535, and floats are kept. The result never
    shares memory with an image or an array. Images of mode "P" are masks: they become `[H, W] uint8` with unchanged
    values.

    The image may come from `decode_images` or Pillow (mode L, LA, RGB, RGBA, I;16, F or P), or be an array `[H, W, C]`
    or `[H, W]`, or a tensor `[..., C, H, W]`, of uint8 or float.

    Example:
        >>> x = kdp.ToTensor()(Image.new("RGB", (4, 2), (255, 0, 51)))
        >>> x.shape, x.dtype, x[:, 0, 0].tolist()
        (torch.Size([3, 2, 4]), torch.float32, [1.0, 0.0, 0.20000000298023224])
    """

    def apply(self, value: Any, params: dict[str, Any]) -> torch.Tensor:
        """Return the image as a tensor; `params` are empty."""
        pixels = _of_array(value) if isinstance(value, np.ndarray) else as_image(value, "ToTensor")
        if not isinstance(pixels, torch.Tensor):
            if pixels.mode not in _MODES:
                modes = f"{', '.join(_MODES[:-1])} or {_MODES[-1]}"
                way_out = 'Put `lambda image: image.convert("RGB")` before it.'
                raise TypeError(
                    f"`ToTensor` takes images of mode {modes}, but got one of mode {pixels.mode}. {way_out}"
                )
            if pixels.mode == "P":
                return torch.from_numpy(np.array(pixels))
            array = np.asarray(pixels)
            pixels = _of_array(array / np.float32(65_535) if pixels.mode == "I;16" else array)
        if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
            raise TypeError(_refused(pixels.dtype))
        floats = pixels.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
        return floats.div_(255) if pixels.dtype == torch.uint8 else floats

    def apply_to(self, kind: str, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points unchanged; `collate_samples` makes tensors of them."""
        return value


class Normalize(Fixed):
    """The tensor, less a mean and divided by a standard deviation, for each channel. Recorded as `{}`.

    Takes tensors `[..., C, H, W]` of floats, and keeps their dtype.

    Args:
        mean: One number for each channel, or one for all.
        std: Likewise; above 0.

    Raises:
        TypeError: The value is no tensor of floats.
        ValueError: The tensor has another number of channels.

    Example:
        >>> kdp.Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.25, 0.1])(torch.ones(3, 1, 1)).flatten().tolist()
        [1.0, 2.0, 5.0]
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean = _check_numbers("mean", mean, above=-math.inf)
        self._std = _check_numbers("std", std, above=0)
        if len(self._mean) != len(self._std):
            raise ValueError(must_be("std", f"as many numbers as `mean`, {len(self._mean)}", std))

    def apply(self, value: Any, params: dict[str, Any]) -> torch.Tensor:
        """Return the tensor, normalized; `params` are empty."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            what = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"`Normalize` takes tensors of floats, but got {what}. Put `kdp.ToTensor()` before it.")
        num_channels = as_image(value, "Normalize").shape[-3]
        if len(self._mean) not in {1, num_channels}:
            way_out = f"Its `mean` and `std` are for {len(self._mean)}."
            raise ValueError(f"`Normalize` got a tensor of {num_channels} channels. {way_out}")
        mean, std = (value.new_tensor(numbers)[:, None, None] for numbers in (self._mean, self._std))
        return (value - mean).div_(std)

    def apply_to(self, kind: str, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points unchanged."""
        return value


def _of_array(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    if array.ndim not in {2, 3} or 0 in array.shape:
        raise ValueError(f"`ToTensor` takes arrays [H, W, C] or [H, W], but got one of shape {list(array.shape)}.")
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise TypeError(_refused(array.dtype))
    pixels = torch.from_numpy(array.astype(np.uint8 if array.dtype == np.uint8 else np.float32))
    return (pixels[..., None] if array.ndim == 2 else pixels).permute(2, 0, 1)


def _refused(dtype: Any) -> str:
    return f"`ToTensor` takes pixels of uint8 or float, but got {dtype}. Make floats from 0 to 1 of them first."


def _check_numbers(param: str, values: Any, *, above: float) -> tuple[float, ...]:
    rule = "a sequence of numbers, one for each channel" + ("" if above == -math.inf else f", above {above:g}")
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise TypeError(must_be(param, rule, values))
    if not all(is_number(value) for value in values):
        raise TypeError(must_be(param, rule, values))
    if not len(values) or not all(above < value < math.inf for value in values):
        raise ValueError(must_be(param, rule, values))
    return tuple(float(value) for value in values)
