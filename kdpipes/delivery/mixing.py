"""`mixup` and `cutmix`: blend each image of a batch with another one, or paste a box of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.core.chain import Chain
from kdpipes.core.errors import (
    ChainError,
    DataError,
    check_count,
    check_number,
    check_type,
    closest,
    must_be,
    reject_field,
)
from kdpipes.core.pipe import form_of
from kdpipes.core.registry import functional_pipe, pipe_name
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import ItemForm
from kdpipes.delivery.batch_pipe import BatchPipe, is_channels_last

Params = dict[str, torch.Tensor]


class SampleMixing(BatchPipe):
    """Mixes each sample of a batch with another sample of the same batch. A subclass implements `draw` and `apply`."""

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
        if isinstance(source_datapipe, IterDataPipe):
            _check_chain(source_datapipe, pipe_name(self))
        super().__init__(source_datapipe)
        self._alpha = check_number("alpha", alpha, "a number above 0", math.ulp(0), sys.float_info.max)
        self._p = check_number("p", p, "a probability, from 0 to 1", 0, 1)
        self._num_classes = None if num_classes is None else check_count("num_classes", num_classes)
        self._name = self.unique_name()
        self._form = form_of(source_datapipe) or ItemForm(())
        self.traits = replace(self.traits, item_form=form_of(source_datapipe))
        self._fields = {"image": image, "label": label}
        names = self._form.names
        for param, name in self._fields.items():
            check_type(param, name, str, "the name of a field")
            if names and name not in names:
                hint = f'Select it: `.select("{" ".join([*names, name])}")`; or name another: `{param}=...`.'
                rule = f"among the fields {', '.join(names)}"
                raise ValueError(must_be(param, rule, name, closest(name, names).strip() or hint))

    def draw(self, x: torch.Tensor, rng: np.random.Generator) -> Params:
        """Return the parameters for the images of a batch, drawn from `rng`."""
        raise TypeError(f"{type(self).__name__} must implement `draw`.")

    def apply(self, x: torch.Tensor, y: torch.Tensor, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and labels of a batch, mixed with the parameters that `draw` returned."""
        raise TypeError(f"{type(self).__name__} must implement `apply`.")

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """Return memory for mixed images: the buffer that is sent, if this is the last pipe that runs in a worker."""
        is_last = is_channels_last(x)
        if self._allocate is None or x.device.type != "cpu" or not (is_last or x.is_contiguous()):
            return torch.empty_like(x)
        return self._allocate(x.shape, x.dtype, torch.channels_last if is_last else torch.contiguous_format)

    def _partners(self, size: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return each sample's partner and its own weight, both `[B]`. `p` decides only whether the batch is mixed."""
        is_mixed = rng.random() < self._p
        weight = rng.beta(self._alpha, self._alpha, size)
        partner = rng.permutation(size)
        return (partner, weight) if is_mixed else (np.arange(size), np.ones(size))

    def process(self, batch: Any, rng: np.random.Generator) -> Any:
        if not self._form.has_ctx:
            return self._mixed_fields(batch, rng)[0]
        fields, ctx = batch
        if self._name in ctx:
            raise ChainError(f"The ctx already has an entry {self._name!r}. Rename the transform that recorded it.")
        mixed, params = self._mixed_fields(fields, rng)
        return mixed, {**ctx, self._name: params}

    def _mixed_fields(self, fields: Any, rng: np.random.Generator) -> tuple[Any, Params]:
        places = [self._place(name, fields) for name in self._fields.values()]
        x, y = (fields[index] for index in places)
        for name, value in zip(self._fields.values(), (x, y), strict=True):
            if not isinstance(value, torch.Tensor) or not value.ndim:
                raise DataError(
                    f"Field {name!r} must be a tensor `[B, ...]`, but is {type(value).__name__}. Make it one in "
                    "`.transform(...)`."
                )
        if len(x) != len(y):
            raise DataError(f"A batch has {len(x)} images, but {len(y)} labels. Select one for each.")
        params = self.draw(x, rng)
        mixed = dict(zip(places, self.apply(x, y, params), strict=True))
        if isinstance(fields, Mapping):
            return {**fields, **mixed}, params
        return tuple(mixed.get(index, value) for index, value in enumerate(fields)), params

    def _place(self, name: str, fields: Any) -> Any:
        """Return the key or the position of the field `name` in a batch."""
        if isinstance(fields, Mapping):
            return name if name in fields else reject_field(name, "The batch", fields)
        if isinstance(fields, tuple) and len(fields) == len(self._form.names):
            return self._form.names.index(name)
        raise ChainError(
            f"`.{pipe_name(self)}()` does not know where {name!r} is in a batch of type {type(fields).__name__}. Put "
            "it right after `.collate_samples()`, or make batches dictionaries."
        )


def _check_chain(source: Any, name: str) -> None:
    """Raise ChainError unless each item of `source` is made of exactly one batch of `deal`."""
    chain = Chain.of(source)
    if chain.deal is None:
        raise ChainError(
            f"`.{name}()` draws random numbers for each batch of `.deal()`, but there is no `.deal()` upstream. Put "
            "`.deal(batch_size=...).collate_samples()` before it."
        )
    last = chain.one_to_one_path()[-1]
    if last is chain.end and last is chain.deal:
        raise ChainError(f"`.{name}()` mixes tensors, but `.deal()` gives lists. Put `.collate_samples()` before it.")
    if last.traits.role != "deal":
        raise ChainError(
            f"`.{name}()` must know which batch of `.deal()` it mixes, but {type(last.pipe).__name__} may hold "
            "batches back or change their number. Put it right after `.collate_samples()`."
        )


def mixed_labels(y: torch.Tensor, params: Params, num_classes: int | None) -> torch.Tensor:
    """Return the weighted means of each sample's and its partner's labels, as shares of the classes `[B, C]`.

    `y` holds class numbers `[B]`, -1 for unlabeled samples; or shares `[B, C]`, floats.
    """
    shares = _shares(y, num_classes)
    weight = params["weight"].to(y.device)[:, None]
    partner = params["partner"].to(y.device)
    return (weight * shares + (1 - weight) * shares[partner]).to(shares.dtype)


def _shares(y: torch.Tensor, num_classes: int | None) -> torch.Tensor:
    if y.is_floating_point() and y.ndim == 2:
        if num_classes not in {None, y.shape[1]}:
            raise ValueError(must_be("num_classes", f"{y.shape[1]}, as many as the labels have", num_classes))
        return y
    if y.is_floating_point() or y.is_complex() or y.ndim != 1:
        raise DataError(
            f"Labels must be class numbers `[B]` or floats `[B, C]`, but are {y.dtype} {list(y.shape)}. Name the field "
            "of labels: `label=`."
        )
    if num_classes is None:
        raise ValueError(
            must_be("num_classes", "given if labels are class numbers", None, "The first argument is `alpha`.")
        )
    classes = y.long()
    wrong = classes[(classes < -1) | (classes >= num_classes)]
    if len(wrong):
        raise DataError(
            f"Labels must be from 0 to {num_classes - 1}, or -1 for unlabeled samples, but one is {wrong[0].item()}: "
            f"`num_classes` is {num_classes}. Labels keep their numbers when classes are dropped: pass a larger "
            "`num_classes`, or renumber the classes with `.map_classes(...)`."
        )
    return (classes[:, None] == torch.arange(num_classes, device=y.device)).float()


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
        weight = 1 - box["height"] * box["width"] / (height * width)
        return {name: torch.from_numpy(value) for name, value in {"partner": partner, "weight": weight, **box}.items()}

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
