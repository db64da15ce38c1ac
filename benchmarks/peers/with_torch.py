"""torch's DataLoader over a tree of files, as `torchvision.datasets.ImageFolder` is used.

With simplejpeg, pixels stay where libjpeg-turbo leaves them, [H, W, C], and torch resizes such a view by vector
instructions into one that lies likewise; the default collation brings it into the order [C, H, W]. It is the fastest of
the layouts that were tried (results in the order [C, H, W], the region made contiguous in either order first, batches
channels last).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from corpus import tree_of
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from peers._images import SIZE, is_flipped, random_region
from peers._images import by_pillow as load_by_pillow


class ImageTree(Dataset):  # type: ignore[type-arg]
    """Images in folders of their classes."""

    def __init__(self, folder: Path, load: Callable[[str], torch.Tensor]) -> None:
        self._images = tree_of(folder)
        self._load = load

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._images[index]
        return self._load(path), label


def load_by_simplejpeg(path: str) -> torch.Tensor:
    from simplejpeg import decode_jpeg

    pixels = torch.from_numpy(decode_jpeg(Path(path).read_bytes())[None]).permute(0, 3, 1, 2)
    left, top, width, height = random_region(pixels.shape[3], pixels.shape[2])
    region = pixels[:, :, top : top + height, left : left + width]
    image = interpolate(region, (SIZE, SIZE), mode="bilinear", antialias=True)[0]
    return image.flip(-1) if is_flipped() else image


@contextmanager
def _loader(folder: Path, workers: int, batch_size: int, load: Callable[[str], torch.Tensor]) -> Iterator[Any]:
    yield DataLoader(ImageTree(folder, load), batch_size, shuffle=True, num_workers=workers, persistent_workers=True)


def by_pillow(folder: Path, workers: int, batch_size: int) -> Any:
    return _loader(folder, workers, batch_size, load_by_pillow)


def by_simplejpeg(folder: Path, workers: int, batch_size: int) -> Any:
    import simplejpeg  # noqa: F401 - missing, it is to be missed here, not in a worker

    return _loader(folder, workers, batch_size, load_by_simplejpeg)
