"""Mixup: weighted means of two samples of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kdpipes.core.errors import DataError
from kdpipes.core.registry import functional_pipe
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.delivery._mixing import Params, SampleMixing, mixed_labels


@functional_pipe("mixup", flavour="iter", otherwise="Put `.deal(batch_size=...).collate_samples()` before it.")
class MixerUpIterDataPipe(SampleMixing):
    """Replaces each sample and its label by the weighted mean of two samples (functional name: ``mixup``).

    A random permutation of the batch gives each sample a partner. The sample's own weight is drawn from Beta(alpha,
    alpha). Images keep their dtype: means are computed in float32 (float64 for float64), and rounded for uint8. If
    batches are `((x, y), ctx)`, `ctx["mixup"]` records `{"partner", "weight"}`, `[B] int64` and `[B] float64`. The
    entry of a second `mixup` is `mixup_2`. `pipe.apply(x, y, params)` repeats the mix. Input batches are not modified.

    Args:
        source_datapipe: A stream of batches of tensors, after `deal` and `collate_samples`.
        alpha: The parameter of the Beta distribution, above 0. The larger it is, the closer weights are to 0.5.
        num_classes: The number of classes C, for labels that are class numbers `[B]`. They become `[B, C] float32`,
            with zeros for the label -1. Not needed for labels `[B, C]` of floats, which keep their dtype.
        image: The name of the field of images, `[B, ...]` uint8 or floats.
        label: The name of the field of labels.
        p: The probability that a batch is mixed. In other batches, samples are their own partners with weight 1.

    Length: The length of the source.

    Seed: The seed of `deal`. Each batch of each epoch draws other random numbers, which are the same for any number of
    workers. Each rank mixes its own part of a global batch, so the results depend on the number of ranks.

    Raises:
        ValueError: An argument is out of range, or is not the name of a field in the `select` upstream.
        ChainError: There is no `deal` upstream, or a pipe after it may hold batches back.
        DataError: Labels are not classes, or images are neither uint8 nor floats.

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018, whose code draws one weight for a whole
    batch.

    Example:
        >>> pipe = kdp.from_dataset([(np.float32(0), 0), (np.float32(1), 1)]).select("x y").deal(batch_size=2)
        >>> x, y = next(iter(pipe.collate_samples().mixup(num_classes=2)))
        >>> torch.equal(x, y[:, 1]), y.sum(dim=1).tolist()
        (True, [1.0, 1.0])
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        alpha: float = 0.2,
        *,
        num_classes: int | None = None,
        image: str = "x",
        label: str = "y",
        p: float = 1.0,
    ) -> None:
        super().__init__(source_datapipe, alpha, num_classes=num_classes, image=image, label=label, p=p)

    def draw(self, x: torch.Tensor, rng: np.random.Generator) -> Params:
        partner, weight = self._partners(len(x), rng)
        return {"partner": torch.from_numpy(partner), "weight": torch.from_numpy(weight)}

    def apply(self, x: torch.Tensor, y: torch.Tensor, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        return self._means(x, params), mixed_labels(y, params, self._num_classes)

    def _means(self, x: torch.Tensor, params: Params) -> torch.Tensor:
        if not x.is_floating_point() and x.dtype != torch.uint8:
            raise DataError(
                f"`mixup` takes images of uint8 or floats, but got {x.dtype}. Convert them with `.float()`."
            )
        weight = params["weight"]
        kind = torch.promote_types(x.dtype, torch.float32)
        if bool((weight == 1).all()):
            return x
        means = self.empty_like(x)
        weights = torch.stack([weight, 1 - weight], dim=1).to(x.device, kind)
        # One by one, so that they stay in the processor's cache.
        for row, partner in enumerate(params["partner"].tolist()):
            mean = x[row].to(kind) * weights[row, 0] + x[partner].to(kind) * weights[row, 1]
            means[row] = mean if x.is_floating_point() else mean.round_()
        return means
