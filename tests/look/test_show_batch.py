"""`show_batch`: the images of a batch, denormalised, with classes and the crops that were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kdpipes as kdp

FIRST = (228, 87, 46)  # the color of a crop
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.5]
TILE = 34  # images of 32 by 32 pixels are shown as they are


def photo(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 200, (32, 32, 3), dtype=np.uint8))


PHOTOS = [(photo(number), number % 2) for number in range(5)]


def source() -> Any:
    return kdp.from_dataset(PHOTOS, class_names=["heron", "stork"])


def tiles(picture: Image.Image, *, has_captions: bool = True) -> Any:
    """Return the images of a grid, `[rows * columns, 32, 32, 3]`."""
    pixels, height = np.asarray(picture), TILE + (14 if has_captions else 0)
    grid = pixels.reshape(pixels.shape[0] // height, height, pixels.shape[1] // TILE, TILE, 3).swapaxes(1, 2)
    return grid[:, :, 1:33, 1:33].reshape(-1, 32, 32, 3)


def batch() -> Any:
    x = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image, _ in PHOTOS])
    return x, torch.tensor([label for _, label in PHOTOS])


def expected(number: int) -> Any:
    return np.asarray(PHOTOS[number][0])


def test_images_of_every_kind_look_the_same() -> None:
    x, y = batch()
    bare = kdp.show_batch(x, tile=TILE)
    assert all(np.array_equal(shown, expected(at)) for at, shown in enumerate(tiles(bare, has_captions=False)))
    for images in (x.numpy(), list(x), [image for image, _ in PHOTOS], x.float() / 255, x.double() / 255):
        assert kdp.show_batch(images, tile=TILE).tobytes() == bare.tobytes()
    assert np.array_equal(tiles(kdp.show_batch(x[1], tile=TILE), has_captions=False)[0], expected(1))
    named = kdp.show_batch((x, y), class_names=["heron", "stork"], tile=TILE)
    for given in ({"x": x, "y": y}, [x, y], ((x, y), {}), list(zip(list(x), y.tolist(), strict=True))):
        assert kdp.show_batch(given, class_names=["heron", "stork"], tile=TILE).tobytes() == named.tobytes()
    assert kdp.show_batch((x, y), tile=TILE).tobytes() != named.tobytes(), "numbers in place of names"


def test_one_sample_is_a_batch_of_one(photo_folder: Path) -> None:
    photos = kdp.image_folder(photo_folder).decode_images("x").transform("x", kdp.Resize((32, 32)))
    one, same = kdp.show_batch(photos[0], photos), kdp.show_batch([photos[0]], photos)
    assert one.tobytes() == same.tobytes()


def test_the_chain_says_what_the_parts_are() -> None:
    pipe = source().select("y key x").deal(batch_size=3)
    shown = kdp.show_batch(next(iter(pipe)), pipe, tile=TILE)
    assert shown.tobytes() == kdp.show_batch(next(iter(source().deal(batch_size=3))), source(), tile=TILE).tobytes()
    collated = pipe.collate_samples()
    assert kdp.show_batch(next(iter(collated)), collated, tile=TILE).tobytes() == shown.tobytes()


def test_floats_are_denormalized_by_arguments() -> None:
    pipe = source().transform("x", kdp.ToTensor(), kdp.Normalize(MEAN, STD)).select("x y")
    collated = pipe.deal(batch_size=5).collate_samples()
    given = next(iter(collated))
    for shown in (
        kdp.show_batch(given, mean=MEAN, std=STD, tile=TILE),
        kdp.show_batch(given, collated, mean=np.array(MEAN), std=torch.tensor(STD, dtype=torch.float64), tile=TILE),
    ):
        assert all(np.array_equal(tile, expected(at)) for at, tile in enumerate(tiles(shown)))
    stretched = tiles(kdp.show_batch(given, tile=TILE))
    assert (stretched.min(), stretched.max()) == (0, 255)
    other = kdp.show_batch(given, collated, mean=0.0, std=1.0, tile=TILE)
    assert not np.array_equal(tiles(other)[0], expected(0))


def test_views_stand_side_by_side_with_shares_of_mixed_labels() -> None:
    views = source().transform("x", views=[[kdp.CenterCrop(32)], [kdp.Resize(32)], []]).select("x y")
    collated = views.deal(batch_size=4).collate_samples()
    assert kdp.show_batch(next(iter(collated)), collated, tile=TILE).size == (6 * TILE, 2 * (TILE + 14))
    mixed = source().select("x y").deal(batch_size=5).collate_samples().mixup(num_classes=2)
    assert kdp.show_batch(next(iter(mixed)), mixed, tile=TILE).size == (5 * TILE, TILE + 14)
    x, _ = batch()
    half, whole = torch.tensor([[0.5, 0.5]] * 5), torch.tensor([[0.0, 1.0]] * 5)
    shown = [kdp.show_batch((x, y), class_names=["a", "b"], tile=TILE).tobytes() for y in (half, whole)]
    assert shown[0] != shown[1]
    assert shown[1] == kdp.show_batch((x, torch.ones(5).long()), class_names=["a", "b"], tile=TILE).tobytes()


def test_encoded_images_of_a_folder_are_shown(photo_folder: Path) -> None:
    photos: Any = kdp.image_folder(photo_folder)
    for pipe in (photos, photos.decode_images()):
        dealt = pipe.deal(batch_size=70)
        assert kdp.show_batch(next(iter(dealt)), dealt, tile=20).size == (160, 8 * 34), "64 of 70"


def test_what_is_no_batch_of_images_is_rejected() -> None:
    with pytest.raises(TypeError, match="`batch` must hold images"):
        kdp.show_batch((torch.zeros(3), torch.zeros(3)))
    with pytest.raises(ValueError, match="`mean` and `std` must be given together"):
        kdp.show_batch(batch(), mean=MEAN)
    with pytest.raises(TypeError, match="`std` must be a number for each channel"):
        kdp.show_batch(batch(), mean=MEAN, std=["a"])
    with pytest.raises(ValueError, match="are for 2 channels, but the images have 3"):
        kdp.show_batch(batch()[0].float(), mean=[0.1, 0.2], std=[1.0, 1.0])
