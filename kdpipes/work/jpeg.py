"""JPEG decoders that are faster than Pillow's, where they are installed: the same pixels, or nothing."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import threading
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["BACKENDS", "Backend", "Box", "JpegDecoder", "UnfitError", "decoder", "find_decoders", "made_smaller"]

Backend = Literal["auto", "turbojpeg", "simplejpeg", "pillow"]
BACKENDS = ("auto", "turbojpeg", "simplejpeg", "pillow")
_LIBRARY = "KDPIPES_TURBOJPEG"
_FACTORS = (8, 4, 2)


class Box(NamedTuple):
    """A region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def made_smaller(size: tuple[int, int], box: Box, least: tuple[int, int]) -> tuple[Box, int]:
    """Return a region in an image that is decoded as small as a result of `least` allows, and how many times that is.

    Args:
        size: Width and height of the image.
        box: The region in it.
        least: Height and width that are wanted of the region.

    >>> made_smaller((1000, 800), Box(100, 50, 500, 501), (224, 224))
    (Box(top=50, left=25, height=250, width=251), 2)
    """
    factor = next((k for k in _FACTORS if box.height >= k * least[0] and box.width >= k * least[1]), 1)
    width, height = (-(-length // factor) for length in size)
    top, left = min(round(box.top / factor), height - 1), min(round(box.left / factor), width - 1)
    bottom, right = round((box.top + box.height) / factor), round((box.left + box.width) / factor)
    rows, columns = max(min(bottom, height) - top, 1), max(min(right, width) - left, 1)
    return Box(top, left, rows, columns), factor


class UnfitError(Exception):
    """A decoder leaves a file to Pillow: it is damaged, no JPEG, or of a kind on which the two may differ."""


class JpegDecoder(Protocol):
    """Decodes files of 8 bits whose colours are grey or YCbCr.

    Args:
        name: What `decode_images(backend=...)` calls it.
        version: Of the library.
    """

    name: str
    version: str

    def size(self, content: bytes) -> tuple[int, int]:
        """Return width and height.

        Raises:
            UnfitError: This is a file for Pillow.
        """

    def region(self, content: bytes, box: Box, factor: int = 1) -> NDArray[np.uint8]:
        """Return the RGB pixels of a region, `[height, width, 3]`, as a decoder of the whole image gives them.

        Args:
            content: Of the file.
            box: The region, in pixels of the image that is decoded.
            factor: How many times as small as the file's that image is: 1, 2, 4 or 8.

        Raises:
            UnfitError: This is a file for Pillow.
        """


class _Simplejpeg:
    """The wheel simplejpeg: whole images."""

    name = "simplejpeg"

    def __init__(self, module: Any) -> None:
        self._module = module
        self.version: str = module.__version__

    def size(self, content: bytes) -> tuple[int, int]:
        try:
            height, width, colours, _ = self._module.decode_jpeg_header(content)
        except (ValueError, KeyError) as error:  # the latter: it has no name for the subsampling
            raise UnfitError from error
        if colours not in {"YCbCr", "Gray"}:
            raise UnfitError
        return width, height

    def region(self, content: bytes, box: Box, factor: int = 1) -> NDArray[np.uint8]:
        try:
            width, height = self.size(content) if factor > 1 else (0, 0)
            least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}  # none: its own size
            pixels: NDArray[np.uint8] = self._module.decode_jpeg(content, strict=True, **least)
        except ValueError as error:
            raise UnfitError from error
        return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


_DECOMPRESS, _RGB = 1, 0  # TJINIT_DECOMPRESS, TJPF_RGB
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLOURS = 0, 4, 5, 6, 7, 8  # of enum TJPARAM
_YCBCR, _GREY = 1, 2  # of enum TJCS
_MCU_WIDTHS = (8, 16, 16, 8, 8, 32, 8)  # tjMCUWidth, by subsampling: 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1


class _Scale(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


class _Opened:
    """A file whose header has been read, with a decompressor of its own: one would remember tables of another file."""

    def __init__(self, library: Any, content: bytes) -> None:
        self._library, self.content = library, content
        self._handle = library.tj3Init(_DECOMPRESS)
        if not self._handle:
            raise MemoryError("There is no memory for a JPEG decoder.")
        if library.tj3DecompressHeader(self._handle, content, len(content)):
            raise UnfitError
        if self.told(_PRECISION) != 8 or self.told(_COLOURS) not in {_YCBCR, _GREY}:
            raise UnfitError
        self.width, self.height = self.told(_WIDTH), self.told(_HEIGHT)

    def __del__(self) -> None:
        if self._handle:
            self._library.tj3Destroy(self._handle)

    def told(self, parameter: int) -> int:
        """Return a parameter of the file."""
        value: int = self._library.tj3Get(self._handle, parameter)
        return value

    def mcu_width(self) -> int:
        """Return at multiples of how many columns a region may begin."""
        subsampling = self.told(_SUBSAMPLING)
        if not 0 <= subsampling < len(_MCU_WIDTHS):
            raise UnfitError
        return _MCU_WIDTHS[subsampling]

    def decode(self, box: Box, factor: int) -> NDArray[np.uint8]:
        """Return the pixels of a region of the image made smaller."""
        pixels = np.empty((box.height, box.width, 3), dtype=np.uint8)
        region = _Region(box.left, box.top, box.width, box.height)
        library, handle, content = self._library, self._handle, self.content
        if (
            (factor > 1 and library.tj3SetScalingFactor(handle, _Scale(1, factor)))
            or library.tj3SetCroppingRegion(handle, region)
            or library.tj3Set(handle, _STOP_ON_WARNING, 1)
            or library.tj3Decompress8(handle, content, len(content), pixels.ctypes.data, 0, _RGB)
        ):
            raise UnfitError
        return pixels


class _Turbojpeg:
    """TurboJPEG 3, of libjpeg-turbo: it decodes only the rows and columns of a region.

    Each thread keeps the file whose size it was asked for last open until the next one: of that, pixels are due.
    """

    name = "turbojpeg"

    def __init__(self, library: Any, version: str) -> None:
        self._library = library
        self._kept = threading.local()
        self.version = version

    def size(self, content: bytes) -> tuple[int, int]:
        self._kept.opened = opened = _Opened(self._library, content)
        return opened.width, opened.height

    def region(self, content: bytes, box: Box, factor: int = 1) -> NDArray[np.uint8]:
        opened: _Opened | None = self._kept.__dict__.pop("opened", None)
        if opened is None or opened.content is not content:
            opened = _Opened(self._library, content)
        step = -(-opened.mcu_width() // factor)
        width, height = -(-opened.width // factor), -(-opened.height // factor)
        # At a cut, the colours of the outermost column are made of fewer neighbours: it is decoded, and left out. In a
        # region of few columns, they are made in a simpler way.
        left = max(box.left - 1, 0) // step * step
        right = min(max(box.left + box.width + 1, left + 2 * step), width)
        top, bottom = max(box.top - 1, 0), min(box.top + box.height + 1, height)
        pixels = opened.decode(Box(top, left, bottom - top, right - left), factor)
        rows, columns = box.top - top, box.left - left
        return pixels[rows : rows + box.height, columns : columns + box.width]


def _load_simplejpeg() -> JpegDecoder | None:
    try:
        return _Simplejpeg(import_module("simplejpeg"))
    except ImportError:
        return None


def _load_turbojpeg() -> JpegDecoder | None:
    """Return the first library that is there and is of version 3."""
    for path in _turbojpeg_paths():
        try:
            library = ctypes.CDLL(path)
            _declare(library)
        except (OSError, AttributeError) as error:  # there is none, or it is older
            if _LIBRARY in os.environ:
                text = f"{_LIBRARY} names no library of libjpeg-turbo 3, and JPEGs are decoded by another one: {error}."
                warnings.warn(text, stacklevel=2)
            continue
        return _Turbojpeg(library, os.path.basename(os.path.realpath(path)))  # noqa: PTH119
    return None


def _turbojpeg_paths() -> list[str]:
    """Return where the library may be: where the environment says, in the wheel turbojpeg, in the system."""
    named = os.environ.get(_LIBRARY)
    if named is not None:
        return [named]
    try:
        bundled = [str(path.locate()) for path in files("turbojpeg") or [] if "libturbojpeg" in path.name]
    except PackageNotFoundError:
        bundled = []
    system = ctypes.util.find_library("turbojpeg")
    return [*([system] if system else []), *bundled]


def _declare(library: Any) -> None:
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "tj3Init": (pointer, [integer]),
        "tj3Destroy": (None, [pointer]),
        "tj3Get": (integer, [pointer, integer]),
        "tj3Set": (integer, [pointer, integer, integer]),
        "tj3SetScalingFactor": (integer, [pointer, _Scale]),
        "tj3SetCroppingRegion": (integer, [pointer, _Region]),
        "tj3DecompressHeader": (integer, [pointer, ctypes.c_char_p, size]),
        "tj3Decompress8": (integer, [pointer, ctypes.c_char_p, size, pointer, integer, integer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


_LOADERS: dict[str, Callable[[], JpegDecoder | None]] = {"turbojpeg": _load_turbojpeg, "simplejpeg": _load_simplejpeg}


@cache
def find_decoders() -> dict[str, JpegDecoder]:
    """Return the decoders that are installed, the fastest first, by name."""
    found = {name: load() for name, load in _LOADERS.items()}
    return {name: known for name, known in found.items() if known is not None}


def decoder(backend: Backend) -> JpegDecoder | None:
    """Return the decoder that a backend names, "auto" for the fastest; None for Pillow's.

    Raises:
        ImportError: It is not installed.
    """
    if backend == "pillow":
        return None
    known = find_decoders()
    if backend == "auto":
        return next(iter(known.values()), None)
    if backend not in known:
        hint = "`pip install 'kdpipes[fast]'`"
        if backend == "turbojpeg":
            hint += f", install libjpeg-turbo 3 or later, or name its library in {_LIBRARY}"
        raise ImportError(f'`decode_images(backend="{backend}")` finds no decoder of that name: {hint}.')
    return known[backend]
