"""Pillow's images as plain data: mode, size, pixels, palette, and what their files say besides."""

from __future__ import annotations

from typing import Any

from PIL import Image

__all__ = ["image_as_plain", "image_of"]

_PLAIN = (bool, int, float, str, bytes, type(None))


def image_as_plain(image: Image.Image) -> tuple[Any, ...]:
    """Return mode, size, pixels, palette and the entries of `info` that are plain data (transparency, EXIF, ...)."""
    content = image.tobytes()  # which also reads the palette of a file
    palette = None
    if image.mode in ("P", "PA") and image.palette is not None:
        palette = image.palette.mode, bytes(image.getpalette(image.palette.mode) or b"")
    info = {key: value for key, value in image.info.items() if type(key) is str and _is_plain(value)}
    return image.mode, image.size, content, palette, info


def image_of(plain: tuple[Any, ...]) -> Image.Image:
    """Return an image of what `image_as_plain` has returned; the class and format of its file are not kept."""
    mode, (width, height), content, palette, info = plain
    if not 0 <= width * height <= 8 * len(content):
        raise ValueError(f"{len(content)} bytes are no image of {width} x {height} pixels")
    image = Image.frombytes(mode, (width, height), content)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info = dict(info)
    return image


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(entry) in _PLAIN for entry in value))
