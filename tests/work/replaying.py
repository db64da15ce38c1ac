"""Chains to replay, for tests, and the comparison of every byte of what was delivered with what is made again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

NUMBERS = [(n, n % 2) for n in range(6)]


def indexed(items: Any = NUMBERS) -> Any:
    return kdp.from_dataset(list(items))


def stream(items: Any = NUMBERS) -> Any:
    return IterableWrapper(list(items)).to_samples(fields="x y")


both_flavours = pytest.mark.parametrize("make", [indexed, stream])


def recorded_runs(photo_folder: Path, *transforms: Any) -> list[Any]:
    """Return two epochs of batches of photos with their ctx, made without workers and by two of them."""
    photos: Any = kdp.image_folder(photo_folder)[:24]
    work = photos.decode_images().record_ctx().transform("x", *transforms)
    pipe = work.select("x", return_ctx=True).deal(batch_size=12, shuffle=True, seed=1).collate_samples()
    runs = []
    for num_workers in (0, 2):
        with kdp.Loader(pipe, num_workers=num_workers) as loader:
            runs.append([list(loader) for _ in range(2)])
    return runs


def told(value: Any) -> Any:
    """Return every byte, type and shape of a value, to compare."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Image.Image):
        return "image", value.mode, value.size, value.tobytes()
    if isinstance(value, dict):
        return {name: told(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [told(part) for part in value]
    return type(value).__name__, value


def travelled(ctx: Any) -> Any:
    """Return a ctx as a file of JSON gives it back."""
    return json.loads(json.dumps(ctx))


def delivered(batches: Any, epochs: int = 2) -> list[Any]:
    return [item for _ in range(epochs) for batch in batches for item in batch]


def assert_replayed(pipe: Any, items: list[Any]) -> None:
    """Replay items `((key, ...), ctx)`, and compare them with what was delivered."""
    assert items
    for (key, *rest), ctx in items:
        before = told(ctx)
        again = kdp.replay(key, travelled(ctx), pipe)
        assert told(again) == told(((key, *rest), ctx)), (key, ctx)
        assert told(ctx) == before


def assert_replayed_or_rejected(item: Any, replay: Callable[[], Any]) -> None:
    """Accept the very item or an error of the chain's, and nothing in between."""
    try:
        again = replay()
    except kdp.ChainError:
        return
    assert told(again) == told(item)


class Shift:
    """Adds a recorded number."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"by": int(rng.integers(1, 1 << 40))}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        return value + params["by"]


def plus_random(x: float) -> float:
    return x + random.random()


def plus_rng(x: float, rng: np.random.Generator) -> float:
    return x + rng.random()


@kdp.sample_pipe("replay_test_read_x")
def read_x(sample: kdp.Sample) -> kdp.Sample:
    """A user's pipe that reads a field as the sample passes."""
    sample["x"]
    return sample


@kdp.sample_pipe("replay_test_read_y")
def read_y(sample: kdp.Sample) -> kdp.Sample:
    """Likewise."""
    sample["y"]
    return sample
