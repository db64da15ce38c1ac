"""Crop and resize images of any type, and the corresponding masks, boxes and points."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from kdpipes.core.errors import DataError, check_count, is_sequence, must_be
from kdpipes.core.processes import in_one_torch_thread
from kdpipes.core.registry import argument_check
from kdpipes.work.decode import DecodedImage, EncodedImage

FieldKind = Literal["image", "mask", "boxes", "xywh", "cxcywh", "points", "other"]
NUM_COLUMNS = {"boxes": 4, "xywh": 4, "cxcywh": 4, "points": 2}
_COLUMNS = {
    "boxes": "left, top, right, bottom",
    "xywh": "left, top, width, height",
    "cxcywh": "center x, center y, width, height",
    "points": "x, y",
}
ANCHORS = {"xywh": 0.0, "cxcywh": 0.5}  # where the x and y of a box lie, as a share of its width and height
Interpolation = Literal["nearest", "bilinear", "bicubic"]
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


Method = TypeVar("Method", bound=Callable[..., Any])
_KEEPING_NONE: set[Callable[..., Any]] = set()


def keeps_no_rng(draw: Method) -> Method:
    """Mark a `draw` that does not keep its generator, so that it can borrow one, which is faster."""
    # Not an attribute, because `functools.wraps` would copy it to functions that may keep the generator.
    _KEEPING_NONE.add(draw)
    return draw


def borrows_rng(draw: Any) -> bool:
    """Return whether a `draw` was marked by `keeps_no_rng`."""
    return getattr(draw, "__func__", None) in _KEEPING_NONE  # other callables may not be hashable


class Drawn:
    """The base class of random transforms. A call draws parameters and applies them."""

    if not TYPE_CHECKING:  # with it, pyright would not check the arguments of constructors

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if args:  # copies are made without arguments
                argument_check(cls.__name__, cls.__init__)(None, args, kwargs)
            return super().__new__(cls)

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} must implement `draw`.")

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        raise TypeError(f"{type(self).__name__} must implement `apply`.")

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points unchanged, which is correct for transforms that change only colors."""
        return value

    @in_one_torch_thread
    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        """Return the image with parameters drawn from `rng`."""
        return self.apply(image, self.draw(image, rng))


class Fixed(Drawn):
    """The base class of transforms without random numbers. A call needs no generator."""

    is_random = False

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return an empty dictionary, because there are no parameters."""
        return {}

    @in_one_torch_thread
    def __call__(self, image: Any, rng: np.random.Generator | None = None) -> Any:
        """Return the transformed image. `rng` is not used."""
        return self.apply(image, self.draw(image, rng))


def as_image(value: Any, owner: str, least: tuple[int, int] | None = None) -> Any:
    """Return the pixels of an image as a Pillow image or a tensor `[..., C, H, W]`.

    Args:
        value: An image of any type.
        owner: The name of the transform, for errors.
        least: The height and width to which the image will be resized; None if it will not be.

    Raises:
        TypeError: The value is not an image.
        ValueError: The tensor is empty or has fewer than 3 dimensions.
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
        kinds = "images from `.decode_images()` or Pillow, or tensors [..., C, H, W]"
        hint = ""
        if isinstance(value, np.ndarray):
            hint = (
                ' `kdp.ToTensor()` makes tensors of arrays. A mask among several fields needs `kinds={"NAME": "mask"}`.'
            )

        raise TypeError(f"`{owner}` takes {kinds}, but got {type(value).__name__}.{hint}")
    if value.dim() < 3 or 0 in value.shape[-3:]:
        raise ValueError(f"`{owner}` takes tensors [..., C, H, W], but got one of shape {list(value.shape)}.")
    return value


def like(value: Any, image: Any) -> Any:
    """Return `image` converted to the type of `value`, the image that it was made from."""
    is_ours = isinstance(value, EncodedImage | DecodedImage) and isinstance(image, torch.Tensor)
    return DecodedImage(image) if is_ours else image


def cut_out(value: Any, params: dict[str, int], owner: str, least: tuple[int, int] | None = None) -> Any:
    """Return a region of an image, with black pixels outside the image. Encoded images are decoded only in the region.

    Args:
        value: An image of any type.
        params: The region: `top`, `left`, `height` and `width` in pixels.
        owner: The name of the transform, for errors.
        least: The height and width to which the region will be resized; None if it will not be.
    """
    if isinstance(value, EncodedImage | DecodedImage) and value.mode == "RGB":
        width, height = value.size
        top = params["top"]
        left = params["left"]
        rows = params["height"]
        columns = params["width"]
        if min(top, left) >= 0 and top + rows <= height and left + columns <= width:
            return value.region(top, left, rows, columns, least=least)
    return cut(as_image(value, owner), params)


def size_of(value: Any, owner: str) -> tuple[int, int]:
    """Return the width and height of an image. For an encoded image, they are read from the header."""
    image = value if isinstance(value, EncodedImage | DecodedImage) else as_image(value, owner)
    width, height = image.shape[:-3:-1] if isinstance(image, torch.Tensor) else image.size
    return width, height


def cut(image: Any, params: dict[str, int]) -> Any:
    """Return the region at `top` and `left` with size `height` and `width`. Pixels outside the image are black."""
    top = params["top"]
    left = params["left"]
    bottom = top + params["height"]
    right = left + params["width"]
    if isinstance(image, Image.Image):
        return image.crop((left, top, right, bottom))
    rows, columns = image.shape[-2:]
    return functional.pad(image, (-left, right - columns, -top, bottom - rows))


