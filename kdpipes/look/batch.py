"""Show batches as pictures: the images of a batch, or a batch of any epoch beside the original images."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image

from kdpipes.core.chain import Chain
from kdpipes.core.column import Column
from kdpipes.core.errors import ChainError, check_class_names, check_count, check_seed
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe, item_at
from kdpipes.core.pipe import form_of
from kdpipes.core.sample import Sample
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.traits import ItemForm
from kdpipes.delivery.collate_samples import split_ctx
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.skipping import unrecorded
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe
from kdpipes.look.pictures import (
    check_normalization,
    image_grid,
    is_image,
    picture_of,
)
from kdpipes.look.rendering import class_name

BATCH_SIZE = 16  # for a chain without `deal`


@runtime_checkable
class _Loads(Protocol):
    """A `Loader`, or torch's DataLoader."""

    dataset: Any


@runtime_checkable
class _HoldsChain(Protocol):
    """The dataset of a loader."""

    chain: Any


@runtime_checkable
class _Threaded(Protocol):
    """A stock pipe with threads."""

    def shutdown(self) -> None: ...


def find_chain(subject: Any) -> Any:
    """Return the chain, if the subject is one or a loader of one; None for anything else."""
    if isinstance(subject, _Loads) and not isinstance(subject, IterDataPipe | MapDataPipe):
        subject = subject.dataset
        subject = subject.chain if isinstance(subject, _HoldsChain) else subject
    return subject if isinstance(subject, IterDataPipe | MapDataPipe) else None


def chain_in(subject: Any, view: str) -> Any:
    """Return the chain, if the subject is one or a loader of one. Raise TypeError for anything else.

    Args:
        subject: What the user has passed.
        view: The function that needs a chain, for the error.
    """
    chain = find_chain(subject)
    if chain is None:
        raise TypeError(
            f"`source_datapipe` must be a chain or a loader, but is a {type(subject).__name__} instead. A batch does "
            f"not hold its chain: write `{view}(chain)`, as in `{view}(kdp.image_folder(folder))`."
        )
    return chain


@contextmanager
def looking(pipe: Any) -> Iterator[Iterator[Any]]:
    """Yield the next items of a chain, made in this process and without `to_device`.

    A copy of the chain makes them. Its epochs and the global generators do not change, and no sample is quarantined.
    """
    while isinstance(pipe, DeviceMoverIterDataPipe):
        pipe = pipe.source
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with unrecorded(pipe):
            if isinstance(pipe, MapDataPipe):
                yield (item_at(pipe, index) for index in range(len(pipe)))
                return
            copied: Any = Chain.of(pipe).copy_streams()
            chain = Chain.of(copied)
            for dealer in chain.of_type(Dealer):
                dealer.reads_ahead = False
            items = iter(copied)
            with closing(items) if hasattr(items, "close") else nullcontext():
                yield items
            for threaded in chain.pipes:
                if isinstance(threaded, _Threaded):
                    threaded.shutdown()
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])


def dealer_of(subject: Any) -> Any:
    """Return the `deal` of a chain or of a loader."""
    found = Chain.of(chain_in(subject, "replay_grid")).deal
    if found is None:
        raise ChainError("The chain has no batches. End it with `.deal(batch_size=...)`.")
    return found.pipe


def names_of(chain: Any) -> tuple[ItemForm | None, tuple[str, ...] | None]:
    """Return the form of the items (see `select`) and the names of the classes; None for what is unknown."""
    if chain is None:
        return None, None
    pipes = Chain.of(chain)
    form = next((form for form in map(form_of, pipes.pipes) if form is not None), None)
    for nearest in pipes.of_type(MapPipe, IterPipe):
        return form, nearest.class_names()
    return form, None


