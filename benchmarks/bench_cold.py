"""How fast do photos come from a disk whose contents are not in memory?

Question: JPEGs of 107 KB in a folder and in tars, decoded and cropped to 224 pixels in shuffled batches of 64 by two
workers, while the page cache is empty and while it is warm: how many come per second? Baseline, in the same run,
interleaved: torch's DataLoader, which reads the same files with Pillow. Before each cold epoch, the system is asked to
forget the files (`posix_fadvise`); their names and places may stay known. Reading alone is measured, too.

Result (results/cold.txt): a cold folder is 0.97 times as fast as a warm one, and 1.9 times as fast as a cold
folder in torch's DataLoader.

    python benchmarks/bench_cold.py            # writes benchmarks/results/cold.txt
    python benchmarks/bench_cold.py --smoke    # a few photos, one round, writes nothing
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import make_corpus, photographs, tree_of
from PIL import Image
from rounds import load, machine, main, spread, turns
from torch.utils.data import DataLoader, Dataset

import kdpipes as kdp

BATCH_SIZE, SIZE, NUM_WORKERS = 64, 224, 2


class Files(Dataset[Any]):
    """The files of a folder, as torch's users read them."""

    def __init__(self, folder: Path, *, decodes: bool) -> None:
        self.items = tree_of(folder)
        self.decodes = decodes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        path, label = self.items[index]
        if not self.decodes:
            return len(Path(path).read_bytes())
        with Image.open(path) as image:
            box = kdp.RandomResizedCrop(SIZE).draw(image, np.random.default_rng(index))
            region = (box["left"], box["top"], box["left"] + box["width"], box["top"] + box["height"])
            pixels = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR, region)
        return torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1), label


def forget(folder: Path) -> None:
    """Ask the system to drop the contents of all files in a folder from its cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def chain(folder: Path, source: str, *, decodes: bool) -> Any:
    if source == "tars":
        photos = kdp.open_shards(str(folder / "shards" / "*.tar")).rename_fields(x="jpg", y="cls")
    else:
        photos = kdp.image_folder(folder / "tree")
    if decodes:
        photos = photos.decode_images("x").transform("x", kdp.RandomResizedCrop(SIZE))
    dealt = photos.select("x y").deal(batch_size=BATCH_SIZE, shuffle=True)
    return dealt.collate_samples() if decodes else dealt.map(len)


def rate(batches: Callable[[], Any], folder: Path, *, is_cold: bool) -> float:
    """Return how many photos come per second, from the first request on."""
    number = len(tree_of(folder))
    if is_cold:
        forget(folder)
    begin = time.perf_counter()
    for _ in batches():
        pass
    return number / (time.perf_counter() - begin)


def by_kdpipes(folder: Path, source: str, *, decodes: bool, is_cold: bool) -> float:
    with kdp.Loader(chain(folder, source, decodes=decodes), num_workers=NUM_WORKERS) as loader:
        return rate(lambda: loader, folder, is_cold=is_cold)


def by_torch(folder: Path, *, decodes: bool, is_cold: bool) -> float:
    loader = DataLoader(
        Files(folder, decodes=decodes), BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, prefetch_factor=2
    )
    return rate(lambda: loader, folder, is_cold=is_cold)


def report(*, is_smoke: bool) -> str:
    number, rounds = (20, 1) if is_smoke else (2_000, 5)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_corpus(folder, number=number, seed=0, photos=photographs(None), processes=NUM_WORKERS)
        ways: dict[str, Callable[[], float]] = {}
        for decodes in (True, False):
            for is_cold in (True, False):
                what = f"{'decoded' if decodes else 'read only'}, {'cold' if is_cold else 'warm'}"
                options: dict[str, Any] = {"decodes": decodes, "is_cold": is_cold}
                ways[f"kdpipes image_folder, {what}"] = partial(by_kdpipes, folder, "folder", **options)
                ways[f"kdpipes open_shards, {what}"] = partial(by_kdpipes, folder, "tars", **options)
                ways[f"torch DataLoader, files, {what}"] = partial(by_torch, folder, **options)
        found = turns(ways, rounds, warm_up=False)
    return "\n".join(
        [
            f"torch's DataLoader vs kdpipes: {number:,} JPEGs of 107 KB, photos/s, {rounds} interleaved rounds",
            machine(load(), torch=torch.__version__),
            "",
            f"{'':<48}{'median':>10}{'min':>9}{'max':>9}",
            *(f"{name:<48}{spread(values)}" for name, values in found.items()),
        ]
    )


if __name__ == "__main__":
    main("cold", __doc__, report)
