"""Apply callables to one or several fields of a sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from kdpipes.core.callback import Callback, call_seeded
from kdpipes.core.column import Column
from kdpipes.core.errors import DataError, add_note, check_type, is_sequence, must_be
from kdpipes.core.operation import Step
from kdpipes.core.processes import in_one_torch_thread
from kdpipes.core.sample import Block, Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import Traits
from kdpipes.work.adapters import adapted, as_pil
from kdpipes.work.decode import EncodedImage
from kdpipes.work.image_ops import Drawn, FieldKind, borrows_rng
from kdpipes.work.joint import Fields, JointTransform, fields_of


@runtime_checkable
class RecordedTransform(Protocol):
    """The interface of transforms in two steps, whose parameters are recorded in the ctx and can be replayed.

    `draw(image, rng)` returns the parameters as plain data. `apply(image, params)` applies them and draws nothing. An
    image from `decode_images` is passed as an `EncodedImage`, of which `apply` decodes what it needs. A transform that
    can only do both at once may have a third method, `draw_and_apply(image, rng)`, which returns the parameters and the
    result. To transform several fields together, it needs `apply_to(kind, value, params, size)` for fields that are not
    images: `kind` is "mask", "boxes" or "points", and `size` the width and height of the images before the transform.
    """

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]: ...
    def apply(self, value: Any, params: dict[str, Any]) -> Any: ...


Made = TypeVar("Made")
_Call = tuple[Callback, bool]  # the callable, and whether it works in two steps


@work_pipe("transform")
class Transformer(Step):
    """Applies callables to a field, in order, when the field is read (functional name: ``transform``).

    All random numbers depend only on the seed, the epoch, the ordinal and the operation. They come from a parameter
    `rng`, or from the global generators of `random`, NumPy and torch, which are seeded for the call and restored
    afterwards. This takes about 50 microseconds; it is skipped for callables that have a parameter `rng` or an
    attribute `is_random = False`, and for those whose code shows that they do not draw from these generators.
    Generators that a callable creates itself are not seeded. Neither is an `A.Compose` inside a function: pass the
    composition itself. An image from `decode_images` is passed as a Pillow image (RGB).

    Several fields named in one string, `"image mask"`, are transformed together: each transform draws its parameters
    once for all fields, and has one entry in the ctx. Images are interpolated by the method of the transform, masks by
    nearest neighbor; boxes and points are moved; colors change only in images. Images and masks must have the same
    size. Transforms of torchvision v2 get all fields in one call as `tv_tensors`, those of albumentations as its
    targets. Other callables get one argument per field, and return a tuple of as many values.

    Args:
        field: The name of the field, or several names separated by spaces.
        transforms: Callables that take the value and return the new one. If a callable has a parameter `ctx`, it gets
            the sample's ctx (an empty dictionary without `record_ctx`); if it has a parameter `rng`, it gets a
            `numpy.random.Generator`. Transforms of kdpipes, albumentations and torchvision v2, and others with the
            methods of `kdpipes.work.RecordedTransform`, are recorded in the ctx under their name. A callable must
            return a new value and must not change its argument. Returning None is an error, unless the argument was
            None.
        views: Several lists of callables, instead of `transforms`. The field becomes a tuple of as many views, each
            with its own random numbers, and recorded as `ctx["view_1"]`, `ctx["view_2"]`, ...
        kinds: The kinds of fields, by name: "image"; "mask"; "boxes", `[N, 4]` left, top, right, bottom; "xywh", boxes
            `[N, 4]` left, top, width, height, as in COCO; "cxcywh", boxes `[N, 4]` center x, center y, width, height,
            in pixels; "points", `[N, 2]` x, y; "other", which is left unchanged. Coordinates are in pixels from the
            left and top edge of the image: the middle of the first pixel is 0.5. By default, the name decides: `mask`,
            `masks`, `segmentation` are masks; `box`, `boxes`, `bbox`, `bboxes` are boxes; `point`, `points`,
            `keypoints` are points; `y`, `label`, `labels`, `class`, `classes` are "other"; all others are images. Boxes
            are clipped at the edges of the image, and their number does not change; integer coordinates are rounded.

    Raises:
        FieldError: The field does not exist.
        TypeError: A callable returned None. The message names the callable and the sample.
        DataError: Images and masks of one sample differ in size; or a box has a negative width or height. The message
            names the box and the sample.

    Example:
        >>> def jitter(x, rng):
        ...     return x + rng.integers(10)
        >>> pipe = kdp.from_dataset([(100, 0)]).transform("x", jitter).select("x")
        >>> pipe[0] == pipe[0]
        True
    """

    _fields: Fields | None = None  # None unless joint, so that other states do not change

    def __init__(
        self,
        field: str,
        *transforms: Callable[..., Any] | RecordedTransform,
        views: Sequence[Sequence[Callable[..., Any] | RecordedTransform]] | None = None,
        kinds: Mapping[str, FieldKind] | None = None,
    ) -> None:
        hint = 'Name the field first, or several in one string: `.transform("image mask", function)`.'
        check_type("field", field, str, "the name of a field", hint)
        if transforms and views is not None:
            raise ValueError("`transform` takes either callables or `views`. Put all callables into the views.")
        if not transforms and views is None:
            raise ValueError("`transform` must be given at least one callable after the name of the field, or `views`.")
        names = tuple(field.split())
        if len(names) > 1 or kinds is not None:
            self._fields = fields_of(names, kinds)
        self.field = field if self._fields is None else names[self._fields.lead]
        self._steps = _steps("transforms", transforms, self._fields)
        self._views = None
        if views is not None:
            is_lists = is_sequence(views) and all(map(is_sequence, views))
            if not is_lists or not views:
                raise TypeError(must_be("views", "lists of callables, one list for each view", views))
            self._views = [_steps(f"views[{number}]", recipe, self._fields) for number, recipe in enumerate(views)]
        used = frozenset(self.fields.names)
        steps = self._all_steps()
        recorded = (step.name for step, has_params in steps if has_params or step.parameters & {"ctx", "rng"})
        self.traits = Traits(
            needs=used,
            reads=used,
            changes=used,
            random=next((step.name for step in self.random_steps()), None),
            records=next(recorded, None),
            seeds=tuple(name for step, has_params in steps if not has_params for name in step.seeds),
        )

    def change(self, block: Block) -> None:
        if self._fields is None:
            block.fields[self.field] = self._result(block, block.column(self.field))
            return
        result = self._result(block, _together(block, self._fields))
        for place, name in enumerate(self._fields.names):
            what = f"applying transforms to field {name!r}"
            block.fields[name] = Column(lambda _, values, place=place: values[place], result, what=what)

    def _result(self, block: Block, column: Column) -> Column:
        if self._views is None:
            return self._transformed(block, column, self._steps)
        views = []
        for number, steps in enumerate(self._views, 1):
            name = block.claim_name(f"view_{number}")
            views.append(self._transformed(block, column, steps, view=name))
            if block.is_recording:
                block.promises[name] = views[-1]
        is_joint = self._fields is not None

        def collect(sample: Sample, *views: Any) -> tuple[Any, ...]:
            return tuple(zip(*views, strict=True)) if is_joint else views

        return Column(collect, *views, what=f"making views of {self._what}")

    def _transformed(self, block: Block, column: Column, steps: list[_Call], view: str = "") -> Column:
        what = self._what
        is_recorded = block.is_recording
        for step, has_params in steps:
            place = block.claim_name(f"{view}.{step.name}" if view else step.name)
            if has_params:
                run = _in_two_steps(step, place, view, is_recorded)
            else:
                run = _in_one(step, place, view, is_recorded, self._fields)
            column = Column(run, column, what=f"applying {step.name!r} to {what}", within=_threads_of(step))
            if is_recorded and not view:
                block.promises[place] = column
        return column

    @property
    def _what(self) -> str:
        return f"field {self.field!r}" if self._fields is None else str(self._fields)

    @property
    def fields(self) -> Fields:
        """The names and kinds of the transformed fields."""
        return self._fields or fields_of((self.field,), None)

    def drawing(self) -> tuple[str, ...]:
        return tuple(name for step, has_params in self._all_steps() if not has_params for name in step.drawing)

    def functions(self) -> list[Any]:
        """Return all callables in order, including those of views."""
        return [step.function for step, _ in self._all_steps()]

    def random_steps(self) -> list[Callback]:
        """Return the callables that are known to draw random numbers before they are called."""
        return [
            step
            for step, has_params in self._all_steps()
            if step.is_random or (has_params and step.declares_random is None)
        ]

    def _all_steps(self) -> list[_Call]:
        return [*self._steps, *(step for recipe in self._views or () for step in recipe)]


def _together(block: Block, fields: Fields) -> Column:
    """Return a column of tuples with the values of several fields."""
    names = fields.names
    order = sorted(names, key=lambda name: name != names[fields.lead])  # the original image is taken from the first

    def collect(sample: Sample, *values: Any) -> tuple[Any, ...]:
        found = dict(zip(order, values, strict=True))
        return tuple(found[name] for name in names)

    return Column(collect, *map(block.column, order), what=f"applying transforms to {fields}")


def _steps(param: str, transforms: Sequence[Any], fields: Fields | None) -> list[_Call]:
    return [_step(f"{param}[{number}]", transform, fields) for number, transform in enumerate(transforms)]


def _step(param: str, transform: Any, fields: Fields | None) -> _Call:
    if is_sequence(transform):
        hint = "Pass the callables as separate arguments. For several views of a field, pass `views=[[...], [...]]`."
        raise TypeError(must_be(param, "a callable", transform, hint))
    if isinstance(transform, type) and issubclass(transform, RecordedTransform):
        raise TypeError(must_be(param, "a transform", transform, f"Write `{transform.__name__}(...)` to make one."))
    if not isinstance(transform, RecordedTransform):
        transform = adapted(transform, param, fields)
    elif fields is not None:
        transform = JointTransform(transform, fields, param)
    has_params = isinstance(transform, RecordedTransform)
    return Callback(param, transform, check=not has_params), has_params


def _ctx_of(sample: Sample, view: str) -> dict[str, Any]:
    """Return the dictionary in which operations record their parameters: the ctx, or its entry for a view."""
    return sample.ctx.setdefault(view, {}) if view else sample.ctx


def _in_one(
    step: Callback, place: str, view: str, is_recorded: bool, fields: Fields | None
) -> Callable[[Sample, Any], Any]:
    is_plain = step.is_fixed and not is_recorded and step.parameters.isdisjoint({"ctx", "rng"})

    def run(sample: Sample, value: Any) -> Any:
        values = [as_pil(value)] if fields is None else list(map(as_pil, value))
        try:
            if is_plain:  # `call_seeded` would do the same
                made = step.function(*values)
            else:
                made = call_seeded(step, sample, place, *values, ctx=_ctx_of(sample, view) if is_recorded else None)
        except Exception as error:
            for content in (each for each in values if isinstance(each, bytes)):
                with suppress(DataError):
                    EncodedImage(content, "").size  # noqa: B018 - raises unless it is an image
                    add_note(error, "kdpipes: it got the bytes of an image file: put `.decode_images()` before it")
            raise
        return _made(made, values[0], step) if fields is None else _made_of_all(made, values, step, fields)

    return run


def _made_of_all(made: Any, values: list[Any], step: Callback, fields: Fields) -> tuple[Any, ...]:
    """Return the results of a callable for several fields as a tuple, after checking their number."""
    results = (made,) if len(values) == 1 else made
    if not isinstance(results, tuple | list) or len(results) != len(values):
        shown = f"{len(results)}" if isinstance(results, tuple | list) else type(results).__name__
        raise TypeError(
            f"`{step.name}` must return a tuple of {len(values)} values, for {fields}, but returned {shown}."
        )
    return tuple(_made(result, value, step) for result, value in zip(results, values, strict=True))


def _made(made: Any, value: Any, step: Callback) -> Any:
    """Return the result of a callable. Raise TypeError if it is None, unless the value was None."""
    if made is None and value is not None:
        raise TypeError(f"`{step.name}` must return the new value, but returned None.")
    return made


def _in_two_steps(step: Callback, place: str, view: str, is_recorded: bool) -> Callable[[Sample, Any], Any]:
    transform: RecordedTransform = step.function
    at_once = getattr(transform, "draw_and_apply", None)
    is_borrowed = borrows_rng(transform.draw)
    entry = place[len(view) + 1 :] if view else place

    def run(sample: Sample, value: Any) -> Any:
        replayed = sample.row.sample_key.replayed
        made = None
        params = None if replayed is None else (replayed.get(view, {}) if view else replayed).get(entry)
        is_made = params is None and at_once is not None
        if params is not None:
            params = copy.deepcopy(params)
        elif at_once is not None:
            params, made = at_once(value, sample.rng(place))
        else:
            params = transform.draw(value, sample.rng(place, is_borrowed=is_borrowed))
        if is_recorded:
            _ctx_of(sample, view)[entry] = copy.deepcopy(params)  # `apply` may modify its argument
        result = made if is_made else transform.apply(value, params)
        return _made(result, value, step) if result is None else result

    return run


def _threads_of(step: Callback) -> Callable[[Any], Any] | None:
    """Return the decorator that limits torch to one thread; None unless the transform is one of kdpipes'."""
    transform = step.function
    inner = transform.wrapped if isinstance(transform, JointTransform) else transform
    return in_one_torch_thread if isinstance(inner, Drawn) else None
