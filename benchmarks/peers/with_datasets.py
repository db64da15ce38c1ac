"""Hugging Face datasets: a column of images with a transform, in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corpus import tree_of
from datasets import Dataset, Image
from torch.utils.data import DataLoader, default_collate

from peers._images import transformed


def _transformed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"x": [transformed(image.convert("RGB")) for image in rows["x"]], "y": rows["y"]}


def _collate(samples: list[dict[str, Any]]) -> Any:
    return default_collate([(sample["x"], sample["y"]) for sample in samples])


@contextmanager
def with_transform(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    paths, labels = zip(*tree_of(folder), strict=True)
    dataset = Dataset.from_dict({"x": paths, "y": labels}).cast_column("x", Image()).with_transform(_transformed)
    yield DataLoader(
        dataset, batch_size, shuffle=True, num_workers=workers, persistent_workers=True, collate_fn=_collate
    )
