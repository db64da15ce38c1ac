"""Collate samples into batches of tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from kdpipes.core.chain import Chain
from kdpipes.core.column import number_array
from kdpipes.core.errors import ChainError, DataError, check_choice, check_type, closest, must_be
from kdpipes.core.pipe import form_of
from kdpipes.core.processes import in_one_torch_thread
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.core.traits import ItemForm
from kdpipes.delivery.batch_pipe import Allocate, OneToOne, allocate
from kdpipes.delivery.dealer import Dealer

_ROW_FIELDS = ("segment_ids", "positions")


@functional_pipe("collate_samples", flavour="iter", otherwise="Put `.deal(batch_size=...)` before it.")
class SampleCollatorIterDataPipe(OneToOne):
    """Collates lists of items into batches of tensors (functional name: ``collate_samples``).

    Tuples become tuples of batches, including tuples in a field (several views of an image), and `((x, y), ctx)` keeps
    its form. Images become `[B, C, H, W] uint8` (uint16 for mode "I;16", float32 for "F"; masks of mode "P" become
    `[B, H, W]`), arrays and tensors `[B, ...]` of their dtype, numbers `[B]` (int64, float64 or bool), and lists of
    numbers `[B, n]`. Strings, bytes and None become lists. Dictionaries, including the ctx, become dictionaries of
    batches, with None for items that lack an entry. Without `select`, a batch is a dictionary of all fields.

    Args:
        source_datapipe: A stream of lists, as from `deal`.
        pad: The values that fill up fields of varying shape, by field name: `{"x": 0}`. Each dimension is padded at its
            end to the largest size in the batch. After `deal(batching=kdp.packed(...))`, these fields are
            sequences of the length that `kdp.packed` names. The sequences of a row are joined and filled up:
            `[rows, max_tokens]`. Two fields `[rows, max_tokens] int64` are added at the end: `segment_ids`, 1 for the
            first sample of a row, 2 for the next, 0 where the row is filled up; and `positions`, which count from 0
            within each sample. Other fields have one value per sample.
        memory_format: "channels_last" gives batches of images `[B, C, H, W]` the strides of
            `torch.channels_last`, which convolutions on GPUs prefer. Images are copied without being transposed. Fields
            that are tensors `[C, H, W]` are treated as images; all values are the same.

    Length: The length of the source.

    Raises:
        ValueError: `pad` contains the name of a field that is not in the `select` upstream.
        DataError: The shapes of a field differ, and there is no `pad` for it.

    Example:
        >>> pipe = kdp.from_dataset([([1, 2], 0), ([3], 1)]).select("x y").deal(batch_size=2)
        >>> x, y = next(iter(pipe.collate_samples(pad={"x": 0})))
        >>> x.tolist(), y.tolist()
        ([[1, 2], [3, 0]], [0, 1])
    """

    computed: ClassVar[tuple[str, ...]] = (*OneToOne.computed, "_row_size")  # which `deal` decides
    _is_last = False  # an attribute only if it is True, so that other states do not change

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        *,
        pad: Mapping[str, float] | None = None,
        memory_format: Literal["contiguous", "channels_last"] = "contiguous",
    ) -> None:
        if not isinstance(source_datapipe, IterDataPipe):
            raise TypeError(
                must_be("source_datapipe", "a stream of batches", source_datapipe, "Put `.deal(...)` before it.")
            )
        is_mapping = pad is None or isinstance(pad, Mapping)
        if not is_mapping or not all(isinstance(value, Number) for value in (pad or {}).values()):
            raise TypeError(must_be("pad", 'values by field name, like {"x": 0}', pad))
        check_choice("memory_format", memory_format, ("contiguous", "channels_last"))
        if memory_format == "channels_last":
            self._is_last = True
        self.source = source_datapipe
        self._form = form_of(source_datapipe) or ItemForm(())
        self._pad = dict(pad or {})
        names = self._form.names
        dealer = next(iter(Chain.of(source_datapipe).of_type(Dealer)), None)
        self._row_size = None if dealer is None else dealer.row_size()
        if self._row_size is not None and not (names and self._pad):
            raise ChainError(
                "`collate_samples` after `kdp.packed(...)` must know which fields to join: select fields before "
                '`deal`, and write `.collate_samples(pad={"x": 0})`.'
            )
        unknown = next((name for name in self._pad if names and name not in names), None)
        if unknown is not None:
            raise ValueError(must_be("pad", f"for the fields {', '.join(names)}", unknown) + closest(unknown, names))
        form = form_of(source_datapipe)
        if self._row_size is not None:
            kind: Any = "dict" if self._form.kind == "dict" else "tuple"
            form = ItemForm((*names, *_ROW_FIELDS), self._form.has_ctx, kind)
        self.traits = replace(self.traits, item_form=form)

    def __len__(self) -> int:
        return len(self.source)

    def iterate(self) -> Iterator[Any]:
        for items in self.source:
            if not isinstance(items, list):
                raise ChainError(
                    f"`collate_samples` takes lists, but got {type(items).__name__}. Put it right after `.deal(...)`."
                )
            if self._form.has_ctx:
                fields = self._fields([item for item, _ in items])
                yield fields, collate([ctx for _, ctx in items], name="ctx", ragged=True)
            else:
                yield self._fields(items)

    def _fields(self, items: list[Any]) -> Any:
        names = self._form.names
        kind = self._form.kind
        if self._row_size is not None:
            return self._packed(items, self._row_size)
        if names and kind == "bare":
            return self._field(names[0], items)
        if isinstance(items[0], Sample) or (names and kind == "dict" and isinstance(items[0], dict)):
            found = dict.fromkeys(name for item in items for name in item)
            return {name: self._field(name, [item.get(name) for item in items]) for name in found}
        if isinstance(items[0], tuple) and len(names) == len(items[0]):
            return tuple(self._field(name, [item[place] for item in items]) for place, name in enumerate(names))
        return collate(items)

    def _packed(self, items: list[Any], row_size: int) -> Any:
        """Return a batch of rows, in which the samples follow each other."""
        names = self._form.names
        kind = self._form.kind
        values = {
            name: [item if kind == "bare" else item[name if kind == "dict" else place] for item in items]
            for place, name in enumerate(names)
        }
        first = next(iter(self._pad))
        lengths = [len(value) for value in values[first]]
        places = row_places(lengths, row_size)
        num_rows = places[-1][0] + 1
        empty = self._allocate or allocate
        made = {}
        for name, of_samples in values.items():
            if name not in self._pad:
                made[name] = self._field(name, of_samples)
                continue
            tensors = [_as_tensor(value) for value in of_samples]
            for tensor, length in zip(tensors, lengths, strict=True):
                if tensor.dim() == 0 or len(tensor) != length:
                    raise DataError(
                        f"Field {name!r} must have as many entries as {first!r} in each sample, {length}, but has "
                        f"shape {list(tensor.shape)}."
                    )
            shape = [num_rows, row_size, *tensors[0].shape[1:]]
            pad = self._pad[name]
            made[name] = empty(shape, _common_dtype(tensors, name, pad)).fill_(pad)
            for tensor, (row, start) in zip(tensors, places, strict=True):
                made[name][row, start : start + len(tensor)] = tensor
        segments, positions = (empty([num_rows, row_size], torch.int64).fill_(0) for _ in _ROW_FIELDS)
        number = 0
        last_row = -1
        for length, (row, start) in zip(lengths, places, strict=True):
            number = 1 if row != last_row else number + 1
            last_row = row
            segments[row, start : start + length] = number
            positions[row, start : start + length] = torch.arange(length)
        made.update(zip(_ROW_FIELDS, (segments, positions), strict=True))
        return made if kind == "dict" else tuple(made.values())

    def _field(self, name: str, values: list[Any]) -> Any:
        pad = self._pad.get(name)
        is_last = self._is_last
        return collate(values, name=name, pad=pad, empty=self._allocate, channels_last=is_last)


def row_places(lengths: Sequence[int], row_size: int) -> list[tuple[int, int]]:
    """Return the row and the first place in it of each sample, if a sample that does not fit begins a new row."""
    places = []
    row = 0
    filled = 0
    for length in lengths:
        if length > row_size:
            raise DataError(
                f"A sample has {length} tokens, more than the {row_size} of a row. The field that `kdp.packed` names "
                "must be the length of the fields in `pad`."
            )
        if filled + max(length, 1) > row_size:
            row = row + 1
            filled = 0
        places.append((row, filled))
        filled += max(length, 1)  # an empty sample counts as one token, as in the plan
    return places


def collate(
    values: Sequence[Any],
    *,
    name: str = "item",
    pad: float | None = None,
    ragged: bool = False,
    empty: Allocate | None = None,
    channels_last: bool = False,
) -> Any:
    """Return a batch of values, as `collate_samples` does.

    Args:
        values: One or more values.
        name: The name of the field, for errors.
        pad: The value that fills up values of different shapes.
        ragged: Whether values of different shapes become a list, as in a ctx.
        empty: A function of a shape and a dtype that allocates the tensors of the batch, such as `empty_batch`.
        channels_last: Whether batches of images and of tensors `[C, H, W]` have the strides of `torch.channels_last`.

    Raises:
        DataError: The shapes differ, and there is no `pad`.
    """
    kinds = {_KINDS.get(type(value)) or _kind(value) for value in values}
    if kinds == {"array", "tensor"}:
        values = [_as_tensor(value) for value in values]
        kinds = {"tensor"}
    kind = kinds.pop() if len(kinds) == 1 else ""
    if ragged and _is_ragged(kind, values):
        return list(values)
    if kind == "image":
        kind = "tensor"
        values = [_channels_first(image) for image in values]
    if kind == "tensor" and channels_last and values[0].dim() == 3:
        batch = _stacked(list(values), name, pad, partial(empty or allocate, memory_format=torch.channels_last))
        return batch.contiguous(memory_format=torch.channels_last)
    if kind in {"array", "tensor", "numbers"}:
        if kind == "numbers":
            arrays = [number_array(value) if value else np.zeros(0, dtype=np.int64) for value in values]
        else:
            arrays = list(values)
        if kind != "tensor":
            arrays = _as_one_type(arrays)
        return list(values) if arrays[0].dtype == object else _stacked(arrays, name, pad, empty)
    if kind == "number":
        numbers = number_array(values).reshape(len(values))
        if numbers.dtype == object or (numbers.dtype == np.uint64 and int in map(type, values)):
            return list(values)  # few operations of torch take integers from 2**63 on
        if numbers.dtype.kind == "u" and numbers.itemsize == 8:  # torch does not know all NumPy types of 64 bits
            numbers = numbers.astype(np.uint64)
        batch = torch.from_numpy(numbers)
        return batch if empty is None else empty(batch.shape, batch.dtype).copy_(batch)
    if kind == "mapping":
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: collate([value.get(key) for value in values], name=f"{name}.{key}", ragged=ragged) for key in keys}
    if kind == "tuple":
        if len({len(value) for value in values}) > 1:
            raise DataError(
                f"Field {name!r}: cannot collate tuples of different lengths. Pad them in `.transform(...)`."
            )
        return tuple(
            collate(part, name=f"{name}[{place}]", pad=pad, ragged=ragged, empty=empty, channels_last=channels_last)
            for place, part in enumerate(zip(*values, strict=True))
        )
    if pad is not None:
        kind = type(values[0]).__name__
        made = "lambda content: np.frombuffer(content, np.uint8)" if kind == "bytes" else "to_array"
        raise DataError(
            f"Field {name!r} contains values of type {kind}, which `pad` cannot pad. Convert each value to an array "
            f"before `select`, like `.transform({name!r}, {made})`."
        )
    return list(values)


def split_ctx(ctx: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the ctx of a batch into the ctx of each sample, as plain data.

    Entries that are None are left out, because the sample does not have them.

    Args:
        ctx: The second part of a batch `((x, y), ctx)`.

    Example:
        >>> split_ctx({"crop": {"top": torch.tensor([3, 4])}, "flip": [None, {"flipped": True}]})
        [{'crop': {'top': 3}}, {'crop': {'top': 4}, 'flip': {'flipped': True}}]
    """
    check_type("ctx", ctx, Mapping, "the ctx of a batch, a dictionary")
    parts = [(name, _split(value)) for name, value in ctx.items()]
    return [
        {name: _at(values, place) for name, values in parts if _at(values, place) is not None}
        for place in range(max((len(values) for _, values in parts), default=0))
    ]


