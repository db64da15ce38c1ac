"""What does a random crop of a JPEG cost by each decoder that there is?

Question: JPEGs of ImageNet's size and weight (corpus.py): milliseconds of the processor for the pixels of a region
(RandomResizedCrop's, scale 0.08 to 1), and for those resized to 224x224 with antialiasing, by one thread; and how far
do the pixels of the region differ from Pillow's? Baseline, in the same run, interleaved: Pillow, which resizes by
itself; after the others, torch resizes. kdpipes uses "libjpeg-turbo 3" where it is there, else "simplejpeg".

Run it where what is to be measured is installed: the environment of `make bench`, with `pip install pyvips-binary
pyvips nvidia-nvimgcodec-cu12`. The corpus is that of bench_throughput, or is made of photographs (`--photos DIR`).
`--also PYTHON` measures the Pillow of another environment as well: pillow-simd takes Pillow's place in one of its own.
A library that is not installed, or does not work here, is a row that says why.

Result (results/decoders.txt): libjpeg-turbo 3 and torch take half of Pillow's time, with the same pixels; pillow-simd
seven tenths.

    python benchmarks/bench_decoders.py --corpus DIR --also .venv-simd/bin/python     # writes results/decoders.txt
    python benchmarks/bench_decoders.py --smoke    # a few images, one round, writes nothing
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

Region = tuple[int, int, int, int]  # left, top, right, bottom
Cut = Callable[[bytes, Region], Any]
SIZE, BASELINE = 224, "Pillow"


class Contender(NamedTuple):
    """A decoder: what it is called, how it gives the pixels of a region, and how it gives them resized."""

    name: str
    cut: Cut
    resized: Cut


def by_pillow(content: bytes, region: Region) -> Any:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB").crop(region))


def resized_by_pillow(content: bytes, region: Region) -> Any:
    image = Image.open(io.BytesIO(content)).convert("RGB")
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=region))


def with_torch(cut: Cut) -> Cut:
    import torch

    torch.set_num_threads(1)

    def resized(content: bytes, region: Region) -> Any:
        pixels = torch.from_numpy(np.ascontiguousarray(cut(content, region))).permute(2, 0, 1)[None]
        return torch.nn.functional.interpolate(pixels, (SIZE, SIZE), mode="bilinear", antialias=True)

    return resized


def kdpipes_decoder(name: str) -> Cut:
    from kdpipes.work.jpeg import Box, find_decoders

    if name not in find_decoders():
        raise ImportError(f"no {name} that fits")
    decoder = find_decoders()[name]

    def cut(content: bytes, region: Region) -> Any:
        left, top, right, bottom = region
        return decoder.open(content).region(Box(top, left, bottom - top, right - left))

    return cut


def opencv() -> Cut:
    import cv2

    cv2.setNumThreads(1)

    def cut(content: bytes, region: Region) -> Any:
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
        return pixels[region[1] : region[3], region[0] : region[2]]

    return cut


def libvips() -> Cut:
    os.environ["VIPS_CONCURRENCY"] = "1"
    import pyvips

    def cut(content: bytes, region: Region) -> Any:
        left, top, right, bottom = region
        image = pyvips.Image.new_from_buffer(content, "", access="sequential")
        return image.crop(left, top, right - left, bottom - top).numpy()

    return cut


def nvimgcodec() -> Cut:
    from nvidia import nvimgcodec as nv

    decoder = nv.Decoder(device_id=nv.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1)

    def cut(content: bytes, region: Region) -> Any:
        left, top, right, bottom = region
        part = nv.CodeStream(content).get_sub_code_stream(region=nv.Region([top, left], [bottom, right]))
        image = decoder.decode(part)
        if image is None:
            raise ImportError("its decoder for processors asks for CUDA's driver, too")
        return np.asarray(image)

    return cut


CUTS: dict[str, Callable[[], Cut]] = {
    "libjpeg-turbo 3, region": partial(kdpipes_decoder, "turbojpeg"),
    "simplejpeg": partial(kdpipes_decoder, "simplejpeg"),
    "OpenCV": opencv,
    "libvips, region": libvips,
    "nvImageCodec, region": nvimgcodec,
}


def contenders(sample: tuple[bytes, Region]) -> Iterator[Contender | str]:
    """Give what works here, and a line for what does not."""
    for name, make in CUTS.items():
        try:
            cut = make()
            cut(*sample)
            yield Contender(name, cut, with_torch(cut))
        except Exception as error:
            reason = " ".join(str(error).split())[:70].rstrip(".")
            yield f"  {name:<26} missing: {reason}"


def regions(contents: list[bytes]) -> list[tuple[bytes, Region]]:
    """Return each image with a region of it, drawn as `RandomResizedCrop` draws it, but for very narrow images."""
    rng, found = random.Random(0), []
    for content in contents:
        width, height = Image.open(io.BytesIO(content)).size
        area, aspect = width * height * rng.uniform(0.08, 1), rng.uniform(3 / 4, 4 / 3)
        columns, rows = min(round((area * aspect) ** 0.5), width), min(round((area / aspect) ** 0.5), height)
        left, top = rng.randint(0, width - columns), rng.randint(0, height - rows)
        found.append((content, (left, top, left + columns, top + rows)))
    return found


def milliseconds(cut: Cut, tasks: list[tuple[bytes, Region]]) -> float:
    begin = time.process_time()
    for task in tasks:
        cut(*task)
    return (time.process_time() - begin) / len(tasks) * 1e3


def version_of(python: str) -> str:
    """Return what the Pillow of another environment is called."""
    command = [python, "-c", "import PIL; print(PIL.__version__)"]
    version = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return f"{'pillow-simd' if 'post' in version else 'Pillow'} {version}"


def elsewhere(python: str, folder: Path, number: int) -> list[float]:
    """Return what `own_pillow` gives in another environment."""
    command = [python, __file__, "--pillow-of-here", "--corpus", str(folder), "--number", str(number)]
    answer: list[float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def own_pillow(tasks: list[tuple[bytes, Region]]) -> list[float]:
    milliseconds(by_pillow, tasks[:10])
    return [milliseconds(by_pillow, tasks), milliseconds(resized_by_pillow, tasks)]


def differences(cut: Cut, tasks: list[tuple[bytes, Region]]) -> str:
    """Return by how many gray levels the pixels differ from Pillow's, on average and at most."""
    off = [np.abs(by_pillow(*task).astype(int) - np.asarray(cut(*task), dtype=int)) for task in tasks]
    return f"{np.mean([each.mean() for each in off]):>10.3f}{max(each.max() for each in off):>6}"


