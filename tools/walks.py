"""Six walks through the package: the modules in which a sample runs Python, and how many calls it takes.

Calls are counted in all processes and threads. An epoch of few batches is subtracted from one of many, so that the work
that is done once does not count. Waiting takes a varying number of calls: the least of several runs counts.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PHOTOS = 160
RUNS = 3
FEW, MANY = 2, 6  # repetitions of the photos


class Walk(NamedTuple):
    """A chain of which an epoch may have any number of batches.

    Args:
        chain: Returns the chain, for a number of photo folders' worth of samples.
        batch_size: Samples in a batch.
        num_workers: Worker processes.
    """

    chain: Callable[[int], Any]
    batch_size: int
    num_workers: int


class CallCounter:
    """Counts calls of Python functions by module, in this process and those that it forks."""

    def __init__(self, root: Path) -> None:
        self._indices = {str(path): index for index, path in enumerate(sorted(root.rglob("*.py")))}
        size = 8 * 2 * len(self._indices)
        # Processes share the memory; this one and its workers write to a row each, so that no count is lost.
        self._memory = mmap.mmap(-1, size)
        self.counts: NDArray[np.int64] = np.frombuffer(self._memory, np.int64).reshape(2, -1)
        self._owner = os.getpid()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; a profile function."""
        if event == "call":
            index = self._indices.get(frame.f_code.co_filename)
            if index is not None:
                self.counts[int(os.getpid() != self._owner), index] += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count calls in this thread, in threads started meanwhile, and in forked processes."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def calls_of_an_epoch(walk: Walk, repetitions: int, root: Path) -> NDArray[np.int64]:
    """Return the calls of the second epoch of a loader, by module."""
    import kdpipes as kdp

    counter = CallCounter(root)
    with counter.running(), kdp.Loader(walk.chain(repetitions), num_workers=walk.num_workers) as loader:
        list(loader)
        before = counter.counts.sum(axis=0)
        list(loader)
        return np.asarray(counter.counts.sum(axis=0) - before)


def figures_of(walk: Walk, root: Path) -> tuple[int, float]:
    """Return the number of modules, and the calls for each sample."""
    few = np.min([calls_of_an_epoch(walk, FEW, root) for _ in range(RUNS)], axis=0)
    many = np.min([calls_of_an_epoch(walk, MANY, root) for _ in range(RUNS)], axis=0)
    calls = many - few
    in_every_batch = calls * walk.batch_size >= (MANY - FEW) * PHOTOS  # not only where a process waited long
    return int(in_every_batch.sum()), float(calls.sum() / ((MANY - FEW) * PHOTOS))


def walks(folder: Path) -> dict[str, Walk]:
    """Return the walks by name."""
    import kdpipes as kdp
    from kdpipes.demo import PHOTO_CLASSES, write_photo_folder, write_photo_shards

    photos = write_photo_folder(folder / "photos")
    copies = [write_photo_shards(folder / f"shards-{copy}") for copy in range(MANY)]

    def main_job(repetitions: int, batch_size: int) -> Any:
        chain = kdp.image_folder(photos).repeat_until(repetitions=repetitions).decode_images("x")
        chain = chain.transform("x", kdp.RandomResizedCrop(64), kdp.HorizontalFlip()).select("x y")
        return chain.deal(batch_size=batch_size, shuffle=True, seed=0).collate_samples()

    def stream(repetitions: int) -> Any:
        chain = kdp.stream_shards(copies[:repetitions], class_names=PHOTO_CLASSES).rename_fields(x="jpg", y="cls")
        chain = chain.decode_images("x").transform("x", kdp.Resize((64, 64))).select("x y")
        return chain.deal(batch_size=10).collate_samples()

    def indexed(repetitions: int) -> Any:
        chain = kdp.open_shards(copies[0], class_names=PHOTO_CLASSES).rename_fields(x="jpg", y="cls")
        chain = chain.repeat_until(repetitions=repetitions)
        chain = chain.decode_images("x").transform("x", kdp.Resize((64, 64))).select("x y")
        return chain.deal(batch_size=32).collate_samples()

    def cached(repetitions: int) -> Any:
        chain = kdp.image_folder(photos).repeat_until(repetitions=repetitions).decode_images("x")
        chain = chain.transform("x", kdp.Resize((64, 64))).cache_in_memory().select("x y")
        return chain.deal(batch_size=32).collate_samples()

    def numbers(repetitions: int) -> Any:
        pairs = [(float(number), number % 10) for number in range(PHOTOS * repetitions)]
        return kdp.from_dataset(pairs).select("x y").deal(batch_size=32).collate_samples()

    return {
        "main job, batches of 4": Walk(lambda repetitions: main_job(repetitions, 4), 4, 1),
        "main job, batches of 64": Walk(lambda repetitions: main_job(repetitions, 64), 64, 1),
        "stream in two lanes": Walk(stream, 10, 2),
        "open_shards": Walk(indexed, 32, 1),
        "cache hit": Walk(cached, 32, 1),
        "numbers": Walk(numbers, 32, 1),
    }


def figures(root: Path) -> dict[str, float]:
    """Return modules and calls of each walk."""
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, walk in walks(Path(folder)).items():
            modules, calls = figures_of(walk, root)
            numbers[f"walk: {name}: modules"] = modules
            numbers[f"walk: {name}: calls per sample"] = round(calls, 1)
            numbers[f"walk: {name}: calls per batch"] = round(calls * walk.batch_size)
    return numbers
