"""Convert images of any kind to pictures: one at a time, or side by side."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from kdpipes.core.errors import DataError, check_count, must_be
from kdpipes.work.decode import DecodedImage, EncodedImage

Normalization = list[NDArray[np.float64]]  # mean and standard deviation
_CHANNELS = (1, 3)
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM")
_SLACK = 1e-3  # by which arithmetic misses 0 and 1


def image_grid(
    images: Sequence[Any] | Any, captions: Sequence[str] | None = None, *, num_columns: int = 8, tile: int = 112
) -> Image.Image:
    """Return images side by side as one image, each with a caption below it.

    Args:
        images: A batch `[B, C, H, W]`, or a sequence of images: tensors, arrays `[H, W, 3]`, Pillow or encoded images.
            Floats from 0 to 1 are shown as they are, others from black (minimum) to white (maximum).
        captions: A line of text for each image.
        num_columns: The number of images in a row.
        tile: Height and width of a tile in pixels; images keep their aspect ratio.

    Raises:
        ValueError: There are no images, or not as many captions as images.

    Example:
        >>> image_grid([Image.new("RGB", (20, 10))] * 3, num_columns=2, tile=16).size
        (32, 32)
    """
    if any(isinstance(image, tuple | list) for image in images):
        raise TypeError(
            "`images` must be images, but are tuples of views. Pass one view: `[views[0] for views in images]`."
        )
    pictures = [picture_of(image) for image in images]
    if not pictures:
        raise ValueError("`images` is empty. Pass at least one image.")
    if captions is not None and len(captions) != len(pictures):
        raise ValueError(f"There are {len(captions)} `captions` for {len(pictures)} images. Pass one per image.")
    columns = min(check_count("num_columns", num_columns), len(pictures))
    check_count("tile", tile, minimum=8)
    height = tile + (14 if captions is not None else 0)
    grid = Image.new("RGB", (columns * tile, -(-len(pictures) // columns) * height), "white")
    pen = ImageDraw.Draw(grid)
    for place, picture in enumerate(pictures):
        left = place % columns * tile
        top = place // columns * height
        scale = (tile - 2) / max(picture.size)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        shown = picture.resize(size, Image.Resampling.BILINEAR)
        grid.paste(shown, (left + (tile - shown.width) // 2, top + (tile - shown.height) // 2))
        if captions is not None:
            pen.text((left + 3, top + tile), str(captions[place])[: tile // 5], fill="black")
    return grid


def is_image(value: Any) -> bool:
    """Return whether a value is one image: of Pillow, of `decode_images`, encoded bytes, `[C, H, W]` or `[H, W, C]`."""
    if isinstance(value, bytes):
        return value.startswith(_MAGIC)
    if isinstance(value, Image.Image | EncodedImage | DecodedImage):
        return True
    if not isinstance(value, torch.Tensor | np.ndarray) or len(value.shape) != 3 or 0 in value.shape:
        return False
    is_number_like = "complex" not in str(value.dtype) and "bool" not in str(value.dtype)
    return is_number_like and (value.shape[0] in _CHANNELS or value.shape[2] in _CHANNELS)


def picture_of(image: Any, normalization: Normalization | None = None) -> Image.Image:
    """Return one image of any kind that `is_image` accepts as an RGB Pillow image.

    Floats from 0 to 1, also after denormalization, are shown as they are; others are stretched to black and white.
    """
    if isinstance(image, bytes):
        image = EncodedImage(image, mode="unchanged")
    if not isinstance(image, torch.Tensor | np.ndarray):
        picture: Image.Image = image if isinstance(image, Image.Image) else image.to_pil()
        if picture.mode != "F" and not picture.mode.startswith("I"):
            return picture.convert("RGB")
        image = np.asarray(picture, np.float64)
        normalization = None
    pixels = image.detach().cpu().float().numpy() if isinstance(image, torch.Tensor) else image
    if pixels.ndim == 3 and pixels.shape[0] in _CHANNELS and pixels.shape[2] not in _CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    if str(image.dtype).removeprefix("torch.") != "uint8":
        pixels = _bytes_of(pixels.astype(np.float64), normalization)
    rows = pixels.astype(np.uint8)
    return Image.fromarray(rows.squeeze(-1) if rows.shape[-1] == 1 else rows).convert("RGB")


def image_png(image: Any) -> bytes | None:
    """Return one image of any kind as a PNG file; None if it is damaged."""
    file = io.BytesIO()
    try:
        picture_of(image).save(file, "PNG")
    except DataError:
        return None
    return file.getvalue()


def _bytes_of(pixels: NDArray[np.float64], normalization: Normalization | None) -> NDArray[np.uint8]:
    pixels = np.nan_to_num(pixels)
    if normalization is not None:
        mean, std = normalization
        if mean.size not in {1, pixels.shape[-1]}:
            raise ValueError(
                f"`mean` and `std` are for {mean.size} channels, but the images have {pixels.shape[-1]}. Pass as many."
            )
        pixels = pixels * std + mean
    elif pixels.min() < -_SLACK or pixels.max() > 1 + _SLACK:
        low = pixels.min()
        high = pixels.max()
        pixels = (pixels - low) / max(high - low, 1e-9)
    shown: NDArray[np.uint8] = (pixels.clip(0, 1) * 255).round().astype(np.uint8)
    return shown


def check_normalization(mean: Any, std: Any) -> Normalization | None:
    """Return `mean` and `std` as arrays; raise an error if they are not numbers, or if only one is given."""
    if (mean is None) != (std is None):
        raise ValueError("`mean` and `std` must be given together.")
    if mean is None:
        return None
    arrays = []
    for name, values in (("mean", mean), ("std", std)):
        array = np.atleast_1d(np.asarray(values))
        if array.dtype.kind not in "iuf":
            raise TypeError(must_be(name, "a number for each channel", values))
        arrays.append(array.astype(np.float64))
    return arrays
