"""`ToTensor` and `Normalize`: what a model takes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import kdpipes as kdp
from kdpipes.work import RecordedTransform
from tests.work.replaying import recorded_runs
from tests.work.test_geometric_transforms import encoded
from tests.work.transforms import assert_rejected

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)
FLOATS = torch.from_numpy(PIXELS.transpose(2, 0, 1).astype(np.float32) / 255)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_an_image_of_any_kind_becomes_floats_from_0_to_1() -> None:
    to_tensor = kdp.ToTensor()
    tensor = torch.from_numpy(PIXELS.transpose(2, 0, 1).copy())
    for image in (IMAGE, encoded(IMAGE), PIXELS, tensor, PIXELS / 255, FLOATS, FLOATS.double(), PIXELS[::-1][::-1]):
        result = to_tensor(image)
        assert (result.dtype, result.shape) == (torch.float32, (3, 6, 9))
        assert result.is_contiguous()
        assert torch.equal(result, FLOATS)
    assert to_tensor(tensor.expand(2, 3, 6, 9)).shape == (2, 3, 6, 9)
    assert to_tensor(PIXELS[::-1, ::-1]).tolist() == FLOATS.flip(-1, -2).tolist()


def test_every_mode_has_its_channels() -> None:
    for mode, num_channels in (("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4)):
        image = IMAGE.convert(mode)
        result = kdp.ToTensor()(image)
        assert result.shape == (num_channels, 6, 9)
        assert np.array_equal((result * 255).round().numpy(), np.asarray(image).reshape(6, 9, -1).transpose(2, 0, 1))
    assert kdp.ToTensor()(PIXELS[..., 0]).tolist() == FLOATS[:1].tolist()


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_nothing_is_lost_and_nothing_is_shared_at_any_size(height: int, width: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    array, image, before = pixels.astype(np.float32) / 255, Image.fromarray(pixels), pixels.copy()
    results = [kdp.ToTensor()(given) for given in (pixels, array, image)]
    for result in results:
        assert np.array_equal((result * 255).round().numpy().transpose(1, 2, 0), pixels)
        result.zero_()
    assert np.array_equal(pixels, before)
    assert np.array_equal(array, before.astype(np.float32) / 255)
    assert np.array_equal(np.asarray(image), before)


def test_normalized_is_less_the_mean_divided_by_deviation() -> None:
    normalize = kdp.Normalize(MEAN, STD)
    result = normalize(FLOATS)
    for channel in range(3):
        assert torch.equal(result[channel], (FLOATS[channel] - MEAN[channel]) / STD[channel])
    batch = FLOATS.expand(2, 4, 3, 6, 9)
    assert torch.equal(normalize(batch)[1, 2], result)
    assert torch.equal(kdp.Normalize([0.5], np.array([0.25]))(FLOATS), (FLOATS - 0.5) / 0.25)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        given = FLOATS.to(dtype)
        assert normalize(given).dtype == dtype
        assert torch.equal(given, FLOATS.to(dtype)), "left as it was"


def test_both_record_nothing_and_need_no_generator() -> None:
    for transform, value in ((kdp.ToTensor(), IMAGE), (kdp.Normalize(MEAN, STD), FLOATS)):
        assert isinstance(transform, RecordedTransform)
        assert transform.draw(value, np.random.default_rng(0)) == transform.draw(value) == {}
        results = transform(value), transform(value, np.random.default_rng(0)), transform.apply(value, {})
        assert all(torch.equal(results[0], result) for result in results)


def test_two_epochs_and_their_ctx_are_equal_for_any_workers(photo_folder: Path) -> None:
    transforms = [kdp.RandomResizedCrop(16), kdp.ToTensor(), kdp.HorizontalFlip(), kdp.Normalize(MEAN, STD)]
    runs = recorded_runs(photo_folder, *transforms)
    for epoch, again in zip(*runs, strict=True):
        for ((x,), ctx), ((other,), _) in zip(epoch, again, strict=True):
            assert (x.dtype, x.shape) == (torch.float32, (12, 3, 16, 16))
            assert torch.equal(x, other)
            assert ctx["to_tensor"] == ctx["normalize"] == {}
    assert not torch.equal(runs[0][0][0][0][0], runs[0][1][0][0][0])


def test_normalizing_a_non_float_names_hint_and_sample(photo_folder: Path) -> None:
    pipe = kdp.image_folder(photo_folder).decode_images().transform("x", kdp.Normalize(MEAN, STD)).select("x")
    with pytest.raises(TypeError, match=r"Put `kdp\.ToTensor\(\)` before it") as raised:
        pipe[0]
    assert "of sample 'brick/" in raised.value.__notes__[0]


NUMBERS = "must be a sequence of numbers, one for each channel"
REJECTED: list[tuple[Any, type[Exception], str]] = [
    (lambda: kdp.Normalize(0.5, 0.5), TypeError, f"`mean` {NUMBERS}, but is 0.5 instead."),
    (lambda: kdp.Normalize("abc", [1]), TypeError, f"`mean` {NUMBERS}, but is 'abc' instead."),
    (lambda: kdp.Normalize([], []), ValueError, f"`mean` {NUMBERS}, but is [] instead."),
    (lambda: kdp.Normalize([math.nan], [1]), ValueError, f"`mean` {NUMBERS}, but is [nan] instead."),
    (lambda: kdp.Normalize([0], [0]), ValueError, f"`std` {NUMBERS}, above 0, but is [0] instead."),
    (lambda: kdp.Normalize([0], ["1"]), TypeError, f"`std` {NUMBERS}, above 0, but is ['1'] instead."),
    (
        lambda: kdp.Normalize(MEAN, [1, 1]),
        ValueError,
        "`std` must be as many numbers as `mean`, 3, but is [1, 1] instead.",
    ),
    (
        lambda: kdp.Normalize(MEAN, STD)(FLOATS[:1]),
        ValueError,
        "`Normalize` got a tensor of 1 channels. Its `mean` and `std` have 3 numbers.",
    ),
    (
        lambda: kdp.Normalize(MEAN, STD)(torch.from_numpy(PIXELS)),
        TypeError,
        "takes tensors of floats, but got a tensor of torch.uint8. Put `kdp.ToTensor()` before it.",
    ),
    (lambda: kdp.Normalize(MEAN, STD)(IMAGE), TypeError, "but got Image. Put `kdp.ToTensor()` before it."),
    (
        lambda: kdp.Normalize(MEAN, STD)(FLOATS[0]),
        ValueError,
        "`Normalize` takes tensors [..., C, H, W], but got one of",
    ),
    (lambda: kdp.ToTensor()(IMAGE.convert("CMYK")), TypeError, "RGBA, I;16, F or P, but got one of mode CMYK"),
    (
        lambda: kdp.ToTensor()(PIXELS.astype(int)),
        TypeError,
        "`ToTensor` takes pixels of uint8 or float, but got int64.",
    ),
    (lambda: kdp.ToTensor()(torch.zeros(1, 2, 2).bool()), TypeError, "uint8 or float, but got torch.bool."),
    (lambda: kdp.ToTensor()(PIXELS[0, 0]), ValueError, "takes arrays [H, W, C] or [H, W], but got one of shape [3]."),
    (
        lambda: kdp.ToTensor()([1]),
        TypeError,
        "`ToTensor` takes images from `.decode_images()` or Pillow, or tensors",
    ),
]


def test_bad_arguments_are_rejected() -> None:
    assert_rejected(REJECTED)