def fields_of(item: Any, form: ItemForm | None = None) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the fields of an item or a collated batch, and the ctx. Without names, fields are called by position."""
    if isinstance(item, Sample):
        values = dict(item)  # which records their ctx
        return {"key": item.key, **values}, item.ctx
    item, ctx = _without_ctx(item, form)
    if form is not None and form.kind == "bare":
        return {form.names[0]: item}, ctx
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}, ctx
    if isinstance(item, tuple):
        known = form.names if form is not None and len(form.names) == len(item) else None
        return dict(zip(known or (f"[{place}]" for place in range(len(item))), item, strict=True)), ctx
    return {"value": item}, ctx


def _without_ctx(item: Any, form: ItemForm | None) -> tuple[Any, Mapping[str, Any]]:
    """Return an item of `select(..., return_ctx=True)` without its ctx, and the ctx."""
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[1], Mapping):
        return item, {}
    fields, ctx = item
    has_ctx = isinstance(fields, tuple | list | Mapping) if form is None else form.has_ctx
    if not has_ctx:
        return item, {}
    is_tuple = isinstance(fields, list) and (form is None or form.kind == "tuple")  # torch's collate makes lists
    return tuple(fields) if is_tuple else fields, ctx


def columns_of(batch: Any, form: ItemForm | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the fields of a batch, each with the values of all samples; and the ctx of each sample, if known."""
    if isinstance(batch, list) and any(getattr(part, "ndim", 0) == 4 for part in batch):
        batch = tuple(batch)  # as torch's own collation gives them
    batch = [batch] if isinstance(batch, Sample) else batch
    if isinstance(batch, list) and batch and isinstance(batch[0], Sample | tuple | Mapping):
        items = [fields_of(item, form) for item in batch]
        names = dict.fromkeys(name for each, _ in items for name in each)
        return {name: [each.get(name) for each, _ in items] for name in names}, [dict(ctx) for _, ctx in items]
    values, ctx = fields_of(batch, form)
    return values, split_ctx(ctx) if ctx else []


