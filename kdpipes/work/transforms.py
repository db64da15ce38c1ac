"""Transforms of images: crop, resize, flip, change colors, and convert to normalized tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

from kdpipes.core.errors import check_choice, check_count, check_number, is_number, is_sequence, must_be
from kdpipes.work.decode import DecodedImage
from kdpipes.work.image_ops import (
    RESAMPLING,
    Drawn,
    FieldKind,
    Fixed,
    Interpolation,
    as_image,
    check_size,
    cut_out,
    keeps_no_rng,
    like,
    moved,
    on_mask,
    resized,
    size_of,
)


class RandomResizedCrop(Drawn):
    """Crops a random region of an image and resizes it.

    The ctx records `{"top", "left", "height", "width"}` in pixels of the image. See `kdp.Resize` for the types of
    images and the accuracy. Source: Szegedy et al., "Going Deeper with Convolutions", 2015; regions are sampled like
    those of torchvision's `RandomResizedCrop`.

    Args:
        size: The height and width of the result in pixels: one integer for both, or (height, width).
        scale: The minimum and maximum area of the region, as a share of the area of the image.
        ratio: The minimum and maximum ratio of the region's width to its height.
        interpolation: "nearest", "bilinear" or "bicubic". The last two are antialiased.

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
        rule = "two numbers, the smaller first, above 0"
        self._scale = _check_ends("scale", scale, f"{rule} and up to 1", least=math.ulp(0), most=1)
        self._ratio = _check_ends("ratio", ratio, rule, least=math.ulp(0), most=sys.float_info.max)
        check_choice("interpolation", interpolation, RESAMPLING)
        self._interpolation = interpolation

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return the region for an image, drawn from `rng`."""
        width, height = size_of(value, "RandomResizedCrop")
        for _ in range(10):
            area = width * height * rng.uniform(*self._scale)
            aspect = math.exp(rng.uniform(math.log(self._ratio[0]), math.log(self._ratio[1])))
            w = round(math.sqrt(area * aspect))
            h = round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                top = int(rng.integers(height - h + 1))
                left = int(rng.integers(width - w + 1))
                return {"top": top, "left": left, "height": h, "width": w}
        w = min(width, max(1, round(height * self._ratio[1])))
        h = min(height, max(1, round(width / self._ratio[0])))
        return {"top": (height - h) // 2, "left": (width - w) // 2, "height": h, "width": w}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the region in `params`, resized."""
        region = cut_out(value, params, "RandomResizedCrop", self._size)
        return like(value, resized(region, self._size, self._interpolation))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points cropped and resized like their image, whose size is (width, height)."""
        height, width = self._size
        if kind == "mask":
            owner = "RandomResizedCrop"
            return on_mask(value, lambda mask: like(mask, resized(cut_out(mask, params, owner), self._size, "nearest")))
        scale = width / params["width"], height / params["height"]
        shift = -params["left"] * scale[0], -params["top"] * scale[1]
        return moved(kind, value, scale=scale, shift=shift, size=(width, height))


class CenterCrop(Fixed):
    """Crops the center of an image. A smaller image is padded with black.

    The ctx records `{"top", "left", "height", "width"}` in pixels of the image, negative if black was added. The
    position is that of torchvision's `CenterCrop`, which rounds halves to even numbers. Takes the same images as
    `kdp.Resize`, and tensors of any dtype.

    Args:
        size: The height and width of the result in pixels: one integer for both, or (height, width).

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
        """Return the region for an image. `rng` is not used."""
        width, height = size_of(value, "CenterCrop")
        h, w = self._size
        return {"top": _middle(height - h), "left": _middle(width - w), "height": h, "width": w}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the region in `params`."""
        return like(value, cut_out(value, params, "CenterCrop"))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask (padded with 0), boxes or points, cropped like their image, whose size is (width, height)."""
        if kind == "mask":
            return on_mask(value, lambda mask: self.apply(mask, params))
        shift = -params["left"], -params["top"]
        return moved(kind, value, shift=shift, size=(params["width"], params["height"]))


