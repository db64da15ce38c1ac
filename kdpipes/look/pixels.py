"""Images of any kind as pictures: floats are denormalised, or stretched to black and white."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data.datapipes.iter import Mapper
from torch.utils.data.datapipes.map import Mapper as IndexedMapper

from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError, is_number, must_be
from kdpipes.look.grid import as_picture
from kdpipes.work.decode import DecodedImage, EncodedImage
from kdpipes.work.transform import Transformer

__all__ = ["Normalization", "check_normalization", "is_image", "normalization_of", "picture_of", "picture_or_none"]

Normalization = tuple[NDArray[np.float64], NDArray[np.float64]]
_CHANNELS = (1, 3)
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM")
_SLACK = 1e-3  # by which arithmetic misses 0 and 1


def is_image(value: Any) -> bool:
    """Return whether a value is one image: Pillow's, one of `decode_images`, its bytes, `[C, H, W]` or `[H, W, C]`."""
    if isinstance(value, bytes):
        return value.startswith(_MAGIC)
    if isinstance(value, Image.Image | EncodedImage | DecodedImage):
        return True
    if not isinstance(value, torch.Tensor | np.ndarray) or len(value.shape) != 3 or 0 in value.shape:
        return False
    is_number_like = "complex" not in str(value.dtype) and "bool" not in str(value.dtype)
    return is_number_like and (value.shape[0] in _CHANNELS or value.shape[2] in _CHANNELS)


def picture_of(image: Any, normalization: Normalization | None = None) -> Image.Image:
    """Return one image as an RGB image of Pillow's.

    Args:
        image: What `is_image` says is one; of floats, those from 0 to 1 are taken as such, also after they have been
            denormalised, and others are stretched to black and white.
        normalization: Mean and standard deviation, which are taken back.
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


def picture_or_none(value: Any, normalization: Normalization | None = None) -> Image.Image | None:
    """Return an image as a picture; None for what is none, or is damaged."""
    try:
        return picture_of(value, normalization) if is_image(value) else None
    except DataError:
        return None


def check_normalization(mean: Any, std: Any) -> Normalization | None:
    """Return `mean` and `std` as arrays, or refuse what are no numbers, or only one of both."""
    if (mean is None) != (std is None):
        raise ValueError("`mean` and `std` must be given together.")
    if mean is None:
        return None
    for name, values in (("mean", mean), ("std", std)):
        entries = values if isinstance(values, Sequence | np.ndarray | torch.Tensor) else [values]
        if isinstance(values, str) or not all(is_number(_plain(entry)) for entry in entries):
            raise TypeError(must_be(name, "a number for each channel", values))
    made = tuple(np.atleast_1d(np.asarray(values, dtype=np.float64)) for values in (mean, std))
    return made[0], made[1]


def _plain(entry: Any) -> Any:
    return entry.item() if hasattr(entry, "item") else entry


def normalization_of(chain: Any) -> Normalization | None:
    """Return mean and standard deviation of the `Normalize` in a chain: kdpipes', torchvision's or albumentations'."""
    for node in reversed(Chain.of(chain)):
        functions = node.operation.functions() if isinstance(node.operation, Transformer) else []
        if isinstance(node.pipe, Mapper | IndexedMapper):
            functions = [node.pipe.fn]
        for function in functions:
            if (found := next(_normalizations(function), None)) is not None:
                return found
    return None


def _normalizations(transform: Any, depth: int = 0) -> Iterator[Normalization]:
    """Yield what a transform, or one inside of it, has normalised by, the last one first."""
    inner = getattr(transform, "_transform", transform)
    held = getattr(inner, "__dict__", {})
    if type(inner).__name__ == "Normalize":
        mean, std = (held.get(name, held.get(f"_{name}")) for name in ("mean", "std"))
        if mean is not None and std is not None:
            yield np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
    nested = held.get("transforms")
    if isinstance(nested, list | tuple) and depth < 4:
        for child in reversed(nested):
            yield from _normalizations(child, depth + 1)
