"""A batch of any epoch as a picture: originals with the recorded crops, and what became of them."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from kdpipes._lazy import Lazy
from kdpipes.core.chain import Chain
from kdpipes.delivery.dealer import Dealer
from kdpipes.errors import ChainError, check_count, check_seed
from kdpipes.look.crop_boxes import crop_boxes
from kdpipes.look.grid import image_grid
from kdpipes.sample import Sample

__all__ = ["original_of", "replay_grid"]


def replay_grid(
    source_datapipe: Any, *, seed: int | None = None, epoch: int = 0, batch: int = 0, field: str = "x", tile: int = 128
) -> Image.Image:
    """Return a picture of one batch: of each sample the original, with its recorded crops, and the result beside it.

    The result is that of the work pipes: not mixed with others. Floats are stretched to black and white.

    Args:
        source_datapipe: A chain with `deal`. Crops are drawn where `record_ctx` stands before the transforms.
        seed: The seed of the epoch; by default, that of `deal`.
        epoch: The number of the epoch, from 0.
        batch: The number of the batch, from 0.
        field: The field of images.
        tile: Height and width of an image in pixels.

    Raises:
        ChainError: There is no `deal` in the chain.
        IndexError: The epoch has no such batch.
    """
    dealer = next(iter(Chain.of(source_datapipe).of_type(Dealer)), None)
    if dealer is None:
        raise ChainError("The chain has no `deal`, and so no batches.")
    originals: dict[int, Lazy | None] = {}  # of samples that `on_error` loads at once: then they are known no more

    def seen(sample: Sample) -> None:
        originals[sample.ordinal] = _before(sample, field)

    samples = dealer.whole_samples(
        check_count("epoch", epoch, minimum=0),
        check_count("batch", batch, minimum=0),
        seed=None if seed is None else check_seed(seed),
        seen=seen,
    )
    if samples is None:
        raise IndexError(f"Epoch {epoch} has no batch {batch}.")
    pictures, captions = [], []
    for sample in samples:
        before = originals.get(sample.ordinal)
        original = original_of(sample, field) if before is None else before.get(sample)
        results = sample[field] if isinstance(sample[field], tuple) else (sample[field],)
        pictures += [crop_boxes(original, sample.ctx), *map(_shown, results)]
        captions += [sample.key[-(tile // 6) :], *([""] * len(results))]
    num_each = len(pictures) // len(samples)
    return image_grid(pictures, captions, num_columns=max(1, 8 // num_each) * num_each, tile=tile)


def original_of(sample: Sample, field: str) -> Any:
    """Return the image of a sample before its transforms, or what it is, if it has been read before."""
    before = _before(sample, field)
    return sample[field] if before is None else before.get(sample)


def _before(sample: Sample, field: str) -> Lazy | None:
    return sample.lazy(field).before(lambda step: step.startswith(("applying ", "making views ")))


def _shown(value: Any) -> Any:
    """Return an image; of floats, stretched to black and white."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        low, high = value.amin(), value.amax()
        return ((value - low) / (high - low).clamp(min=1e-9) * 255).to(torch.uint8)
    return value
