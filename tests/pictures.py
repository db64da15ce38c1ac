"""Image files for tests."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image of Pillow, or an array of pixels, as the bytes of a file."""
    file = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, kind, **options)
    return file.getvalue()
