"""Adapt transforms of albumentations and torchvision v2: seed them per sample, and record their parameters."""

from __future__ import annotations

import copy
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from kdpipes.core.errors import must_be
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.randomness import seeded_globals
from kdpipes.work.decode import DecodedImage, EncodedImage
from kdpipes.work.image_ops import NUM_COLUMNS, FieldKind, as_array, back_as, from_corners
from kdpipes.work.joint import Fields, JointTransform
from kdpipes.work.plain_data import as_plain, restored

_NUM_SEEDS = 1 << 53  # larger integers are not exact in all JSON readers
_TARGETS = {  # albumentations' names
    "image": "image",
    "mask": "mask",
    "points": "keypoints",
    **dict.fromkeys(("boxes", "xywh", "cxcywh"), "bboxes"),
}
_NO_IDENTITY = {"_images_was_list", "_key2func", "_masks_was_list", "params", "py_random", "random_generator", "seed"}


def adapted(transform: Any, param: str = "transform", fields: Fields | None = None) -> Any:
    """Return a recorded transform for a transform of albumentations or torchvision v2; other callables unchanged.

    Args:
        transform: Any callable. A library is imported only if the callable belongs to it.
        param: The name of the parameter that `transform` was passed as, for errors.
        fields: The fields that are passed as a tuple; None for a single image.
    """
    if _has_base(transform, "albumentations", "BasicTransform", "BaseCompose"):
        _check_albumentations(transform, param, fields)
        return AlbumentationsAdapter(transform, fields)
    if _has_base(transform, "torchvision.transforms.v2", "Transform") and type(transform).__name__ != "Lambda":
        if fields is not None:
            fields.check_image(param, transform)
        return TorchvisionAdapter(transform, fields)
    return transform


def _has_base(transform: Any, package: str, *names: str) -> bool:
    return any(_is_of(kind, package) and kind.__name__ in names for kind in type(transform).__mro__)


