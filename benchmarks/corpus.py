"""JPEGs that cost what ImageNet's cost, made of the few photographs at hand, in a folder that is kept.

ImageNet's training images are on average about 470x430 pixels and 110 KB, which is 0.53 bytes a pixel, with chroma
halved both ways (4:2:0). What a JPEG costs to decode goes with its pixels and its bytes, so both are met: each image is
a random region of a photograph, mirrored or not, lighter or darker, resized to a random size around 470x430, and saved
in the quality whose bytes per pixel come closest to a random number around 0.53. What is not met: the photographs are
few, so regions overlap, and many are enlarged; such images are smooth, and are saved in a higher quality than a camera
would have chosen. No two images have the same bytes. All is drawn from a seed; another release of Pillow may encode the
same pixels to other bytes.

The folder has the images as `tree/CLASS/NUMBER.jpg` and as webdataset tars, with their index, as
`shards/corpus-SHARD.tar`; a peer that reads another format adds a folder of its own.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import webdataset as wds
from PIL import Image

import kdpipes as kdp

NUM_CLASSES = 100
NUM_SHARDS = 16
SIZE = (470, 430)
BYTES_PER_PIXEL = 0.53
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def photographs(folder: str | Path | None) -> list[Path]:
    """Return the paths of the photographs in a folder, or of those that installed packages ship."""
    if folder is not None:
        found = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not found:
            raise FileNotFoundError(f"There is no photograph ({', '.join(sorted(SUFFIXES))}) in {str(folder)!r}.")
        return found
    return _shipped()


def _shipped() -> list[Path]:
    # Not the smooth ones (retina.jpg, rocket.jpg): in no quality have they as many bytes a pixel as is asked for; and
    # not kdpipes' own, which are small.
    names = ["astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png"]
    names += ["motorcycle_left.png", "motorcycle_right.png"]
    found = [path for name in names if (path := _folder_of("skimage") / "data" / name).exists()]
    found += sorted((_folder_of("sklearn") / "datasets" / "images").glob("*.jpg"))
    if not found:
        raise FileNotFoundError("No package here ships photographs. Install scikit-image, or give `--photos DIR`.")
    return found


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else Path("/nonexistent")


@lru_cache(maxsize=16)
def _photo(path: Path) -> Image.Image:
    with Image.open(path) as photo:
        return photo.convert("RGB")


def _region(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    size = tuple(round(length * rng.uniform(0.8, 1.2)) for length in SIZE)
    largest = min(photo.width / size[0], photo.height / size[1])
    width, height = (round(length * largest * rng.uniform(0.6, 1.0)) for length in size)
    left, top = int(rng.integers(photo.width - width + 1)), int(rng.integers(photo.height - height + 1))
    region = photo.crop((left, top, left + width, top + height)).resize(size, Image.Resampling.LANCZOS)
    if rng.random() < 0.5:
        region = region.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    brightness = rng.uniform(0.8, 1.2)
    return region.point([min(255, round(level * brightness)) for level in range(256)] * 3)


def _encoded(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


def _of_size(image: Image.Image, num_bytes: float) -> bytes:
    """Return the JPEG whose size comes closest, among qualities from 20 to 100."""
    low, high, tried = 20, 100, []
    while low <= high:
        quality = (low + high) // 2
        tried.append(_encoded(image, quality))
        low, high = (quality + 1, high) if len(tried[-1]) < num_bytes else (low, quality - 1)
    return min(tried, key=lambda content: abs(len(content) - num_bytes))


def _make(index: int, *, seed: int, photos: list[Path]) -> tuple[bytes, int]:
    """Return the JPEG of an image, and how many pixels it has."""
    rng = np.random.default_rng([seed, index])
    image = _region(_photo(photos[index % len(photos)]), rng)
    num_pixels = image.width * image.height
    return _of_size(image, num_pixels * BYTES_PER_PIXEL * rng.uniform(0.8, 1.2)), num_pixels


def _write(folder: Path, made: list[tuple[bytes, int]]) -> None:
    for index, (content, _) in enumerate(made):
        path = folder / "tree" / f"{index % NUM_CLASSES:03}" / f"{index:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "shards").mkdir()
    for shard in range(NUM_SHARDS):
        with wds.TarWriter(str(folder / "shards" / f"corpus-{shard:03}.tar")) as writer:
            for index in range(shard, len(made), NUM_SHARDS):
                writer.write({"__key__": f"{index:06}", "jpg": made[index][0], "cls": str(index % NUM_CLASSES)})
    len(kdp.open_shards(shard_urls(folder)))  # writes the index


def _described(number: int, seed: int, photos: list[Path]) -> dict[str, Any]:
    sizes = {path.name: path.stat().st_size for path in photos}
    return {"number": number, "seed": seed, "photos": sizes, "pillow": PIL.__version__}


def make_corpus(folder: Path, *, number: int, seed: int, photos: list[Path], processes: int) -> dict[str, Any]:
    """Make the corpus unless it is there, and return what it is: numbers, and means over its images."""
    wanted = _described(number, seed, photos)
    note = folder / "corpus.json"
    if note.exists() and (told := json.loads(note.read_text())).items() >= wanted.items():
        return dict(told)
    _clear(folder)
    with ProcessPoolExecutor(processes) as pool:
        made = list(pool.map(partial(_make, seed=seed, photos=photos), range(number), chunksize=8))
    _write(folder, made)
    num_bytes, num_pixels = (sum(column) for column in zip(*((len(jpeg), area) for jpeg, area in made), strict=True))
    told = {
        **wanted,
        "distinct": len({content for content, _ in made}),
        "mean_bytes": num_bytes / number,
        "mean_pixels": num_pixels / number,
        "bytes_per_pixel": num_bytes / num_pixels,
    }
    note.write_text(json.dumps(told, indent=1) + "\n")
    return told


def _clear(folder: Path) -> None:
    """Empty a folder that holds a corpus or nothing: anybody else's files are not ours to remove."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "corpus.begun").exists():
        raise FileExistsError(f"{str(folder)!r} holds something else. Give `--corpus` a folder of its own.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "corpus.begun").touch()


def tree_of(folder: Path) -> list[tuple[str, int]]:
    """Return path and class of every image."""
    return [(str(path), int(path.parent.name)) for path in sorted((folder / "tree").rglob("*.jpg"))]


def shard_urls(folder: Path) -> str:
    """Return the brace range of the shards."""
    return f"{folder}/shards/corpus-{{000..{NUM_SHARDS - 1:03}}}.tar"


def in_format(folder: Path, name: str, write: Callable[[Path], Any]) -> Path:
    """Return the folder of a peer's format, which `write` makes if it is not there whole."""
    target = folder / name
    if not target.exists():
        begun = folder / f"{name}.begun"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        write(begun)
        begun.rename(target)
    return target
