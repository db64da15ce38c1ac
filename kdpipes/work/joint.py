"""Joint transforms of several fields: images, masks, boxes and points that belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from kdpipes.errors import DataError, closest, must_be
from kdpipes.work.decode import DecodedImage, EncodedImage
from kdpipes.work.image_ops import size_of

__all__ = ["FieldKind", "Fields", "JointTransform", "as_array", "back_as", "fields_of", "moved", "on_mask"]

FieldKind = Literal["image", "mask", "boxes", "points", "other"]
_BY_NAME: dict[str, FieldKind] = {
    **dict.fromkeys(("mask", "masks", "segmentation", "seg", "annotation", "label_map"), "mask"),
    **dict.fromkeys(("box", "boxes", "bbox", "bboxes"), "boxes"),
    **dict.fromkeys(("point", "points", "keypoints"), "points"),
    **dict.fromkeys(("y", "label", "labels", "class", "classes"), "other"),
}
_NUM_COLUMNS = {"boxes": 4, "points": 2}


class Fields(NamedTuple):
    """The fields of one joint transform, and the kind of each."""

    names: tuple[str, ...]
    kinds: tuple[FieldKind, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.names))
        return f"field{'s' * (len(self.names) > 1)} {shown}"

    @property
    def lead(self) -> int:
        """The position of the field that parameters are drawn for: the first image, else the first mask, else 0."""
        return next((self.kinds.index(kind) for kind in ("image", "mask") if kind in self.kinds), 0)

    def size(self, values: tuple[Any, ...]) -> tuple[int, int]:
        """Return width and height of the images and masks, or raise if they differ."""
        for name, kind, value in zip(self.names, self.kinds, values, strict=True):
            if kind == "other" and isinstance(value, Image.Image | EncodedImage | DecodedImage):
                raise TypeError(
                    f"Field {name!r} of a joint transform holds an image, but would stay as it is. Write "
                    f'`kinds={{{name!r}: "mask"}}`, or "image".'
                )
        known = [
            (name, _size_of(value, kind))
            for name, kind, value in zip(self.names, self.kinds, values, strict=True)
            if kind in ("image", "mask")
        ]
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
    if kinds is not None and not isinstance(kinds, Mapping):
        raise TypeError(must_be("kinds", 'kinds by field name, like {"mask": "mask"}', kinds))
    for name, kind in (kinds or {}).items():
        if name not in names:
            raise ValueError(must_be("kinds", f"for the {Fields(names, ())}", name) + closest(str(name), names))
        if kind not in get_args(FieldKind):
            rule = "one of " + ", ".join(map(repr, get_args(FieldKind)))
            raise ValueError(must_be(f"kinds[{name!r}]", rule, kind))
    known = {name: _BY_NAME.get(name.lower(), "image") for name in names} | dict(kinds or {})
    return Fields(names, tuple(known[name] for name in names))


class JointTransform:
    """A transform with the methods of `RecordedTransform`, drawn once for all fields.

    `apply` transforms images; `apply_to(kind, value, params, size)` transforms masks, boxes and points, where `size` is
    the width and height of the images before the transform. Other fields are left unchanged.

    Args:
        transform: The transform.
        fields: The fields that it gets as a tuple.
        param: The name of the parameter for `transform`, for errors.
    """

    def __init__(self, transform: Any, fields: Fields, param: str = "transform") -> None:
        if not {"image", "mask"} & set(fields.kinds):
            rule = "a function of all fields, because none of them is an image or a mask"
            raise ValueError(must_be(param, rule, transform))
        if not hasattr(transform, "apply_to") and set(fields.kinds) - {"image", "other"}:
            way_out = (
                "Give it a method `apply_to(kind, value, params, size)` for masks, boxes and points, or use a function "
                "that takes all fields and returns as many values."
            )
            raise TypeError(must_be(param, f"a transform of {fields}", transform, way_out))
        self._transform = transform
        self._fields = fields
        self.__name__ = type(transform).__name__
        if (is_random := getattr(transform, "is_random", None)) is not None:
            self.is_random = is_random

    def draw(self, values: tuple[Any, ...], rng: np.random.Generator) -> dict[str, Any]:
        """Return the parameters, drawn for the first image."""
        self._fields.size(values)
        params: dict[str, Any] = self._transform.draw(_drawable(values[self._fields.lead]), rng)
        return params

    def apply(self, values: tuple[Any, ...], params: dict[str, Any]) -> tuple[Any, ...]:
        """Return all values after the transform that `params` describe."""
        size = self._fields.size(values)
        return tuple(
            self._applied(kind, value, params, size) for kind, value in zip(self._fields.kinds, values, strict=True)
        )

    def _applied(self, kind: FieldKind, value: Any, params: dict[str, Any], size: tuple[int, int]) -> Any:
        if kind == "other":
            return value
        transform = self._transform
        return transform.apply(value, params) if kind == "image" else transform.apply_to(kind, value, params, size)


def _drawable(value: Any) -> Any:
    """Return the value to draw parameters for: for a mask that is an array, an image of its size."""
    if isinstance(value, np.ndarray):
        return torch.empty((1, *value.shape[:2]), dtype=torch.uint8)
    return value[None] if isinstance(value, torch.Tensor) and value.dim() == 2 else value


def _size_of(value: Any, kind: FieldKind) -> tuple[int, int]:
    if isinstance(value, np.ndarray):
        return value.shape[1], value.shape[0]
    if isinstance(value, torch.Tensor) and value.dim() == 2:
        return value.shape[1], value.shape[0]
    return size_of(value, f"a joint transform of {kind}s")


def on_mask(value: Any, apply: Callable[[Any], Any]) -> Any:
    """Return a mask of any dtype, in its own type, after an operation on images that makes no new values.

    Args:
        value: An image from Pillow or `decode_images`, a tensor `[..., H, W]` or an array `[H, W]` or `[H, W, C]`.
        apply: The operation on images from Pillow or `decode_images`, and on tensors `[..., C, H, W]`.
    """
    if isinstance(value, torch.Tensor):
        return apply(value[None])[0] if value.dim() == 2 else apply(value)
    if not isinstance(value, np.ndarray):
        return apply(value)
    kind = value.dtype
    bits = np.dtype(f"i{kind.itemsize}") if kind.kind == "u" and kind.itemsize > 1 else kind  # a dtype that torch has
    planes = torch.from_numpy(np.atleast_3d(value).transpose(2, 0, 1).copy().view(bits))
    made: NDArray[Any] = np.ascontiguousarray(apply(planes).permute(1, 2, 0).numpy()).view(kind)
    return made[..., 0] if value.ndim == 2 else made


def moved(
    kind: FieldKind,
    value: Any,
    *,
    scale: tuple[float, float] = (1, 1),
    shift: tuple[float, float] = (0, 0),
    size: tuple[int, int],
) -> Any:
    """Return boxes or points after `x * scale + shift`; boxes are clipped at the edges of the image.

    Args:
        kind: "boxes" or "points".
        value: Boxes `[N, 4]`, or points `[N, 2]`, in a form that `as_array` takes.
        scale: The factors in x and y.
        shift: The shifts in x and y, in pixels of the result.
        size: Width and height of the resulting image.
    """
    found = as_array(kind, value)
    points = found.reshape(len(found), _NUM_COLUMNS[kind] // 2, 2) * np.asarray(scale, np.float64) + np.asarray(
        shift, np.float64
    )
    if kind == "boxes":
        points = np.stack([points.min(axis=1), points.max(axis=1)], axis=1).clip(0, size)
    return back_as(value, points.reshape(found.shape))


def as_array(kind: FieldKind, value: Any) -> NDArray[Any]:
    """Return boxes or points, also from lists, as an array of floats; an empty value becomes `[0, 4]` or `[0, 2]`."""
    found = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if not found.size:
        found = found.reshape(0, _NUM_COLUMNS[kind])
    if found.ndim != 2 or found.shape[1] != _NUM_COLUMNS[kind] or found.dtype.kind not in "iuf":
        what = {"boxes": "[N, 4]: left, top, right, bottom", "points": "[N, 2]: x, y"}[kind]
        raise DataError(f"{kind.capitalize()} must be numbers {what}, in pixels, but are {found.dtype} {found.shape}.")
    return found.astype(np.float64 if found.dtype != np.float32 else np.float32)


def back_as(before: Any, made: Any) -> Any:
    """Return numbers in the type and dtype of the original value; for a list, as an array of float32."""
    array = np.asarray(made)
    if isinstance(before, torch.Tensor):
        return torch.from_numpy(_rounded(array, not before.is_floating_point())).to(before.device, before.dtype)
    if isinstance(before, np.ndarray):
        return _rounded(array, before.dtype.kind in "iu").astype(before.dtype)
    return array.astype(np.float32)


def _rounded(array: NDArray[Any], is_integer: bool) -> NDArray[Any]:
    return np.rint(array) if is_integer else array


def _plain(value: Any) -> Any:
    return value.to_pil() if isinstance(value, EncodedImage | DecodedImage) else value


def opened_for_albumentations(fields: Fields, values: tuple[Any, ...], labels: tuple[str, ...]) -> dict[str, Any]:
    """Return the values in the form that albumentations takes, by the names of its targets.

    Args:
        fields: The fields of the values.
        values: The values.
        labels: The fields that are filtered along with boxes or points.
    """
    fields.size(values)
    data: dict[str, Any] = {}
    for name, target, kind, value in zip(fields.names, targets_of(fields), fields.kinds, values, strict=True):
        if kind in ("boxes", "points"):
            data[target] = as_array(kind, value).astype(np.float32)
        elif kind == "other":
            data.update({name: value} if name in labels else {})
        elif isinstance(value, torch.Tensor):
            data[target] = np.ascontiguousarray(value.numpy() if value.dim() == 2 else value.permute(1, 2, 0).numpy())
        else:
            image = _plain(value)
            is_odd = kind == "image" and isinstance(image, Image.Image) and image.mode not in {"L", "RGB"}
            data[target] = np.array(image.convert("RGB") if is_odd else image)
    return data


def closed_of_albumentations(fields: Fields, values: tuple[Any, ...], data: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the results of albumentations, each in the type of the original value."""
    made = []
    for name, target, kind, value in zip(fields.names, targets_of(fields), fields.kinds, values, strict=True):
        if kind == "other":
            made.append(_filtered(value, data[name]) if name in data else value)
        elif kind in ("boxes", "points"):
            made.append(back_as(value, np.asarray(data[target]).reshape(-1, _NUM_COLUMNS[kind])))
        else:
            made.append(_closed_image(kind, value, data[target]))
    return tuple(made)


