"""Transform several fields together: images, masks, boxes and points of one sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from PIL import Image

from kdpipes.core.errors import DataError, check_type, closest, must_be
from kdpipes.work.decode import MASK_NAMES, DecodedImage, EncodedImage
from kdpipes.work.image_ops import ANCHORS, FieldKind, as_array, back_as, from_corners, size_of

_BY_NAME: dict[str, FieldKind] = {
    **dict.fromkeys(MASK_NAMES, "mask"),
    **dict.fromkeys(("box", "boxes", "bbox", "bboxes"), "boxes"),
    **dict.fromkeys(("point", "points", "keypoints"), "points"),
    **dict.fromkeys(("y", "label", "labels", "class", "classes"), "other"),
}


class Fields(NamedTuple):
    """The names and kinds of the fields of a joint transform."""

    names: tuple[str, ...]
    kinds: tuple[FieldKind, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.names))
        return f"field{'s' * (len(self.names) > 1)} {shown}"

    @property
    def lead(self) -> int:
        """The position of the field for which parameters are drawn: the first image, else the first mask, else 0."""
        return next((self.kinds.index(kind) for kind in ("image", "mask") if kind in self.kinds), 0)

    def check_image(self, param: str, transform: Any) -> None:
        """Raise ValueError if no field is an image or a mask, for which `transform` would draw its parameters."""
        if not {"image", "mask"} & set(self.kinds):
            rule = "a function of all fields, because none of them is an image or a mask"
            hint = f'Name the image, too: `.transform("x {self.names[0]}", ...)`.'
            raise ValueError(must_be(param, rule, transform, hint))

    def size(self, values: tuple[Any, ...]) -> tuple[int, int]:
        """Return the width and height of the images and masks. Raise DataError if they differ."""
        known: list[tuple[str, tuple[int, int]]] = []
        for name, kind, value in zip(self.names, self.kinds, values, strict=True):
            if kind == "other" and isinstance(value, Image.Image | EncodedImage | DecodedImage):
                raise TypeError(
                    f'Field {name!r} of a joint transform holds an image, but is of kind "other", which is not '
                    f'transformed. Write `kinds={{{name!r}: "mask"}}`, or "image".'
                )
            if kind in ("image", "mask"):
                is_plane = isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and value.dim() == 2)
                owner = f"a joint transform of {kind}s"
                known.append((name, (value.shape[1], value.shape[0]) if is_plane else size_of(value, owner)))
        for name, size in known[1:]:
            if size != known[0][1]:
                sizes = [f"{name!r} is {width} x {height}" for name, (width, height) in (known[0], (name, size))]
                raise DataError(
                    f"Images and masks of a joint transform must have the same size, but {sizes[0]}, and {sizes[1]}."
                )
        return known[0][1]


def fields_of(names: tuple[str, ...], kinds: Any) -> Fields:
    """Return the fields of a joint transform with their kinds, either given or derived from their names."""
    if len(set(names)) < len(names):
        raise ValueError(must_be("field", "names that differ", " ".join(names)))
    check_type("kinds", kinds, Mapping | None, 'kinds by field name, like {"mask": "mask"}')
    for name, kind in (kinds or {}).items():
        if name not in names:
            raise ValueError(must_be("kinds", f"for the {Fields(names, ())}", name) + closest(str(name), names))
        if kind not in get_args(FieldKind):
            rule = "one of " + ", ".join(map(repr, get_args(FieldKind)))
            raise ValueError(must_be(f"kinds[{name!r}]", rule, kind))
    known = {name: _BY_NAME.get(name.lower(), "image") for name in names} | dict(kinds or {})
    return Fields(names, tuple(known[name] for name in names))


@runtime_checkable
class _AppliesToFields(Protocol):
    def apply_to(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any: ...


class JointTransform:
    """A transform with the methods of `RecordedTransform`, drawn once for all fields.

    `apply` transforms images; `apply_to(kind, value, params, size)` transforms masks, boxes and points, where `size` is
    the width and height of the images before the transform. Other fields are left unchanged. The values of the
    fields are passed as one tuple.
    """

    def __init__(self, transform: Any, fields: Fields, param: str = "transform") -> None:
        fields.check_image(param, transform)
        if not isinstance(transform, _AppliesToFields) and set(fields.kinds) - {"image", "other"}:
            hint = (
                "Give it a method `apply_to(kind, value, params, size)` for masks, boxes and points, or use a function "
                "that takes all fields and returns as many values."
            )
            raise TypeError(must_be(param, f"a transform of {fields}", transform, hint))
        self._transform = transform
        self._fields = fields
        self.__name__ = type(transform).__name__
        if (is_random := getattr(transform, "is_random", None)) is not None:
            self.is_random = is_random

    @property
    def wrapped(self) -> Any:
        """The transform of one image."""
        return self._transform

    def draw(self, values: tuple[Any, ...], rng: np.random.Generator) -> dict[str, Any]:
        """Return the parameters, drawn for the first image."""
        self._fields.size(values)
        value = values[self._fields.lead]
        if isinstance(value, np.ndarray):  # a mask: parameters are drawn for an image of its size
            value = torch.empty((1, *value.shape[:2]), dtype=torch.uint8)
        elif isinstance(value, torch.Tensor) and value.dim() == 2:
            value = value[None]
        params: dict[str, Any] = self._transform.draw(value, rng)
        return params

    def apply(self, values: tuple[Any, ...], params: dict[str, Any]) -> tuple[Any, ...]:
        """Return all values after the transform that `params` describe."""
        size = self._fields.size(values)
        made = list(values)
        for place, (kind, value) in enumerate(zip(self._fields.kinds, values, strict=True)):
            if kind == "image":
                made[place] = self._transform.apply(value, params)
            elif kind in ANCHORS:
                corners = self._transform.apply_to("boxes", as_array(kind, value), params, size)
                made[place] = back_as(value, from_corners(kind, corners))
            elif kind != "other":
                made[place] = self._transform.apply_to(kind, value, params, size)
        return tuple(made)