def resized(image: Any, size: tuple[int, int], interpolation: str) -> Any:
    """Return the image resized to (height, width), antialiased unless `interpolation` is "nearest"."""
    height, width = size
    if isinstance(image, Image.Image):
        return image.resize((width, height), RESAMPLING[interpolation])
    if interpolation == "nearest":
        rows = _nearest(image.shape[-2], height)
        columns = _nearest(image.shape[-1], width)
        return image.index_select(-2, rows.to(image.device)).index_select(-1, columns.to(image.device))
    return _interpolated(image, size, interpolation)


def _nearest(length: int, wanted: int) -> torch.Tensor:
    """Return the positions of the pixels that Pillow selects, reproducing its rounding errors."""
    steps = np.full(wanted, length / wanted)
    steps[0] /= 2
    return torch.from_numpy(np.cumsum(steps).astype(np.int64).clip(max=length - 1))


def _interpolated(image: torch.Tensor, size: tuple[int, int], interpolation: str) -> torch.Tensor:
    antialiased = partial(functional.interpolate, mode=interpolation, align_corners=False, antialias=True)
    is_bytes = image.dtype == torch.uint8
    if not is_bytes and not image.is_floating_point():
        hint = 'Convert the tensor first, or use `interpolation="nearest"`.'
        raise TypeError(f"Only uint8 and float tensors can be resized by {interpolation!r}, not {image.dtype}. {hint}")
    lead = image.shape[:-2]
    is_quick = is_bytes and min(size[1], image.shape[-1]) > 1 and image.device.type == "cpu"
    if is_quick and image.dim() == 3 and image.stride(0) == 1:  # channels last is fastest, and is preserved
        _, row, column = image.stride()
        one = image.as_strided(
            (1, *image.shape), (row * image.shape[1], 1, row, column)
        )  # strides that torch recognizes
        return antialiased(one, size)[0]
    batch = image.reshape(math.prod(lead[:-1]), *image.shape[-3:])
    if is_quick:
        return antialiased(batch, size).reshape(*lead, *size)
    batch = batch.contiguous()
    exact = batch if image.dtype == torch.float64 else batch.to(torch.float32)
    # For a width of 1, torch 2.13 returns wrong values, or fails for bytes. A height of 1 works.
    turned = size[1] == 1
    result = antialiased(exact.mT if turned else exact, size[::-1] if turned else size)
    result = result.mT if turned else result
    if is_bytes:
        result = result.round().clamp(0, 255)
    return result.to(image.dtype).reshape(*lead, *size)


def check_size(value: Any) -> tuple[int, int]:
    """Return `size` as (height, width), which are equal for a single integer. Raise if it is invalid."""
    is_pair = is_sequence(value) and len(value) == 2
    try:
        height, width = [check_count("size", length) for length in (value if is_pair else (value, value))]
    except (TypeError, ValueError) as error:
        rule = "an integer of at least 1, or two of them, height and width"
        raise type(error)(must_be("size", rule, value)) from None
    return height, width


def on_mask(value: Any, apply: Callable[[Any], Any]) -> Any:
    """Apply an image operation that creates no new values to a mask, preserving its type and dtype.

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
    """Return boxes or points after `x * scale + shift`. Boxes are clipped at the edges of the image.

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
    """Return boxes or points as an array of floats, `[N, 4]` or `[N, 2]`. The value may be a list, and may be empty.

    Boxes of all kinds become left, top, right, bottom.
    """
    found = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if not found.size:
        found = found.reshape(0, NUM_COLUMNS[kind])
    if found.ndim != 2 or found.shape[1] != NUM_COLUMNS[kind] or found.dtype.kind not in "iuf":
        rule = f"numbers [N, {NUM_COLUMNS[kind]}]: {_COLUMNS[kind]}, in pixels"
        raise DataError(f"Fields of kind {kind!r} must be {rule}, but are {found.dtype} {found.shape}.")
    floats = found.astype(np.float64)
    if kind in ANCHORS:
        floats[:, :2] -= floats[:, 2:] * ANCHORS[kind]
        floats[:, 2:] += floats[:, :2]
    wrong = np.flatnonzero((floats[:, 2:] < floats[:, :-2]).any(axis=1))  # none for points, which have no size
    if len(wrong):
        raise DataError(
            f"Box {wrong[0]} (counting from 0) ends before it begins: {found[wrong[0]].tolist()}. Boxes of kind "
            f"{kind!r} are {_COLUMNS[kind]}. If all boxes have a width and height, write "
            '`kinds={"NAME": "xywh"}` or "cxcywh"; otherwise, correct this box in a function before the transform.'
        )
    return floats


def from_corners(kind: FieldKind, value: Any) -> Any:
    """Return boxes left, top, right, bottom in the form of their kind, and points unchanged."""
    if kind not in ANCHORS:
        return value
    boxes = np.asarray(value).copy()
    boxes[:, 2:] -= boxes[:, :2]
    boxes[:, :2] += boxes[:, 2:] * ANCHORS[kind]
    return boxes


def back_as(before: Any, made: Any) -> Any:
    """Return numbers in the type and dtype of the original value; for a list, as a float32 array."""
    array = np.asarray(made)
    if isinstance(before, torch.Tensor):
        array = array if before.is_floating_point() else np.rint(array)
        return torch.from_numpy(array).to(before.device, before.dtype)
    if isinstance(before, np.ndarray):
        return (np.rint(array) if before.dtype.kind in "iu" else array).astype(before.dtype)
    return array.astype(np.float32)
