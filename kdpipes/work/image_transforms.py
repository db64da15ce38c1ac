"""The two transforms of the worked example. Other libraries' transforms are callables like any other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image

from kdpipes.errors import check_count, must_be
from kdpipes.work.decode_images import EncodedImage

__all__ = ["HorizontalFlip", "RandomResizedCrop"]


def _size_of(image: Any, name: str) -> tuple[int, int]:
    return image.size if isinstance(image, EncodedImage) else _as_pil(image, name).size


def _as_pil(image: Any, name: str) -> Image.Image:
    if isinstance(image, EncodedImage):
        return image.to_pil()
    if not isinstance(image, Image.Image):
        raise TypeError(f"`{name}` takes images of `.decode_images()` or of Pillow's, but got {type(image).__name__}.")
    return image


class _Recorded:
    """What both transforms share: a call of its own draws and applies."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} must implement `draw`.")

    def apply(self, value: Any, params: dict[str, Any]) -> Image.Image:
        raise TypeError(f"{type(self).__name__} must implement `apply`.")

    def __call__(self, image: Any, rng: np.random.Generator) -> Image.Image:
        """Return the image with parameters drawn from `rng`."""
        return self.apply(image, self.draw(image, rng))


class RandomResizedCrop(_Recorded):
    """A random region of the image, resized to a square: the crop that Inception networks were trained with.

    Recorded as `{"top", "left", "height", "width"}` in pixels of the image. Source: Szegedy et al., "Going Deeper with
    Convolutions", 2015; the sampling is torchvision's `RandomResizedCrop`.

    Args:
        size: Height and width of the result in pixels.
        scale: The least and the largest area of the region, as a share of the image's.
        ratio: The least and the largest width of the region, as a multiple of its height.

    Example:
        >>> crop = kdp.RandomResizedCrop(8)
        >>> crop.apply(Image.new("RGB", (20, 10)), {"top": 0, "left": 2, "height": 5, "width": 6}).size
        (8, 8)
    """

    def __init__(
        self,
        size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        self._size = check_count("size", size)
        self._scale = _check_range("scale", scale, below=1.0)
        self._ratio = _check_range("ratio", ratio, below=math.inf)

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return the region for an image, drawn from `rng`."""
        width, height = _size_of(value, "RandomResizedCrop")
        for _ in range(10):
            area = width * height * rng.uniform(*self._scale)
            aspect = math.exp(rng.uniform(math.log(self._ratio[0]), math.log(self._ratio[1])))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
                return {"top": top, "left": left, "height": h, "width": w}
        return self._central(width, height)

    def apply(self, value: Any, params: dict[str, Any]) -> Image.Image:
        """Return the region that `params` name, resized."""
        left, top = params["left"], params["top"]
        box = (left, top, left + params["width"], top + params["height"])
        region = _as_pil(value, "RandomResizedCrop").crop(box)
        return region.resize((self._size, self._size), Image.Resampling.BILINEAR)

    def _central(self, width: int, height: int) -> dict[str, Any]:
        w = min(width, max(1, round(height * self._ratio[1])))
        h = min(height, max(1, round(width / self._ratio[0])))
        return {"top": (height - h) // 2, "left": (width - w) // 2, "height": h, "width": w}


class HorizontalFlip(_Recorded):
    """The image mirrored left to right, with a probability. Recorded as `{"flipped": bool}`.

    Args:
        p: The probability of a flip, from 0 to 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float):
            raise TypeError(must_be("p", "a probability, from 0 to 1", p))
        if not 0 <= p <= 1:
            raise ValueError(must_be("p", "a probability, from 0 to 1", p))
        self._p = p

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return whether to flip, drawn from `rng`."""
        return {"flipped": bool(rng.random() < self._p)}

    def apply(self, value: Any, params: dict[str, Any]) -> Image.Image:
        """Return the image, flipped if `params` say so."""
        image = _as_pil(value, "HorizontalFlip")
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if params["flipped"] else image


def _check_range(param: str, value: Any, *, below: float) -> tuple[float, float]:
    rule = "two numbers, the smaller first, above 0" + (f" and up to {below:g}" if below < math.inf else "")
    if not isinstance(value, tuple | list) or [isinstance(end, int | float) for end in value] != [True, True]:
        raise TypeError(must_be(param, rule, value))
    low, high = value
    if not (0 < low <= high <= below and math.isfinite(high)):
        raise ValueError(must_be(param, rule, value))
    return float(low), float(high)
