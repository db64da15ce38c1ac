"""How many images per second come from record files, beside image files in torch's DataLoader?

Question: TorchRecord's own table (its README: 11,788 JPEGs of CUB200, about 470 x 390 pixels, loaded and made tensors,
batches of 32, 4 cores) has records 1.94 times as fast as files with 2 workers, and 1.65 times with 4. The same here:
JPEGs of ImageNet's size and weight (corpus.py) -> 224 x 224, antialiased -> float32 from 0 to 1 -> shuffled batches of
32 in the main process. Rows: files in torch's DataLoader with Pillow, which is TorchRecord's "conventional", and the
baseline; files in kdpipes; records of the files' bytes ("encoded"), with the fastest decoder that is installed and with
Pillow; records of pixels at full size ("raw"), as TorchRecord's default writes them; and of pixels that were resized
when they were written ("raw, 224 x 224"), where the size is fixed. Pillow resizes images of Pillow's, torch all else;
the pixels differ by at most 2 gray levels. Checksums are compared at every read.

How it is measured: workers are started once, an epoch is loaded that does not count, then epochs of all rows follow
each other in rounds, each from its first batch asked for to its last received. All is in the page cache. Ratios are of
medians. The table also says how large the records are, and how long it took to write them with one process.

    python benchmarks/bench_records.py            # writes benchmarks/results/records.txt
    python benchmarks/bench_records.py --smoke    # a few images, one round, writes nothing
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image

import kdpipes as kdp  # before torchdata, whose banner it keeps quiet

# isort: split
import torch
from corpus import make_corpus, photographs, tree_of
from rounds import load, machine, medians, parser, publish, spread, turns
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE, SIZE = 32, 224
BASELINE, KDPIPES = "files, torch DataLoader, Pillow", "records, raw"
Rows = dict[str, Callable[[int], Any]]


class Files(Dataset):  # type: ignore[type-arg]
    """Images of a tree, by Pillow."""

    def __init__(self, folder: Path) -> None:
        self._images = tree_of(folder)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._images[index]
        with Image.open(path) as image:
            pixels = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous().float().div_(255), label


@contextmanager
def by_torch(folder: Path, num_workers: int) -> Iterator[Any]:
    yield DataLoader(Files(folder), BATCH_SIZE, shuffle=True, num_workers=num_workers, persistent_workers=True)


@contextmanager
def by_kdpipes(chain: Any, num_workers: int) -> Iterator[Any]:
    pipe = chain.transform("x", kdp.ToTensor()).select("x y").deal(batch_size=BATCH_SIZE, shuffle=True)
    with kdp.Loader(pipe.collate_samples(), num_workers) as loader:
        yield loader


def resized(chain: Any) -> Any:
    return chain.transform("x", kdp.Resize((SIZE, SIZE)))


def decoded(sample: Any) -> dict[str, Any]:
    return {"x": sample["x"].decoded(), "y": sample["y"]}


def write(folder: Path) -> tuple[Rows, list[str]]:
    """Write the records, and return the rows, and what was written."""
    images = kdp.image_folder(folder / "tree")
    sources: dict[str, tuple[Any, Any]] = {
        "encoded": (images, None),
        "raw": (images.decode_images("x"), decoded),
        "raw-224": (resized(images.decode_images("x")), None),
    }
    told = []
    for name, (source, encode) in sources.items():
        begin = time.perf_counter()
        result = kdp.write_records(source, folder / name, encode=encode)
        took = time.perf_counter() - begin
        told.append(f"{name}: {result.num_bytes / 1e6:.0f} MB, written at {result.num_samples / took:.0f} samples/s")
    encoded, raw, small = (kdp.open_records(folder / name) for name in sources)
    rows: Rows = {
        BASELINE: lambda number: by_torch(folder, number),
        "files, kdpipes": lambda number: by_kdpipes(resized(images.decode_images("x")), number),
        "records, encoded, Pillow": lambda n: by_kdpipes(resized(encoded.decode_images("x", backend="pillow")), n),
        "records, encoded": lambda number: by_kdpipes(resized(encoded.decode_images("x")), number),
        KDPIPES: lambda number: by_kdpipes(resized(raw), number),
        "records, raw, 224 x 224": lambda number: by_kdpipes(small, number),
    }
    return rows, told


def rate(loader: Any, number: int) -> float:
    begin = time.perf_counter()
    num_samples = 0
    for x, _ in loader:
        if x.shape[1:] != (3, SIZE, SIZE) or x.dtype != torch.float32:
            raise TypeError(f"A batch is {x.dtype} {list(x.shape)}.")
        num_samples += len(x)
    if num_samples != number:
        raise RuntimeError(f"{num_samples} of {number} samples have come.")
    return number / (time.perf_counter() - begin)


def compare(rows: Rows, num_workers: int, number: int, rounds: int) -> list[str]:
    with ExitStack() as stack:
        loaders = {name: stack.enter_context(make(num_workers)) for name, make in rows.items()}
        ways = {name: partial(rate, loader, number) for name, loader in loaders.items()}
        found = turns(ways, rounds, warm_up=True)
    median = medians(found)
    title = f"{num_workers} workers"
    lines = [f"{title:<34}{'samples/s':>10}{'min':>7}{'max':>7}{'vs torch':>10}{'vs kdpipes raw':>16}"]
    for name, rates in found.items():
        ratios = f"{median[name] / median[BASELINE]:>9.2f}x{median[name] / median[KDPIPES]:>15.2f}x"
        lines.append(f"  {name:<32}{spread(rates, width=7)}{ratios}")
    return [*lines, ""]


def report(*, is_smoke: bool, photos: str | None) -> str:
    number, rounds = (40, 1) if is_smoke else (640, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = make_corpus(folder, number=number, seed=0, photos=photographs(photos), processes=2)
        rows, written = write(folder)
        before = load()
        tables = [line for workers in (2, 4) for line in compare(rows, workers, number, rounds)]
    lines = [
        f"{number:,} JPEGs of {told['mean_bytes'] / 1e3:.0f} KB and {told['mean_pixels'] / 1e6:.2f} megapixels on "
        f"average, {rounds} interleaved rounds after one that does not count; "
        + machine(f"{before} before (others use the machine)", torch=torch.__version__, Pillow=PIL.__version__),
        *written,
        "",
        *tables,
    ]
    return "\n".join(lines)


def main() -> None:
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores: as asked
    command = parser(__doc__)
    command.add_argument("--photos", help="a folder of photographs to make the corpus of")
    given = command.parse_args()
    publish(report(is_smoke=given.smoke, photos=given.photos), "records", is_smoke=given.smoke)


if __name__ == "__main__":
    main()
