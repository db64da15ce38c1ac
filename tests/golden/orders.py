"""Epoch orders: which samples come, and in which batches, from every plan pipe, every kind of `deal`, and streams."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

LABELS = [2, 1, 1, 3, 1, 3, 1, 1, 3, 1, 0, 1, 3, 1, 0, 0, 1, 2, 1, 1]  # 3, 11, 2 and 4 of each class
CLASS_COUNTS = {label: LABELS.count(label) for label in range(4)}
SHARD_SIZES = [3, 5, 2, 6, 4]


class Birds(kdp.SampleSource):
    """Twenty samples in five shards, with a column of lengths."""

    def __len__(self) -> int:
        return len(LABELS)

    def getitem_x(self, index: int) -> int:
        return index

    def getitem_y(self, index: int) -> int:
        return LABELS[index]

    def getitem_length(self, index: int) -> int:
        return 1 + index * index % 13

    def shard_numbers(self) -> np.ndarray:
        return np.repeat(np.arange(len(SHARD_SIZES)), SHARD_SIZES)


def items(start: int = 0) -> list[tuple[int, int]]:
    return [(start + number, label) for number, label in enumerate(LABELS)]


def indexed(start: int = 0) -> Any:
    """Twenty samples of four classes; `x` counts from `start`."""
    return kdp.from_dataset(items(start), class_names=["heron", "stork", "gull", "crane"])


def stream(start: int = 0) -> Any:
    """The same samples as a stream."""
    return IterableWrapper(items(start)).to_samples(fields="x y")


def short(item: tuple[Any, ...]) -> Any:
    return item[0] if len(item) == 1 else list(item)


def order(pipe: Any, fields: str = "x", seed: int = 1) -> list[Any]:
    """Return the samples of two epochs."""
    dealt = pipe.select(fields).deal(batch_size=64, seed=seed)
    return [[short(item) for batch in dealt for item in batch] for _ in range(2)]


def batches(pipe: Any, fields: str = "x", **deal: Any) -> list[Any]:
    """Return the batches of two epochs."""
    dealt = pipe.select(fields).deal(**deal)
    return [[[short(item) for item in batch] for batch in dealt] for _ in range(2)]


def on_ranks(num_ranks: int, read: Callable[[], Any]) -> list[Any]:
    """Return what each rank reads."""
    by_rank = []
    for rank in range(num_ranks):
        with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(num_ranks)):
            by_rank.append(read())
    return by_rank


def write_shards(folder: Path) -> list[str]:
    """Write five small shards and return their paths."""
    paths = []
    for number, size in enumerate(SHARD_SIZES):
        ids = [f"{number}-{place}" for place in range(size)]
        pipe = kdp.from_ids(ids, [0] * size, load=str.encode).rename_fields(txt="x", cls="y")
        paths += kdp.write_shards(pipe, folder / f"{number}-%06d.tar", max_samples=size).urls
    return paths


def streamed(folder: Path, num_workers: int = 0, **deal: Any) -> list[Any]:
    """Return the keys of two epochs of a stream of shards, read by worker threads."""
    pipe = kdp.stream_shards(write_shards(folder)).shuffle(buffer_size=6).select("key")
    service = kdp.ThreadReadingService(num_workers) if num_workers else None
    with kdp.Loader(pipe.deal(**deal), reading_service=service) as loader:
        return [[[key.rpartition("/")[2] for (key,) in batch] for batch in loader] for _ in range(2)]


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "filter_classes, valid": lambda _: order(indexed().filter_classes(valid=["heron", "gull"])),
    "filter_classes, invalid": lambda _: order(indexed().filter_classes(invalid=[1])),
    "filter_classes, stream": lambda _: order(stream().filter_classes(invalid=[1])),
    "map_classes, drop": lambda _: order(
        indexed().map_classes({"heron": "bird", "gull": "bird"}, unmapped="drop"), "x y"
    ),
    "map_classes, keep": lambda _: order(indexed().map_classes({0: 1, 2: 0}, unmapped="keep"), "x y"),
    "map_classes, stream": lambda _: order(stream().map_classes({0: 1, 2: 0}, unmapped="keep"), "x y"),
    "oversample, multiply": lambda _: order(indexed().oversample()),
    "oversample, exact": lambda _: order(indexed().oversample(mode="exact")),
    "oversample, exact without redraw": lambda _: order(indexed().oversample(mode="exact", redraw=False)),
    "oversample, stream multiply": lambda _: order(stream().oversample(class_counts=CLASS_COUNTS)),
    "oversample, stream exact": lambda _: order(stream().oversample(mode="exact", class_counts=CLASS_COUNTS)),
    "filter_samples": lambda _: order(indexed().filter_samples(columns="x", keep=lambda x: x % 3 == 1)),
    "filter_samples, stream": lambda _: order(stream().filter_samples(columns="x", keep=lambda x: x % 3 == 1)),
    "join": lambda _: order(indexed()[4:12].join(indexed(100).rename_fields(other="x", label="y")), "x other"),
    "split, by key": lambda _: [order(part) for part in kdp.split(indexed(), train=0.7, test=0.3, seed=1)],
    "split, by class": lambda _: [order(part) for part in kdp.split(indexed(), train=0.7, test=0.3, by="y", seed=1)],
    "few_shot, rest": lambda _: order(indexed().few_shot(2, seed=3, rest=True)),
    "few_shot": lambda _: order(indexed().few_shot(2, seed=3)),
    "take_per_class, num_samples": lambda _: order(indexed().take_per_class(num_samples=3)),
    "take_per_class, share and seed": lambda _: order(indexed().take_per_class(share=0.5, seed=4)),
    "sample_weighted, by class": lambda _: order(indexed().sample_weighted({0: 1, 1: 1, 2: 5, 3: 0.5})),
    "sample_weighted, by sample": lambda _: order(indexed().sample_weighted(range(20), num_samples=12, seed=5)),
    "sample_weighted, no replacement": lambda _: order(
        indexed().sample_weighted(range(1, 21), num_samples=9, replacement=False, redraw=False)
    ),
    "take_percent": lambda _: order(indexed().take_percent(from_percent=0.33, to_percent=0.77)),
    "take_percent, rounded up": lambda _: order(
        indexed().take_percent(from_percent=0.33, to_percent=0.77, ceil_from_index=True, ceil_to_index=True)
    ),
    "permute": lambda _: order(indexed().permute(seed=6)),
    "permute, of a million": lambda _: [
        x for (x,) in kdp.from_dataset(range(10**6), "x").permute(seed=7)[:9].select("x")
    ],
    "subset": lambda _: order(indexed().subset([3, -1, 3, 0])),
    "slicing": lambda _: order(indexed()[17:2:-3]),
    "repeat_until, min_size": lambda _: order(indexed()[:7].repeat_until(min_size=16)),
    "repeat_until, stream": lambda _: order(stream().shuffle(buffer_size=5).repeat_until(repetitions=2)),
    "mix, first": lambda _: order(indexed().mix(indexed(100), weights=[2, 1], seed=8)),
    "mix, all": lambda _: order(indexed().mix([indexed(100)[:5], indexed(200)[:3]], stop="all")),
    "mix, without redraw": lambda _: order(indexed().mix(indexed(100), weights=[1, 3], redraw=False)),
    "mix, stream": lambda _: order(stream().mix(stream(100), weights=[2, 1], seed=8)),
    "concat": lambda _: order(kdp.concat(indexed()[:3], indexed(100)[:2], indexed(200)[:4])),
    "a chain of plans": lambda _: order(
        indexed().filter_classes(invalid=[3]).oversample(mode="exact").permute(seed=1)[2:].repeat_until(min_size=40)
    ),
    "stock shuffle": lambda _: order(stream().shuffle(buffer_size=5)),
    "stock shuffle before to_samples": lambda _: order(
        IterableWrapper(items()).shuffle(buffer_size=50).to_samples(fields="x y"), seed=2
    ),
    "deal, in order": lambda _: batches(indexed(), batch_size=6),
    "deal, shuffle": lambda _: batches(indexed(), batch_size=6, shuffle=True),
    "deal, shuffle with a large seed": lambda _: batches(indexed(), batch_size=6, shuffle=True, seed=2**63 - 1),
    "deal, shuffle a million": lambda _: next(
        iter(kdp.from_dataset(range(10**6), "x").select("index").deal(batch_size=9, shuffle=True, seed=7))
    ),
    "deal, shuffle an oversampled plan": lambda _: batches(
        indexed().oversample(mode="exact"), batch_size=11, shuffle=True, seed=3
    ),
    "deal, pad": lambda _: batches(indexed(), "x ordinal is_padding", batch_size=8, shuffle=True, uneven="pad"),
    "deal, drop": lambda _: batches(indexed(), batch_size=8, shuffle=True, uneven="drop"),
    "deal, 2 ranks": lambda _: on_ranks(2, lambda: batches(indexed(), global_batch_size=8, shuffle=True)),
    "deal, 3 ranks, pad": lambda _: on_ranks(3, lambda: batches(indexed(), batch_size=3, shuffle=True, uneven="pad")),
    "deal, by length": lambda _: batches(
        Birds(), "x length", shuffle=True, seed=1, batching=kdp.by_length("length", max_tokens=30)
    ),
    "deal, by length in order": lambda _: batches(Birds(), batching=kdp.by_length("length", max_tokens=30)),
    "deal, by length on 2 ranks": lambda _: on_ranks(
        2, lambda: batches(Birds(), shuffle=True, seed=2, batching=kdp.by_length("length", max_tokens=20))
    ),
    "deal, by shard": lambda _: batches(Birds(), batch_size=6, shuffle="shards", seed=1),
    "deal, by shard in windows": lambda _: batches(Birds(), batch_size=6, shuffle=kdp.by_shard(window=7), seed=1),
    "deal, by shard on 2 ranks": lambda _: on_ranks(
        2, lambda: batches(Birds(), global_batch_size=6, shuffle=kdp.by_shard(window=1), seed=4)
    ),
    "deal, stream": lambda _: batches(stream().shuffle(buffer_size=8), batch_size=6, seed=5),
    "deal, stream on 2 ranks": lambda _: on_ranks(
        2, lambda: batches(stream().shuffle(buffer_size=8), global_batch_size=6, seed=5)
    ),
    "deal, stream of shards": lambda folder: streamed(folder, batch_size=4, shuffle="shards", seed=2),
    "deal, stream of shards, 2 workers": lambda folder: streamed(folder, 2, batch_size=4, shuffle="shards", seed=2),
    "deal, stream of shards, read whole": lambda folder: streamed(
        folder, 2, batch_size=4, split="samples", shuffle="shards", seed=2
    ),
    "deal, stream of shards, 2 ranks": lambda folder: on_ranks(
        2, lambda: streamed(folder, 2, global_batch_size=4, shuffle="shards", seed=3, split=kdp.lanes(max_ranks=2))
    ),
}
