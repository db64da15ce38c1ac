"""Random numbers: what transforms record in the ctx, and what users' functions draw.

An operation draws from (seed, epoch, position in the epoch, name and place of the operation).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp


def pictures() -> list[tuple[Image.Image, int]]:
    return [(Image.new("RGB", (40 + number, 30)), number % 3) for number in range(4)]


def number_from_rng(x: Any, rng: np.random.Generator) -> list[float]:
    return [float(rng.random()), int(rng.integers(1000)), float(rng.normal())]


def number_from_globals(x: Any) -> list[float]:
    return [random.random(), random.randrange(1000), float(np.random.rand()), torch.rand(()).item()]


class Noisy(kdp.SampleSource):
    """A source that draws."""

    def __len__(self) -> int:
        return 3

    def getitem_x(self, index: int, rng: np.random.Generator) -> float:
        return float(rng.random())


def indexed() -> Any:
    return kdp.from_dataset(pictures()).record_ctx()


def stream() -> Any:
    return IterableWrapper(pictures()).to_samples(fields="x y").record_ctx()


def recorded(pipe: Any, *, shuffle: bool = True) -> list[Any]:
    """Return the ctx of two epochs."""
    dealt = pipe.select("x", return_ctx=True).deal(batch_size=2, shuffle=shuffle, seed=3)
    return [[ctx for batch in dealt for _, ctx in batch] for _ in range(2)]


def values(pipe: Any, *, shuffle: bool = True) -> list[Any]:
    """Return the x of two epochs."""
    dealt = pipe.select("x").deal(batch_size=2, shuffle=shuffle, seed=3)
    return [[x for batch in dealt for (x,) in batch] for _ in range(2)]


def of_batches(mix: Callable[[Any], Any]) -> list[Any]:
    """Return the ctx of the batches of two epochs."""
    items = [(np.zeros((3, 8, 6), np.uint8), number % 3) for number in range(6)]
    source = kdp.from_dataset(items).record_ctx().select("x y", return_ctx=True)
    mixed = mix(source.deal(batch_size=3, shuffle=True, seed=3).collate_samples())
    return [[ctx for _, ctx in mixed] for _ in range(2)]


CROP = kdp.RandomResizedCrop(8)
ENTRIES: dict[str, Callable[[Path], Any]] = {
    "RandomResizedCrop": lambda _: recorded(indexed().transform("x", CROP)),
    "RandomResizedCrop, stream": lambda _: recorded(stream().transform("x", CROP), shuffle=False),
    "RandomResizedCrop, scale and ratio": lambda _: recorded(
        indexed().transform("x", kdp.RandomResizedCrop((6, 9), scale=(0.3, 0.6), ratio=(0.5, 2.0)))
    ),
    "CenterCrop": lambda _: recorded(indexed().transform("x", kdp.CenterCrop(20))),
    "Resize": lambda _: recorded(indexed().transform("x", kdp.Resize(16))),
    "HorizontalFlip": lambda _: recorded(indexed().transform("x", kdp.HorizontalFlip())),
    "ColorJitter": lambda _: recorded(
        indexed().transform("x", kdp.ColorJitter(brightness=0.4, contrast=0.3, saturation=(0.5, 2.0), hue=0.1))
    ),
    "ToTensor": lambda _: recorded(indexed().transform("x", kdp.ToTensor())),
    "Normalize": lambda _: recorded(indexed().transform("x", kdp.ToTensor(), kdp.Normalize([0.5] * 3, [0.5] * 3))),
    "two of one name": lambda _: recorded(indexed().transform("x", CROP, kdp.RandomResizedCrop(4))),
    "views": lambda _: recorded(indexed().transform("x", views=[[CROP], [kdp.HorizontalFlip(), CROP]])),
    "joint fields": lambda _: recorded(
        indexed().add_field("z", lambda sample: sample["x"]).transform("x z", CROP).transform("z", kdp.HorizontalFlip())
    ),
    "rng": lambda _: values(indexed().transform("x", number_from_rng)),
    "rng, stream": lambda _: values(stream().transform("x", number_from_rng), shuffle=False),
    "rng, after repeat_until": lambda _: values(indexed().repeat_until(repetitions=2).transform("x", number_from_rng)),
    "rng, without deal": lambda _: [x for (x,) in indexed().transform("x", number_from_rng).select("x")],
    "rng, of a field": lambda _: values(indexed().add_field("x", lambda sample, rng: float(rng.random()))),
    "rng, of a source": lambda _: values(Noisy()),
    "global generators": lambda _: values(indexed().transform("x", number_from_globals)),
    "mixup": lambda _: of_batches(lambda pipe: pipe.mixup(num_classes=3)),
    "cutmix": lambda _: of_batches(lambda pipe: pipe.cutmix(num_classes=3, p=0.7)),
}
