"""`cutmix`: the box, pixel by pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp

NAMES = ("partner", "top", "left", "height", "width")


def chain(images: Any, alpha: float = 1.0, **arguments: Any) -> Any:
    items = [(image, number % 3) for number, image in enumerate(images)]
    batches = kdp.from_dataset(items).record_ctx().select("x y", return_ctx=True).deal(batch_size=8, seed=2)
    return batches.collate_samples().cutmix(alpha, **({"num_classes": 3} | arguments))


def images_of(dtype: Any, *shape: int) -> Any:
    return np.random.default_rng(0).uniform(0, 255, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(3, 5, 17), (17, 5), (2, 3, 8, 8)], ids=str)
def test_it_is_what_numpy_works_out(dtype: Any, shape: tuple[int, ...]) -> None:
    images = images_of(dtype, 16, *shape)
    for number, ((x, y), ctx) in enumerate(chain(images)):
        own, one_hot = images[8 * number :][:8], np.eye(3)[np.arange(8 * number, 8 * number + 8) % 3]
        expected, shares = own.copy(), one_hot.copy()
        places = zip(*(ctx["cutmix"][name].tolist() for name in NAMES), strict=True)
        for row, (partner, top, left, height, width) in enumerate(places):
            expected[row, ..., top : top + height, left : left + width] = own[
                partner, ..., top : top + height, left : left + width
            ]
            kept = 1 - height * width / (shape[-2] * shape[-1])
            assert ctx["cutmix"]["weight"][row] == kept
            shares[row] = kept * one_hot[row] + (1 - kept) * one_hot[partner]
        np.testing.assert_array_equal(x, expected)
        np.testing.assert_array_equal(y, shares.astype(np.float32))


def test_labels_are_the_shares_of_the_pixels() -> None:
    images = [np.full((7, 31), number % 3, np.uint8) for number in range(160)]
    for (x, y), _ in chain(images):
        counted = torch.stack([(x == number).double().mean(dim=(1, 2)) for number in range(3)], dim=1)
        torch.testing.assert_close(y, counted.float())


def test_boxes_lie_in_the_image_and_are_cut_off_at_its_edges() -> None:
    boxes = torch.cat(
        [torch.stack([ctx["cutmix"][n] for n in NAMES[1:]]) for _, ctx in chain(np.zeros((4000, 10, 40)))], dim=1
    )
    top, left, height, width = boxes
    assert min(top.min(), left.min(), height.min(), width.min()) >= 0
    assert (top + height).max() == 10
    assert (left + width).max() == 40
    whole = (top > 0) & (left > 0) & (top + height < 10) & (left + width < 40) & (height > 0)
    assert ((4 * height <= width) & (width <= 4 * height + 6))[whole].all()  # the image's ratio, but for rounding


def test_weights_are_the_areas_of_boxes_drawn_as_in_the_paper() -> None:
    weights = torch.cat([ctx["cutmix"]["weight"] for _, ctx in chain(np.zeros((4000, 64, 64)))]).numpy()
    rng = np.random.default_rng(5)
    half, kept = np.sqrt(1 - rng.beta(1, 1, 20000)) / 2, 1.0
    spans = [rng.uniform(size=20000) for _ in range(2)]
    kept = 1 - np.prod([np.minimum(c + half, 1) - np.maximum(c - half, 0) for c in spans], axis=0)
    assert abs(weights.mean() - kept.mean()) < 0.03
    assert np.abs(np.quantile(weights, [0.1, 0.5, 0.9]) - np.quantile(kept, [0.1, 0.5, 0.9])).max() < 0.05
    assert weights.max() <= 1


def test_a_batch_that_is_not_mixed_has_empty_boxes() -> None:
    for _, ctx in chain(np.zeros((16, 4, 6)), p=0):
        assert ctx["cutmix"]["height"].tolist() == ctx["cutmix"]["width"].tolist() == [0] * 8


def test_what_has_no_height_and_width_is_rejected() -> None:
    with pytest.raises(kdp.DataError, match=r"`cutmix` takes images `\[B, \.\.\., H, W\]`, but got \[8, 4\]"):
        next(iter(chain(np.zeros((8, 4)))))
