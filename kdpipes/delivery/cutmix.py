"""A box of each image, pasted from another one of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterDataPipe

from kdpipes.core.errors import DataError
from kdpipes.core.registry import functional_pipe, refuse_flavour
from kdpipes.delivery._mixing import Params, SampleMixing, mixed_labels

__all__ = ["CutMixerIterDataPipe"]

refuse_flavour("cutmix", flavour="map", hint="Put `.deal(batch_size=...).collate_samples()` before it.")


@functional_pipe("cutmix", flavour="iter")
class CutMixerIterDataPipe(SampleMixing):
    """Pastes a box of another image into each, and mixes their labels by area (functional name: ``cutmix``).

    The partner is of the same batch, by a permutation, the box has the image's aspect ratio, its centre lies anywhere
    in the image, which cuts it off. Its area is drawn: the image's own share from Beta(alpha, alpha); the weight of its
    label is the share that is left. Where batches are `((x, y), ctx)`, `ctx["cutmix"]` records `{"partner", "weight",
    "top", "left", "height", "width"}`, `[B]`, the weight float64, the others int64; `cutmix_2` is the second of a
    chain. `pipe.apply(x, y, params)` mixes a batch by them again. Batches that come in stay as they are.

    Args:
        source_datapipe: A stream of batches, as `collate_samples` makes them of those of `deal`.
        alpha: Above 0; with 1.0, all areas are equally likely.
        num_classes: C: labels `[B]` become shares `[B, C] float32`, and a label -1 no share. Not needed for labels
            `[B, C]` of floats, which keep their dtype.
        image: The name of the field of images, `[B, ..., H, W]` of any dtype.
        label: The name of the field of labels.
        p: The probability that a batch is mixed; in one that is not, samples are their own partners, of weight 1.

    Length: the source's.

    Seed: that of `deal`; each batch of each epoch draws anew, the same for any number of workers. Ranks mix within
    their own part of a global batch, which therefore depends on their number.

    Raises:
        ValueError: An argument is out of range, or names a field that `select` upstream does not.
        ChainError: No `deal` upstream, or a pipe behind it that may hold batches back.
        DataError: Labels are no classes, or images have no height and width.

    Source: Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", 2019;
    their code has one box for a whole batch. The box's sides are rounded as in torchvision's `CutMix`.

    Example:
        >>> images = [np.full((8, 8), value, np.float32) for value in (0, 1)]
        >>> pipe = kdp.from_dataset([(images[0], 0), (images[1], 1)]).select("x y").deal(batch_size=2)
        >>> x, y = next(iter(pipe.collate_samples().cutmix(num_classes=2)))
        >>> torch.equal(x.mean(dim=(1, 2)), y[:, 1])
        True
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        alpha: float = 1.0,
        *,
        num_classes: int | None = None,
        image: str = "x",
        label: str = "y",
        p: float = 1.0,
    ) -> None:
        super().__init__(source_datapipe, alpha, num_classes=num_classes, image=image, label=label, p=p)

    def draw(self, x: torch.Tensor, rng: np.random.Generator) -> Params:
        if x.ndim < 3:
            raise DataError(f"`cutmix` takes images `[B, ..., H, W]`, but got {list(x.shape)}.")
        height, width = x.shape[-2:]
        partner, weight = self._partners(len(x), rng)
        half = np.sqrt(1 - weight) / 2
        top, bottom = _span(half, height, rng)
        left, right = _span(half, width, rng)
        box = {"top": top, "left": left, "height": bottom - top, "width": right - left}
        kept = 1 - box["height"] * box["width"] / (height * width)
        return {name: torch.from_numpy(value) for name, value in {"partner": partner, "weight": kept, **box}.items()}

    def apply(self, x: torch.Tensor, y: torch.Tensor, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        return _pasted(x, params, self.empty_like), mixed_labels(y, params, self._num_classes)


def _span(half: NDArray[np.float64], size: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return where boxes begin and end in one dimension.

    Args:
        half: How far they reach from their centres, as shares of `size`.
        size: Of the image.
        rng: Draws the centres.
    """
    centre, reach = rng.integers(size, size=len(half)), (half * size).astype(np.int64)
    return np.maximum(centre - reach, 0), np.minimum(centre + reach, size)


def _pasted(x: torch.Tensor, params: Params, empty_like: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    pasted = empty_like(x).copy_(x)
    names = ("partner", "top", "left", "height", "width")
    for row, (partner, top, left, height, width) in enumerate(zip(*(params[n].tolist() for n in names), strict=True)):
        box = (..., slice(top, top + height), slice(left, left + width))
        pasted[row][box] = x[partner][box]
    return pasted
