"""`mixup`: the weighted mean, number by number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp


def chain(images: Any, alpha: float = 0.2, **arguments: Any) -> Any:
    items = [(image, number % 3) for number, image in enumerate(images)]
    batches = kdp.from_dataset(items).record_ctx().select("x y", return_ctx=True).deal(batch_size=8, seed=2)
    return batches.collate_samples().mixup(alpha, **({"num_classes": 3} | arguments))


def images_of(dtype: Any, number: int = 16) -> Any:
    values = np.random.default_rng(0).uniform(0, 255, (number, 3, 4, 6))
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_it_is_what_numpy_works_out(dtype: Any) -> None:
    images = images_of(dtype)
    kind = np.promote_types(dtype, np.float32) if dtype != np.uint8 else np.float32
    for number, ((x, y), ctx) in enumerate(chain(images)):
        own, one_hot = images[8 * number :][:8], np.eye(3)[np.arange(8 * number, 8 * number + 8) % 3]
        partner, weight = (ctx["mixup"][name].numpy() for name in ("partner", "weight"))
        near, far = (share.astype(kind).reshape(-1, 1, 1, 1) for share in (weight, 1 - weight))
        mean = near * own.astype(kind) + far * own[partner].astype(kind)
        np.testing.assert_array_equal(x, np.round(mean).astype(dtype) if dtype == np.uint8 else mean.astype(dtype))
        labels = weight[:, None] * one_hot + (1 - weight[:, None]) * one_hot[partner]
        np.testing.assert_array_equal(y, labels.astype(np.float32))


def test_bytes_are_rounded_and_not_cut_off() -> None:
    x = torch.tensor([[0, 255, 255, 3], [1, 255, 0, 6]], dtype=torch.uint8)
    params = {"partner": torch.tensor([1, 0]), "weight": torch.tensor([0.25, 0.7])}
    mixed, _ = chain(images_of(np.uint8)).apply(x, torch.tensor([0, 1]), params)
    assert mixed.dtype == torch.uint8
    assert mixed.tolist() == [[1, 255, 64, 5], [1, 255, 76, 5]]


def test_bfloat16_stays_what_it_is() -> None:
    x = torch.rand(2, 5).bfloat16()
    params = {"partner": torch.tensor([1, 0]), "weight": torch.tensor([0.25, 0.7], dtype=torch.float64)}
    mixed, _ = chain(images_of(np.uint8)).apply(x, torch.tensor([0, 1]), params)
    assert mixed.dtype == torch.bfloat16
    near, far = torch.tensor([[0.25], [0.7]]), torch.tensor([[0.75], [0.3]])
    torch.testing.assert_close(mixed, (near * x.float() + far * x[[1, 0]].float()).bfloat16())


def test_images_of_other_whole_numbers_are_rejected() -> None:
    with pytest.raises(
        kdp.DataError, match=r"takes images of uint8 or floats, but got torch.int64. Convert them with `.float\(\)`"
    ):
        next(iter(chain(images_of(np.int64))))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_weights_are_spread_as_alpha_says(alpha: float) -> None:
    zeros = np.zeros((4000, 1), np.float32)
    weights = torch.cat([ctx["mixup"]["weight"] for _, ctx in chain(zeros, alpha)]).numpy()
    assert weights.min() >= 0
    assert weights.max() <= 1
    assert abs(weights.mean() - 0.5) < 0.04
    assert abs(weights.var() - 0.25 / (2 * alpha + 1)) < 0.02


def test_partners_are_any_of_the_batch() -> None:
    partners = torch.stack([ctx["mixup"]["partner"] for _, ctx in chain(np.zeros((1600, 1), np.float32))])
    assert all(set(column.tolist()) == set(range(8)) for column in partners.T)
