"""A demonstration on the included photos: balance, augment and batch an image folder and tar shards."""

from __future__ import annotations

import shutil
import tarfile
import time
from collections import Counter
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from webdataset import TarWriter

from kdpipes.core.errors import check_count
from kdpipes.core.map_pipe import MapPipe
from kdpipes.loader.loader import Loader
from kdpipes.look.pictures import image_grid
from kdpipes.plan.class_counts import class_counts
from kdpipes.sources.image_folder import ImageFolderMapDataPipe
from kdpipes.sources.open_shards import ShardReaderMapDataPipe
from kdpipes.work.transforms import HorizontalFlip, RandomResizedCrop

__all__ = ["PHOTO_CLASSES", "run_demo", "write_photo_folder", "write_photo_shards"]

PHOTO_CLASSES = ("brick", "cat", "coffee", "galaxies", "grass", "gravel", "retina", "rocket")
"""The names of the classes 0, 1, ... of the included photos."""

_KEPT = ("cat", "coffee", "galaxies", "rocket")
_NUM_SHARDS = 4


def _photos() -> list[tuple[str, bytes, int]]:
    """Return the key, JPEG bytes and class of each included photo."""
    with as_file(files("kdpipes") / "data" / "photos.tar") as path, tarfile.open(path) as tar:
        contents = {info.name: tar.extractfile(info).read() for info in tar.getmembers()}  # type: ignore[union-attr]
    keys = sorted(Path(name).stem for name in contents if name.endswith(".jpg"))
    return [(key, contents[f"{key}.jpg"], int(contents[f"{key}.cls"])) for key in keys]


def write_photo_folder(root: str | Path) -> Path:
    """Write the included photos as `root/CLASS/KEY.jpg`, and return `root`.

    They are 160 crops of freely licensed photographs (CC0 or public domain) in 8 classes of unequal size.
    """
    folder = Path(root)
    for key, content, label in _photos():
        path = folder / PHOTO_CLASSES[label] / f"{key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:  # caches also identify files by their times
            path.write_bytes(content)
    return folder


def write_photo_shards(root: str | Path, *, num_shards: int = _NUM_SHARDS) -> str:
    """Write the included photos as webdataset tars in `root`, and return their brace range.

    Args:
        root: The folder, which is created if it does not exist.
        num_shards: The number of tars, from 1 to 160. Photo n goes to shard `n % num_shards`.
    """
    photos = _photos()
    check_count("num_shards", num_shards)
    Path(root).mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        with TarWriter(str(Path(root) / f"photos-{shard:03}.tar")) as writer:
            for key, content, label in photos[shard::num_shards]:
                writer.write({"__key__": key, "jpg": content, "cls": str(label)})
    return f"{root}/photos-{{000..{num_shards - 1:03}}}.tar"


def _chain(source: MapPipe, *, size: int) -> Any:
    return (
        source.filter_classes(valid=_KEPT)
        .oversample(mode="exact")
        .repeat_until(min_size=256)
        .decode_images("x")
        .record_ctx()
        .add_field("original", lambda sample: sample["x"])
        .transform("x", RandomResizedCrop(size, scale=(0.2, 1.0)), HorizontalFlip())
    )


def _run_epochs(chain: Any, *, num_workers: int, num_epochs: int, name: str) -> Counter[int]:
    from tqdm.auto import tqdm  # imported here because it warns in notebooks without ipywidgets

    pipe = chain.select("x y", return_ctx=True).deal(batch_size=32, shuffle=True, seed=0).collate_samples()
    seen: Counter[int] = Counter()
    with Loader(pipe, num_workers=num_workers) as loader:
        for epoch in range(num_epochs):
            begin = time.perf_counter()
            for (x, y), _ in tqdm(loader, desc=f"  {name}, epoch {epoch}", unit="batch"):
                assert x.shape[1] == 3
                seen.update(y.tolist())
            took = time.perf_counter() - begin
            note = ", their start included" if epoch == 0 and num_workers else ""
            print(f"  {len(chain) / took:,.0f} samples/s with {num_workers} workers{note}")
    return seen


def _write_grid(chain: Any, path: Path) -> None:
    batch = next(iter(chain.select("original x y", return_ctx=True).deal(batch_size=16, shuffle=True, seed=0)))
    tiles, captions = [], []
    for (original, x, y), ctx in batch:
        crop = ctx["random_resized_crop"]
        tiles += [original, x]
        flipped = " flipped" if ctx["horizontal_flip"]["flipped"] else ""
        captions += [PHOTO_CLASSES[y], f"{crop['width']}x{crop['height']}+{crop['left']}+{crop['top']}{flipped}"]
    image_grid(tiles, captions, num_columns=8).save(path)


def run_demo(output: str | Path, *, num_workers: int = 2, num_epochs: int = 2, size: int = 96) -> Path:
    """Run a chain on the included photos, and return the path of a picture of one augmented batch.

    The photos are written as an image folder and as tar shards. The same chain runs on both: class filter,
    oversampling, repetition, recorded random crops, shuffled batches.

    Args:
        output: The folder for the photos and the picture. Files of an earlier run are replaced.
        num_workers: The number of worker processes.
        num_epochs: The number of epochs.
        size: The height and width of the crops in pixels.
    """
    check_count("num_epochs", num_epochs)
    root = Path(output)
    for name in ("folder", "shards"):
        shutil.rmtree(root / name, ignore_errors=True)
    folder = ImageFolderMapDataPipe(write_photo_folder(root / "folder"))
    urls = write_photo_shards(root / "shards")
    shards: Any = ShardReaderMapDataPipe(urls, class_names=PHOTO_CLASSES)
    sources = {"image folder": folder, "tar shards": shards.rename_fields(x="jpg", y="cls")}
    for name, source in sources.items():
        chain = _chain(source, size=size)
        print(f"{name}: {len(source)} photos -> {len(chain)} samples an epoch")
        labels = chain.column("y")
        before, after = class_counts(source.column("y")), class_counts(labels)
        print(f"  {'class':<10}{'before':>8}{'after':>8}")
        for number, label in enumerate(PHOTO_CLASSES):
            print(f"  {label:<10}{before[number]:>8}{after.get(number, 0) or '-':>8}")
        seen = _run_epochs(chain, num_workers=num_workers, num_epochs=num_epochs, name=name)
        assert seen == Counter(np.tile(labels, num_epochs).tolist()), "every sample comes once an epoch"
    picture = root / "batch.png"
    _write_grid(_chain(folder, size=size), picture)
    print(f"One augmented batch, each photo and the result, with the recorded crop: {picture}")
    return picture
