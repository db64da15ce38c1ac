"""Convert images of any kind to pictures: one at a time, or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from kdpipes.core.errors import check_count, is_number, must_be
from kdpipes.work.decode import DecodedImage, EncodedImage

Normalization = tuple[NDArray[np.float64], NDArray[np.float64]]
_CHANNELS = (1, 3)
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM")
_SLACK = 1e-3  # by which arithmetic misses 0 and 1


def image_grid(
    images: Sequence[Any] | Any, captions: Sequence[str] | None = None, *, num_columns: int = 8, tile: int = 112
) -> Image.Image:
    """Return images side by side as one image, each with a caption below it.

    Args:
        images: A batch `[B, C, H, W] uint8`, or a sequence of images: tensors, arrays `[H, W, 3]` or Pillow images.
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
        scale = (tile - 2) / max(picture.size)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        shown = picture.resize(size, Image.Resampling.BILINEAR)
        grid.paste(shown, (left + (tile - shown.width) // 2, top + (tile - shown.height) // 2))
        if captions is not None:
            pen.text((left + 3, top + tile), str(captions[place])[: tile // 5], fill="black")
    return grid


def as_picture(image: Any) -> Image.Image:
    """Return an image of any kind as an RGB Pillow image."""
    if isinstance(image, tuple | list):
        raise TypeError(
            "`images` must be images, but are tuples of views. Pass one view: `[views[0] for views in images]`."
        )
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if hasattr(image, "to_pil"):
        picture: Image.Image = image.to_pil().convert("RGB")
        return picture
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype != np.uint8:
        found, hint = pixels.dtype.name, "Scale them to 0..255 first."
        if isinstance(image, bytes):
            found, hint = "encoded bytes", "Decode them first, with `.decode_images(...)`."
        raise TypeError(f"`images` must hold uint8 pixels, but hold {found} instead. {hint}")
    return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).convert("RGB")


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
        image = image if isinstance(image, Image.Image) else image.to_pil()
        is_wide = image.mode == "F" or image.mode.startswith("I")
        return as_picture(_bytes_of(np.asarray(image, np.float64), None) if is_wide else image)
    pixels = image.detach().cpu().float().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if str(image.dtype).removeprefix("torch.") == "uint8":
        return as_picture(pixels.astype(np.uint8))
    return as_picture(_bytes_of(pixels.astype(np.float64), normalization))


def _bytes_of(pixels: NDArray[np.float64], normalization: Normalization | None) -> NDArray[np.uint8]:
    if pixels.ndim == 3 and pixels.shape[0] in _CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    pixels = np.nan_to_num(pixels)
    if normalization is not None:
        mean, std = normalization
        if mean.size not in {1, pixels.shape[-1]}:
            raise ValueError(
                f"`mean` and `std` are for {mean.size} channels, but the images have {pixels.shape[-1]} channels."
            )
        pixels = pixels * std + mean
    elif pixels.min() < -_SLACK or pixels.max() > 1 + _SLACK:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / max(high - low, 1e-9)
    shown: NDArray[np.uint8] = (pixels.clip(0, 1) * 255).round().astype(np.uint8)
    return shown


def check_normalization(mean: Any, std: Any) -> Normalization | None:
    """Return `mean` and `std` as arrays; raise an error if they are not numbers, or if only one is given."""
    if (mean is None) != (std is None):
        raise ValueError("`mean` and `std` must be given together.")
    if mean is None:
        return None
    for name, values in (("mean", mean), ("std", std)):
        entries = values if isinstance(values, Sequence | np.ndarray | torch.Tensor) else [values]
        plain = [entry.item() if isinstance(entry, torch.Tensor | np.generic) else entry for entry in entries]
        if isinstance(values, str) or not all(map(is_number, plain)):
            raise TypeError(must_be(name, "a number for each channel", values))
    made = tuple(np.atleast_1d(np.asarray(values, dtype=np.float64)) for values in (mean, std))
    return made[0], made[1]
