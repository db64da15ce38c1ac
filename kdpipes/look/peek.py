"""The first samples of a chain, looked at without moving anything."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from html import escape
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import MapDataPipe

from kdpipes._printable import printable
from kdpipes.core.chain import Chain
from kdpipes.core.masked import masked
from kdpipes.core.registry import register
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.skipping import unrecorded
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe
from kdpipes.errors import check_count
from kdpipes.look.chain import a_chain
from kdpipes.look.items import Fields, class_names_of, fields_of, names_of
from kdpipes.look.known import is_behind_deal
from kdpipes.look.pixels import is_image, normalization_of, picture_or_none
from kdpipes.look.values import summary

__all__ = ["Peek"]

_SIDE = 96  # of a thumbnail
_LEAST = 48  # what is smaller is shown larger, pixel by pixel
_FRAME = "border-collapse:collapse;font:12px/1.5 system-ui,sans-serif;text-align:left"
_CELL = "padding:4px 8px;border:1px solid rgba(128,128,128,.35);vertical-align:top;text-align:left;max-width:420px"


class Peek:
    """The first items of a chain; `repr` says what they are, and notebooks show their images.

    Args:
        items: As the chain gives them.
        source_datapipe: The chain.
        num_shown: How many images of a batch to show.
    """

    def __init__(self, items: list[Any], source_datapipe: Any, num_shown: int) -> None:
        self.items = items
        self._num_shown = num_shown
        self._class_names = class_names_of(source_datapipe)
        self._normalization = normalization_of(source_datapipe)
        names = names_of(source_datapipe)
        self._fields = [fields_of(item, names) for item in items]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __repr__(self) -> str:
        if not self.items:
            return "nothing: the chain is empty"
        return "\n".join(self._lines(number, fields) for number, fields in enumerate(self._fields))

    def _lines(self, number: int, fields: Fields) -> str:
        width = max(map(len, [*fields.values, *(["ctx"] if fields.ctx else [])]), default=0)
        lines = [f"{name:<{width}}  {self._shown(name, value)}" for name, value in fields.values.items()]
        lines += [f"{'ctx':<{width}}  {masked(summary(fields.ctx))}"] if fields.ctx else []
        return f"{number:>3}  " + "\n     ".join(lines)

    def _shown(self, name: str, value: Any) -> str:
        names = self._class_names
        if name == "y" and names is not None and isinstance(value, int) and 0 <= value < len(names):
            return f"{value} ({printable(names[value])})"
        return masked(summary(value))

    def _repr_html_(self) -> str:
        if not self.items:
            return "<i>nothing: the chain is empty</i>"
        columns = list(dict.fromkeys(name for fields in self._fields for name in fields.values))
        columns += ["ctx"] if any(fields.ctx for fields in self._fields) else []
        head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in ["", *columns])
        rows = "".join(self._row(number, fields, columns) for number, fields in enumerate(self._fields))
        return f'<table style="{_FRAME}"><tr>{head}</tr>{rows}</table>'

    def _row(self, number: int, fields: Fields, columns: list[str]) -> str:
        values = {**fields.values, **({"ctx": fields.ctx} if fields.ctx else {})}
        cells = [self._cell(name, values[name]) if name in values else "" for name in columns]
        shown = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in [str(number), *cells])
        return f"<tr>{shown}</tr>"

    def _cell(self, name: str, value: Any) -> str:
        found = [picture_or_none(image, self._normalization) for image in self._images(value)]
        images = "".join(_thumbnail(picture) for picture in found if picture is not None)
        return f"<div>{images}</div>{escape(self._shown(name, value))}" if images else escape(self._shown(name, value))

    def _images(self, value: Any) -> list[Any]:
        """Return the images of a field: itself, its views, or the first ones of a batch."""
        if isinstance(value, tuple | list):
            return [image for part in value[: self._num_shown] for image in self._images(part)]
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            return [image for image in value[: self._num_shown] if is_image(image)]
        return [value] if is_image(value) else []


def _thumbnail(picture: Image.Image) -> str:
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    factor = max(1, _LEAST // max(picture.size))
    size = f'width="{factor * picture.width}" height="{factor * picture.height}"'
    return f'<img src="data:image/png;base64,{data}" {size} style="margin:0 3px 3px 0;image-rendering:pixelated">'


def peek(source_datapipe: Any, n: int = 3) -> Peek:
    """Shows the first samples of a chain: kinds, shapes, ranges and images (functional name: ``peek``).

    They are those that come next, made in this process, of a copy: the epochs of the pipe, and of loaders made later,
    stay where they are, and so do the global generators of random numbers. Behind `deal`, the samples of as many
    batches as it takes; collated batches are shown whole, with their first images. `to_device` is left out. Sources
    elsewhere are asked for these samples alone. Samples that `on_error` leaves out are put into no quarantine.

    Args:
        source_datapipe: Any pipe, stock ones included.
        n: How many samples; of a stream of anything else, how many items.

    Returns:
        What shows them; its `items` are they.

    Example:
        >>> kdp.from_dataset([("heron", 0), ("stork", 1)], class_names=["a", "b"]).peek(1)
          0  key  '0'
             x    'heron'
             y    0 (a)
    """
    check_count("n", n)
    pipe = a_chain(source_datapipe)
    while isinstance(pipe, DeviceMoverIterDataPipe):
        pipe = pipe.source
    with _generators_kept(), unrecorded(pipe):
        items = [pipe[index] for index in range(min(n, len(pipe)))] if _is_indexed(pipe) else _taken(pipe, n)
        return Peek(items, pipe, n)


def _is_indexed(pipe: Any) -> bool:
    return isinstance(pipe, MapDataPipe)


def _taken(pipe: Any, n: int) -> list[Any]:
    copied: Any = Chain.of(pipe).copy_streams()
    for dealer in Chain.of(copied).of_type(Dealer):
        dealer.reads_ahead = False
    is_dealt, items = is_behind_deal(copied), list[Any]()
    iterator = iter(copied)
    with closing(iterator) if hasattr(iterator, "close") else nullcontext():
        for item in islice(iterator, n):
            if not is_dealt or not isinstance(item, list):
                items.append(item)
                if is_dealt and _size(item) * len(items) >= n:
                    break
                continue
            items += item[: n - len(items)]
            if len(items) == n:
                break
    for upstream in Chain.of(copied).pipes:
        end = getattr(type(upstream), "shutdown", None)  # of stock pipes with threads
        if end is not None:
            end(upstream)
    return items


def _size(batch: Any) -> int:
    """Return how many samples a collated batch has."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    parts = list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, tuple) else []
    return max((_size(part) for part in parts), default=1)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Put the global generators of random numbers back where they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


register("peek", peek, flavour="map")
register("peek", peek, flavour="iter")
