"""The two image transforms: drawn, recorded, and done again from what was recorded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from PIL import Image

import kdpipes as kdp

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("transform", [kdp.RandomResizedCrop(32), kdp.HorizontalFlip()])
def test_a_call_is_draw_and_apply(transform: Any) -> None:
    assert isinstance(transform, kdp.RecordedTransform)
    results = [transform(IMAGE, rng(seed)) for seed in range(8)]
    assert all(same(image, transform.apply(IMAGE, transform.draw(IMAGE, rng(n)))) for n, image in enumerate(results))
    assert len({image.tobytes() for image in results}) == (8 if isinstance(transform, kdp.RandomResizedCrop) else 2)


def test_a_crop_is_pillows_own_crop_and_resize_but_for_its_border() -> None:
    crop = kdp.RandomResizedCrop(32)
    for params in ({"top": 3, "left": 7, "height": 50, "width": 41}, {"top": 30, "left": 0, "height": 20, "width": 90}):
        left, top = params["left"], params["top"]
        region = IMAGE.crop((left, top, left + params["width"], top + params["height"]))
        resized = np.asarray(region.resize((32, 32), Image.Resampling.BILINEAR))
        assert np.array_equal(np.asarray(crop.apply(IMAGE, params))[2:-2, 2:-2], resized[2:-2, 2:-2])
    everything = {"top": 0, "left": 0, "height": 60, "width": 90}
    assert same(crop.apply(IMAGE, everything), IMAGE.resize((32, 32), Image.Resampling.BILINEAR))


def test_crops_lie_in_the_image_and_keep_to_scale_and_ratio() -> None:
    crop = kdp.RandomResizedCrop(32, scale=(0.2, 0.5), ratio=(0.5, 2.0))
    shares, aspects, lefts = [], [], set()
    for seed in range(300):
        params = crop.draw(IMAGE, rng(seed))
        assert all(type(value) is int for value in params.values())
        assert 0 <= params["top"] <= params["top"] + params["height"] <= 60
        assert 0 <= params["left"] <= params["left"] + params["width"] <= 90
        shares.append(params["width"] * params["height"] / (60 * 90))
        aspects.append(params["width"] / params["height"])
        lefts.add(params["left"])
    assert 0.19 < min(shares) < 0.22
    assert 0.48 < max(shares) < 0.51
    assert 0.47 < min(aspects) < 0.6
    assert 1.7 < max(aspects) < 2.1
    assert abs(np.mean(np.log(aspects))) < 0.1, "as often wide as high"
    assert len(lefts) > 30


def test_an_image_that_no_crop_fits_gives_its_centre() -> None:
    crop = kdp.RandomResizedCrop(8, ratio=(3 / 4, 4 / 3))
    assert crop.draw(Image.new("L", (1000, 3)), rng(0)) == {"top": 0, "left": 498, "height": 3, "width": 4}
    assert crop.draw(Image.new("L", (3, 1000)), rng(0)) == {"top": 498, "left": 0, "height": 4, "width": 3}
    assert crop(Image.new("L", (1, 1)), rng(0)).size == (8, 8)


def test_a_flip_mirrors_left_and_right_with_its_probability() -> None:
    flipped = kdp.HorizontalFlip().apply(IMAGE, {"flipped": True})
    assert np.array_equal(np.asarray(flipped), PIXELS[:, ::-1])
    assert same(kdp.HorizontalFlip().apply(IMAGE, {"flipped": False}), IMAGE)
    for p, least, most in ((0, 0, 0), (1, 1000, 1000), (0.25, 200, 300)):
        count = sum(kdp.HorizontalFlip(p).draw(IMAGE, rng(seed))["flipped"] for seed in range(1000))
        assert least <= count <= most, p


def test_recorded_parameters_reproduce_the_pixels(photo_folder: Any) -> None:
    crop, flip = kdp.RandomResizedCrop(24), kdp.HorizontalFlip()
    photos: Any = kdp.image_folder(photo_folder)[:12]
    chain = photos.decode_images().record_ctx().add_field("original", lambda sample: sample["x"])
    dealt = chain.transform("x", crop, flip, crop).select("original x", return_ctx=True).deal(batch_size=12)
    for _ in range(2):
        for (original, x), ctx in next(iter(dealt)):
            image = flip.apply(crop.apply(original, ctx["random_resized_crop"]), ctx["horizontal_flip"])
            assert same(crop.apply(image, ctx["random_resized_crop_2"]), x)
            assert x.size == (24, 24)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: kdp.RandomResizedCrop(0), ValueError, "`size` must be an integer of at least 1, but is 0"),
    (lambda: kdp.RandomResizedCrop(2.5), TypeError, "`size` must be an integer of at least 1, but is 2.5"),
    (lambda: kdp.RandomResizedCrop(8, scale=0.5), TypeError, "`scale` must be two numbers, the smaller first"),
    (lambda: kdp.RandomResizedCrop(8, scale=(0.5, 0.2)), ValueError, "`scale` must be two numbers, the smaller"),
    (lambda: kdp.RandomResizedCrop(8, scale=(0.5, 1.5)), ValueError, "above 0 and up to 1, but is (0.5, 1.5)"),
    (lambda: kdp.RandomResizedCrop(8, ratio=(0, 1)), ValueError, "`ratio` must be two numbers, the smaller"),
    (lambda: kdp.RandomResizedCrop(8, scale=(math.nan, 1)), ValueError, "`scale` must be two numbers"),
    (lambda: kdp.HorizontalFlip(1.5), ValueError, "`p` must be a probability, from 0 to 1, but is 1.5 instead"),
    (lambda: kdp.HorizontalFlip("half"), TypeError, "`p` must be a probability, from 0 to 1, but is 'half'"),
    (
        lambda: kdp.HorizontalFlip().apply(PIXELS, {}),
        TypeError,
        "takes images of `.decode_images()` or of Pillow's, but got ndarray.",
    ),
]


def test_bad_arguments_are_refused() -> None:
    for make, error, message in REFUSED:
        with pytest.raises(error) as raised:
            make()
        assert message in str(raised.value)
