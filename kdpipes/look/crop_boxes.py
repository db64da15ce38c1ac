"""Recorded crops, drawn over the image that they were cut from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

from PIL import Image, ImageDraw

from kdpipes.core.errors import must_be
from kdpipes.look.grid import as_picture

__all__ = ["crop_boxes"]

_BOX = {"top", "left", "height", "width"}
_COLORS = ("#e4572e", "#17bebb", "#ffc914", "#76b041", "#c77dff", "#4ea8de")
_LIGHT, _DARK = "#ffffff", "#000000"
Box = tuple[float, float, float, float]


def crop_boxes(image: Any, ctx: Mapping[str, Any], *, line: int | None = None) -> Image.Image:
    """Return a copy of the image with a rectangle around the region that each view was cut from.

    It is the first region that a ctx has recorded, and of each view of it the first: red, turquoise, yellow, ..., with
    a light edge outside and a dark one inside. The flips and resizes that kdpipes' own transforms did before are
    reckoned with; behind transforms of other libraries nothing is drawn.

    Args:
        image: The image before all transforms: Pillow's, one of `decode_images`, an array or a tensor.
        ctx: The sample's ctx, with entries of `top`, `left`, `height` and `width`.
        line: The width of lines in pixels; by default, as the size of the image wants it.

    Raises:
        TypeError: The ctx is that of a batch.

    Example:
        >>> region = {"top": 2, "left": 4, "height": 9, "width": 9}
        >>> crop_boxes(Image.new("RGB", (40, 30)), {"random_resized_crop": region}).getpixel((4, 2))
        (228, 87, 46)
    """
    if isinstance(image, Mapping):
        raise TypeError(must_be("image", "an image, like `sample['x']`", image))
    drawn = as_picture(image).copy()
    pen, width = ImageDraw.Draw(drawn), line or max(3, round(max(drawn.size) / 60))
    views = [ctx, *(entry for name, entry in ctx.items() if name.startswith("view_") and isinstance(entry, Mapping))]
    colors = cycle(_COLORS)
    if len(views) > 1 and not list(_first_box(ctx, drawn.size)):
        views = views[1:]
    boxes = [(box, color) for view, color in zip(views, colors, strict=False) for box in _first_box(view, drawn.size)]
    for box, _ in boxes:
        _draw_edges(pen, box, width)
    for (left, top, right, bottom), color in boxes:
        pen.rectangle((left, top, right - 1, bottom - 1), outline=color, width=width)
    return drawn


def _draw_edges(pen: ImageDraw.ImageDraw, box: Box, width: int) -> None:
    """Draw a light line around the region and a dark one inside, so that it shows on images of any colour."""
    (left, top, right, bottom), edge = box, max(1, round(width / 3))
    outer, inner = (left - edge, top - edge, right - 1 + edge, bottom - 1 + edge), width + edge
    pen.rectangle(outer, outline=_LIGHT, width=edge)
    if min(right - left, bottom - top) > 2 * inner:
        pen.rectangle((left, top, right - 1, bottom - 1), outline=_DARK, width=inner)


def _first_box(ctx: Mapping[str, Any], size: tuple[int, int]) -> Iterator[Box]:
    """Yield the first region of a view, in pixels of the image that it began with."""
    (width, height), is_mirrored = size, False
    for entry in ctx.values():
        if not isinstance(entry, Mapping) or "partner" in entry:
            continue
        if set(entry) >= _BOX:
            yield _scaled(entry, size, (width, height), is_mirrored=is_mirrored)
            return
        if set(entry) == {"height", "width"}:
            width, height = entry["width"], entry["height"]
        is_mirrored ^= entry.get("flipped") is True
        if "steps" in entry:
            return


def _scaled(box: Mapping[str, Any], size: tuple[int, int], seen: tuple[int, int], *, is_mirrored: bool) -> Box:
    sides = [box["left"], box["top"], box["left"] + box["width"], box["top"] + box["height"]]
    if not all(isinstance(side, int) for side in sides):
        raise TypeError(must_be("ctx", "that of one sample", dict(box), "Of a batch, `kdp.split_ctx(ctx)` makes them."))
    across, down = size[0] / seen[0], size[1] / seen[1]
    left, top, right, bottom = sides[0] * across, sides[1] * down, sides[2] * across, sides[3] * down
    return (size[0] - right, top, size[0] - left, bottom) if is_mirrored else (left, top, right, bottom)
