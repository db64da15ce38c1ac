"""The formats of images: open those that only hold pixels, and find files by their suffixes."""

from __future__ import annotations

import io
from functools import lru_cache

from PIL import Image, UnidentifiedImageError

# Pillow's formats that are read, the most frequent ones first. Of its other ones, EPS is a program that Pillow gives to
# Ghostscript, WMF, BUFR, GRIB, HDF5 and MPEG have no decoder, and the rest is too rare to accept from strangers.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"),
    *("DDS", "DIB", "ICO", "PCX", "QOI", "SGI", "SUN", "TGA"),
)
_PROGRAMS = (b"%!PS", b"\xc5\xd0\xd3\xc6")  # PostScript, plain and in an EPS with a preview


def open_image(content: bytes | bytearray | memoryview) -> Image.Image:
    """Open an image of a format that only holds pixels, or that a plugin outside of Pillow has registered.

    Raises:
        UnidentifiedImageError: It is no such image.
    """
    Image.preinit()
    try:
        return Image.open(io.BytesIO(content), formats=_formats(len(Image.OPEN)))
    except UnidentifiedImageError as error:
        if bytes(content[:4]) in _PROGRAMS:
            raise UnidentifiedImageError("it is PostScript, a program, which is not run; convert it to PNG") from error
        if not Image.init():  # rare formats are known by now
            raise
        return Image.open(io.BytesIO(content), formats=_formats(len(Image.OPEN)))


def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes of the formats that `open_image` reads, in lower case: ".jpg", ".png", ..."""
    Image.init()
    formats = {*_formats(len(Image.OPEN)), "MPO"}  # which the reader of JPEG opens
    return tuple(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


@lru_cache(maxsize=1)
def _formats(num_registered: int) -> list[str]:
    others = [name for name in Image.OPEN if name not in _FORMATS and not _is_pillows(name)]
    return [name for name in _FORMATS if name in Image.OPEN] + others


def _is_pillows(name: str) -> bool:
    factory, _ = Image.OPEN[name]
    return getattr(factory, "__module__", "").startswith("PIL.")
