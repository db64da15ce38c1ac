"""Build ``kdpipes/data/photos.tar``, the small image classification set that the demo trains on.

The archive is a plain webdataset tar of 160 JPEG photographs in 8 classes, imbalanced on purpose (6 to 40 per
class). One class is the subject of one photograph that the scikit-image wheel ships in its package folder; each
image is a different seeded crop of it. Only photographs that scikit-image states to be CC0 or in the public domain
are used; ``kdpipes/data/README.md`` lists source, author and licence of each.

Run it from the repository root, with scikit-image and Pillow installed::

    python tools/build_photos.py

The seed is fixed and the tar headers carry no time and no user, so the same releases of scikit-image and Pillow
give the same bytes. Another Pillow (another JPEG encoder) may give other bytes for the same crops.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import random
import tarfile
from pathlib import Path
from typing import NamedTuple

import skimage
from PIL import Image

SEED = 20240
JPEG_QUALITY = 80
LONGEST_SIDE = (80, 128)
ASPECT_RATIO = (0.67, 1.5)
DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "kdpipes" / "data" / "photos.tar"

CLASS_NAMES = ("brick", "cat", "coffee", "galaxies", "grass", "gravel", "retina", "rocket")


class Source(NamedTuple):
    """One photograph: its file name, how many crops to take and where.

    ``crop_side`` bounds the longest side of a crop in source pixels, and the center of a crop is drawn from
    ``focus`` (left, upper, right, lower), so that the subject stays in the picture.
    """

    file: str
    count: int
    crop_side: tuple[int, int]
    focus: tuple[int, int, int, int]


class Sample(NamedTuple):
    """An encoded image and its integer label."""

    jpeg: bytes
    label: int


SOURCES: dict[str, Source] = {
    "brick": Source("brick.png", 24, (160, 360), (0, 0, 512, 512)),
    "cat": Source("chelsea.png", 40, (150, 330), (120, 70, 330, 230)),
    "coffee": Source("coffee.png", 30, (190, 420), (230, 90, 430, 270)),
    "galaxies": Source("hubble_deep_field.jpg", 12, (160, 420), (0, 0, 1000, 872)),
    "grass": Source("grass.png", 8, (160, 360), (0, 0, 512, 512)),
    "gravel": Source("gravel.png", 6, (160, 360), (0, 0, 512, 512)),
    "retina": Source("retina.jpg", 16, (450, 1000), (350, 350, 1060, 1060)),
    "rocket": Source("rocket.jpg", 24, (170, 400), (300, 170, 350, 330)),
}


def draw_crop(rng: random.Random, source: Source, width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a crop box (left, upper, right, lower) that lies inside a ``width`` by ``height`` photograph."""
    side = rng.uniform(*source.crop_side)
    ratio = math.exp(rng.uniform(math.log(ASPECT_RATIO[0]), math.log(ASPECT_RATIO[1])))
    crop_width = min(width, round(side * min(1.0, ratio)))
    crop_height = min(height, round(side * min(1.0, 1.0 / ratio)))
    left, upper, right, lower = source.focus
    x = round(rng.uniform(left, right) - crop_width / 2)
    y = round(rng.uniform(upper, lower) - crop_height / 2)
    x = max(0, min(x, width - crop_width))
    y = max(0, min(y, height - crop_height))
    return x, y, x + crop_width, y + crop_height


def encode_crop(photo: Image.Image, box: tuple[int, int, int, int], longest_side: int) -> bytes:
    """Cut ``box`` out of ``photo``, shrink it to ``longest_side`` and return it as a JPEG file."""
    crop = photo.crop(box)
    scale = longest_side / max(crop.size)
    size = (max(1, round(crop.width * scale)), max(1, round(crop.height * scale)))
    buffer = io.BytesIO()
    crop.resize(size, Image.Resampling.LANCZOS).save(buffer, format="JPEG", quality=JPEG_QUALITY, optimize=True)
    return buffer.getvalue()


def class_samples(name: str, folder: Path) -> list[Sample]:
    """Return all samples of one class, cut from the photograph of that class in ``folder``."""
    source = SOURCES[name]
    # A generator of its own per class: changing one class leaves the crops of the others as they are.
    rng = random.Random(f"{SEED}/{name}")
    with Image.open(folder / source.file) as opened:
        photo = opened.convert("RGB")
    samples = []
    for _ in range(source.count):
        box = draw_crop(rng, source, photo.width, photo.height)
        samples.append(Sample(encode_crop(photo, box, rng.randint(*LONGEST_SIDE)), CLASS_NAMES.index(name)))
    return samples


def shuffled_samples(folder: Path) -> list[Sample]:
    """Return the samples of all classes in a seeded shuffled order."""
    samples = [sample for name in CLASS_NAMES for sample in class_samples(name, folder)]
    random.Random(f"{SEED}/order").shuffle(samples)
    return samples


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append one file to ``archive`` under a header that is the same on every machine."""
    # A fresh TarInfo has mtime, uid and gid 0 and no user or group name.
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o644
    archive.addfile(info, io.BytesIO(content))


def write_archive(samples: list[Sample], path: Path) -> None:
    """Write ``samples`` to ``path`` as a webdataset tar: for each a ``.jpg`` member, then a ``.cls`` member."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for index, sample in enumerate(samples):
            add_member(archive, f"{index:06d}.jpg", sample.jpeg)
            add_member(archive, f"{index:06d}.cls", str(sample.label).encode("ascii"))


def main() -> None:
    """Build the archive and print what is in it."""
    parser = argparse.ArgumentParser(description="Build the demo's webdataset tar of freely licensed photographs.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="tar file to write (default: %(default)s)")
    output: Path = parser.parse_args().output
    samples = shuffled_samples(Path(skimage.__file__).parent / "data")
    write_archive(samples, output)
    for label, name in enumerate(CLASS_NAMES):
        print(f"{label} {name}: {sum(sample.label == label for sample in samples)}")
    content = output.read_bytes()
    print(f"{output}: {len(samples)} samples, {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
