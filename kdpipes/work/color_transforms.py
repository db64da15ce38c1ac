"""Transforms that change colours."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

from kdpipes.core.errors import is_number, must_be
from kdpipes.work._images import Drawn, as_image, keeps_no_rng, like

__all__ = ["ColorJitter"]

_ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


class ColorJitter(Drawn):
    """The image with brightness, contrast, saturation and hue changed at random, in an order at random.

    Recorded as `{"order": ["hue", "brightness"], "hue": 0.1, "brightness": 0.8}`, without what is never changed. The
    formulas are those of Pillow's `ImageEnhance`, with hues turned as by torchvision's `ColorJitter`. Images of one
    channel have no saturation and no hue to change.

    Tensors `[..., C, H, W]` of uint8 become Pillow's pixels exactly; the images of a batch share their factors. Floats
    must be from 0 to 1 and are not rounded between: on photos, a change differs from Pillow's by at most 1 grey level,
    a turned hue by at most 14, on average 2, as Pillow keeps hues in 8 bits.

    Args:
        brightness: The factor's range as (min, max), from 0; one number b is (max(0, 1 - b), 1 + b). 0 is black.
        contrast: Likewise; a factor of 0 is the grey of the image's mean.
        saturation: Likewise; a factor of 0 is a grey image.
        hue: The turn's range as (min, max), from -0.5 to 0.5; one number h is (-h, h). 0.5 is the complement.

    Example:
        >>> jitter = kdp.ColorJitter(brightness=0.4, hue=(0, 0.1))
        >>> sorted(jitter.draw(None, np.random.default_rng(0)))
        ['brightness', 'hue', 'order']
        >>> jitter.apply(torch.full((3, 1, 1), 100, dtype=torch.uint8), {"order": ["brightness"], "brightness": 1.5})[0]
        tensor([[150]], dtype=torch.uint8)
    """

    def __init__(
        self,
        brightness: float | tuple[float, float] = 0,
        contrast: float | tuple[float, float] = 0,
        saturation: float | tuple[float, float] = 0,
        hue: float | tuple[float, float] = 0,
    ) -> None:
        factors = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        ranges = {name: _check_factor(name, value) for name, value in factors.items()}
        ranges["hue"] = _check_hue(hue)
        self._ranges = {name: ends for name, ends in ranges.items() if set(ends) != {0.0 if name == "hue" else 1.0}}

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return the factors and their order, drawn from `rng`."""
        names = list(self._ranges)
        order = [names[place] for place in rng.permutation(len(names))]
        return {"order": order, **{name: float(rng.uniform(*ends)) for name, ends in self._ranges.items()}}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the image, changed as `params` say."""
        image = as_image(value, "ColorJitter")
        _check_kind(image)
        adjusted = _adjusted_tensor if isinstance(image, torch.Tensor) else _adjusted_image
        for name in params["order"]:
            image = adjusted(image, name, params[name])
        return like(value, image)

    def apply_to(self, kind: str, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points unchanged: only colours change."""
        return value


def _check_kind(image: Any) -> None:
    if not isinstance(image, torch.Tensor):
        if image.mode not in {"L", "RGB"}:
            way_out = 'Put `lambda image: image.convert("RGB")` before it.'
            raise TypeError(f"`ColorJitter` takes images of mode L or RGB, but got one of mode {image.mode}. {way_out}")
    elif image.shape[-3] not in {1, 3}:
        raise ValueError(f"`ColorJitter` takes tensors of 1 or 3 channels, but got one of {image.shape[-3]}.")
    elif image.dtype != torch.uint8 and not image.is_floating_point():
        raise TypeError(f"`ColorJitter` takes tensors of uint8 or float, but got one of {image.dtype}.")
    elif image.is_floating_point() and (image.amin() < -0.5 or image.amax() > 1.5):
        raise ValueError("`ColorJitter` takes floats from 0 to 1. Put `Normalize` behind it.")


