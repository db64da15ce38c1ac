"""Chains as users write them: mypy checks them in strict mode (`[tool.mypy] files`), `tests/test_names.py` runs them.

An annotated assignment states a type that mypy must agree with; a `type: ignore` states a mistake that it must find.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kdpipes as kdp
from kdpipes.cache.store import CacheStats
from kdpipes.demo import PHOTO_CLASSES
from kdpipes.look.peek import Peek
from kdpipes.write.records import RecordsResult

if TYPE_CHECKING:
    from kdpipes._fluent import IterChain, MapChain


def hero(root: str, num_workers: int) -> int:
    """The chain of the README; returns its number of batches."""
    source: kdp.MapPipe = kdp.image_folder(root)
    plan: MapChain = source.filter_classes(valid=["cat", "rocket"]).oversample().repeat_until(min_size=70)
    work: MapChain = (
        plan.decode_images("x")
        .record_ctx()
        .transform("x", kdp.RandomResizedCrop(16), kdp.HorizontalFlip())
        .select("x y", return_ctx=True)
    )
    pipe: IterChain = work.deal(batch_size=32, shuffle=True, seed=0).collate_samples()
    num_batches = 0
    with kdp.Loader(pipe, num_workers=num_workers) as loader:
        for (x, y), ctx in loader:
            assert x.shape[1:] == (3, 16, 16)
            assert len(x) == len(y) == len(ctx["random_resized_crop"]["top"])
            num_batches += 1
    return num_batches


def streamed(urls: str) -> int:
    """A stream front to back; returns the number of samples of two classes."""
    source: kdp.IterPipe = kdp.stream_shards(urls, class_names=PHOTO_CLASSES)
    named: IterChain = source.rename_fields(x="jpg", y="cls").filter_classes(valid=["cat", "rocket"])
    batches: IterChain = named.select("key y").deal(batch_size=10, uneven="keep")
    items: Iterator[Any] = iter(batches)
    return sum(len(batch) for batch in items)


def shards(urls: str) -> tuple[str, int]:
    """Random access; returns the class of a sample and the length of a slice."""
    source = kdp.open_shards(urls, class_names=PHOTO_CLASSES)
    pipe: MapChain = source.rename_fields(x="jpg", y="cls").filter_classes(valid=["cat"]).subset([4, 0, 4])
    part: kdp.MapPipe = source[5:15:2]
    labels: NDArray[Any] = part.column("cls")
    names: tuple[str, ...] | None = source.class_names()
    assert names is not None
    sample: kdp.Sample = pipe[0]
    return names[sample["y"]], len(labels)


def recorded(photos: str, folder: str) -> tuple[int, list[Any]]:
    """Photos into records and back; returns the number of samples and a batch."""
    result: RecordsResult = kdp.write_records(kdp.image_folder(photos), folder, num_parts=2, num_workers=2)
    records = kdp.open_records(folder, verify=False)
    pipe: IterChain = records.filter_classes(valid=["cat"]).select("key y").deal(batch_size=2, shuffle="shards")
    return result.num_samples, next(iter(pipe))


class Squares(kdp.SampleSource):
    """A source of one's own."""

    def __len__(self) -> int:
        return 4

    def getitem_x(self, index: int) -> int:
        return index * index

    def getitem_y(self, index: int, ctx: dict[str, Any] | None = None) -> int:
        return index % 2


def cached(folder: str, cache: str) -> tuple[int, int]:
    """Caches before and behind decoding; returns the entries on disk, and the samples that open without a source."""
    on_disk = kdp.image_folder(folder)[:4].cache_on_disk(cache, layout="files")
    stats: CacheStats = on_disk.warm_up(progress=False)
    pipe: MapChain = on_disk.decode_images("x").cache_in_memory(max_bytes=1 << 24).select("x y")
    assert len(pipe[0]) == 2
    return stats.entries, len(kdp.open_cache(cache))


def jitter(x: int, rng: np.random.Generator) -> int:
    return x + int(rng.integers(1))


def own_source() -> list[Any]:
    """A source and a transform of one's own; returns the items."""
    pipe: MapChain = Squares().filter_classes(valid=[1]).transform("x", jitter).select("x y")
    first: Peek = pipe.peek(2)
    return first.items


def mistakes(indexed: MapChain, stream: IterChain) -> None:
    """Never called: what mypy must find wrong."""
    indexed.filter_classes(vaild=["cat"])  # type: ignore[call-arg]
    indexed.filter_classes(valid=0.5)  # type: ignore[arg-type]
    indexed.oversample(mode="exactly")  # type: ignore[arg-type]
    indexed.oversample(class_counts={0: 1})  # type: ignore[call-arg]
    indexed.repeat_until(10)  # type: ignore[call-arg]
    indexed.select(["x", "y"])  # type: ignore[arg-type]
    indexed.select("x", as_dict="yes")  # type: ignore[arg-type]
    indexed.select("x", False, True)  # type: ignore[call-arg]
    indexed.transform("x", [kdp.HorizontalFlip()])  # type: ignore[arg-type]
    indexed.transform("x", kdp.Resize(8, interpolation="lanczos"))  # type: ignore[arg-type]
    stream.mixup(num_classes="3")  # type: ignore[arg-type]
    stream.cutmix(1.0, 3)  # type: ignore[call-arg]
    indexed.cache_in_memory(keep="sometimes")  # type: ignore[arg-type]
    indexed.cache_on_disk()  # type: ignore[call-arg]
    stream.cache_in_redis("redis://localhost", ttl="1h")  # type: ignore[call-arg]
    indexed.deal(batch_size=64, uneven="ignore")  # type: ignore[arg-type]
    stream.oversample(class_counts=[4, 2])  # type: ignore[arg-type]
    indexed.peek(count=3)  # type: ignore[call-arg]
    wrong: MapChain = indexed.deal(batch_size=64)  # type: ignore[assignment]
    del wrong