def show_batch(
    batch: Any,
    source_datapipe: Any = None,
    *,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    max_images: int = 64,
    num_columns: int = 8,
    tile: int = 112,
) -> Image.Image:
    """Return the images of a batch side by side, with the names of their classes.

    Floats are denormalized with `mean` and `std`. Without them, floats from 0 to 1 are shown as they are, and other
    values are rescaled, from black (minimum) to white (maximum).

    Args:
        batch: A chain or a loader, whose first batch is shown, or the first 16 samples without `deal`; neither of them
            advances. Or what it yields: `(x, y)`, `((x, y), ctx)`, a dictionary, or a list of samples or tuples; or
            images `[B, C, H, W]`, one image `[C, H, W]`, or a list of images of any kind. Mixed labels
            `[B, num_classes]` are shown with their shares.
        source_datapipe: The chain or the loader that yielded the batch. It provides the names of fields and classes.
        class_names: The names of the classes 0, 1, ..., instead of those of the chain.
        mean: The mean, one number or one for each channel.
        std: The standard deviation, one number or one for each channel.
        max_images: The largest number of images to show.
        num_columns: The number of images in a row.
        tile: The height and width of a tile in pixels.

    Returns:
        A Pillow image, which notebooks show.

    Raises:
        TypeError: The batch holds no images.
        ChainError: The chain yields nothing.

    Example:
        >>> x, y = torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 0])
        >>> kdp.show_batch((x, y), class_names=["heron", "stork"], tile=32).size
        (96, 46)
    """
    normalization = check_normalization(mean, std)
    chain = find_chain(batch)
    if chain is not None:
        is_dealt = Chain.of(chain).deal is not None
        with looking(chain) as items:
            batch = list(islice(items, 1 if is_dealt else BATCH_SIZE))
        if not batch:
            raise ChainError("The chain yields nothing. Look at `len(pipe)` after each filter.")
        batch = batch[0] if is_dealt else batch
    elif source_datapipe is not None:
        chain = chain_in(source_datapipe, "kdp.show_batch")
    form, known_names = names_of(chain)
    labels_of = check_class_names(class_names) or known_names
    values, _ = columns_of(batch, form)
    images = _images(values)
    labels = values.get("y")
    if labels is None:
        labels = next((value for value in values.values() if _are_labels(value, len(images))), None)
    shown = images[: check_count("max_images", max_images)]
    captions = [_caption(labels, place, labels_of) for place in range(len(shown))]
    views = (image if isinstance(image, tuple) else (image,) for image in shown)
    rows = [[picture_of(view, normalization) for view in each] for each in views]
    num_each = max(map(len, rows))
    return image_grid(
        [picture for row in rows for picture in row],
        [text for caption in captions for text in (caption, *[""] * (num_each - 1))] if any(captions) else None,
        num_columns=max(1, check_count("num_columns", num_columns) // num_each) * num_each,
        tile=tile,
    )


def _images(values: Mapping[str, Any]) -> list[Any]:
    """Return the images of a batch; tuples of images if each has several views."""
    for value in ([values["x"]] if "x" in values else []) + list(values.values()):
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 4 and len(value) and is_image(value[0]):
            return list(value)
        if is_image(value):
            return [value]
        if isinstance(value, tuple) and value and all(getattr(view, "ndim", 0) == 4 for view in value):
            return list(zip(*value, strict=True))
        if isinstance(value, list):
            views = [view for image in value for view in (image if isinstance(image, tuple) else [image])]
            if views and all(map(is_image, views)):
                return value
    shown = ", ".join(f"{name}: {type(value).__name__}" for name, value in values.items())
    raise TypeError(f"`batch` must hold images, [B, C, H, W] or a list of them, but holds {shown}.")


def _are_labels(value: Any, size: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape[:1] == (size,) and value.dim() <= 2 and not value.is_complex() and value.dim() > 0
    if not isinstance(value, list | tuple) or len(value) != size:
        return False
    return all(isinstance(entry, int | str | np.integer) or getattr(entry, "ndim", 1) == 0 for entry in value)


def _caption(labels: Any, place: int, names: Sequence[str] | None) -> str:
    if labels is None:
        return ""
    label = labels[place]
    label = label.tolist() if hasattr(label, "tolist") else label
    if not isinstance(label, list):
        return class_name(label, names) or str(label)
    shares = sorted(((share, number) for number, share in enumerate(label) if share > 0.005), reverse=True)[:2]
    texts = [class_name(number, names) or str(number) for _, number in shares]
    if len(texts) == 1:
        return texts[0]
    return " ".join(f"{text} {share:.0%}" for text, (share, _) in zip(texts, shares, strict=True))


def replay_grid(
    source_datapipe: Any, *, seed: int | None = None, epoch: int = 0, batch: int = 0, field: str = "x", tile: int = 128
) -> Image.Image:
    """Return a picture of one batch: each original image, and the result beside it.

    The result shows the sample after the per-sample transforms; `mixup` and `cutmix` are not applied. Floats are
    rescaled, from black (minimum) to white (maximum).

    Args:
        source_datapipe: A chain with `deal`, or its loader.
        seed: The seed of the epoch; by default, that of `deal`.
        epoch: The epoch number, from 0.
        batch: The batch number, from 0.
        field: The field of images.
        tile: The height and width of an image in pixels.

    Raises:
        ChainError: The chain has no `deal`.
        IndexError: The epoch has no such batch.
    """
    dealer = dealer_of(source_datapipe)
    # `on_error` loads fields at once, after which the original values are unknown.
    originals: dict[int, Column | None] = {}

    def seen(sample: Sample) -> None:
        originals[sample.ordinal] = _before(sample, field)

    samples = dealer.whole_samples(
        check_count("epoch", epoch, minimum=0),
        check_count("batch", batch, minimum=0),
        seed=None if seed is None else check_seed(seed),
        seen=seen,
    )
    if samples is None:
        raise IndexError(f"Epoch {epoch} has no batch {batch}. Pass a smaller number; batches are numbered from 0.")
    pictures = []
    captions = []
    for sample in samples:
        before = originals.get(sample.ordinal)
        original = original_of(sample, field) if before is None else before.get(sample)
        results = sample[field] if isinstance(sample[field], tuple) else (sample[field],)
        pictures += [picture_of(original), *map(picture_of, results)]
        captions += [sample.key[-(tile // 6) :], *([""] * len(results))]
    num_each = len(pictures) // len(samples)
    return image_grid(pictures, captions, num_columns=max(1, 8 // num_each) * num_each, tile=tile)


def original_of(sample: Sample, field: str) -> Any:
    """Return the image of a sample before its transforms; if the field was read before, its value."""
    before = _before(sample, field)
    return sample[field] if before is None else before.get(sample)


def _before(sample: Sample, field: str) -> Column | None:
    return sample.lazy(field).without_steps(lambda step: step.startswith(("applying ", "making views ")))