def _adjusted_image(image: Image.Image, name: str, factor: float) -> Image.Image:
    if name != "hue":
        return _ENHANCERS[name](image).enhance(factor)
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + int(factor * 255)) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _adjusted_tensor(image: torch.Tensor, name: str, factor: float) -> torch.Tensor:
    is_bytes = image.dtype == torch.uint8
    levels = image.to(torch.float32)
    if name == "hue":
        changed = _turned(levels, factor, is_bytes=is_bytes) if levels.shape[-3] == 3 else levels
    else:
        base = _base(levels, name, is_bytes=is_bytes)
        changed = base + factor * (levels - base)
    return changed.clamp(0, 255 if is_bytes else 1).to(image.dtype)


def _base(levels: torch.Tensor, name: str, *, is_bytes: bool) -> torch.Tensor:
    """Return what a factor of 0 gives: black, the mean grey, or the grey image."""
    if name == "brightness":
        return torch.zeros((), device=levels.device)
    grey = _grey(levels, is_bytes=is_bytes)
    if name == "saturation":
        return grey
    mean = grey.mean((-2, -1), keepdim=True, dtype=torch.float64)
    return ((mean + 0.5).floor() if is_bytes else mean).to(torch.float32)


def _grey(levels: torch.Tensor, *, is_bytes: bool) -> torch.Tensor:
    if levels.shape[-3] == 1:
        return levels
    weights = torch.tensor([19595, 38470, 7471], device=levels.device) / 65536  # ITU-R 601-2, as Pillow rounds them
    grey = (levels * weights[:, None, None]).sum(-3, keepdim=True)
    return (grey + 0.5).floor() if is_bytes else grey


def _turned(levels: torch.Tensor, turn: float, *, is_bytes: bool) -> torch.Tensor:
    """Return the pixels with their hues turned; of bytes, with hue and saturation in 8 bits, as Pillow has them."""
    hue, saturation = _hue_and_saturation(levels)
    if is_bytes:
        sixths = ((hue * 255).floor() + int(turn * 255)) % 256 * 6 / 255
        saturation = (saturation * 255).floor() / 255
    else:
        sixths = (hue + turn) * 6
    starts = torch.tensor([5, 3, 1], dtype=torch.float64, device=levels.device)[:, None, None]
    places = (starts + sixths.unsqueeze(-3)) % 6
    away = torch.minimum(places, 4 - places).clamp(0, 1).to(torch.float32)
    pixels = levels.amax(-3, keepdim=True) * (1 - saturation.unsqueeze(-3) * away)
    return (pixels + 0.5).floor() if is_bytes else pixels


def _hue_and_saturation(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both from 0 to 1, `[..., H, W]`, rounded as Pillow's conversion to HSV rounds them."""
    top = levels.amax(-3)
    span = top - levels.amin(-3)
    below = (top.unsqueeze(-3) - levels) / torch.where(span > 0, span, 1).unsqueeze(-3)
    red, green, blue = below.to(torch.float64).unbind(-3)
    sixths = torch.where(red == 0, blue - green, torch.where(green == 0, 2 + red - blue, 4 + green - red))
    hue = ((sixths.to(torch.float32).to(torch.float64) / 6 + 1) % 1).to(torch.float32)
    return hue, span / torch.where(top > 0, top, 1)


def _check_factor(param: str, value: Any) -> tuple[float, float]:
    rule = "a number of at least 0, or two of them, the smaller first"
    return _check_ends(param, value, rule, centre=1, least=0, most=sys.float_info.max)


def _check_hue(value: Any) -> tuple[float, float]:
    rule = "a number from 0 to 0.5, or two from -0.5 to 0.5, the smaller first"
    return _check_ends("hue", value, rule, centre=0, least=-0.5, most=0.5)


def _check_ends(param: str, value: Any, rule: str, *, centre: float, least: float, most: float) -> tuple[float, float]:
    if is_number(value):
        low, high = max(least, centre - value), centre + value
    elif isinstance(value, tuple | list) and [is_number(end) for end in value] == [True, True]:
        low, high = value
    else:
        raise TypeError(must_be(param, rule, value))
    if not least <= low <= high <= most:
        raise ValueError(must_be(param, rule, value))
    return float(low), float(high)
