"""`ColorJitter`: drawn, recorded, done again; Pillow's own colors, on its images and on tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from skimage import data

import kdpipes as kdp
from kdpipes.work import EncodedImage
from tests.pictures import file_of
from tests.work.replaying import recorded_runs
from tests.work.test_geometric_transforms import as_tensor
from tests.work.transforms import assert_rejected

NAMES = ("brightness", "contrast", "saturation", "hue")
FACTORS = dict.fromkeys(NAMES[:3], (0.0, 0.3, 0.95, 1.0, 1.7)) | {"hue": (-0.5, -0.21, 0.0, 0.03, 0.1, 0.5)}
ENHANCERS: dict[str, Any] = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}
JITTER = kdp.ColorJitter(0.4, 0.4, 0.4, 0.1)
CAT = Image.fromarray(data.chelsea())


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def photos(folder: Path) -> list[Image.Image]:
    shipped = [Image.open(path).convert("RGB") for path in sorted(folder.rglob("*.jpg"))[::16]]
    return [*shipped, CAT, Image.fromarray(data.coffee())]


def one(name: str, factor: float) -> dict[str, Any]:
    return {"order": [name], name: factor}


def colors(red: int) -> Image.Image:
    """An image of all colors with this much red."""
    green, blue = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    return Image.fromarray(np.stack([np.full_like(green, red), green, blue], axis=-1).astype(np.uint8))


def test_what_is_recorded_is_plain_and_does_the_same_again() -> None:
    orders = set()
    for seed in range(60):
        params = JITTER.draw(CAT, rng(seed))
        assert sorted(params) == sorted(["order", *NAMES])
        assert sorted(params["order"]) == sorted(NAMES)
        assert all(type(params[name]) is float for name in NAMES)
        assert all(0.6 <= params[name] <= 1.4 for name in NAMES[:3])
        assert -0.1 <= params["hue"] <= 0.1
        orders.add(tuple(params["order"]))
    assert len(orders) > 15, "drawn anew for each image"
    for image in (CAT, as_tensor(CAT), as_tensor(CAT) / 255):
        result = np.asarray(JITTER(image, rng(3)))
        assert np.array_equal(result, np.asarray(JITTER.apply(image, JITTER.draw(image, rng(3)))))
        assert not np.array_equal(result, np.asarray(JITTER(image, rng(4))))


def test_one_number_is_a_range_around_no_change() -> None:
    cases: list[tuple[str, Any, tuple[float, float]]] = [
        ("brightness", 0.25, (0.75, 1.25)),
        ("contrast", 3, (0, 4)),
        ("saturation", (0.5, 0.75), (0.5, 0.75)),
        ("saturation", [2, 2], (2, 2)),
        ("hue", 0.5, (-0.5, 0.5)),
        ("hue", (0.1, 0.2), (0.1, 0.2)),
    ]
    for name, value, (low, high) in cases:
        drawn = [kdp.ColorJitter(**{name: value}).draw(CAT, rng(seed)) for seed in range(200)]
        assert all(params.keys() == {"order", name} for params in drawn)
        factors = [params[name] for params in drawn]
        assert low <= min(factors) <= low + (high - low) / 10
        assert high - (high - low) / 10 <= max(factors) <= high


def test_what_changes_nothing_is_neither_drawn_nor_recorded() -> None:
    for jitter in (kdp.ColorJitter(), kdp.ColorJitter((1, 1), 0, (1.0, 1.0), (0, 0))):
        assert jitter.draw(CAT, rng(0)) == {"order": []}
        assert jitter(CAT, rng(0)).tobytes() == CAT.tobytes()


def test_changes_are_made_in_the_recorded_order() -> None:
    params: dict[str, Any] = {"brightness": 1.4, "contrast": 0.6}
    for image in (CAT, as_tensor(CAT)):
        results = []
        for order in (["brightness", "contrast"], ["contrast", "brightness"]):
            expected = image
            for name in order:
                expected = JITTER.apply(expected, one(name, params[name]))
            result = JITTER.apply(image, {"order": order, **params})
            assert np.array_equal(np.asarray(result), np.asarray(expected))
            results.append(np.asarray(result))
        assert not np.array_equal(*results)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_image_becomes_what_pillows_own_enhancers_make(mode: str) -> None:
    image = CAT.convert(mode)
    for name, enhancer in ENHANCERS.items():
        for factor in FACTORS[name]:
            result = JITTER.apply(image, one(name, factor))
            assert result.mode == mode
            assert result.tobytes() == enhancer(image).enhance(factor).tobytes(), (name, factor)


def test_a_hue_is_turned_in_pillows_hsv() -> None:
    red = Image.new("RGB", (1, 1), (200, 0, 0))
    assert JITTER.apply(red, one("hue", 1 / 3)).getpixel((0, 0)) == (0, 200, 0)
    assert JITTER.apply(red, one("hue", -0.5)).getpixel((0, 0))[0] < 5
    for turn in FACTORS["hue"]:
        channels = np.array(CAT.convert("HSV")).astype(int)
        channels[..., 0] = (channels[..., 0] + int(turn * 255)) % 256
        parts = [Image.fromarray(channels[..., place].astype(np.uint8)) for place in range(3)]
        assert JITTER.apply(CAT, one("hue", turn)).tobytes() == Image.merge("HSV", parts).convert("RGB").tobytes()
    assert JITTER.apply(CAT.convert("L"), one("hue", 0.3)).tobytes() == CAT.convert("L").tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_bytes_become_pillows_pixels_exactly(name: str, photo_folder: Path) -> None:
    images = [*photos(photo_folder), CAT.convert("L"), *(colors(red) for red in range(0, 256, 17))]
    for number, image in enumerate(images):
        for factor in (*FACTORS[name], float(rng(number).uniform(-0.5 if name == "hue" else 0, 0.5))):
            expected = as_tensor(JITTER.apply(image, one(name, factor)))
            result = JITTER.apply(as_tensor(image), one(name, factor))
            assert result.dtype == torch.uint8
            assert torch.equal(result, expected), (number, factor)


def test_tensors_of_floats_differ_by_pillows_rounding(photo_folder: Path) -> None:
    for name, most, mean in [(name, 1, 1.0) for name in NAMES[:3]] + [("hue", 14, 2.0)]:
        for photo in photos(photo_folder):
            for factor in FACTORS[name]:
                result = JITTER.apply(as_tensor(photo) / 255, one(name, factor))
                assert result.dtype == torch.float32
                assert 0 <= result.min() <= result.max() <= 1
                difference = ((result * 255).round() - as_tensor(JITTER.apply(photo, one(name, factor)))).abs()
                assert difference.max() <= most, (name, factor)
                assert difference.mean() <= mean, (name, factor)


def test_a_factor_that_changes_nothing_keeps_floats() -> None:
    tensor = as_tensor(CAT) / 255
    for name in NAMES:
        result = JITTER.apply(tensor, one(name, 0.0 if name == "hue" else 1.0))
        assert torch.allclose(result, tensor, atol=1e-6), name


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 999))
def test_images_of_any_size_become_pillows_and_stay_as_they_were(
    height: int, width: int, depth: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, depth), dtype=np.uint8)
    image = Image.fromarray(pixels[..., 0] if depth == 1 else pixels)
    tensor, params = as_tensor(image), JITTER.draw(image, rng(seed))
    floats = {dtype: (tensor / 255).to(dtype) for dtype in (torch.float16, torch.float32, torch.float64)}
    assert torch.equal(JITTER.apply(tensor, params), as_tensor(JITTER.apply(image, params)))
    for dtype, levels in floats.items():
        result = JITTER.apply(levels, params)
        assert (result.dtype, result.shape) == (dtype, tensor.shape)
        assert torch.equal(levels, (tensor / 255).to(dtype))
    assert torch.equal(tensor, as_tensor(image))
    assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


def test_a_batch_shares_its_factors_but_images_have_own_means() -> None:
    batch = torch.stack([as_tensor(CAT)[:, :50, :60], as_tensor(CAT)[:, 50:100, 60:120]])[None]
    for tensors in (batch, batch / 255):
        params = JITTER.draw(tensors, rng(0))
        results = JITTER.apply(tensors, params)
        for place in range(2):
            assert torch.equal(results[0, place], JITTER.apply(tensors[0, place], params))


def test_two_epochs_and_their_ctx_are_equal_for_any_workers(photo_folder: Path) -> None:
    runs = recorded_runs(photo_folder, kdp.Resize((24, 24)), JITTER)
    for epoch, again in zip(*runs, strict=True):
        for ((x,), ctx), ((other,), other_ctx) in zip(epoch, again, strict=True):
            assert torch.equal(x, other)
            jitter = ctx["color_jitter"]
            assert jitter["hue"].shape == (12,)
            assert jitter["order"] == other_ctx["color_jitter"]["order"]
            assert len(jitter["order"]) == 12
    assert not torch.equal(runs[0][0][0][1]["color_jitter"]["hue"], runs[0][1][0][1]["color_jitter"]["hue"])


def test_an_encoded_image_is_decoded() -> None:
    assert JITTER(EncodedImage(file_of(CAT)), rng(0)).tobytes() == JITTER(CAT, rng(0)).tobytes()


FACTOR_RULE = "must be a number of at least 0, or two of them, the smaller first, but is"
HUE_RULE = "`hue` must be a number from 0 to 0.5, or two from -0.5 to 0.5, the smaller first, but is"
REJECTED: list[tuple[Any, type[Exception], str]] = [
    (lambda: kdp.ColorJitter(-0.1), ValueError, f"`brightness` {FACTOR_RULE} -0.1 instead."),
    (lambda: kdp.ColorJitter(contrast=(0.5, 0.1)), ValueError, f"`contrast` {FACTOR_RULE} (0.5, 0.1) instead."),
    (lambda: kdp.ColorJitter(contrast=(-0.5, 0.1)), ValueError, f"`contrast` {FACTOR_RULE} (-0.5, 0.1)"),
    (lambda: kdp.ColorJitter(saturation="much"), TypeError, f"`saturation` {FACTOR_RULE} 'much'"),
    (lambda: kdp.ColorJitter(saturation=(1, 2, 3)), TypeError, f"`saturation` {FACTOR_RULE} (1, 2, 3)"),
    (lambda: kdp.ColorJitter(saturation=True), TypeError, f"`saturation` {FACTOR_RULE} True"),
    (lambda: kdp.ColorJitter(math.nan), ValueError, f"`brightness` {FACTOR_RULE} nan"),
    (lambda: kdp.ColorJitter(math.inf), ValueError, f"`brightness` {FACTOR_RULE} inf"),
    (lambda: kdp.ColorJitter(hue=0.6), ValueError, f"{HUE_RULE} 0.6 instead."),
    (lambda: kdp.ColorJitter(hue=-0.1), ValueError, f"{HUE_RULE} -0.1 instead."),
    (lambda: kdp.ColorJitter(hue=(-0.6, 0)), ValueError, f"{HUE_RULE} (-0.6, 0) instead."),
    (
        lambda: JITTER(CAT.convert("RGBA"), rng(0)),
        TypeError,
        "`ColorJitter` takes images of mode L or RGB, but got one of mode RGBA.",
    ),
    (lambda: JITTER(torch.zeros(4, 2, 2), rng(0)), ValueError, "takes tensors of 1 or 3 channels, but got one of 4."),
    (
        lambda: JITTER(torch.zeros(3, 2, 2, dtype=torch.int64), rng(0)),
        TypeError,
        "takes tensors of uint8 or float, but got one of torch.int64.",
    ),
    (
        lambda: JITTER(np.zeros((2, 2, 3)), rng(0)),
        TypeError,
        "but got ndarray. `kdp.ToTensor()` makes tensors of arrays.",
    ),
]


def test_bad_arguments_are_rejected() -> None:
    assert_rejected(REJECTED)


def test_floats_that_are_no_colours_are_rejected() -> None:
    image = kdp.Normalize([0.5] * 3, [0.2] * 3)(torch.rand(3, 8, 8))
    with pytest.raises(ValueError, match=r"floats from 0 to 1\. Put `Normalize` after it"):
        kdp.ColorJitter(brightness=0.1)(image, np.random.default_rng(0))
