"""Decode images as late as possible: `decode_images`, `EncodedImage` and `DecodedImage`."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import PIL
import torch
from numpy.typing import DTypeLike, NDArray
from PIL import Image

from kdpipes.core.column import Column
from kdpipes.core.errors import REPLACE_FILE, DataError, check_choice, check_flag, check_type
from kdpipes.core.messages import counted
from kdpipes.core.on_use import call_slot
from kdpipes.core.operation import Step
from kdpipes.core.sample import Block, Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import Traits
from kdpipes.storage.codec import register_type
from kdpipes.storage.decoding import open_image
from kdpipes.storage.files import read_url
from kdpipes.storage.urls import is_local
from kdpipes.work.jpeg import BACKENDS, Backend, Box, OpenedJpeg, UnfitError, decoder, made_smaller

MASK_NAMES = ("mask", "masks", "segmentation", "seg", "annotation", "label_map")  # names of fields with masks
_JPEG = b"\xff\xd8\xff"
Mode = Literal["RGB", "L", "I;16", "F", "P", "unchanged"]
_ORIENTATION = 0x0112  # the tag of EXIF
# The dimensions to flip to turn an image upright, by orientation. From 5 on, transpose rows and columns first.
_FLIPS: dict[int, tuple[int, ...]] = {2: (-1,), 3: (-1, -2), 4: (-2,), 5: (), 6: (-1,), 7: (-1, -2), 8: (-2,)}
_TAGS = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")  # entries of `info` that hold an orientation
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class DecodedImage:
    """An image that transforms of kdpipes have created from an encoded image.

    `np.asarray(image)` returns `[H, W, 3] uint8`, `image.to_pil()` an RGB image from Pillow.

    Args:
        pixels: The pixels `[3, H, W] uint8`, in main memory. They must not be modified.
    """

    __slots__ = ("_pixels", "_shared")
    mode = "RGB"

    def __init__(self, pixels: torch.Tensor) -> None:
        self._pixels: torch.Tensor | None = pixels
        self._shared: NDArray[np.uint8] | None = None

    @classmethod
    def of_rows(cls, rows: NDArray[np.uint8]) -> DecodedImage:
        """Return the image of read-only pixels `[H, W, 3] uint8`, which are copied only when necessary."""
        image = cls.__new__(cls)
        image._pixels = None
        image._shared = rows
        return image

    @property
    def pixels(self) -> torch.Tensor:
        """The pixels `[3, H, W] uint8`, which must not be modified."""
        if self._pixels is None:
            self._pixels = _as_planes(self._rows)
        return self._pixels

    @property
    def _rows(self) -> NDArray[np.uint8]:
        return self.pixels.numpy().transpose(1, 2, 0) if self._shared is None else self._shared

    def as_rows(self) -> NDArray[np.uint8]:
        """Return the pixels `[H, W, 3] uint8` for caches. Raise TypeError if they have another shape or dtype."""
        pixels = self._pixels
        if pixels is None or self._shared is not None:
            return self._rows
        if pixels.dtype != torch.uint8 or pixels.dim() != 3 or len(pixels) != 3 or pixels.device.type != "cpu":
            found = f"{list(pixels.shape)} {pixels.dtype} on {str(pixels.device)!r}"
            raise TypeError(
                f"The pixels of a DecodedImage must be [3, H, W] uint8 in main memory, but are {found} instead."
            )
        return self._rows

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        height, width = self.pixels.shape[1:] if self._shared is None else self._shared.shape[:2]
        return width, height

    @property
    def width(self) -> int:
        """The width in pixels."""
        return self.size[0]

    @property
    def height(self) -> int:
        """The height in pixels."""
        return self.size[1]

    def region(
        self, top: int, left: int, height: int, width: int, *, least: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return a copy of a region, like `EncodedImage.region`. `least` is ignored."""
        return _as_planes(self._rows[top : top + height, left : left + width].copy())

    def to_pil(self) -> Image.Image:
        """Return a new Pillow image."""
        return Image.fromarray(np.ascontiguousarray(self._rows))

    def tobytes(self) -> bytes:
        """Return the pixels row by row, as Pillow images do."""
        return self._rows.tobytes()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._rows, dtype=dtype, order="C")

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedImage, (self.pixels.clone(),)

    def __repr__(self) -> str:
        return f"DecodedImage({self.width}x{self.height})"

    def _repr_png_(self) -> Any:
        return call_slot("image_png", self)


