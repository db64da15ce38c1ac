"""LitData's StreamingDataLoader over its optimized chunks, which lie here.

The JPEGs are stored as bytes: LitData's own type for images decodes them with torchvision, which is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import litdata
from corpus import in_format, tree_of

from peers._images import by_pillow


def _sample(item: tuple[str, int]) -> dict[str, Any]:
    return {"x": Path(item[0]).read_bytes(), "y": item[1]}


class Photos(litdata.StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, index: Any) -> tuple[Any, int]:
        sample = super().__getitem__(index)
        return by_pillow(sample["x"]), sample["y"]


@contextmanager
def streaming(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    def write(target: Path) -> None:
        litdata.optimize(
            _sample, inputs=tree_of(folder), output_dir=str(target), chunk_bytes="16MB", num_workers=1, mode="overwrite"
        )

    photos = Photos(str(in_format(folder, "litdata", write)), shuffle=True)
    yield litdata.StreamingDataLoader(photos, batch_size=batch_size, num_workers=workers, persistent_workers=True)