def _is_of(kind: type, package: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{package}.")


def _owner_of(transform: Any, method: str) -> type:
    return next(kind for kind in type(transform).__mro__ if method in vars(kind))


class _Unit(ABC):
    """One transform in a copy of a user's transform. Each call is recorded as a step.

    If the library passes all parameters to one method, named `does`, the parameters are recorded. Otherwise, or if they
    are not plain data or the method draws more random numbers, the seed of the call is recorded.
    """

    params_at: ClassVar[int]  # the position of the parameters among the arguments of `does`

    def __init__(self, transform: Any, at: list[int], tree: _Tree, *, does: str | None) -> None:
        self._transform = transform
        self._at = at
        self._tree = tree
        self._is_split = does is not None
        if does is not None:
            self._does: Callable[..., Any] = getattr(transform, does)
            setattr(transform, does, self._noted)

    @property
    def name(self) -> str:
        """The name of the transform's class or function."""
        return str(getattr(self._transform, "__name__", type(self._transform).__name__))

    def _record(self, call: dict[str, Any], given: Any) -> Any:
        result = self._run({"seed": int(self._tree.rng.integers(_NUM_SEEDS)), **call}, given)
        if self._did is not None:
            self._tree.steps.append({"transform": self.name, "at": list(self._at), **self._did})
        return result

    def _run(self, call: dict[str, Any], given: Any) -> Any:
        self._call = call
        self._did = None if self._is_split else call
        with nullcontext() if self._is_split else seeded_globals(str(call["seed"]).encode()):
            self._seed(call["seed"])
            return self._called(call, given)

    def _noted(self, *args: Any, **data: Any) -> Any:
        """Call the original method, and record the parameters."""
        plain = as_plain(args[self.params_at])
        before = self._state()
        result = self._does(*args, **data)
        # A joint transform calls this for each field. After one call was recorded by its seed, all are.
        if self._did is not self._call:
            self._did = self._call if plain is None or self._state() != before else plain
        return result

    @abstractmethod
    def _seed(self, seed: int) -> None: ...

    @abstractmethod
    def _called(self, call: dict[str, Any], given: Any) -> Any: ...

    @abstractmethod
    def _state(self) -> Any: ...

    @abstractmethod
    def again(self, value: Any, step: dict[str, Any]) -> Any:
        """Return `value` after applying the recorded step again."""


class _Tree:
    """A copy of a user's transform for one thread: its units by their place, and the steps that they record."""

    def __init__(self, transform: Any, adapter: type[_Adapter]) -> None:
        self.rng = np.random.default_rng(0)
        self.steps: list[dict[str, Any]] = []
        self.is_skipped = False
        self._units: dict[tuple[int, ...], _Unit] = {}
        self.top = self._grown(transform, [], adapter)

    def _grown(self, transform: Any, at: list[int], adapter: type[_Adapter]) -> Any:
        if _is_of(type(transform), adapter.package) and type(transform).__name__ in adapter.containers:
            grown = copy.copy(transform)
            children = enumerate(transform.transforms)
            vars(grown)["transforms"] = [self._grown(child, [*at, number], adapter) for number, child in children]
            return grown
        return self._units.setdefault(tuple(at), adapter.unit(copy.deepcopy(transform), at, self))

    def unit_of(self, step: dict[str, Any]) -> _Unit:
        """Return the unit that recorded a step."""
        unit = self._units.get(tuple(step["at"]))
        if unit is None or unit.name != step["transform"]:
            raise ValueError(must_be("params", "recorded by the same transform", step))
        return unit


class _Adapter(ABC, Fingerprinted):
    """The base class of both adapters."""

    package: ClassVar[str]
    containers: ClassVar[frozenset[str]]  # names of classes that only call other transforms in sequence
    unit: ClassVar[type[Any]]  # class of the units of all other transforms

    def __init__(self, transform: Any, fields: Fields | None = None) -> None:
        self._transform = transform
        self._fields = fields
        self._local = threading.local()  # per thread, because units hold the state of a call
        self.__name__ = type(transform).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._transform, self._fields)

    @property
    def wrapped(self) -> Any:
        """The transform of the other library."""
        return self._transform

    def __repr__(self) -> str:
        return repr(self._transform)

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return the steps that the transform applies to `value` with random numbers from `rng`."""
        return self.draw_and_apply(value, rng)[0]

    def draw_and_apply(self, value: Any, rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
        """Return the steps that the transform applies to `value` with random numbers from `rng`, and the new value."""
        tree = self._tree()
        tree.rng = rng
        tree.steps = []
        tree.is_skipped = False
        result = self._run(tree, self._opened(value))
        skipped = {"skipped": True} if tree.is_skipped else {}
        return {"steps": tree.steps, **skipped}, self._closed(result, value)

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        """Return `value` after the recorded steps."""
        tree = self._tree()
        result = self._opened(value)
        with seeded_globals(b""):  # this restores the generators, which steps recorded by seed change
            result = self._again(tree, result, params)
        return self._closed(result, value)

    def _again(self, tree: _Tree, result: Any, params: dict[str, Any]) -> Any:
        for step in params["steps"]:
            result = tree.unit_of(step).again(result, step)
        return result

    def _tree(self) -> _Tree:
        if not hasattr(self._local, "tree"):
            self._local.tree = _Tree(self._prepared(), type(self))
        tree: _Tree = self._local.tree
        return tree

    def _prepared(self) -> Any:
        return self._transform

    @abstractmethod
    def _opened(self, value: Any) -> Any: ...

    @abstractmethod
    def _run(self, tree: _Tree, value: Any) -> Any: ...

    @abstractmethod
    def _closed(self, result: Any, value: Any) -> Any: ...


class _AlbumentationsUnit(_Unit):
    params_at = 0

    def __init__(self, transform: Any, at: list[int], tree: _Tree) -> None:
        is_theirs = _is_of(type(transform), "albumentations") and type(transform).__name__ != "Lambda"
        is_split = is_theirs and _owner_of(transform, "__call__").__name__ == "BasicTransform"
        super().__init__(transform, at, tree, does="apply_with_params" if is_split else None)

    def __call__(self, *, force_apply: bool = False, **data: Any) -> Any:
        return self._record({"force_apply": True} if force_apply else {}, data)

    def __getattr__(self, name: str) -> Any:
        # A composition reads the probability, the targets and the random state of its parts.
        return getattr(self.__dict__["_transform"], name)

    def again(self, value: Any, step: dict[str, Any]) -> Any:
        return (
            self._run(step, value) if "seed" in step else self._does(restored(step["params"], step["kinds"]), **value)
        )

    def _seed(self, seed: int) -> None:
        self._transform.set_random_state(np.random.Generator(np.random.PCG64(seed)), random.Random(seed))
        sys.modules["cv2"].setRNGSeed(seed % (1 << 31))  # albumentations draws Gaussian noise from OpenCV

    def _called(self, call: dict[str, Any], given: Any) -> Any:
        return self._transform(**given, **({"force_apply": True} if "force_apply" in call else {}))

    def _state(self) -> Any:
        return self._transform.random_generator.bit_generator.state, self._transform.py_random.getstate()


class AlbumentationsAdapter(_Adapter):
    """A recorded transform or composition of albumentations, created by `.transform("x", A.HorizontalFlip())`.

    The ctx entry contains the applied `steps` in order: the class (`transform`), the path in the composition (`at`),
    and the parameters as plain data (`params`, and `kinds` for types that JSON lacks). Steps with parameters that are
    not plain data or have more than 1,000 values (noise, distortion maps) are recorded by their `seed`. So are users'
    own transform classes, `Lambda`, and compositions that do more than call their parts in sequence.

    For several fields (`.transform("image mask boxes", ...)`), the targets are `image`, `mask`, `bboxes` and
    `keypoints`; a second field of a kind is passed under its own name. Boxes need a composition with `bbox_params`,
    whose `label_fields` are fields of kind "other". Points need `keypoint_params`.

    The image may come from `decode_images` or Pillow (modes other than RGB and L are converted to RGB), or be an array.
    A result `[H, W, 3] uint8` or `[H, W] uint8` becomes a Pillow image; other results do not change.

    Seed: All random numbers derive from the sample's key. The random states and `seed` of albumentations have no
        effect.
    """

    package = "albumentations"
    containers = frozenset({"Compose", "OneOf", "OneOrOther", "RandomOrder", "ReplayCompose", "Sequential", "SomeOf"})
    unit = _AlbumentationsUnit

    def fingerprint(self) -> Any:
        """Return the data that identifies the transform, without its random state."""
        known = _identity(self._transform)
        return known if self._fields is None else [known, self._fields]

    def _prepared(self) -> Any:
        if self._fields is None:
            return self._transform
        transform = copy.deepcopy(self._transform)  # this includes its processors, which hold state during a call
        targets = zip(_targets_of(self._fields), self._fields.kinds, strict=True)
        transform.add_targets(
            {target: _TARGETS[kind] for target, kind in targets if target != _TARGETS.get(kind, target)}
        )
        return transform

    def _opened(self, value: Any) -> dict[str, Any]:
        fields = self._fields
        if fields is None:
            return {"image": self._opened_image(value)}
        fields.size(value)
        labels = _labels_of(self._transform)
        data = dict[str, Any]()
        for name, target, kind, each in zip(fields.names, _targets_of(fields), fields.kinds, value, strict=True):
            if kind in NUM_COLUMNS:
                data[target] = as_array(kind, each).astype(np.float32)
            elif kind == "other":
                data.update({name: each} if name in labels else {})
            elif isinstance(each, torch.Tensor):
                pixels = each.numpy()
                data[target] = np.ascontiguousarray(pixels if each.dim() == 2 else pixels.transpose(1, 2, 0))
            else:
                image = as_pil(each)
                is_odd = kind == "image" and isinstance(image, Image.Image) and image.mode not in {"L", "RGB"}
                data[target] = np.array(image.convert("RGB") if is_odd else image)
        return data

    def _opened_image(self, value: Any) -> NDArray[Any]:
        if isinstance(value, Image.Image):
            return np.array(value if value.mode in {"L", "RGB"} else value.convert("RGB"))
        if not isinstance(value, EncodedImage | DecodedImage | np.ndarray):
            kinds = "images from `.decode_images()` or Pillow, and arrays"
            raise TypeError(
                f"`{self.__name__}` takes {kinds}, but got {type(value).__name__}. Decode or convert the field first."
            )
        return np.array(value)

    def _run(self, tree: _Tree, value: Any) -> Any:
        if not isinstance(tree.top, _Unit):
            tree.top.set_random_state(tree.rng, random.Random(int(tree.rng.integers(_NUM_SEEDS))))
        if not _processors_of(tree.top):
            return tree.top(**value)
        tree.is_skipped = tree.top.p < 1 and bool(tree.rng.random() >= tree.top.p)
        return value if tree.is_skipped else tree.top(force_apply=True, **value)

    def _again(self, tree: _Tree, result: Any, params: dict[str, Any]) -> Any:
        if not _processors_of(tree.top):
            return super()._again(tree, result, params)
        if params.get("skipped"):
            return result

        def repeated(step: dict[str, Any]) -> Callable[..., Any]:
            return lambda **data: tree.unit_of(step).again(data, step)

        flat = copy.copy(tree.top)  # converts boxes to albumentations' format, filters them and converts them back
        vars(flat)["transforms"] = [repeated(step) for step in params["steps"]]
        if tree.top.transforms and not any(step["at"][0] == 0 for step in params["steps"]):
            flat.transforms.insert(0, dict)  # boxes are checked after the first step, even if it was not applied
        return flat(force_apply=True, **result)

    def _closed(self, result: Any, value: Any) -> Any:
        fields = self._fields
        if fields is None:
            image = result["image"]
            return Image.fromarray(image) if _is_picture(image) else image
        made = []
        for name, target, kind, before in zip(fields.names, _targets_of(fields), fields.kinds, value, strict=True):
            if kind == "other":
                made.append(_filtered(before, result[name]) if name in result else before)
            elif kind in NUM_COLUMNS:
                numbers = np.asarray(result[target]).reshape(-1, NUM_COLUMNS[kind])
                made.append(back_as(before, from_corners(kind, numbers)))
            else:
                made.append(_closed_image(kind, before, result[target]))
        return tuple(made)


def _processors_of(transform: Any) -> dict[str, Any]:
    """Return the processors that a composition applies to boxes and keypoints before and after its transforms."""
    found: dict[str, Any] = {} if isinstance(transform, _Unit) else getattr(transform, "processors", None) or {}
    return found


def _labels_of(transform: Any) -> tuple[str, ...]:
    """Return the fields that are filtered along with boxes or keypoints."""
    processors = _processors_of(transform).values()
    return tuple(label for processor in processors for label in processor.params.label_fields or ())


def _check_joint(transform: Any, param: str, fields: Fields) -> None:
    """Raise unless a transform of albumentations gets an image, and declares the formats of boxes and points."""
    fields.check_image(param, transform)
    processors = _processors_of(transform)
    targets = {_TARGETS.get(kind) for kind in fields.kinds}
    for name, format, maker in (
        ("bboxes", "pascal_voc", 'bbox_params=A.BboxParams("pascal_voc", label_fields=[...])'),
        ("keypoints", "xy", 'keypoint_params=A.KeypointParams("xy")'),
    ):
        if (name in targets) != (name in processors):
            what = "with" if name in targets else "without"
            hint = f"Write `A.Compose([...], {maker})`." if what == "with" else ""
            rule = f"a composition {what} `{maker.partition('=')[0]}`, for {fields}"
            raise ValueError(must_be(param, rule, transform, hint))
        if name in processors and processors[name].params.format != format:
            raise ValueError(must_be(param, f"for the format {format!r}", processors[name].params.format))
    known = [name for name, kind in zip(*fields, strict=True) if kind == "other"]
    unknown = next((label for label in _labels_of(transform) if label not in known), None)
    if unknown is not None:
        hint = f'Name it in `transform`: `"{" ".join(fields.names)} {unknown}"`, of kind "other".'
        raise ValueError(must_be("label_fields", f"among the other fields {known}", unknown, hint))


def _check_albumentations(transform: Any, param: str, fields: Fields | None) -> None:
    if not hasattr(transform, "set_random_state"):
        hint = "Install it: `pip install 'albumentations>=2.0.8,<3'`."
        raise ValueError(must_be(param, "a transform from albumentations 2 or later", transform, hint))
    if fields is not None:
        _check_joint(transform, param, fields)
        return
    for part in _parts(transform):
        processors = getattr(part, "processors", None) or {}
        others = [f"{name.removesuffix('es').removesuffix('s')}_params" for name in processors]
        if others:
            hint = (
                f'Remove `{others[0]}`, or name the fields of boxes and keypoints, too: `.transform("x boxes", ...)`.'
            )
            raise ValueError(must_be(param, "a transform of images alone", transform, hint))
        wanted = sorted(set(getattr(part, "targets_as_params", ())) - {"image"})
        if wanted:
            hint = f"`{type(part).__name__}` also takes {wanted[0]!r}: call it in a function of your own."
            raise ValueError(must_be(param, "a transform of images alone", transform, hint))


def _parts(transform: Any) -> Iterator[Any]:
    yield transform
    for part in getattr(transform, "transforms", ()):
        yield from _parts(part)


def _identity(transform: Any) -> list[Any]:
    own = {name: value for name, value in vars(transform).items() if name not in _NO_IDENTITY}
    if "transforms" in own:
        own["transforms"] = [_identity(part) for part in own["transforms"]]
    return [type(transform).__qualname__, own]


def as_pil(value: Any) -> Any:
    """Return an image from `decode_images` as a Pillow image, and other values unchanged."""
    return value.to_pil() if isinstance(value, EncodedImage | DecodedImage) else value


def _targets_of(fields: Fields) -> list[str]:
    """Return the target name of each field: that of its kind for the first field of a kind, else the field's name."""
    targets = [_TARGETS.get(kind, name) for name, kind in zip(*fields, strict=True)]
    return [target if target not in targets[:place] else fields.names[place] for place, target in enumerate(targets)]


