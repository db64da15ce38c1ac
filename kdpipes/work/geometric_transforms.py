"""Transforms that move pixels: crops, sizes, flips."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image

from kdpipes.core.errors import check_choice, check_count, is_number, must_be
from kdpipes.work._images import (
    RESAMPLING,
    Drawn,
    Fixed,
    Interpolation,
    as_image,
    check_size,
    cut_out,
    keeps_no_rng,
    like,
    resized,
    size_of,
)
from kdpipes.work.joint import FieldKind, moved, on_mask

__all__ = ["CenterCrop", "HorizontalFlip", "RandomResizedCrop", "Resize"]


class RandomResizedCrop(Drawn):
    """A random region of the image, resized: the crop that Inception networks were trained with.

    Recorded as `{"top", "left", "height", "width"}` in pixels of the image. Source: Szegedy et al., "Going Deeper with
    Convolutions", 2015; the sampling is torchvision's `RandomResizedCrop`. Kinds of images and their tolerance: as
    `kdp.Resize`.

    Args:
        size: Height and width of the result in pixels: one integer, or (height, width).
        scale: The least and the largest area of the region, as a share of the image's.
        ratio: The least and the largest width of the region, as a multiple of its height.
        interpolation: "nearest", "bilinear" or "bicubic"; the last two are antialiased.

    Example:
        >>> crop = kdp.RandomResizedCrop(8)
        >>> crop.apply(Image.new("RGB", (20, 10)), {"top": 0, "left": 2, "height": 5, "width": 6}).size
        (8, 8)
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self._size = check_size(size)
        self._scale = _check_range("scale", scale, below=1.0)
        self._ratio = _check_range("ratio", ratio, below=math.inf)
        check_choice("interpolation", interpolation, RESAMPLING)
        self._interpolation = interpolation

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return the region for an image, drawn from `rng`."""
        width, height = size_of(value, "RandomResizedCrop")
        for _ in range(10):
            area = width * height * rng.uniform(*self._scale)
            aspect = math.exp(rng.uniform(math.log(self._ratio[0]), math.log(self._ratio[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
                return {"top": top, "left": left, "height": h, "width": w}
        return self._central(width, height)

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the region that `params` name, resized."""
        region = cut_out(value, params, "RandomResizedCrop", self._size)
        return like(value, resized(region, self._size, self._interpolation))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points cropped and resized like their image, whose size is (width, height)."""
        height, width = self._size
        if kind == "mask":
            return on_mask(value, lambda mask: self._of_mask(mask, params))
        scale = width / params["width"], height / params["height"]
        shift = -params["left"] * scale[0], -params["top"] * scale[1]
        return moved(kind, value, scale=scale, shift=shift, size=(width, height))

    def _of_mask(self, mask: Any, params: dict[str, Any]) -> Any:
        return like(mask, resized(cut_out(mask, params, "RandomResizedCrop"), self._size, "nearest"))

    def _central(self, width: int, height: int) -> dict[str, Any]:
        w = min(width, max(1, round(height * self._ratio[1])))
        h = min(height, max(1, round(width / self._ratio[0])))
        return {"top": (height - h) // 2, "left": (width - w) // 2, "height": h, "width": w}


class CenterCrop(Fixed):
    """The middle of the image; where the image is smaller, it stands in the middle of black.

    Recorded as `{"top", "left", "height", "width"}` in pixels of the image, negative where black was added. The
    position is that of torchvision's `CenterCrop`, which rounds a half to the even number. Takes what `kdp.Resize`
    takes, and tensors of any dtype.

    Args:
        size: Height and width of the result in pixels: one integer, or (height, width).

    Example:
        >>> crop = kdp.CenterCrop((4, 8))
        >>> crop.draw(Image.new("RGB", (20, 3)))
        {'top': 0, 'left': 6, 'height': 4, 'width': 8}
        >>> crop(Image.new("RGB", (20, 3))).size
        (8, 4)
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self._size = check_size(size)

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return the region for an image; `rng` is not used."""
        width, height = size_of(value, "CenterCrop")
        h, w = self._size
        return {"top": _middle(height - h), "left": _middle(width - w), "height": h, "width": w}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the region that `params` name."""
        return like(value, cut_out(value, params, "CenterCrop"))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask (0 where the image becomes black), boxes or points, cropped like their image of that size."""
        if kind == "mask":
            return on_mask(value, lambda mask: self.apply(mask, params))
        shift = -params["left"], -params["top"]
        return moved(kind, value, shift=shift, size=(params["width"], params["height"]))


class Resize(Fixed):
    """The image in another size, antialiased (by "nearest": not). Recorded as `{"height", "width"}`.

    Images of Pillow's become such, those of `decode_images` a `kdp.DecodedImage`, tensors `[..., C, H, W]` of uint8 or
    float tensors of their dtype. Sizes are rounded down, as by torchvision's `Resize`. Of an image of Pillow's, the
    pixels are Pillow's; else, on photos, they differ from them by at most 1 grey level ("bicubic": 2, or 8 where one
    edge grows and the other shrinks, which versions of Pillow do in different orders; "nearest": 0), on average by less
    than 0.1.

    Args:
        size: The shorter edge of the result in pixels, which keeps the aspect ratio; or (height, width).
        max_size: The longest that the longer edge may become: then the shorter one is less than `size`.
        interpolation: "nearest", "bilinear" or "bicubic"; the last two are antialiased. Floats of a tensor may become
            less than 0 or more than 1 by "bicubic".

    Example:
        >>> photo = Image.new("RGB", (640, 480))
        >>> kdp.Resize(256)(photo).size, kdp.Resize((100, 50))(photo).size, kdp.Resize(256, max_size=300)(photo).size
        ((341, 256), (50, 100), (300, 225))
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        max_size: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        height, width = check_size(size)
        self._size = (height, width) if isinstance(size, tuple | list) else height
        self._max_size = None if max_size is None else _check_max_size(max_size, self._size)
        check_choice("interpolation", interpolation, RESAMPLING)
        self._interpolation = interpolation

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return the size for an image; `rng` is not used."""
        if isinstance(self._size, tuple):
            return {"height": self._size[0], "width": self._size[1]}
        width, height = size_of(value, "Resize")
        short, long = self._size, self._size * max(width, height) // min(width, height)
        if self._max_size is not None and long > self._max_size:
            short, long = max(1, self._max_size * short // long), self._max_size
        return {"height": short, "width": long} if height < width else {"height": long, "width": short}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the image in the size that `params` name."""
        size = params["height"], params["width"]
        return like(value, resized(as_image(value, "Resize", size), size, self._interpolation))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask (by nearest neighbour), boxes or points, resized like their image of size (width, height)."""
        height, width = params["height"], params["width"]
        if kind == "mask":
            return on_mask(
                value, lambda mask: like(mask, resized(as_image(mask, "Resize"), (height, width), "nearest"))
            )
        return moved(kind, value, scale=(width / size[0], height / size[1]), size=(width, height))


class HorizontalFlip(Drawn):
    """The image mirrored left to right, with a probability. Recorded as `{"flipped": bool}`.

    Takes what `kdp.Resize` takes, and tensors of any dtype.

    Args:
        p: The probability of a flip, from 0 to 1.

    Example:
        >>> kdp.HorizontalFlip().apply(torch.arange(3).reshape(1, 1, 3), {"flipped": True})
        tensor([[[2, 1, 0]]])
    """

    def __init__(self, p: float = 0.5) -> None:
        if not is_number(p):
            raise TypeError(must_be("p", "a probability, from 0 to 1", p))
        if not 0 <= p <= 1:
            raise ValueError(must_be("p", "a probability, from 0 to 1", p))
        self._p = p

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return whether to flip, drawn from `rng`."""
        return {"flipped": bool(rng.random() < self._p)}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the image, flipped if `params` say so."""
        image = as_image(value, "HorizontalFlip")
        if not params["flipped"]:
            return like(value, image)
        is_pil = isinstance(image, Image.Image)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_pil else like(value, image.flip(-1))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points, flipped if `params` say so, like their image of size (width, height)."""
        if kind == "mask":
            return on_mask(value, lambda mask: self.apply(mask, params))
        how: dict[str, Any] = {"scale": (-1, 1), "shift": (size[0], 0)} if params["flipped"] else {}
        return moved(kind, value, size=size, **how)


def _middle(space: int) -> int:
    return round(space / 2) if space >= 0 else -(-space // 2)


def _check_range(param: str, value: Any, *, below: float) -> tuple[float, float]:
    rule = "two numbers, the smaller first, above 0" + (f" and up to {below:g}" if below < math.inf else "")
    if not isinstance(value, tuple | list) or [is_number(end) for end in value] != [True, True]:
        raise TypeError(must_be(param, rule, value))
    low, high = value
    if not (0 < low <= high <= below and math.isfinite(high)):
        raise ValueError(must_be(param, rule, value))
    return float(low), float(high)


def _check_max_size(value: Any, size: int | tuple[int, int]) -> int:
    if isinstance(size, tuple):
        raise ValueError(must_be("max_size", "None where `size` is a height and a width", value))
    return check_count("max_size", value, minimum=size + 1)
