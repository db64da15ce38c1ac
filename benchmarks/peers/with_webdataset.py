"""webdataset's WebLoader over tar shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import webdataset as wds
from corpus import NUM_SHARDS, shard_urls
from torch.utils.data import default_collate

from peers._images import transformed


@contextmanager
def web_loader(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    dataset = (
        wds.WebDataset(shard_urls(folder), shardshuffle=NUM_SHARDS)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transformed, int)
        .batched(batch_size, collation_fn=default_collate)
    )
    yield wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
