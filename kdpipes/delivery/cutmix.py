"""CutMix: paste a box of another image of the batch into each image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.core.registry import functional_pipe
from kdpipes.delivery._mixing import Params, SampleMixing, mixed_labels


@functional_pipe("cutmix", flavour="iter", otherwise="Put `.deal(batch_size=...).collate_samples()` before it.")
class CutMixerIterDataPipe(SampleMixing):
    """Pastes a box of another image into each image, and mixes labels by area (functional name: ``cutmix``).

    A random permutation of the batch gives each image a partner. The box has the aspect ratio of the image, and a
    center anywhere in the image, which clips the box. The share of the image outside the box is drawn from Beta(alpha,
    alpha); the weight of its label is the share that is left after clipping. If batches are `((x, y), ctx)`,
    `ctx["cutmix"]` records `{"partner", "weight", "top", "left", "height", "width"}`, each `[B]`: the weight is
    float64, the others are int64. The entry of a second `cutmix` is `cutmix_2`. `pipe.apply(x, y, params)` repeats the
    mix. Input batches are not modified.

    Args:
        source_datapipe: A stream of batches of tensors, after `deal` and `collate_samples`.
        alpha: The parameter of the Beta distribution, above 0. With 1.0, all areas are equally likely.
        num_classes: The number of classes C, for labels that are class numbers `[B]`. They become `[B, C] float32`,
            with zeros for the label -1. Not needed for labels `[B, C]` of floats, which keep their dtype.
        image: The name of the field of images, `[B, ..., H, W]` of any dtype.
        label: The name of the field of labels.
        p: The probability that a batch is mixed. In other batches, samples are their own partners with weight 1.

    Length: The length of the source.

    Seed: The seed of `deal`. Each batch of each epoch draws other random numbers, which are the same for any number of
    workers. Each rank mixes its own part of a global batch, so the results depend on the number of ranks.

    Raises:
        ValueError: An argument is out of range, or is not the name of a field in the `select` upstream.
        ChainError: There is no `deal` upstream, or a pipe after it may hold batches back.
        DataError: Labels are not classes, or images have no height and width.

    Source: Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", 2019,
    whose code draws one box for a whole batch. The sides of boxes are rounded as in torchvision's `CutMix`.

    Example:
        >>> images = [np.full((8, 8), value, np.float32) for value in (0, 1)]
        >>> pipe = kdp.from_dataset([(images[0], 0), (images[1], 1)]).select("x y").deal(batch_size=2)
        >>> x, y = next(iter(pipe.collate_samples().cutmix(num_classes=2)))
        >>> torch.equal(x.mean(dim=(1, 2)), y[:, 1])
        True
    """

    def draw(self, x: torch.Tensor, rng: np.random.Generator) -> Params:
        if x.ndim < 3:
            raise DataError(
                f"`cutmix` takes images `[B, ..., H, W]`, but got {list(x.shape)}. Name the field of images: `image=`."
            )
        height, width = x.shape[-2:]
        partner, weight = self._partners(len(x), rng)
        half = np.sqrt(1 - weight) / 2
        top, bottom = _span(half, height, rng)
        left, right = _span(half, width, rng)
        box = {"top": top, "left": left, "height": bottom - top, "width": right - left}
        kept = 1 - box["height"] * box["width"] / (height * width)
        return {name: torch.from_numpy(value) for name, value in {"partner": partner, "weight": kept, **box}.items()}

    def apply(self, x: torch.Tensor, y: torch.Tensor, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        pasted = self.empty_like(x).copy_(x)
        boxes = zip(*(params[name].tolist() for name in ("partner", "top", "left", "height", "width")), strict=True)
        for row, (partner, top, left, height, width) in enumerate(boxes):
            box = (..., slice(top, top + height), slice(left, left + width))
            pasted[row][box] = x[partner][box]
        return pasted, mixed_labels(y, params, self._num_classes)


def _span(half: NDArray[np.float64], size: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the starts and ends of the boxes in a dimension of `size` pixels, both `[B] int64`.

    `half` is half the length of each box, as a share of `size`, `[B]`.
    """
    center = rng.integers(size, size=len(half))
    reach = (half * size).astype(np.int64)
    return np.maximum(center - reach, 0), np.minimum(center + reach, size)
