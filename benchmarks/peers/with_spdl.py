"""SPDL's DataLoader: FFmpeg decodes, cuts, resizes (bilinear, antialiased) and flips, in threads of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import spdl.io
from corpus import tree_of
from spdl.dataloader import DataLoader

from peers._images import SIZE, is_flipped, random_region


def _load(item: tuple[str, int]) -> tuple[Any, int]:
    packets = spdl.io.demux_image(item[0])
    left, top, width, height = random_region(packets.width, packets.height)
    crop = f"crop=w={width}:h={height}:x={left}:y={top}:exact=1"
    flip = ",hflip" if is_flipped() else ""
    steps = f"{crop},scale=w={SIZE}:h={SIZE}:flags=bilinear{flip},format=pix_fmts=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=steps), item[1]


def _collate(samples: list[tuple[Any, int]]) -> tuple[Any, list[int]]:
    frames, labels = zip(*samples, strict=True)
    images = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
    return images.permute(0, 3, 1, 2), list(labels)


class Shuffled:
    """The images, in another order each time."""

    def __init__(self, folder: Path) -> None:
        self._images = tree_of(folder)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(random.sample(self._images, len(self._images)))


def _check_ffmpeg() -> None:
    try:
        spdl.io.demux_config()
    except RuntimeError as error:
        raise ImportError("it finds no libraries of FFmpeg's (Debian: `apt-get install ffmpeg`)") from error


@contextmanager
def pipeline(folder: Path, workers: int, batch_size: int) -> Iterator[Any]:
    _check_ffmpeg()
    yield DataLoader(
        Shuffled(folder), preprocessor=_load, batch_size=batch_size, aggregator=_collate, num_threads=workers
    )