def report(given: argparse.Namespace, folder: Path) -> str:
    from rounds import load, machine, medians, turns

    number, rounds = (8, 1) if given.smoke else (given.number, given.rounds)
    tasks = read(folder, number)
    here = machine(load(), **versions())
    known = list(contenders(tasks[0]))
    own = [Contender(BASELINE, by_pillow, resized_by_pillow), *(one for one in known if not isinstance(one, str))]
    ways: dict[str, Callable[[], list[float]]] = {
        one.name: partial(lambda one: [milliseconds(one.cut, tasks), milliseconds(one.resized, tasks)], one)
        for one in own
    }
    others = {version_of(python): partial(elsewhere, python, folder, number) for python in given.also}
    found = turns(ways | others, rounds, warm_up=not given.smoke)
    cut, resized = ({name: [pair[k] for pair in pairs] for name, pairs in found.items()} for k in (0, 1))
    lines = [
        f"{number:,} JPEGs, {rounds} interleaved rounds, one thread, milliseconds of CPU an image; {here}",
        "",
        "decoders vs kdpipes (the first two)     region  resized  vs Pillow  mean off  most",
    ]
    by_name = {one.name: one for one in own}
    order = [name for name in (*CUTS, BASELINE, *others) if name in found]
    for name in order:
        median, whole = medians(cut)[name], medians(resized)[name]
        off = differences(by_name[name].cut, tasks[:100]) if name in by_name else ""
        ratio = medians(resized)[BASELINE] / whole
        lines.append(f"  {name:<36}{median:>8.2f}{whole:>9.2f}{ratio:>10.2f}x{off}".rstrip())
    return "\n".join([*lines, *(one for one in known if isinstance(one, str))])


def versions() -> dict[str, str]:
    """Return those of the libraries that are installed here."""
    found = {}
    for name in ("pillow", "torch", "turbojpeg", "simplejpeg", "opencv-python-headless", "pyvips", "pyvips-binary"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def read(folder: Path, number: int) -> list[tuple[bytes, Region]]:
    paths = sorted(folder.glob("tree/*/*.jpg"))[:number]
    return regions([path.read_bytes() for path in paths])


def main() -> None:
    command = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    command.add_argument("--smoke", action="store_true", help="next to nothing, one round; writes nothing")
    command.add_argument("--corpus", metavar="DIR", help="where the corpus of bench_throughput is kept")
    command.add_argument("--photos", metavar="DIR", help="photographs to make the corpus of")
    command.add_argument("--number", type=int, default=300, help="how many images")
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--also", action="append", metavar="PYTHON", default=[])
    command.add_argument("--pillow-of-here", action="store_true", help=argparse.SUPPRESS)
    given = command.parse_args()
    if given.pillow_of_here:
        print(json.dumps(own_pillow(read(Path(given.corpus), given.number))))
        return
    from corpus import make_corpus, photographs
    from rounds import publish

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if given.smoke or not given.corpus else given.corpus).absolute()
        number = 8 if given.smoke else given.number
        if not (folder / "tree").is_dir():
            make_corpus(folder, number=number, seed=0, photos=photographs(given.photos), processes=2)
        publish(report(given, folder), "decoders", is_smoke=given.smoke)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