class Resize(Fixed):
    """Resizes an image, with antialiasing unless `interpolation` is "nearest".

    The ctx records `{"height", "width"}`. A Pillow image stays one, an image from `decode_images` becomes a
    `DecodedImage`, and a tensor `[..., C, H, W]` of uint8 or float keeps its dtype. Sizes are rounded down, as in
    torchvision's `Resize`. For Pillow images, the pixels are those of Pillow. For other images, the pixels of photos
    differ from those by less than 0.1 gray levels on average and by at most 1 ("nearest": 0; "bicubic": 2, or 8 if one
    edge grows and the other shrinks, which versions of Pillow do in different orders).

    Args:
        size: The length of the shorter edge of the result in pixels, which keeps the aspect ratio; or (height, width).
        max_size: The maximum length of the longer edge. The shorter edge may then be less than `size`.
        interpolation: "nearest", "bilinear" or "bicubic". With "bicubic", floats may become less than 0 or more than 1.

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
        self._size = (height, width) if is_sequence(size) else height
        if max_size is not None and isinstance(self._size, tuple):
            raise ValueError(must_be("max_size", "None if `size` is a height and a width", max_size))
        self._max_size = None if max_size is None else check_count("max_size", max_size, minimum=height + 1)
        check_choice("interpolation", interpolation, RESAMPLING)
        self._interpolation = interpolation

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return the new size for an image. `rng` is not used."""
        if isinstance(self._size, tuple):
            return {"height": self._size[0], "width": self._size[1]}
        width, height = size_of(value, "Resize")
        short = self._size
        long = self._size * max(width, height) // min(width, height)
        if self._max_size is not None and long > self._max_size:
            short = max(1, self._max_size * short // long)
            long = self._max_size
        return {"height": short, "width": long} if height < width else {"height": long, "width": short}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the image resized to the size in `params`."""
        size = params["height"], params["width"]
        return like(value, resized(as_image(value, "Resize", size), size, self._interpolation))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask (by nearest neighbor), boxes or points, resized like their image of size (width, height)."""
        height = params["height"]
        width = params["width"]
        if kind == "mask":
            return on_mask(
                value, lambda mask: like(mask, resized(as_image(mask, "Resize"), (height, width), "nearest"))
            )
        return moved(kind, value, scale=(width / size[0], height / size[1]), size=(width, height))


class HorizontalFlip(Drawn):
    """Flips an image left to right with some probability.

    The ctx records `{"flipped": bool}`. Takes the same images as `kdp.Resize`, and tensors of any dtype.

    Args:
        p: The probability of a flip, from 0 to 1.

    Example:
        >>> kdp.HorizontalFlip().apply(torch.arange(3).reshape(1, 1, 3), {"flipped": True})
        tensor([[[2, 1, 0]]])
    """

    def __init__(self, p: float = 0.5) -> None:
        check_number("p", p, "a probability, from 0 to 1", 0, 1)
        self._p = p

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return whether to flip, drawn from `rng`."""
        return {"flipped": bool(rng.random() < self._p)}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the image, flipped if `params["flipped"]` is True."""
        if isinstance(value, DecodedImage) and not params["flipped"]:
            return value
        image = as_image(value, "HorizontalFlip")
        if not params["flipped"]:
            return like(value, image)
        is_pil = isinstance(image, Image.Image)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_pil else like(value, image.flip(-1))

    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        """Return a mask, boxes or points, flipped like their image, whose size is (width, height)."""
        if kind == "mask":
            return on_mask(value, lambda mask: self.apply(mask, params))
        how: dict[str, Any] = {"scale": (-1, 1), "shift": (size[0], 0)} if params["flipped"] else {}
        return moved(kind, value, size=size, **how)


def _middle(space: int) -> int:
    return round(space / 2) if space >= 0 else -(-space // 2)


_ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


class ColorJitter(Drawn):
    """Randomly changes the brightness, contrast, saturation and hue of an image, in random order.

    The ctx records the applied changes, `{"order": ["hue", "brightness"], "hue": 0.1, "brightness": 0.8}`. The formulas
    are those of Pillow's `ImageEnhance`, and for the hue those of torchvision's `ColorJitter`. The saturation and hue
    of images with one channel do not change.

    Tensors `[..., C, H, W]` of uint8 get exactly the pixels of Pillow; all images of such a tensor share the factors.
    Floats must be from 0 to 1 and are not rounded: pixels of photos differ from those of Pillow by at most 1 gray
    level, and after a change of hue by 2 on average and at most 14, because Pillow keeps hues in 8 bits.

    Args:
        brightness: The range of the factor, (min, max), at least 0. One number b stands for (max(0, 1 - b), 1 + b). A
            factor of 0 makes a black image.
        contrast: The range of the factor, as for `brightness`. A factor of 0 makes an image of its mean gray level.
        saturation: The range of the factor, as for `brightness`. A factor of 0 makes a gray image.
        hue: The range of the shift, (min, max), from -0.5 to 0.5. One number h stands for (-h, h). A shift of 0.5 makes
            complementary colors.

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
        rule = "a number of at least 0, or two of them, the smaller first"
        ranges = {
            name: _check_ends(name, value, rule, center=1, least=0, most=sys.float_info.max)
            for name, value in factors.items()
        }
        rule = "a number from 0 to 0.5, or two from -0.5 to 0.5, the smaller first"
        ranges["hue"] = _check_ends("hue", hue, rule, center=0, least=-0.5, most=0.5)
        self._ranges = {name: ends for name, ends in ranges.items() if set(ends) != {0.0 if name == "hue" else 1.0}}

    @keeps_no_rng
    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return the factors and their order, drawn from `rng`."""
        names = list(self._ranges)
        order = [names[place] for place in rng.permutation(len(names))]
        return {"order": order, **{name: float(rng.uniform(*ends)) for name, ends in self._ranges.items()}}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return the image with the changes in `params`."""
        image = as_image(value, "ColorJitter")
        _check_kind(image)
        adjusted = _adjusted_tensor if isinstance(image, torch.Tensor) else _adjusted_image
        for name in params["order"]:
            image = adjusted(image, name, params[name])
        return like(value, image)


def _check_kind(image: Any) -> None:
    if not isinstance(image, torch.Tensor):
        if image.mode not in {"L", "RGB"}:
            hint = 'Put `lambda image: image.convert("RGB")` before it.'
            raise TypeError(f"`ColorJitter` takes images of mode L or RGB, but got one of mode {image.mode}. {hint}")
    elif image.shape[-3] not in {1, 3}:
        raise ValueError(f"`ColorJitter` takes tensors of 1 or 3 channels, but got one of {image.shape[-3]}.")
    elif image.dtype != torch.uint8 and not image.is_floating_point():
        raise TypeError(f"`ColorJitter` takes tensors of uint8 or float, but got one of {image.dtype}.")
    elif image.is_floating_point() and (image.amin() < -0.5 or image.amax() > 1.5):
        raise ValueError("`ColorJitter` takes floats from 0 to 1. Put `Normalize` after it.")


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
    """Return the image for a factor of 0: black, the mean gray, or the gray image."""
    if name == "brightness":
        return torch.zeros((), device=levels.device)
    gray = _grey(levels, is_bytes=is_bytes)
    if name == "saturation":
        return gray
    mean = gray.mean((-2, -1), keepdim=True, dtype=torch.float64)
    return ((mean + 0.5).floor() if is_bytes else mean).to(torch.float32)


def _grey(levels: torch.Tensor, *, is_bytes: bool) -> torch.Tensor:
    if levels.shape[-3] == 1:
        return levels
    weights = torch.tensor([19595, 38470, 7471], device=levels.device) / 65536  # ITU-R 601-2, rounded as in Pillow
    gray = (levels * weights[:, None, None]).sum(-3, keepdim=True)
    return (gray + 0.5).floor() if is_bytes else gray


def _turned(levels: torch.Tensor, turn: float, *, is_bytes: bool) -> torch.Tensor:
    """Return the pixels with shifted hues. For bytes, hue and saturation are rounded to 8 bits, as in Pillow."""
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
    """Return hue and saturation from 0 to 1, `[..., H, W]`, rounded as in Pillow's conversion to HSV."""
    top = levels.amax(-3)
    span = top - levels.amin(-3)
    below = (top.unsqueeze(-3) - levels) / torch.where(span > 0, span, 1).unsqueeze(-3)
    red, green, blue = below.to(torch.float64).unbind(-3)
    sixths = torch.where(red == 0, blue - green, torch.where(green == 0, 2 + red - blue, 4 + green - red))
    hue = ((sixths.to(torch.float32).to(torch.float64) / 6 + 1) % 1).to(torch.float32)
    return hue, span / torch.where(top > 0, top, 1)


def _check_ends(
    param: str, value: Any, rule: str, *, center: float | None = None, least: float, most: float
) -> tuple[float, float]:
    """Return the ends of a range. A single number is a distance from `center`, if that is not None."""
    ends = (max(least, center - value), center + value) if center is not None and is_number(value) else value
    if not is_sequence(ends) or [is_number(end) for end in ends] != [True, True]:
        raise TypeError(must_be(param, rule, value))
    low, high = ends
    if not least <= low <= high <= most:
        raise ValueError(must_be(param, rule, value))
    return float(low), float(high)


_MODES = ("L", "LA", "RGB", "RGBA", "I;16", "F", "P")


class ToTensor(Fixed):
    """Converts an image to a tensor `[C, H, W] float32` with values from 0 to 1.

    8-bit values are divided by 255, 16-bit values of mode "I;16" by 65,535, and floats do not change. The result does
    not share memory with an image or an array. Images of mode "P" are masks and become `[H, W] uint8` with the same
    values. The ctx records `{}`.

    The image may come from `decode_images` or Pillow (mode L, LA, RGB, RGBA, I;16, F or P), or be an array `[H, W, C]`
    or `[H, W]`, or a tensor `[..., C, H, W]`, of uint8 or float.

    Example:
        >>> x = kdp.ToTensor()(Image.new("RGB", (4, 2), (255, 0, 51)))
        >>> x.shape, x.dtype, x[:, 0, 0].tolist()
        (torch.Size([3, 2, 4]), torch.float32, [1.0, 0.0, 0.20000000298023224])
    """

    def apply(self, value: Any, params: dict[str, Any]) -> torch.Tensor:
        """Return the image as a tensor. `params` is empty."""
        pixels = _of_array(value) if isinstance(value, np.ndarray) else as_image(value, "ToTensor")
        if not isinstance(pixels, torch.Tensor):
            if pixels.mode not in _MODES:
                modes = f"{', '.join(_MODES[:-1])} or {_MODES[-1]}"
                hint = 'Put `lambda image: image.convert("RGB")` before it.'
                raise TypeError(f"`ToTensor` takes images of mode {modes}, but got one of mode {pixels.mode}. {hint}")
            if pixels.mode == "P":
                return torch.from_numpy(np.array(pixels))
            array = np.asarray(pixels)
            pixels = _of_array(array / np.float32(65_535) if pixels.mode == "I;16" else array)
        if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
            raise TypeError(_rejected(pixels.dtype))
        floats = pixels.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
        return floats.div_(255) if pixels.dtype == torch.uint8 else floats


class Normalize(Fixed):
    """Subtracts a mean from each channel of a tensor, and divides the channel by a standard deviation.

    Takes tensors `[..., C, H, W]` of floats, and keeps their dtype. The ctx records `{}`.

    Args:
        mean: The mean of each channel, or one number for all channels.
        std: The standard deviation of each channel, or one number for all channels. Must be above 0.

    Raises:
        TypeError: The value is not a tensor of floats.
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
        """Return the normalized tensor. `params` is empty."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            what = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"`Normalize` takes tensors of floats, but got {what}. Put `kdp.ToTensor()` before it.")
        num_channels = as_image(value, "Normalize").shape[-3]
        if len(self._mean) not in {1, num_channels}:
            hint = f"Its `mean` and `std` have {len(self._mean)} numbers."
            raise ValueError(f"`Normalize` got a tensor of {num_channels} channels. {hint}")
        mean, std = (value.new_tensor(numbers)[:, None, None] for numbers in (self._mean, self._std))
        return (value - mean).div_(std)


def _of_array(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    if array.ndim not in {2, 3} or 0 in array.shape:
        raise ValueError(f"`ToTensor` takes arrays [H, W, C] or [H, W], but got one of shape {list(array.shape)}.")
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise TypeError(_rejected(array.dtype))
    pixels = torch.from_numpy(array.astype(np.uint8 if array.dtype == np.uint8 else np.float32))
    return (pixels[..., None] if array.ndim == 2 else pixels).permute(2, 0, 1)


def _rejected(dtype: Any) -> str:
    return f"`ToTensor` takes pixels of uint8 or float, but got {dtype}. Convert them to floats from 0 to 1 first."


def _check_numbers(param: str, values: Any, *, above: float) -> tuple[float, ...]:
    rule = "a sequence of numbers, one for each channel" + ("" if above == -math.inf else f", above {above:g}")
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise TypeError(must_be(param, rule, values))
    if not all(is_number(value) for value in values):
        raise TypeError(must_be(param, rule, values))
    if not len(values) or not all(above < value < math.inf for value in values):
        raise ValueError(must_be(param, rule, values))
    return tuple(float(value) for value in values)