class EncodedImage:
    """An image in the bytes of its file. The size is read from the header, and pixels are decoded when they are needed.

    `np.asarray(image)` returns `[H, W, 3] uint8`, `image.to_pil()` a Pillow image in mode RGB. In other modes, they
    return `[H, W]` (uint8 for "L" and "P", uint16 for "I;16", float32 for "F") and an image of that mode.

    Args:
        content: The bytes of a file: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF, JPEG 2000, or a rarer format of pixels
            that Pillow or a plugin of Pillow reads. PostScript (EPS), which is a program, is an error.
        name: The name of the sample, for errors; or a function that returns it.
        backend: See `decode_images`.
        exact: See `decode_images`.
        mode: See `decode_images`.
        exif: See `decode_images`.

    Raises:
        DataError: The bytes are not an image; or, when pixels are read, the file is truncated, or the mode cannot hold
            the pixels.
    """

    __slots__ = ("_image", "_jpegs", "_name", "_size", "_turn", "backend", "content", "exact", "exif", "mode")
    late_methods = ("region", "to_pil")  # the profiler adds their time to `decode_images`

    def __init__(
        self,
        content: bytes,
        name: str | Callable[[], str] = "",
        backend: Backend = "auto",
        exact: bool = True,
        mode: Mode = "RGB",
        exif: bool = False,
    ) -> None:
        self.content = content
        self.exact = exact
        self.mode = mode
        self.exif = exif
        self._turn: int | None = None if exif else 1
        self._name = name
        self.backend = backend
        self._image: Image.Image | None = None
        self._jpegs: list[OpenedJpeg] = []  # opened to read the size; pixels are usually needed next, by one thread
        self._size: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The name of the sample, for errors."""
        if not isinstance(self._name, str):
            self._name = self._name()
        return self._name

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the header."""
        if self._size is None:
            jpeg = self._jpeg_opened()
            self._jpegs = [] if jpeg is None else [jpeg]
            size = self._opened().size if jpeg is None else jpeg.size
            self._size = size[::-1] if (self._turn or self._orientation()) > 4 else size
        return self._size

    def region(
        self, top: int, left: int, height: int, width: int, *, least: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return the pixels of a region, which must lie inside the image, as `[3, height, width] uint8`.

        In modes other than "RGB", the result is `[1, height, width]` in the dtype of the mode.

        Args:
            top: The first row of the region.
            left: The first column of the region.
            height: The height of the region in pixels.
            width: The width of the region in pixels.
            least: The height and width to which the region will be resized. If `exact` is False, the result may be
                smaller than the region, but not smaller than this.
        """
        box = Box(top, left, height, width)
        factor = 1
        turn = self._turn or self._orientation()
        if self.mode != "RGB":
            return _as_planes(np.array(self.to_pil().crop((left, top, left + width, top + height))))
        if turn > 1:
            box = _box_in_file(box, turn, self.size)
        if least is not None and not self.exact and self.content.startswith(_JPEG):
            (width, height), (rows, columns) = self.size, least
            is_swapped = turn > 4
            size, least = ((height, width), (columns, rows)) if is_swapped else (self.size, least)
            box, factor = made_smaller(size, box, least)
        planes = self._planes_in_file(box, factor)
        if turn == 1:
            return planes
        return (planes.mT if turn > 4 else planes).flip(_FLIPS[turn])

    def _planes_in_file(self, box: Box, factor: int) -> torch.Tensor:
        try:
            jpeg: OpenedJpeg | None = self._jpegs.pop()
        except IndexError:
            jpeg = self._jpeg_opened()
        if jpeg is not None:
            try:
                return _as_planes(jpeg.region(box, factor))
            except UnfitError:
                self.backend = "pillow"
        image = self._decoded_by_pillow(factor)
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        return _as_planes(np.asarray(image if corners == (0, 0, *image.size) else image.crop(corners)))

    def decoded(self) -> DecodedImage | Image.Image:
        """Return all pixels; in modes other than "RGB", as a Pillow image."""
        if self.mode != "RGB":
            return self.to_pil()
        width, height = self.size
        return DecodedImage(self.region(0, 0, height, width))

    def to_pil(self) -> Image.Image:
        """Return all pixels as a new Pillow image of the mode."""
        turn = self._orientation()
        image = self._decoded_by_pillow(1)
        if turn == 1:
            return image
        upright = image.transpose(_TURNS[turn])
        for name in _TAGS:  # otherwise, readers of these tags would turn the image again
            upright.info.pop(name, None)
        return upright

    def _decoded_by_pillow(self, factor: int) -> Image.Image:
        image = self._opened()
        try:
            if factor > 1:
                width, height = image.size
                image.draft(None, (width // factor, height // factor))
            image.load()
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            raise DataError(f"{self._who()} cannot be decoded: {error}. {REPLACE_FILE}") from error
        finally:
            self._image = None
        try:
            return _converted(image, self.mode)
        except ValueError as error:
            raise DataError(f"{self._who()} cannot be decoded: {error}.") from error

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.decoded(), dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedImage, self.as_plain()

    def as_plain(self) -> tuple[Any, ...]:
        """Return the arguments of the constructor; in the default mode, in the format of older caches."""
        is_default = self.mode == "RGB" and not self.exif
        return self.content, self.name, self.backend, self.exact, *(() if is_default else (self.mode, self.exif))

    def __repr__(self) -> str:
        return f"EncodedImage({counted(len(self.content), 'byte')})"

    def _repr_png_(self) -> Any:
        return call_slot("image_png", self)

    def _who(self) -> str:
        return f"The image of {self.name}" if self.name else "The image"

    def _orientation(self) -> int:
        """Return the orientation of the file's pixels, from 1 (upright) to 8; 1 if `exif` is False."""
        if self._turn is None:
            self._turn = orientation_of(self._opened())
        return self._turn

    def _jpeg_opened(self) -> OpenedJpeg | None:
        """Return the file opened by a fast decoder; None if Pillow must read it."""
        is_pillows = self.backend == "pillow" or self.mode != "RGB" or not self.content.startswith(_JPEG)
        fast = None if is_pillows else decoder(self.backend)
        if fast is None:
            return None
        try:
            jpeg = fast.open(self.content)
        except UnfitError:
            self.backend = "pillow"
            return None
        width, height = jpeg.size
        if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
            self.backend = "pillow"  # Pillow warns or raises, depending on the size
            return None
        return jpeg

    def _opened(self) -> Image.Image:
        if self._image is None:
            try:
                self._image = open_image(self.content)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                reason = "" if str(error).startswith("cannot identify image file") else f" ({error})"
                what = f"its {len(self.content)} bytes are not an image that Pillow can identify{reason}"
                raise DataError(f"{self._who()} cannot be read: {what}. {REPLACE_FILE}") from error
        return self._image


def _as_planes(rows: NDArray[Any]) -> torch.Tensor:
    """Return pixels `[H, W, 3]` as `[3, H, W]`, and `[H, W]` as `[1, H, W]`, without a copy if they are writable."""
    rows = rows[..., None] if rows.ndim == 2 else rows
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy()).permute(2, 0, 1)


