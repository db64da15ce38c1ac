"""Recorded crops, drawn over the image that they were cut from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

__all__ = ["crop_boxes"]

_BOX = {"top", "left", "height", "width"}
_COLORS = ("#e4572e", "#17bebb", "#ffc914", "#76b041", "#a06cd5", "#2e86ab")


def crop_boxes(image: Any, ctx: Mapping[str, Any], *, line: int = 3) -> Image.Image:
    """Return a copy of the image with a rectangle around each region that a ctx has recorded.

    Of each view, and of what stands outside of views, it is the first region: later ones are regions of that.

    Args:
        image: The image before the crop: Pillow's, one of `decode_images`, or an array `[H, W, 3] uint8`.
        ctx: The sample's ctx: entries with `top`, `left`, `height` and `width`, in pixels of the image.
        line: The width of lines in pixels.

    Example:
        >>> region = {"top": 2, "left": 4, "height": 9, "width": 9}
        >>> crop_boxes(Image.new("RGB", (40, 30)), {"random_resized_crop": region}).getpixel((4, 2))
        (228, 87, 46)
    """
    picture = image.to_pil() if hasattr(image, "to_pil") else image
    drawn = (picture if isinstance(picture, Image.Image) else Image.fromarray(np.asarray(picture))).convert("RGB")
    drawn = drawn.copy() if drawn is picture else drawn
    pen = ImageDraw.Draw(drawn)
    for number, box in enumerate(_boxes_in(ctx)):
        left, top = box["left"], box["top"]
        corners = (left, top, left + box["width"] - 1, top + box["height"] - 1)
        pen.rectangle(corners, outline=_COLORS[number % len(_COLORS)], width=line)
    return drawn


def _boxes_in(ctx: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    is_found = False
    for entry in ctx.values():
        if isinstance(entry, Mapping) and set(entry) >= _BOX:
            if not is_found:
                yield entry
            is_found = True
        elif isinstance(entry, Mapping):
            yield from _boxes_in(entry)
