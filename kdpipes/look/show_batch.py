"""A batch as a picture: its images with the names of their classes, and where they were cut from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, check_count, check_names
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import SampleMapper
from kdpipes.delivery.collate_samples import split_ctx
from kdpipes.look.chain import a_chain
from kdpipes.look.crop_boxes import crop_boxes
from kdpipes.look.grid import image_grid
from kdpipes.look.items import class_names_of, fields_of, names_of, rows_of
from kdpipes.look.pixels import Normalization, check_normalization, is_image, normalization_of, picture_of
from kdpipes.look.replay_grid import original_of
from kdpipes.work.replay import find_sample
from kdpipes.work.transform import Transformer

__all__ = ["show_batch"]


class _Batch(NamedTuple):
    images: list[Any]  # or tuples of views
    labels: Any
    keys: Sequence[str] | None
    ctxs: list[dict[str, Any]]


def show_batch(
    batch: Any,
    source_datapipe: Any = None,
    *,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    crops: bool = False,
    originals: Sequence[Any] | None = None,
    max_images: int = 64,
    num_columns: int = 8,
    tile: int = 112,
) -> Image.Image:
    """Return the images of a batch side by side, with the names of their classes.

    Floats are denormalised: by `mean` and `std`, by those of the `Normalize` in the chain, or, where neither is given,
    shown as they are from 0 to 1, and otherwise stretched to black and white.

    Args:
        batch: What a chain or a loader gives: `(x, y)`, `((x, y), ctx)`, a dictionary, a list of samples or tuples;
            images `[B, C, H, W]`, one `[C, H, W]`, or a list of images of any kind. Mixed labels `[B, num_classes]` are
            shown with their shares.
        source_datapipe: The chain that gives it: says which part is what, the names of the classes, the `Normalize`,
            and, for `crops`, the originals.
        class_names: The names of the classes 0, 1, ..., in place of the chain's.
        mean: For each channel, or one for all.
        std: Likewise.
        crops: Whether to show each image beside its original, with the recorded regions that were cut out: for chains
            with `record_ctx()` and `select(..., return_ctx=True)`.
        originals: The original images, where the chain cannot give them; it can where it is indexed, and where the
            batch has the samples' keys: `select("x y key", return_ctx=True)`.
        max_images: Of larger batches, this many are shown.
        num_columns: The number of images in a row; with `crops`, of originals and images together.
        tile: Height and width of a tile in pixels.

    Returns:
        An image of Pillow's, which notebooks show.

    Raises:
        TypeError: There are no images in the batch.
        ChainError: `crops`, and nothing was recorded, or the originals are not known.

    Example:
        >>> x, y = torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 0])
        >>> kdp.show_batch((x, y), class_names=["heron", "stork"], tile=32).size
        (96, 46)
    """
    names = None if source_datapipe is None else names_of(a_chain(source_datapipe))
    labels_of = check_names("class_names", class_names)
    if source_datapipe is not None and labels_of is None:
        labels_of = class_names_of(source_datapipe)
    normalization = check_normalization(mean, std)
    if normalization is None and source_datapipe is not None:
        normalization = normalization_of(source_datapipe)
    found = _read(batch, names)
    shown = found.images[: check_count("max_images", max_images)]
    captions = [_caption(found.labels, place, labels_of) for place in range(len(shown))]
    rows = [_pictures(image, normalization) for image in shown]
    if crops or originals is not None:
        drawn = _originals(found, source_datapipe, originals, len(shown))
        triples = zip(drawn, found.ctxs, rows, strict=False)  # of larger batches, only some are shown
        rows = [[crop_boxes(original, ctx), *row] for original, ctx, row in triples]
    num_each = max(map(len, rows))
    return image_grid(
        [picture for row in rows for picture in row],
        [text for caption in captions for text in (caption, *[""] * (num_each - 1))] if any(captions) else None,
        num_columns=max(1, check_count("num_columns", num_columns) // num_each) * num_each,
        tile=tile,
    )


def _read(batch: Any, names: Any) -> _Batch:
    """Return the parts of a batch that are shown."""
    ctxs: list[dict[str, Any]] = []
    if isinstance(batch, list) and any(getattr(part, "ndim", 0) == 4 for part in batch):
        batch = tuple(batch)  # as torch's own collation gives them
    if isinstance(batch, Sample):
        batch = [batch]
    if _is_list_of_items(batch):
        fields, items = rows_of(batch, names), [fields_of(item, names) for item in batch]
        ctxs = [dict(item.ctx) for item in items]
    else:
        fields = fields_of(batch, names)
        ctxs = split_ctx(fields.ctx) if fields.ctx else []
    images = _images(fields.values)
    labels = fields.values.get("y")
    if labels is None:
        labels = next((value for value in fields.values.values() if _are_labels(value, len(images))), None)
    return _Batch(images, labels, fields.values.get("key"), ctxs)


def _is_list_of_items(batch: Any) -> bool:
    return isinstance(batch, list) and bool(batch) and isinstance(batch[0], Sample | tuple | Mapping)


def _images(values: Mapping[str, Any]) -> list[Any]:
    """Return the images of a batch; where each has several views, tuples of them."""
    for value in ([values["x"]] if "x" in values else []) + list(values.values()):
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 4 and len(value) and is_image(value[0]):
            return list(value)
        if is_image(value):
            return [value]
        if isinstance(value, tuple) and value and all(getattr(view, "ndim", 0) == 4 for view in value):
            return list(zip(*value, strict=True))
        if isinstance(value, list) and value and all(_is_image_or_views(image) for image in value):
            return value
    shown = ", ".join(f"{name}: {type(value).__name__}" for name, value in values.items())
    raise TypeError(f"`batch` must hold images, [B, C, H, W] or a list of them, but holds {shown}.")


def _is_image_or_views(value: Any) -> bool:
    return is_image(value) or (isinstance(value, tuple) and bool(value) and all(map(is_image, value)))


def _are_labels(value: Any, size: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape[:1] == (size,) and value.dim() <= 2 and not value.is_complex() and value.dim() > 0
    if not isinstance(value, list | tuple) or len(value) != size:
        return False
    return all(isinstance(entry, int | str | np.integer) or getattr(entry, "ndim", 1) == 0 for entry in value)


def _pictures(image: Any, normalization: Normalization | None) -> list[Image.Image]:
    return [picture_of(view, normalization) for view in (image if isinstance(image, tuple) else (image,))]


def _caption(labels: Any, place: int, names: Sequence[str] | None) -> str:
    if labels is None:
        return ""
    label = labels[place]
    label = label.tolist() if hasattr(label, "tolist") else label
    if not isinstance(label, list):
        return _class_of(label, names)
    shares = sorted(((share, number) for number, share in enumerate(label) if share > 0.005), reverse=True)[:2]
    if len(shares) == 1:
        return _class_of(shares[0][1], names)
    return " ".join(f"{_class_of(number, names)} {share:.0%}" for share, number in shares)


def _class_of(label: Any, names: Sequence[str] | None) -> str:
    is_named = names is not None and isinstance(label, int) and 0 <= label < len(names)
    return names[label] if is_named and names is not None else str(label)


def _originals(batch: _Batch, chain: Any, originals: Sequence[Any] | None, number: int) -> Sequence[Any]:
    """Return the images that those of a batch were cut from."""
    if not any(batch.ctxs):
        raise ChainError(
            "`crops` needs what was recorded: `.record_ctx()` before the transforms, and "
            "`.select(..., return_ctx=True)`."
        )
    if originals is not None:
        if len(originals) < number:
            raise ValueError(f"`originals` must be as many as the {number} images, but are {len(originals)}.")
        return originals
    source = (
        None if chain is None else next((pipe for pipe in Chain.of(chain).pipes if isinstance(pipe, MapPipe)), None)
    )
    if source is None or batch.keys is None:
        raise ChainError(
            "`crops` needs the originals: give the chain, indexed, and batches with keys, "
            '`select("x y key", return_ctx=True)`; or `originals=[...]`.'
        )
    while isinstance(source, SampleMapper) and source.traits.gives == "items":
        source = source.source
    keys = list(map(str, batch.keys[:number]))
    return [original_of(_sample_of(key, source), _image_field(source)) for key in keys]


def _sample_of(key: str, source: MapPipe) -> Sample:
    sample = find_sample(key, source)
    if sample is None:
        raise ChainError(
            f"The chain has no sample {key!r}: the batch is another chain's. Give the chain that it comes from, or "
            "`originals=[...]`."
        )
    return sample


def _image_field(source: Any) -> str:
    """Return the field that transforms were applied to."""
    transforms = Chain.of(source).operations(Transformer)
    return transforms[0].field if transforms else "x"
