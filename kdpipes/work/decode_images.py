"""Encoded images that decode as late as possible."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import Image, UnidentifiedImageError

from kdpipes._sample_pipe import sample_pipe
from kdpipes.errors import DataError, must_be, refuse_field
from kdpipes.sample import Lazy, Sample

__all__ = ["EncodedImage", "ImageDecoder"]


class EncodedImage:
    """An image as its file has it: the size is read from the header, pixels when they are asked for.

    `np.asarray(image)` gives `[H, W, 3] uint8`, `image.to_pil()` an RGB image of Pillow's. Orientation tags (EXIF) are
    left alone, as Pillow and torchvision's datasets leave them.

    Args:
        content: The bytes of a file in any format that Pillow reads: JPEG, PNG, WebP, ... Of 16 bits, 8 are kept.
        name: What the image is of, for errors.

    Raises:
        DataError: The bytes are no image, or are truncated (when pixels are read).
    """

    __slots__ = ("_image", "content", "name")

    def __init__(self, content: bytes, name: str = "") -> None:
        self.content = content
        self.name = name
        self._image: Image.Image | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the header."""
        return self._opened().size

    def to_pil(self) -> Image.Image:
        """Return all pixels as an RGB image, a new one each time."""
        try:
            image = _as_rgb(self._opened())
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            raise DataError(f"{self._who()} cannot be decoded: {error}.") from error
        finally:
            self._image = None
        return image

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.to_pil(), dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedImage, (self.content, self.name)

    def __repr__(self) -> str:
        return f"EncodedImage({len(self.content)} bytes)"

    def _who(self) -> str:
        return f"The image of {self.name}" if self.name else "The image"

    def _opened(self) -> Image.Image:
        if self._image is None:
            try:
                self._image = Image.open(io.BytesIO(self.content))
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
                reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
                what = f"its {len(self.content)} bytes are no image that Pillow knows{reason}"
                raise DataError(f"{self._who()} cannot be read: {what}.") from error
        return self._image


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


@sample_pipe("decode_images")
class ImageDecoder:
    """Takes the bytes of a field for an encoded image (functional name: ``decode_images``).

    Nothing is decoded yet: the field becomes an `EncodedImage`, and the first operation that needs pixels decodes it.

    Args:
        field: The field's name. It may hold bytes, an image of Pillow's (which stays), or None (a sample without one).

    Raises:
        FieldError: There is no such field.
        DataError: The bytes are no image; it names the sample.

    Example:
        >>> kdp.image_folder("photos").decode_images("x")[0]["x"].size  # doctest: +SKIP
        (128, 96)
    """

    def __init__(self, field: str = "x") -> None:
        if not isinstance(field, str):
            raise TypeError(must_be("field", "the name of a field", field))
        self._field = field

    def __call__(self, sample: Sample) -> Sample:
        sample[self._field] = Lazy(_encoded, sample.lazy(self._field), what=f"decoding field {self._field!r}")
        return sample

    def check(self, known: frozenset[str]) -> None:
        if self._field not in known:
            refuse_field(self._field, "The source", known)

    def field_names(self, known: frozenset[str]) -> frozenset[str]:
        return known

    def column_name(self, name: str) -> str | None:
        return None if name == self._field else name


def _encoded(sample: Sample, value: Any) -> Any:
    if isinstance(value, Image.Image | EncodedImage) or value is None:
        return value
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"`decode_images` takes bytes, but the field holds {type(value).__name__}.")
    image = EncodedImage(bytes(value), f"sample {sample.key!r}")
    image.size  # noqa: B018 - a file that is no image is to fail here, where the sample is known
    return image