def targets_of(fields: Fields) -> list[str]:
    """Return the target name of each field: the first of a kind has the kind's target, others their own name."""
    names = {"image": "image", "mask": "mask", "boxes": "bboxes", "points": "keypoints"}
    return [
        names.get(kind, name) if fields.kinds.index(kind) == place else name
        for place, (name, kind) in enumerate(zip(*fields, strict=True))
    ]


def _filtered(before: Any, made: Any) -> Any:
    if isinstance(before, torch.Tensor | np.ndarray):
        is_number = isinstance(before, torch.Tensor) or before.dtype.kind in "iuf"
        return back_as(before, made) if is_number else np.asarray(made)
    return type(before)(made) if isinstance(before, list | tuple) else made


def _closed_image(kind: FieldKind, before: Any, made: Any) -> Any:
    if not isinstance(made, np.ndarray) or isinstance(before, np.ndarray):
        return made
    if isinstance(before, torch.Tensor):
        planes = torch.from_numpy(np.ascontiguousarray(made))
        return planes if made.ndim == 2 else planes.permute(2, 0, 1)
    is_picture = made.dtype == np.uint8 and made.shape[2:] in {(), (3,)}
    if not is_picture and not (kind == "mask" and made.ndim == 2):
        return made
    image = Image.fromarray(made)
    if getattr(before, "mode", None) == "P" and image.mode == "L":
        image.putpalette([value for value in range(256) for _ in "rgb"])  # makes it a mask of class numbers again
    return image