def _at(values: list[Any], place: int) -> Any:
    return values[place] if values else {}  # an empty entry, whose number of samples is unknown


def _split(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        parts = {name: _split(part) for name, part in value.items()}
        size = max(map(len, parts.values()), default=0)
        return [{name: _at(part, place) for name, part in parts.items()} for place in range(size)]
    if isinstance(value, tuple):
        return list(zip(*map(_split, value), strict=True))
    if not isinstance(value, torch.Tensor | list):
        raise TypeError(
            must_be("ctx", "the ctx of a batch, of tensors and lists", value, "The ctx of a sample need not be split.")
        )
    return value.tolist() if isinstance(value, torch.Tensor) else value


_KINDS: dict[type, str] = {torch.Tensor: "tensor", int: "number", float: "number", bool: "number", tuple: "tuple"}


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, Image.Image) or hasattr(value, "to_pil"):
        _KINDS[type(value)] = "image"
        return "image"
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind in "biufc" else ""
    if isinstance(value, Number | np.bool_):
        return "number"
    if isinstance(value, Mapping):
        return "mapping"
    if isinstance(value, list):
        return "numbers" if all(isinstance(entry, Number) for entry in value) else ""
    return "tuple" if isinstance(value, tuple) else ""  # a named one


def _channels_first(image: Any) -> torch.Tensor:
    image = image.decoded() if hasattr(image, "decoded") else image  # an `EncodedImage` is decoded only here
    planes: torch.Tensor | None = getattr(image, "pixels", None)
    if planes is not None:
        return planes
    pixels = torch.from_numpy(np.array(image))
    if pixels.dim() == 3:
        return pixels.permute(2, 0, 1)
    is_mask = isinstance(image, Image.Image) and image.mode == "P"
    return pixels if is_mask else pixels[None]


