"""What the transforms share: images of three kinds, how each is cut and resized, and how a transform is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from kdpipes.errors import check_count, must_be
from kdpipes.work.decode import DecodedImage, EncodedImage

__all__ = [
    "RESAMPLING",
    "Drawn",
    "Fixed",
    "Interpolation",
    "as_image",
    "borrows_rng",
    "check_size",
    "cut",
    "cut_out",
    "keeps_no_rng",
    "like",
    "resized",
    "size_of",
]

Interpolation = Literal["nearest", "bilinear", "bicubic"]
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


Method = TypeVar("Method", bound=Callable[..., Any])
_KEEPING_NONE: set[Callable[..., Any]] = set()


def keeps_no_rng(draw: Method) -> Method:
    """Mark a `draw` as done with its generator when it returns, so that it can borrow one, which is faster."""
    # An attribute would not do: `functools.wraps` copies it to functions that may keep the generator.
    _KEEPING_NONE.add(draw)
    return draw


def borrows_rng(draw: Any) -> bool:
    """Return whether `keeps_no_rng` marks a `draw`."""
    return getattr(draw, "__func__", None) in _KEEPING_NONE  # other callables may not be hashable


class Drawn:
    """A random transform: a call of its own draws and applies."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} must implement `draw`.")

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        raise TypeError(f"{type(self).__name__} must implement `apply`.")

    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        """Return the image with parameters drawn from `rng`."""
        return self.apply(image, self.draw(image, rng))


class Fixed(Drawn):
    """A transform that draws nothing: a call of its own needs no generator."""

    is_random = False

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return nothing: there is nothing to record."""
        return {}

    def __call__(self, image: Any, rng: np.random.Generator | None = None) -> Any:
        """Return the image, transformed; `rng` is not used."""
        return self.apply(image, self.draw(image, rng))


def as_image(value: Any, owner: str, least: tuple[int, int] | None = None) -> Any:
    """Return a value's pixels as an image of Pillow's or a tensor `[..., C, H, W]`, or refuse it.

    Args:
        value: An image of any kind.
        owner: Which transform wants it.
        least: The height and width that it will be resized to.
    """
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, EncodedImage):
        if value.mode != "RGB":
            return value.to_pil()
        width, height = value.size
        return value.region(0, 0, height, width, least=least)
    if isinstance(value, DecodedImage):
        return value.pixels
    if not isinstance(value, torch.Tensor):
        kinds = "images of `.decode_images()` or of Pillow's, or tensors [..., C, H, W]"
        way_out = " `kdp.ToTensor()` makes tensors of arrays." if isinstance(value, np.ndarray) else ""
        raise TypeError(f"`{owner}` takes {kinds}, but got {type(value).__name__}.{way_out}")
    if value.dim() < 3 or 0 in value.shape[-3:]:
        raise ValueError(f"`{owner}` takes tensors [..., C, H, W], but got one of shape {list(value.shape)}.")
    return value


def like(value: Any, image: Any) -> Any:
    """Return an image that was made from `value` in the type of `value`."""
    is_ours = isinstance(value, EncodedImage | DecodedImage) and isinstance(image, torch.Tensor)
    return DecodedImage(image) if is_ours else image


def cut_out(value: Any, params: dict[str, int], owner: str, least: tuple[int, int] | None = None) -> Any:
    """Return a region of a value's pixels, black where it is outside of the image; of an encoded image, only that.

    Args:
        value: An image of any kind.
        params: The region.
        owner: Which transform wants it.
        least: The height and width that it will be resized to.
    """
    if isinstance(value, EncodedImage | DecodedImage) and value.mode == "RGB":
        width, height = value.size
        top, left, rows, columns = (params[name] for name in ("top", "left", "height", "width"))
        if min(top, left) >= 0 and top + rows <= height and left + columns <= width:
            return value.region(top, left, rows, columns, least=least)
    return cut(as_image(value, owner), params)


def size_of(value: Any, owner: str) -> tuple[int, int]:
    """Return width and height, of an encoded image from its header."""
    image = value if isinstance(value, EncodedImage | DecodedImage) else as_image(value, owner)
    width, height = image.shape[:-3:-1] if isinstance(image, torch.Tensor) else image.size
    return width, height


def cut(image: Any, params: dict[str, int]) -> Any:
    """Return the region from `top` and `left` of `height` and `width`, black where it is outside of the image."""
    top, left = params["top"], params["left"]
    bottom, right = top + params["height"], left + params["width"]
    if isinstance(image, Image.Image):
        return image.crop((left, top, right, bottom))
    rows, columns = image.shape[-2:]
    return functional.pad(image, (-left, right - columns, -top, bottom - rows))


def resized(image: Any, size: tuple[int, int], interpolation: str) -> Any:
    """Return the image in another size (height, width), antialiased unless by "nearest"."""
    height, width = size
    if isinstance(image, Image.Image):
        return image.resize((width, height), RESAMPLING[interpolation])
    if interpolation == "nearest":
        rows, columns = _nearest(image.shape[-2], height), _nearest(image.shape[-1], width)
        return image.index_select(-2, rows.to(image.device)).index_select(-1, columns.to(image.device))
    return _interpolated(image, size, interpolation)


def _nearest(length: int, wanted: int) -> torch.Tensor:
    """Return the positions whose pixels Pillow takes: it adds up steps, and rounds as they do."""
    steps = np.full(wanted, length / wanted)
    steps[0] /= 2
    return torch.from_numpy(np.cumsum(steps).astype(np.int64).clip(max=length - 1))


def _interpolated(image: torch.Tensor, size: tuple[int, int], interpolation: str) -> torch.Tensor:
    is_bytes = image.dtype == torch.uint8
    if not is_bytes and not image.is_floating_point():
        raise TypeError(f"Only tensors of uint8 or float can be resized by {interpolation!r}, but got {image.dtype}.")
    lead = image.shape[:-2]
    is_quick = is_bytes and min(size[1], image.shape[-1]) > 1 and image.device.type == "cpu"
    if is_quick and image.dim() == 3 and image.stride(0) == 1:  # as pixels lie in an image: the fastest, stays so
        _, row, column = image.stride()
        one = image.as_strided((1, *image.shape), (row * image.shape[1], 1, row, column))  # a batch that torch knows so
        return _antialiased(one, size, interpolation)[0]
    batch = image.reshape(math.prod(lead[:-1]), *image.shape[-3:])
    if is_quick:
        return _antialiased(batch, size, interpolation).reshape(*lead, *size)
    batch = batch.contiguous()
    exact = batch if image.dtype == torch.float64 else batch.to(torch.float32)
    # Of a width of 1, torch 2.13 makes wrong values, or of bytes an internal error; of a height of 1 it does not.
    turned = size[1] == 1
    result = _antialiased(exact.mT if turned else exact, size[::-1] if turned else size, interpolation)
    result = result.mT if turned else result
    if is_bytes:
        result = result.round().clamp(0, 255)
    return result.to(image.dtype).reshape(*lead, *size)


def _antialiased(batch: torch.Tensor, size: tuple[int, ...], interpolation: str) -> torch.Tensor:
    return functional.interpolate(batch, size, mode=interpolation, align_corners=False, antialias=True)


def check_size(value: Any) -> tuple[int, int]:
    """Return `size` as height and width, an integer as both, or refuse it."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    try:
        height, width = [check_count("size", length) for length in (value if is_pair else (value, value))]
    except (TypeError, ValueError) as error:
        rule = "an integer of at least 1, or two of them, height and width"
        raise type(error)(must_be("size", rule, value)) from None
    return height, width
