"""`image_grid`: images side by side, each in its tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kdpipes as kdp
from kdpipes.look import image_grid

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def solid(color: tuple[int, int, int], size: tuple[int, int] = (10, 10)) -> Image.Image:
    return Image.new("RGB", size, color)


def center(grid: Image.Image, column: int, row: int, tile: int, height: int) -> Any:
    return grid.getpixel((column * tile + tile // 2, row * height + tile // 2))


def test_images_fill_the_rows_from_left_to_right() -> None:
    grid = image_grid([solid(RED), solid(GREEN), solid(BLUE)], num_columns=2, tile=20)
    assert grid.size == (40, 40)
    shown = [center(grid, column, row, 20, 20) for row in range(2) for column in range(2)]
    assert shown == [RED, GREEN, BLUE, (255, 255, 255)]
    assert image_grid([solid(RED)] * 3, num_columns=8, tile=20).size == (60, 20), "no empty columns"


def test_an_image_keeps_its_aspect_ratio() -> None:
    pixels = np.asarray(image_grid([solid(RED, (40, 10))], tile=42))
    red = (pixels == RED).all(axis=2)
    assert (red.any(axis=1).sum(), red.any(axis=0).sum()) == (10, 40)


def test_captions_are_written_below_the_tiles() -> None:
    images = [solid(RED), solid(GREEN)]
    grid = image_grid(images, ["one", ""], num_columns=1, tile=40)
    assert grid.size == (40, 108)
    pixels = np.asarray(grid)
    assert (pixels[41:54] < 128).all(axis=2).any(), "the first has a caption"
    assert (pixels[95:] == 255).all(), "the second has none"
    assert center(grid, 0, 1, 40, 54) == GREEN


def test_tensors_arrays_and_pillows_images_look_the_same() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 12, 16, 3), dtype=np.uint8)
    batch = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    expected = image_grid([Image.fromarray(image) for image in pixels], tile=18)
    assert np.array_equal(np.asarray(expected)[3:15, 1:17], pixels[0])
    for images in (batch, list(batch), batch.numpy(), pixels, list(pixels)):
        assert image_grid(images, tile=18).tobytes() == expected.tobytes()


def test_grey_and_encoded_images_and_batches_are_shown(photo_folder: Any) -> None:
    gray = np.full((8, 8), 77, dtype=np.uint8)
    for image in (gray, gray[..., None], torch.from_numpy(gray[None]), Image.fromarray(gray)):
        assert center(image_grid([image], tile=20), 0, 0, 20, 20) == (77, 77, 77)
    photos: Any = kdp.image_folder(photo_folder)[:4]
    encoded = photos.decode_images()
    cropped = encoded.transform("x", kdp.RandomResizedCrop(16)).select("x y").deal(batch_size=4).collate_samples()
    x, _ = next(iter(cropped))
    assert image_grid(x, tile=18).size == (72, 18)
    assert image_grid([sample["x"] for sample in encoded], tile=18).size == (72, 18)


def test_what_cannot_be_shown_is_rejected() -> None:
    with pytest.raises(ValueError, match="`images` is empty"):
        image_grid([])
    with pytest.raises(ValueError, match="There are 1 `captions` for 2 images"):
        image_grid([solid(RED)] * 2, ["one"])
    with pytest.raises(ValueError, match="`num_columns` must be an integer of at least 1, but is 0"):
        image_grid([solid(RED)], num_columns=0)
