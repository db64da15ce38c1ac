"""Operations that transforms share: crop and resize images of any type, and move masks, boxes and points with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from kdpipes.core.errors import DataError, check_count, must_be
from kdpipes.work.decode import DecodedImage, EncodedImage

__all__ = [
    "NUM_COLUMNS",
    "RESAMPLING",
    "Drawn",
    "FieldKind",
    "Fixed",
    "Interpolation",
    "as_array",
    "as_image",
    "back_as",
    "borrows_rng",
    "check_size",
    "cut",
    "cut_out",
    "keeps_no_rng",
    "like",
    "moved",
    "on_mask",
    "resized",
    "size_of",
]

FieldKind = Literal["image", "mask", "boxes", "points", "other"]
NUM_COLUMNS = {"boxes": 4, "points": 2}
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

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points unchanged, as transforms do that change only the values of pixels."""
        return value

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
        hint = " `kdp.ToTensor()` makes tensors of arrays." if isinstance(value, np.ndarray) else ""
        raise TypeError(f"`{owner}` takes {kinds}, but got {type(value).__name__}.{hint}")
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
    antialiased = partial(functional.interpolate, mode=interpolation, align_corners=False, antialias=True)
    is_bytes = image.dtype == torch.uint8
    if not is_bytes and not image.is_floating_point():
        raise TypeError(f"Only tensors of uint8 or float can be resized by {interpolation!r}, but got {image.dtype}.")
    lead = image.shape[:-2]
    is_quick = is_bytes and min(size[1], image.shape[-1]) > 1 and image.device.type == "cpu"
    if is_quick and image.dim() == 3 and image.stride(0) == 1:  # as pixels lie in an image: the fastest, stays so
        _, row, column = image.stride()
        one = image.as_strided((1, *image.shape), (row * image.shape[1], 1, row, column))  # a batch that torch knows so
        return antialiased(one, size)[0]
    batch = image.reshape(math.prod(lead[:-1]), *image.shape[-3:])
    if is_quick:
        return antialiased(batch, size).reshape(*lead, *size)
    batch = batch.contiguous()
    exact = batch if image.dtype == torch.float64 else batch.to(torch.float32)
    # Of a width of 1, torch 2.13 makes wrong values, or of bytes an internal error; of a height of 1 it does not.
    turned = size[1] == 1
    result = antialiased(exact.mT if turned else exact, size[::-1] if turned else size)
    result = result.mT if turned else result
    if is_bytes:
        result = result.round().clamp(0, 255)
    return result.to(image.dtype).reshape(*lead, *size)


def check_size(value: Any) -> tuple[int, int]:
    """Return `size` as height and width, an integer as both, or refuse it."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    try:
        height, width = [check_count("size", length) for length in (value if is_pair else (value, value))]
    except (TypeError, ValueError) as error:
        rule = "an integer of at least 1, or two of them, height and width"
        raise type(error)(must_be("size", rule, value)) from None
    return height, width


def on_mask(value: Any, apply: Callable[[Any], Any]) -> Any:
    """Return a mask of any dtype, in its own type, after an operation on images that makes no new values.

    Args:
        value: An image from Pillow or `decode_images`, a tensor `[..., H, W]` or an array `[H, W]` or `[H, W, C]`.
        apply: The operation on images from Pillow or `decode_images`, and on tensors `[..., C, H, W]`.
    """
    if isinstance(value, torch.Tensor):
        return apply(value[None])[0] if value.dim() == 2 else apply(value)
    if not isinstance(value, np.ndarray):
        return apply(value)
    kind = value.dtype
    bits = np.dtype(f"i{kind.itemsize}") if kind.kind == "u" and kind.itemsize > 1 else kind  # a dtype that torch has
    planes = torch.from_numpy(np.atleast_3d(value).transpose(2, 0, 1).copy().view(bits))
    made: NDArray[Any] = np.ascontiguousarray(apply(planes).permute(1, 2, 0).numpy()).view(kind)
    return made[..., 0] if value.ndim == 2 else made


def moved(
    kind: FieldKind,
    value: Any,
    *,
    scale: tuple[float, float] = (1, 1),
    shift: tuple[float, float] = (0, 0),
    size: tuple[int, int],
) -> Any:
    """Return boxes or points after `x * scale + shift`; boxes are clipped at the edges of the image.

    Args:
        kind: "boxes" or "points".
        value: Boxes `[N, 4]`, or points `[N, 2]`, in a form that `as_array` takes.
        scale: The factors in x and y.
        shift: The shifts in x and y, in pixels of the result.
        size: Width and height of the resulting image.
    """
    found = as_array(kind, value)
    points = found.reshape(len(found), NUM_COLUMNS[kind] // 2, 2) * np.asarray(scale, np.float64) + np.asarray(
        shift, np.float64
    )
    if kind == "boxes":
        points = np.stack([points.min(axis=1), points.max(axis=1)], axis=1).clip(0, size)
    return back_as(value, points.reshape(found.shape))


def as_array(kind: FieldKind, value: Any) -> NDArray[Any]:
    """Return boxes or points, also from lists, as an array of floats; an empty value becomes `[0, 4]` or `[0, 2]`."""
    found = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if not found.size:
        found = found.reshape(0, NUM_COLUMNS[kind])
    if found.ndim != 2 or found.shape[1] != NUM_COLUMNS[kind] or found.dtype.kind not in "iuf":
        what = {"boxes": "[N, 4]: left, top, right, bottom", "points": "[N, 2]: x, y"}[kind]
        raise DataError(f"{kind.capitalize()} must be numbers {what}, in pixels, but are {found.dtype} {found.shape}.")
    return found.astype(np.float64 if found.dtype != np.float32 else np.float32)


def back_as(before: Any, made: Any) -> Any:
    """Return numbers in the type and dtype of the original value; for a list, as an array of float32."""
    array = np.asarray(made)
    if isinstance(before, torch.Tensor):
        array = array if before.is_floating_point() else np.rint(array)
        return torch.from_numpy(array).to(before.device, before.dtype)
    if isinstance(before, np.ndarray):
        return (np.rint(array) if before.dtype.kind in "iu" else array).astype(before.dtype)
    return array.astype(np.float32)
