"""The formats of images: open those that only hold pixels, find files by suffix, and send Pillow's settings along."""

from __future__ import annotations

import io
import sys
from functools import lru_cache
from importlib import import_module
from typing import Any

import cloudpickle
from PIL import Image, UnidentifiedImageError

from kdpipes.core import pickling

# The formats of Pillow that are read, the most frequent ones first. EPS is excluded because Pillow runs it as a program
# in Ghostscript, WMF, BUFR, GRIB, HDF5 and MPEG because they have no decoder, and the others because they are too rare
# to accept in untrusted data.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"),
    *("DDS", "DIB", "ICO", "PCX", "QOI", "SGI", "SUN", "TGA"),
)
_SETTINGS = (
    ("PIL.Image", "MAX_IMAGE_PIXELS"),
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"),
    ("PIL.ImageFile", "MAXBLOCK"),
    ("PIL.GifImagePlugin", "LOADING_STRATEGY"),
    ("PIL.PngImagePlugin", "MAX_TEXT_CHUNK"),
    ("PIL.PngImagePlugin", "MAX_TEXT_MEMORY"),
    ("PIL.TiffImagePlugin", "READ_LIBTIFF"),
)
_PROGRAMS = (b"%!PS", b"\xc5\xd0\xd3\xc6")  # marks of PostScript: plain, and in an EPS with a preview


def open_image(content: bytes | bytearray | memoryview) -> Image.Image:
    """Open an image of a format that contains only pixels, or that a plugin outside of Pillow has registered.

    Raises:
        UnidentifiedImageError: The content is not such an image.
    """
    Image.preinit()
    try:
        return Image.open(io.BytesIO(content), formats=_formats(len(Image.OPEN)))
    except UnidentifiedImageError as error:
        if bytes(content[:4]) in _PROGRAMS:
            raise UnidentifiedImageError("it is PostScript, a program, which is not run; convert it to PNG") from error
        if not Image.init():  # False: all plugins, also those for rare formats, are already loaded
            raise
        return Image.open(io.BytesIO(content), formats=_formats(len(Image.OPEN)))


def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes of the formats that `open_image` reads, in lower case: ".jpg", ".png", ..."""
    Image.init()
    formats = {*_formats(len(Image.OPEN)), "MPO"}  # the JPEG reader opens MPO
    return tuple(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


def dumps_with_pillow(value: Any) -> bytes:
    """Return a pickle of a value for a new process, along with this process's Pillow settings and plugins."""
    plugins = [(name, *Image.OPEN[name]) for name in Image.OPEN if not _is_pillows(name)]
    names = {name for name, *_ in plugins}
    suffixes = [(name, suffix) for suffix, name in Image.EXTENSION.items() if name in names]
    settings = [
        (module, name, getattr(sys.modules[module], name)) for module, name in _SETTINGS if module in sys.modules
    ]
    return pickling.dumps((settings, plugins, suffixes, value))


def loads_with_pillow(content: bytes) -> Any:
    """Return the value pickled by `dumps_with_pillow`, and restore the Pillow settings of the sending process."""
    settings, plugins, suffixes, value = cloudpickle.loads(content)
    for module, name, setting in settings:
        setattr(import_module(module), name, setting)
    if plugins:
        Image.init()  # called later, it would replace plugins for formats of its own
    for plugin in plugins:
        Image.register_open(*plugin)
    for name, suffix in suffixes:
        Image.register_extension(name, suffix)
    return value


@lru_cache(maxsize=1)
def _formats(num_registered: int) -> list[str]:
    others = [name for name in Image.OPEN if name not in _FORMATS and not _is_pillows(name)]
    return [name for name in _FORMATS if name in Image.OPEN] + others


def _is_pillows(name: str) -> bool:
    factory, _ = Image.OPEN[name]
    return getattr(factory, "__module__", "").startswith("PIL.")