def _is_picture(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] in {(), (3,)}


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
    if not _is_picture(made) and not (kind == "mask" and made.ndim == 2):
        return made
    image = Image.fromarray(made)
    if isinstance(before, Image.Image | EncodedImage | DecodedImage) and before.mode == "P" and image.mode == "L":
        image.putpalette([value for value in range(256) for _ in "rgb"])  # restores a mask of class numbers
    return image


class _TorchvisionUnit(_Unit):
    params_at = 1

    def __init__(self, transform: Any, at: list[int], tree: _Tree) -> None:
        is_split = _is_of(type(transform), "torchvision.transforms.v2") and type(transform).__name__ != "Lambda"
        if is_split:
            is_split = _owner_of(transform, "forward").__name__ in {"Transform", "_RandomApplyTransform"}
        does = "transform" if hasattr(transform, "transform") else "_transform"  # `_transform` until torchvision 0.20
        super().__init__(transform, at, tree, does=does if is_split else None)

    def __call__(self, value: Any) -> Any:
        return self._record({}, value)

    def again(self, value: Any, step: dict[str, Any]) -> Any:
        if "seed" in step:
            return self._run(step, value)
        params = restored(step["params"], step["kinds"])
        if not isinstance(value, dict):
            return self._does(value, params)
        wanted = self._transform._needs_transform_list(list(value.values()))
        return {
            name: self._does(part, params) if is_wanted else part
            for (name, part), is_wanted in zip(value.items(), wanted, strict=True)
        }

    def _seed(self, seed: int) -> None:
        if self._is_split:
            torch.default_generator.manual_seed(seed)

    def _called(self, call: dict[str, Any], given: Any) -> Any:
        return self._transform(given)

    def _state(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()


class TorchvisionAdapter(_Adapter):
    """A recorded transform of `torchvision.transforms.v2`, created by `.transform("x", v2.RandomResizedCrop(224))`.

    The ctx entry contains the applied `steps` in order, as for `AlbumentationsAdapter`: the `params` of `make_params`;
    or the `seed`, for transforms that draw in other ways or draw many values (AutoAugment, GaussianNoise,
    ElasticTransform), for users' own classes, and for other callables in a v2 container. A `v2.Lambda` outside a
    container is a callable like any other.

    An image from `decode_images` is passed as a Pillow image, other values unchanged. Several fields are passed as one
    dictionary of `tv_tensors` and Pillow images by field name.
    """

    package = "torchvision.transforms.v2"
    containers = frozenset({"Compose", "RandomApply", "RandomChoice", "RandomOrder"})
    unit = _TorchvisionUnit

    def fingerprint(self) -> Any:
        """Return the data that identifies the transform."""
        return self._transform if self._fields is None else [self._transform, self._fields]

    def _opened(self, value: Any) -> Any:
        if self._fields is None:
            return as_pil(value)
        from torchvision import tv_tensors  # type: ignore[import-untyped]  # imported already by the transform's module

        if "points" in self._fields.kinds and not hasattr(tv_tensors, "KeyPoints"):
            raise ImportError("Points need torchvision 0.23 or newer, which has `tv_tensors.KeyPoints`.")
        width, height = self._fields.size(value)
        data: dict[str, Any] = {}
        for name, kind, each in zip(*self._fields, value, strict=True):
            if kind == "other" or isinstance(each, tv_tensors.TVTensor):
                data[name] = torch.as_tensor(each) if _is_numbers(each) else each  # v2 would treat an array as an image
            elif kind in NUM_COLUMNS:
                numbers = torch.as_tensor(as_array(kind, each)).float()
                how: dict[str, Any] = {"canvas_size": (height, width)}
                made = tv_tensors.KeyPoints if kind == "points" else tv_tensors.BoundingBoxes
                data[name] = made(numbers, **how, **({"format": "XYXY"} if kind != "points" else {}))
            elif kind == "image":
                image = as_pil(each)
                data[name] = image if isinstance(image, Image.Image) else tv_tensors.Image(_planes_of(image))
            else:
                data[name] = tv_tensors.Mask(_planes_of(as_pil(each)))
        return data

    def _run(self, tree: _Tree, value: Any) -> Any:
        with seeded_globals(tree.rng.bytes(32)):
            return tree.top(value)

    def _closed(self, result: Any, value: Any) -> Any:
        if self._fields is None:
            return result
        made = []
        for name, kind, before in zip(*self._fields, value, strict=True):
            each = result[name]
            if not isinstance(each, torch.Tensor) or type(before) is type(each):
                made.append(each)
                continue
            plain = each.as_subclass(torch.Tensor)
            if kind == "image" or (kind == "mask" and isinstance(before, torch.Tensor)):
                made.append(plain)
            elif kind == "mask":
                array = np.ascontiguousarray((plain if plain.dim() == 2 else plain.permute(1, 2, 0)).numpy())
                made.append(array.astype(before.dtype) if isinstance(before, np.ndarray) else Image.fromarray(array))
            else:
                is_list = kind == "other" and isinstance(before, list)
                made.append(plain.tolist() if is_list else back_as(before, from_corners(kind, plain)))
        return tuple(made)


def unwrapped(transform: Any) -> Any:
    """Return the transform that the user passed to `.transform(...)`, without an adapter of kdpipes."""
    return transform.wrapped if isinstance(transform, _Adapter | JointTransform) else transform


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
