"""Optional JPEG decoders that are faster than Pillow and return the same pixels."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.messages import warn

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
    """Return the region in an image decoded at a reduced size, and the reduction factor.

    Args:
        size: The width and height of the image.
        box: The region in the image.
        least: The minimum height and width of the region after the reduction.

    >>> made_smaller((1000, 800), Box(100, 50, 500, 501), (224, 224))
    (Box(top=50, left=25, height=250, width=251), 2)
    """
    factor = next((k for k in _FACTORS if box.height >= k * least[0] and box.width >= k * least[1]), 1)
    width, height = (-(-length // factor) for length in size)
    top = min(round(box.top / factor), height - 1)
    left = min(round(box.left / factor), width - 1)
    bottom = round((box.top + box.height) / factor)
    right = round((box.left + box.width) / factor)
    rows = max(min(bottom, height) - top, 1)
    columns = max(min(right, width) - left, 1)
    return Box(top, left, rows, columns), factor


class UnfitError(Exception):
    """A file must be decoded by Pillow: it is damaged, not a JPEG, or of a kind whose pixels might differ."""


class OpenedJpeg(Protocol):
    """A JPEG whose header has been read. It decodes one region, in one thread.

    Attributes:
        size: The width and height of the image.
    """

    size: tuple[int, int]

    def region(self, box: Box, factor: int = 1) -> NDArray[np.uint8]:
        """Return the RGB pixels of a region, `[height, width, 3] uint8`, equal to those of decoding the whole image.

        Args:
            box: The region, in pixels of the reduced image.
            factor: The factor by which the image is reduced: 1, 2, 4 or 8.

        Raises:
            UnfitError: The file must be decoded by Pillow.
        """


class JpegDecoder(NamedTuple):
    """A decoder for 8-bit JPEGs in gray or YCbCr.

    Attributes:
        name: The name in `decode_images(backend=...)`.
        version: The version of the library.
        open: A function that reads the header of a file, given its bytes. It raises UnfitError if Pillow must decode
            the file.
    """

    name: str
    version: str
    open: Callable[[bytes], OpenedJpeg]


class _Simplejpeg:
    """A file read by the package simplejpeg, which decodes whole images."""

    def __init__(self, module: Any, content: bytes) -> None:
        self._module = module
        self._content = content
        try:
            height, width, colors, _ = module.decode_jpeg_header(content)
        except (ValueError, KeyError) as error:  # KeyError: an unknown subsampling
            raise UnfitError from error
        if colors not in {"YCbCr", "Gray"}:
            raise UnfitError
        self.size: tuple[int, int] = width, height

    def region(self, box: Box, factor: int = 1) -> NDArray[np.uint8]:
        width, height = self.size if factor > 1 else (0, 0)  # 0 means full size
        least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
        try:
            pixels: NDArray[np.uint8] = self._module.decode_jpeg(self._content, strict=True, **least)
        except ValueError as error:
            raise UnfitError from error
        return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


_DECOMPRESS, _RGB = 1, 0  # TJINIT_DECOMPRESS, TJPF_RGB
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLOURS = 0, 4, 5, 6, 7, 8  # of enum TJPARAM
_YCBCR, _GREY = 1, 2  # of enum TJCS
_MCU_WIDTHS = (8, 16, 16, 8, 8, 32, 8)  # tjMCUWidth, by subsampling: 4:4:4, 4:2:2, 4:2:0, gray, 4:4:0, 4:1:1, 4:4:1


class _Scale(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


class _Turbojpeg:
    """A file read by TurboJPEG 3 from libjpeg-turbo, which decodes only the rows and columns of a region.

    It has its own decompressor, because a shared one would keep tables of other files.
    """

    def __init__(self, library: Any, content: bytes) -> None:
        self._library = library
        self._content = content
        self._handle = handle = library.tj3Init(_DECOMPRESS)
        if not handle:
            raise MemoryError("There is not enough memory for a JPEG decoder.")
        if library.tj3DecompressHeader(handle, content, len(content)):
            raise UnfitError
        read = library.tj3Get
        subsampling = read(handle, _SUBSAMPLING)
        is_usual = read(handle, _PRECISION) == 8 and read(handle, _COLOURS) in {_YCBCR, _GREY}
        if not is_usual or not 0 <= subsampling < len(_MCU_WIDTHS):
            raise UnfitError
        self._step = _MCU_WIDTHS[subsampling]  # regions may begin at multiples of this
        self.size: tuple[int, int] = read(handle, _WIDTH), read(handle, _HEIGHT)

    def __del__(self) -> None:
        if self._handle:
            self._library.tj3Destroy(self._handle)

    def region(self, box: Box, factor: int = 1) -> NDArray[np.uint8]:
        width, height = self.size
        width = -(-width // factor)
        height = -(-height // factor)
        step = -(-self._step // factor)
        # The colors of the outermost column of a region are interpolated from fewer neighbors, so one more column is
        # decoded and cut off. In a region of few columns, colors are interpolated in a simpler way.
        left = max(box.left - 1, 0) // step * step
        right = min(max(box.left + box.width + 1, left + 2 * step), width)
        top = max(box.top - 1, 0)
        bottom = min(box.top + box.height + 1, height)
        pixels = np.empty((bottom - top, right - left, 3), dtype=np.uint8)
        address = pixels.__array_interface__["data"][0]  # faster than `pixels.ctypes`
        library = self._library
        handle = self._handle
        content = self._content
        if (
            (factor > 1 and library.tj3SetScalingFactor(handle, _Scale(1, factor)))
            or library.tj3SetCroppingRegion(handle, _Region(left, top, right - left, bottom - top))
            or library.tj3Set(handle, _STOP_ON_WARNING, 1)
            or library.tj3Decompress8(handle, content, len(content), address, 0, _RGB)
        ):
            raise UnfitError
        rows = box.top - top
        columns = box.left - left
        return pixels[rows : rows + box.height, columns : columns + box.width]


def _load_simplejpeg() -> JpegDecoder | None:
    try:
        module = import_module("simplejpeg")
    except ImportError:
        return None
    return JpegDecoder("simplejpeg", module.__version__, partial(_Simplejpeg, module))


def _load_turbojpeg() -> JpegDecoder | None:
    """Return the first installed library of version 3, or None."""
    for path in _turbojpeg_paths():
        try:
            library = ctypes.CDLL(path)
            _declare(library)
        except (OSError, AttributeError) as error:  # the library is missing or older
            if _LIBRARY in os.environ:
                what = f"{_LIBRARY} is not the path of libjpeg-turbo 3"
                warn(f"{what}, so JPEGs are decoded by another library: {error}.")
            continue
        version = os.path.basename(os.path.realpath(path))  # noqa: PTH119
        return JpegDecoder("turbojpeg", version, partial(_Turbojpeg, library))
    return None


def _turbojpeg_paths() -> list[str]:
    """Return candidate paths of the library: from the environment, the system and a Python package."""
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
    pointer = ctypes.c_void_p
    integer = ctypes.c_int
    size = ctypes.c_size_t
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
        function.restype = result
        function.argtypes = arguments


@cache
def find_decoders() -> dict[str, JpegDecoder]:
    """Return the installed decoders by name, fastest first."""
    return {found.name: found for found in (_load_turbojpeg(), _load_simplejpeg()) if found is not None}


def decoder(backend: Backend) -> JpegDecoder | None:
    """Return the decoder of a backend, the fastest one for "auto", or None for Pillow.

    Raises:
        ImportError: The decoder is not installed.
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
        raise ImportError(f'The decoder of `decode_images(backend="{backend}")` is not installed: {hint}.')
    return known[backend]
