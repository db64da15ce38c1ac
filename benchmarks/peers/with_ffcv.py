"""FFCV's Loader over its own file, in threads: decoded whole by libjpeg-turbo, resized by OpenCV's area averages.

Its writer encodes pixels anew, which would make other images of them. The one call that does so is replaced while the
file is written, so that it holds the very bytes of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from corpus import in_format, tree_of
from ffcv.fields import IntField, RGBImageField, rgb_image
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image


class _Encoded(np.ndarray):  # type: ignore[type-arg]
    """Pixels that remember the JPEG that they were."""

    jpeg: Any = None


class _Photos:
    def __init__(self, folder: Path) -> None:
        self._images = tree_of(folder)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self._images[index]
        pixels = np.asarray(Image.open(path).convert("RGB")).view(_Encoded)
        pixels.jpeg = np.frombuffer(Path(path).read_bytes(), np.uint8)
        return pixels, label


def _as_it_was(pixels: Any, quality: int) -> Any:
    return pixels.jpeg


@contextmanager
def loader(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    def write(target: Path) -> None:
        fields = {"x": RGBImageField(write_mode="jpg"), "y": IntField()}
        with patch.object(rgb_image, "encode_jpeg", _as_it_was):
            writer = DatasetWriter(str(target / "corpus.beton"), fields, num_workers=1)
            writer.from_indexed_dataset(_Photos(folder), chunksize=50)

    pipelines = {
        "x": [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
        "y": [IntDecoder(), ToTensor()],
    }
    yield Loader(
        str(in_format(folder, "ffcv", write) / "corpus.beton"),
        batch_size=batch_size,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines=pipelines,
    )