@in_one_torch_thread
def _stack(values: list[torch.Tensor], empty: Allocate | None) -> torch.Tensor:
    if empty is not None and len({value.dtype for value in values}) == 1 and all(map(_is_plain, values)):
        batch = empty((len(values), *values[0].shape), values[0].dtype)
        if values[0].dim() == 3 and values[0].stride(0) == 1 and batch.is_contiguous():
            # Images `[C, H, W]` with channels last in memory: NumPy transposes them faster than torch, 48 against 62 us
            # for 224 by 224 pixels.
            for row, value in zip(batch.numpy(), values, strict=True):
                np.copyto(row, value.numpy())
            return batch
        return torch.stack(values, out=batch)
    return torch.stack(values)


def _stack_arrays(values: list[NDArray[Any]], empty: Allocate | None) -> torch.Tensor:
    kind = values[0].dtype
    if empty is not None and kind.isnative and all(value.dtype == kind for value in values):
        batch = empty((len(values), *values[0].shape), _dtype_of(kind))
        np.stack(values, out=batch.numpy())
        return batch
    return torch.from_numpy(np.stack(values))


@functools.cache
def _dtype_of(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype


def _is_plain(value: torch.Tensor) -> bool:
    return type(value) is torch.Tensor and not value.requires_grad and value.device.type == "cpu"


def _stacked(values: list[Any], name: str, pad: float | None, empty: Allocate | None) -> torch.Tensor:
    shapes = [tuple(value.shape) for value in values]
    if len(set(shapes)) == 1:
        return _stack(values, empty) if isinstance(values[0], torch.Tensor) else _stack_arrays(values, empty)
    if len({len(shape) for shape in shapes}) > 1 or pad is None:
        hint = ""
        if pad is None and name.isidentifier():
            are_images = all(len(shape) == 3 and shape[0] in (1, 3) for shape in shapes)
            resize = ", as `kdp.Resize((224, 224))` and `kdp.CenterCrop(224)` do" if are_images else ""
            hint = f' Make their shapes equal{resize}, or pad them: `.collate_samples(pad={{"{name}": 0}})`.'
        shown = ", ".join(str(list(shape)) for shape in sorted(set(shapes))[:4])
        raise DataError(f"Field {name!r} has different shapes in one batch: {shown}.{hint}")
    tensors = [_as_tensor(value) for value in values]
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    batch = (empty or allocate)([len(tensors), *largest], _common_dtype(tensors, name, pad)).fill_(pad)
    for row, tensor in zip(batch, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return batch


def _as_one_type(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return integers of which some have 64 bits and no sign as one type, because NumPy would make floats of them."""
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) < 2 or not dtypes & {np.dtype(np.uint64), np.dtype(object)}:
        return arrays
    if not all(dtype.kind in "iuO" for dtype in dtypes):
        return arrays
    fits = all(array.dtype != object and not (array < 0).any() for array in arrays)
    return [array.astype(np.uint64 if fits else object) for array in arrays]


def _is_ragged(kind: str, values: Sequence[Any]) -> bool:
    if kind == "image":
        return True
    if kind in {"tuple", "numbers"}:
        return len({len(value) for value in values}) > 1
    return kind in {"array", "tensor"} and len({tuple(value.shape) for value in values}) > 1


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))


def _common_dtype(tensors: list[torch.Tensor], name: str, pad: float) -> torch.dtype:
    """Return the dtype that can hold all values. Empty tensors do not count."""
    dtypes = [tensor.dtype for tensor in tensors if tensor.numel()] or [tensors[0].dtype]
    dtype = functools.reduce(torch.promote_types, dtypes)
    if torch.tensor(pad).to(dtype).item() != pad:
        raise DataError(
            f"Field {name!r} has dtype {dtype}, which cannot represent the `pad` value {pad!r}. Choose another "
            "`pad`, or convert the field to another dtype first."
        )
    return dtype