register_type("EncodedImage", EncodedImage, EncodedImage.as_plain, lambda plain: EncodedImage(*plain))


def _image_of(plain: Any) -> DecodedImage:
    if plain.dtype != np.uint8 or plain.ndim != 3 or plain.shape[2] != 3:
        raise ValueError(f"the pixels of an image must be [H, W, 3] uint8, but are {list(plain.shape)} {plain.dtype}")
    return DecodedImage.of_rows(plain)


register_type("DecodedImage", DecodedImage, DecodedImage.as_rows, _image_of)


def _box_in_file(box: Box, turn: int, size: tuple[int, int]) -> Box:
    """Return the region of the stored image that corresponds to a region of the upright image."""
    width, height = size
    top, left, rows, columns = box
    top = height - top - rows if -2 in _FLIPS[turn] else top
    left = width - left - columns if -1 in _FLIPS[turn] else left
    return Box(left, top, columns, rows) if turn > 4 else Box(top, left, rows, columns)


def orientation_of(image: Image.Image) -> int:
    """Return the orientation in the EXIF tag of a file, from 1 (upright, or no tag) to 8."""
    if image.format == "TIFF":  # Pillow turns these upright
        return 1
    try:
        turn = image.getexif().get(_ORIENTATION)
    except (OSError, SyntaxError, ValueError, struct.error):  # the tags are damaged
        return 1
    return turn if isinstance(turn, int) and turn in _TURNS else 1


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Return an image in another mode.

    Raises:
        ValueError: The mode cannot hold its pixels.
    """
    found = image.mode
    if found == mode or (mode == "unchanged" and not found.startswith("I;16")):
        return image.copy()  # the copy does not keep the file open
    is_wide = found == "F" or found.startswith("I")
    if mode in ("RGB", "L") and not is_wide:
        image = image.convert("RGBA") if found == "P" and "transparency" in image.info else image
        return image.convert(mode)
    if mode == "P" and found in ("L", "1"):
        return Image.fromarray(np.asarray(image).astype(np.uint8)).convert("P")
    if mode in ("I;16", "F", "unchanged") and found != "F" and (is_wide or found in ("L", "1")):
        pixels = np.asarray(image)
        converted = pixels.astype(np.float32 if mode == "F" else np.uint16)
        if np.array_equal(converted, pixels, equal_nan=is_wide):
            return Image.fromarray(converted)
    kept = found if found in ("F", "P", "RGB") else "I;16" if found.startswith("I;16") else "unchanged"
    raise ValueError(
        f"`mode={mode!r}` cannot hold its pixels, of mode {found!r}; `decode_images(..., mode={kept!r})` keeps them"
    )


@work_pipe("decode_images")
class ImageDecoder(Step):
    """Converts the bytes of a field to an encoded image, which is decoded lazily (functional name: ``decode_images``).

    The field becomes an `EncodedImage`, which is decoded by the first operation that needs pixels. Transforms of
    kdpipes decode only what they need: for a crop of a JPEG, only its region, if the decoder supports that. All
    backends return the same pixels as Pillow. See `kdp.Resize` for pixels after resizing.

    Args:
        field: The name of the field. Its value may be bytes; an array of bytes, `[n] uint8`; the path of a local file;
            an image as Hugging Face stores it, `{"bytes": ..., "path": ...}`; a Pillow image, which is kept; or None.
        backend: The decoder for JPEGs. "auto": the fastest one that is installed. "turbojpeg": libjpeg-turbo 3, which
            decodes regions; from the system, the extra `fast`, or the path in the environment variable
            `KDPIPES_TURBOJPEG`. "simplejpeg": the library of the extra `fast`, which decodes whole images. "pillow":
            Pillow, which always decodes other formats, damaged files and CMYK.
        exact: Whether pixels are exactly those of a full decode. If False, `kdp.Resize` and `kdp.RandomResizedCrop` may
            decode a JPEG at half, a quarter or an eighth of its size if their result is no larger than that. This is
            faster for large photos (see Accuracy).
        mode: The mode of the pixels: "RGB"; "L", 8-bit gray; "I;16", 16-bit gray, as in depth maps; "F", floats; "P",
            palette indices or 8-bit gray, as in class masks; or "unchanged", the mode of the file. The default is "P"
            for fields named `mask`, `masks`, `segmentation`, `seg`, `annotation` or `label_map`, and "RGB" for others.
            "RGB" and "L" convert palette indices to their colors, and raise an error for pixels of more than 8 bits;
            other modes raise for pixels that they cannot hold. Pillow reads only 8 bits of 16-bit colors.
        exif: Whether to turn photos upright, following their orientation tag (EXIF). By default the tag is ignored, as
            in Pillow and torchvision's datasets.

    In modes other than "RGB", `np.asarray(image)` returns `[H, W]` of uint8 ("L", "P"), uint16 ("I;16") or float32
    ("F"). Pillow then decodes whole images, and transforms return Pillow images; "P" is always resized by nearest
    neighbor. In batches, "P" becomes `[B, H, W] uint8`, the others `[B, 1, H, W]`.

    Accuracy: with `exact=False`, photos (of scikit-image, and those that kdpipes ships) that become half as large or
        smaller differ from exact results by 1 to 2.3 gray levels on average, and by up to 90 at edges.

    Raises:
        FieldError: The field does not exist.
        ImportError: The backend is not installed.
        DataError: The bytes are not an image, or the mode cannot hold the pixels; the error names the sample.
        FileNotFoundError: A file does not exist.

    Example:
        >>> kdp.image_folder("photos").decode_images("x")[0]["x"].size  # doctest: +SKIP
        (128, 96)
    """

    def __init__(
        self,
        field: str = "x",
        *,
        backend: Backend = "auto",
        exact: bool = True,
        mode: Mode | None = None,
        exif: bool = False,
    ) -> None:
        check_type("field", field, str, "the name of a field")
        if mode is None:
            mode = "P" if field in MASK_NAMES else "RGB"
        check_choice("backend", backend, BACKENDS)
        check_flag("exact", exact)
        check_choice("mode", mode, get_args(Mode))
        check_flag("exif", exif)
        decoder(backend)
        self.field = field
        self.backend = backend
        self._exact = exact
        self.mode: Mode = mode
        self.exif = exif
        self._what = f"decoding field {field!r}"
        used = frozenset({field})
        self.traits = Traits(needs=used, reads=used, changes=used)

    def change(self, block: Block) -> None:
        block.fields[self.field] = Column(self._encoded, block.column(self.field), what=self._what)

    def value_fingerprint(self) -> Any:
        """Return the data that determines the pixels: the decoder, its version, and the mode."""
        return self.field, *self.decoded_by(), PIL.__version__, self._exact, self.mode, self.exif

    def fingerprint(self) -> Any:
        """Return the arguments that change the images."""
        return self.field, self.backend, self._exact, self.mode, self.exif

    def decoded_by(self) -> tuple[str, str]:
        """Return the name and the version of the JPEG decoder. The version of Pillow is left empty."""
        fast = decoder(self.backend)
        return ("pillow", "") if fast is None else (fast.name, fast.version)

    def _encoded(self, sample: Sample, value: Any) -> Any:
        if isinstance(value, Image.Image | EncodedImage | DecodedImage) or value is None:
            return value
        content = _content_of(value)
        if content is None:
            return None
        image = EncodedImage(content, sample.naming(), self.backend, self._exact, self.mode, self.exif)
        image.size  # noqa: B018 - bytes that are not an image fail here, where the sample is known
        return image


def _content_of(value: Any) -> bytes | None:
    """Return the bytes of an encoded image in any form used by datasets; None for a missing image.

    Raises:
        DataError: A path does not lead to a local file.
        TypeError: The value has another type.
    """
    if isinstance(value, Mapping) and value and value.keys() <= {"bytes", "path"}:  # as Hugging Face stores images
        content = value.get("bytes")
        value = value.get("path") if content is None else content
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
        return value.tobytes()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str | os.PathLike):
        return _read_local(os.fspath(value))
    if value is None:
        return None
    hint = "Arrays and tensors of pixels need no decoding: remove this pipe." if hasattr(value, "shape") else ""
    kind = type(value).__name__
    raise TypeError(
        f"`decode_images` takes bytes or the path of a local file, but the field holds {kind}. {hint}".strip()
    )


def _read_local(path: str) -> bytes:
    if not is_local(path):
        hint = "To read URLs, use `kdp.from_table(..., path=...)` or `kdp.from_ids`."
        raise DataError(f"{path!r} is not a local file. {hint}")
    if Path(path).exists() and not Path(path).is_file():  # reading a device or a pipe may never end
        raise DataError(f"{path!r} is not a regular file. Name a file that contains an image.")
    return read_url(path)


class UnchangedImages(ImageDecoder):
    """Raises an error for bytes that are not an image, as `ImageDecoder` does, and leaves other bytes unchanged.

    States and half-written shards fit chains with and without this operation.
    """

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.traits = replace(self.traits, is_transparent=True)

    def _encoded(self, sample: Sample, value: Any) -> Any:
        super()._encoded(sample, value)
        return value
