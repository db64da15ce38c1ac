"""The work that peers without transforms of their own are given: a random resized crop and a flip.

The region is drawn as torchvision's `RandomResizedCrop` draws it, and resized with antialiasing.
"""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import torch
from PIL import Image

SIZE = 224
SCALE = (0.08, 1.0)
LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))


def random_region(width: int, height: int) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random region."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        aspect = math.exp(random.uniform(*LOG_RATIO))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h


def is_flipped() -> bool:
    return random.random() < 0.5


def transformed(image: Image.Image) -> torch.Tensor:
    """Return an image of Pillow's, cropped, resized and flipped by Pillow."""
    left, top, width, height = random_region(*image.size)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    if is_flipped():
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def by_pillow(content: Any) -> torch.Tensor:
    """Return a JPEG, from bytes or a path, decoded and transformed by Pillow."""
    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
        return transformed(image.convert("RGB"))
