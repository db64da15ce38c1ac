"""Show the first samples of a chain without changing its epoch or any random numbers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from kdpipes.core.call_text import shown_value
from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError, check_count
from kdpipes.core.messages import counted
from kdpipes.core.pipe import a_datapipe
from kdpipes.core.registry import register
from kdpipes.core.secrets import printable, safe_text
from kdpipes.work.decode import DecodedImage, EncodedImage

_SIDE = 96  # of a thumbnail
_LEAST = 48  # what is smaller is shown larger, pixel by pixel
_MANY = 20_000_000  # the range of more values is not looked for
_ENTRIES = 6


class Peek:
    """The first items of a chain. `repr` describes them, and notebooks show their images.

    Args:
        items: The items, as the chain yields them.
        source_datapipe: The chain; None if it is unknown.
        num_shown: The number of images of a batch to show.
    """

    def __init__(self, items: list[Any], source_datapipe: Any, num_shown: int) -> None:
        # Imported on use, here and below: what draws pictures and HTML need not be imported with every pipe.
        from kdpipes.look.batch import fields_of, names_of

        self.items = items
        self._num_shown = num_shown
        names, self._class_names = names_of(source_datapipe)
        found = [fields_of(item, names) for item in items]
        self._rows = [{**values, **({"ctx": ctx} if ctx else {})} for values, ctx in found]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __repr__(self) -> str:
        if not self.items:
            return "nothing: the chain is empty"
        lines = []
        for number, row in enumerate(self._rows):
            width = max((len(printable(name)) for name in row), default=0)
            fields = (f"{printable(name):<{width}}  {self._shown(name, value)}" for name, value in row.items())
            lines.append(f"{number:>3}  " + "\n     ".join(fields))
        return "\n".join(lines)

    def _shown(self, name: str, value: Any) -> str:
        from kdpipes.look.rendering import class_name

        known = class_name(value, self._class_names) if name == "y" else None
        return safe_text(summary(value)) if known is None else f"{value} ({printable(known)})"

    def _repr_html_(self) -> str:
        if not self.items:
            return "<i>nothing: the chain is empty</i>"
        from kdpipes.look.rendering import render

        names = dict.fromkeys(name for row in self._rows for name in row)
        columns = sorted(names, key=lambda name: name == "ctx")  # which comes last
        cells: list[list[Any]] = []
        for row in self._rows:
            cells.append([None] * len(columns))
            for place, name in enumerate(columns):
                if name in row:
                    images = [_thumbnail(image) for image in self._images(row[name])]
                    text = self._shown(name, row[name])
                    cells[-1][place] = {"images": list(filter(None, images)), "text": text}
        return render("peek", columns, cells)

    def _images(self, value: Any) -> list[Any]:
        """Return the images of a field: itself, its views, or the first ones of a batch."""
        from kdpipes.look.pictures import is_image

        if isinstance(value, tuple | list):
            return [image for part in value[: self._num_shown] for image in self._images(part)]
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            return [image for image in value[: self._num_shown] if is_image(image)]
        return [value] if is_image(value) else []


def _thumbnail(image: Any) -> dict[str, Any] | None:
    """Return an image of any kind for HTML; None if it is damaged."""
    from kdpipes.look.pictures import image_png, picture_of

    try:
        picture = picture_of(image)
    except DataError:
        return None
    picture.thumbnail((_SIDE, _SIDE))
    factor = max(1, _LEAST // max(picture.size))
    width = factor * picture.width
    height = factor * picture.height
    return {"data": base64.b64encode(image_png(picture) or b"").decode(), "width": width, "height": height}


def peek(source_datapipe: Any, n: int = 3) -> Peek:
    """Shows the first samples of a chain: types, shapes, ranges and images (functional name: ``peek``).

    A copy of the chain makes the samples that come next, in this process. The epochs of the pipe and of later loaders
    do not advance, and the global random generators do not change. After `deal`, as many batches are made as the
    samples need; of collated batches, the first one is shown whole. `to_device` is left out. Only these samples
    are read from remote sources. Samples that `on_error` skips are not put into quarantine.

    Args:
        source_datapipe: Any pipe, including stock pipes.
        n: The number of samples; for a stream of other items, the number of items.

    Returns:
        An object that shows them. Its attribute `items` holds them.

    Example:
        >>> kdp.from_dataset([("heron", 0), ("stork", 1)], class_names=["a", "b"]).peek(1)
          0  key  '0'
             x    'heron'
             y    0 (a)
    """
    from kdpipes.look.batch import looking

    check_count("n", n)
    first = list[Any]()
    with looking(a_datapipe(source_datapipe)) as items:
        for item in items:
            is_batch = Chain.of(source_datapipe).deal is not None
            if is_batch and isinstance(item, list):
                first += item[: n - len(first)]
            else:
                first.append(item)
            if len(first) >= n or (is_batch and isinstance(item, tuple | dict | torch.Tensor)):
                break
    return Peek(first, source_datapipe, n)


def summary(value: Any) -> str:
    """Return a short description of a value.

    Example:
        >>> summary(torch.arange(6.0).reshape(2, 3)), summary(b"abc"), summary("heron")
        ('tensor float32 [2, 3], 0 … 5', '3 bytes', "'heron'")
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, EncodedImage):
        return f"encoded image {value.size[0]}x{value.size[1]}, {counted(len(value.content), 'byte')}"
    if isinstance(value, Image.Image | DecodedImage):
        return f"image {value.mode} {value.size[0]}x{value.size[1]}"
    if isinstance(value, bytes | bytearray | memoryview):
        return counted(len(value), "byte")
    if isinstance(value, list | tuple) and len(value) > _ENTRIES:
        kinds = sorted({type(entry).__name__ for entry in value})
        return f"{type(value).__name__} of {len(value):,}: {', '.join(kinds[:3])}{', …' if len(kinds) > 3 else ''}"
    if isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return f"{opening}{', '.join(map(summary, value))}{closing}"
    if isinstance(value, Mapping):
        entries = [f"{name}: {summary(entry)}" for name, entry in list(value.items())[:_ENTRIES]]
        return f"{{{', '.join([*entries, *(['…'] if len(value) > _ENTRIES else [])])}}}"
    return shown_value(value)


def _array(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    dtype = str(value.dtype).removeprefix("torch.")
    text = f"{'tensor' if is_tensor else 'array'} {dtype} {list(value.shape)}"
    size = value.numel() if is_tensor else value.size
    if is_tensor and value.device.type != "cpu":
        return f"{text} on {value.device}"
    if not size or size > _MANY or "complex" in dtype or (not is_tensor and value.dtype.kind not in "biuf"):
        return text
    if not value.shape:
        return f"{text}: {_number(value.item())}"
    if dtype == "bool":
        return f"{text}, {(value.sum() / size).item():.0%} True"
    return f"{text}, {_number(value.min().item())} … {_number(value.max().item())}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


register("peek", peek, flavour="map")
register("peek", peek, flavour="iter")