def opened_for_v2(fields: Fields, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the values in the form that torchvision v2 takes: `tv_tensors` and Pillow images, by field."""
    from torchvision import tv_tensors  # type: ignore[import-untyped]  # imported already by the transform's module

    width, height = fields.size(values)
    data: dict[str, Any] = {}
    for name, kind, value in zip(fields.names, fields.kinds, values, strict=True):
        if kind == "other" or isinstance(value, tv_tensors.TVTensor):
            data[name] = torch.as_tensor(value) if _is_numbers(value) else value  # v2 would treat an array as an image
        elif kind in ("boxes", "points"):
            numbers = torch.as_tensor(as_array(kind, value)).float()
            how: dict[str, Any] = {"canvas_size": (height, width)}
            made = tv_tensors.KeyPoints if kind == "points" else tv_tensors.BoundingBoxes
            data[name] = made(numbers, **how, **({"format": "XYXY"} if kind == "boxes" else {}))
        elif kind == "image":
            image = _plain(value)
            data[name] = image if isinstance(image, Image.Image) else tv_tensors.Image(_planes_of(image))
        else:
            data[name] = tv_tensors.Mask(_planes_of(_plain(value)))
    return data


def closed_of_v2(fields: Fields, values: tuple[Any, ...], data: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the results of v2: plain tensors, and masks, boxes and points in the types of the original values."""
    made = []
    for name, kind, value in zip(fields.names, fields.kinds, values, strict=True):
        result = data[name]
        if not isinstance(result, torch.Tensor) or type(value) is type(result):
            made.append(result)
        elif kind == "image" or (kind == "mask" and isinstance(value, torch.Tensor)):
            made.append(result.as_subclass(torch.Tensor))
        elif kind == "mask":
            made.append(_mask_of(value, result.as_subclass(torch.Tensor)))
        else:
            is_list = kind == "other" and isinstance(value, list)
            made.append(result.tolist() if is_list else back_as(value, result.as_subclass(torch.Tensor)))
    return tuple(made)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(entry, int | float) for entry in value)
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _planes_of(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    array = np.array(value)
    planes = torch.from_numpy(array.astype(np.int32) if array.dtype in (np.uint16, np.uint32) else array)
    return planes if array.ndim == 2 else planes.permute(2, 0, 1)


def _mask_of(before: Any, made: torch.Tensor) -> Any:
    array = np.ascontiguousarray((made if made.dim() == 2 else made.permute(1, 2, 0)).numpy())
    if isinstance(before, np.ndarray):
        return array.astype(before.dtype)
    return Image.fromarray(array)
