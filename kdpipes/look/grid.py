"""A grid of images with captions, to see what a batch holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from kdpipes.core.errors import check_count

__all__ = ["as_picture", "image_grid"]


def image_grid(
    images: Sequence[Any] | Any, captions: Sequence[str] | None = None, *, num_columns: int = 8, tile: int = 112
) -> Image.Image:
    """Return images side by side as one image, each with a caption below it.

    Args:
        images: A batch `[B, C, H, W] uint8`, or a sequence of images: tensors, arrays `[H, W, 3]`, Pillow's.
        captions: A line of text for each image.
        num_columns: The number of images in a row.
        tile: Height and width of a tile in pixels; images keep their aspect ratio.

    Raises:
        ValueError: There are no images, or not as many captions as images.

    Example:
        >>> image_grid([Image.new("RGB", (20, 10))] * 3, num_columns=2, tile=16).size
        (32, 32)
    """
    pictures = [as_picture(image) for image in images]
    if not pictures:
        raise ValueError("`images` must hold at least one image, but holds none.")
    if captions is not None and len(captions) != len(pictures):
        raise ValueError(f"`captions` must be as many as the {len(pictures)} images, but are {len(captions)}.")
    columns = min(check_count("num_columns", num_columns), len(pictures))
    check_count("tile", tile, minimum=8)
    height = tile + (14 if captions is not None else 0)
    grid = Image.new("RGB", (columns * tile, -(-len(pictures) // columns) * height), "white")
    pen = ImageDraw.Draw(grid)
    for place, picture in enumerate(pictures):
        left, top = place % columns * tile, place // columns * height
        shown = _fitted(picture, tile - 2)
        grid.paste(shown, (left + (tile - shown.width) // 2, top + (tile - shown.height) // 2))
        if captions is not None:
            pen.text((left + 3, top + tile), str(captions[place])[: tile // 5], fill="black")
    return grid


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    scale = side / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.BILINEAR)


def as_picture(image: Any) -> Image.Image:
    """Return an image of any kind as an RGB image of Pillow's."""
    if isinstance(image, tuple | list):
        raise TypeError("`images` must be images, but are tuples: of several views, show one at a time.")
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if hasattr(image, "to_pil"):
        picture: Image.Image = image.to_pil().convert("RGB")
        return picture
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype != np.uint8:
        raise TypeError(
            f"`images` must hold uint8 pixels, but hold {pixels.dtype} instead. Scale them to 0..255 first."
        )
    return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).convert("RGB")
