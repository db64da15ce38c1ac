"""What does not reach workers, and what is costly to send back from them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.chain import Chain, Node
from kdpipes.core.sample import Sample
from kdpipes.delivery.meter import size_of
from kdpipes.look.doctor.facts import Facts, Finding, shrinks
from kdpipes.look.profile_view import bytes_text
from kdpipes.storage.shared import Shared, sharing
from kdpipes.work.decode import DecodedImage, EncodedImage, ImageDecoder

__all__ = ["float_pixels", "full_size_pixels", "small_shared_memory", "unpicklable"]

_LARGE = 512 << 10  # bytes of a sample, from which on sending it counts
_ENOUGH = 16 << 20  # bytes of a pickle that has come so far
_PREFETCH, _LENT = 2, 2


def unpicklable(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """Parts of a chain that spawned workers cannot get."""
    for node in reversed(chain):
        for name, value in _parts(node):
            error = _refusal(value)
            if error is not None:
                yield Finding(
                    "unpicklable",
                    "warning",
                    node.name,
                    f"`{name}` of `{node.name}` cannot be pickled ({error}).",
                    "Workers that are forked inherit it, open handles and locks included; spawned ones (macOS, CUDA in "
                    "the main process) cannot start.",
                    "Open it where it is first used, in the worker; or use `kdp.ThreadReadingService`.",
                )


def _parts(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a pipe, those of its operation instead of that."""
    operation = node.operation
    held = {} if operation is None else vars(operation)
    for name, value in {**vars(node.pipe), **held}.items():
        if isinstance(value, IterDataPipe | MapDataPipe) or value is operation:
            continue
        yield name.lstrip("_"), value.value if isinstance(value, Shared) else value


class _Enough(Exception):
    """So much of a value has been pickled that the rest will do."""


class _Sink(io.RawIOBase):
    """Counts what is written, and keeps nothing."""

    def __init__(self) -> None:
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        self._size += size
        if self._size > _ENOUGH:
            raise _Enough
        return size


def _refusal(value: Any) -> str | None:
    """Return why a value cannot be pickled; None if it can."""
    try:
        with sharing():
            cloudpickle.dump(value, _Sink(), protocol=5)
    except _Enough:
        return None
    except Exception as error:  # whatever a user's class raises
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def full_size_pixels(chain: Chain, facts: Facts, batch: Any) -> Iterator[Finding]:
    """Decoded images that leave the workers as large as they are."""
    image = next((image for image in _images(batch) if _bytes_of(image) >= _LARGE), None)
    decoders = chain.operations(ImageDecoder)
    if image is not None and decoders and not shrinks(chain) and facts.num_workers:
        yield Finding(
            "full-size-pixels",
            "warning",
            chain.end.name,
            f"Images leave the workers at their full size, {bytes_text(_bytes_of(image))} each.",
            "Pixels are ten to twenty times as large as their JPEG, and each is copied on its way.",
            "Resize or crop in the workers: `.transform(field, kdp.RandomResizedCrop(224))`, which also decodes less.",
        )


def float_pixels(chain: Chain, facts: Facts, batch: Any) -> Iterator[Finding]:
    """Images that leave the workers as floating-point numbers."""
    for image in _images(batch):
        if facts.num_workers and _is_float(image) and _bytes_of(image) >= _LARGE:
            yield Finding(
                "float-pixels",
                "hint",
                chain.end.name,
                f"Images leave the workers as {str(image.dtype).removeprefix('torch.')}.",
                "That is four times the bytes of the uint8 that they were decoded to.",
                "Send uint8, and divide and normalize on the device: `x.to(device).float().div_(255)`.",
            )
            return


def _is_float(image: Any) -> bool:
    if isinstance(image, torch.Tensor):
        return image.dtype.is_floating_point
    return isinstance(image, np.ndarray) and image.dtype.kind == "f"


def _bytes_of(image: Any) -> int:
    """Return the size of the pixels of one image."""
    size = getattr(image, "size", None)
    if isinstance(size, tuple) and not isinstance(image, torch.Tensor | np.ndarray):
        return int(size[0] * size[1] * 3)
    return size_of(image)


def _images(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield one image of each field of a batch that holds images."""
    if isinstance(value, Sample):  # to look into it would load its fields
        return
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim == 4 and len(value) and {value.shape[1], value.shape[3]} & {1, 3, 4}:
            yield value[0]
        elif value.ndim == 3 and {value.shape[0], value.shape[2]} & {1, 3, 4}:
            yield value
    elif isinstance(value, Mapping | list | tuple) and depth < 4:
        parts = list(value.values()) if isinstance(value, Mapping) else list(value)
        for part in parts[:8]:
            yield from _images(part, depth + 1)
    elif isinstance(value, Image.Image | EncodedImage | DecodedImage):
        yield value


def small_shared_memory(chain: Chain, facts: Facts, batch: Any) -> Iterator[Finding]:
    """Less shared memory than the batches on their way need."""
    needed = facts.num_workers * (_PREFETCH + _LENT) * size_of(batch)
    if facts.shm_free is not None and needed > facts.shm_free:
        yield Finding(
            "small-shared-memory",
            "warning",
            chain.end.name,
            f"The batches on their way need {bytes_text(needed)} of shared memory, of which "
            f"{bytes_text(facts.shm_free)} are free in /dev/shm.",
            "What finds no room takes a slower way.",
            "Give the container more (`docker run --shm-size=2g`, `--ipc=host`), or use fewer workers.",
        )
