"""Read any torch Dataset as samples: `from_dataset`, and `SampleSource` for datasets whose fields load separately."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from kdpipes.core.callback import Callback, call_seeded
from kdpipes.core.column import Column, as_column, filled
from kdpipes.core.errors import ChainError, DataError, check_class_names, must_be, reject_field
from kdpipes.core.fingerprint import digest, settled_attributes, sketch, sketch_of_attributes
from kdpipes.core.labels import (
    class_names_in,
    is_label,
    is_same,
    is_text,
    number_column,
    number_fields,
    number_labels,
    numbered,
)
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import warn
from kdpipes.core.randomness import GlobalUse, SampleKey, using_key
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.shared import Shared, is_sharing
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.user_code import draws_nothing, own_members
from kdpipes.sources.from_ids import by_position

_PREFIX = "getitem_"
_LABELS = ("targets", "labels")  # attributes of datasets
_IN_MEMORY = (list, tuple, np.ndarray, TensorDataset)
_LOADING = "loading an item"
_NAMES = "_kdpipes_names"
_NUM_COMPARED = 4  # number of items whose labels are compared with the dataset's attribute
_SHOWN = 60  # number of characters of a label in a warning
_SHARED = "_kdpipes_shared"  # an attribute of users' classes


@called_as("from_dataset")
class DatasetReaderMapDataPipe(MapPipe):
    """Reads the items of a dataset as samples with named fields (`kdp.from_dataset(dataset)`).

    If the dataset has methods `getitem_x(index)`, `getitem_y(index)`, ... (KappaData's convention), each field is
    loaded separately when it is read. A parameter `ctx` gets the sample's ctx, `rng` a generator. For any other
    dataset, the whole item is loaded when one of its fields is first read. The global generators of `random`, NumPy and
    torch are seeded for methods that take `ctx`, and for items of datasets that may draw from them, so that random
    transforms of the dataset depend on the epoch only. If the dataset has a method `__getitems__`, as Hugging
    Face datasets do, and items are cheap, it is called once for many items.

    Args:
        dataset: An object with `__len__` and `__getitem__`, or with `__len__` and `getitem_*` methods.
        fields: The names of an item's parts, in order, as one string; for items that are dictionaries, which keys to
            take. Not for datasets with `getitem_*` methods.
        labels: The labels, `[len(dataset)]`, which then are not read from the items. Text labels become class numbers.
            By default, plans read the dataset's `targets` or `labels`, as in torchvision's datasets, if a comparison
            with some items shows that they hold the same labels.
        class_names: The names of the classes 0, 1, ...; by default, the dataset's `classes` or `class_names`, those of
            a Hugging Face `ClassLabel`, or the sorted labels if these are text. Without class names, labels in items
            are unchanged. "Labels" in docs/sources.md has all rules.

    Workers: The dataset is shared with workers that are forked, and pickled for others.

    Example:
        >>> pipe = kdp.from_dataset([("cat.jpg", 0), ("dog.jpg", 1)])
        >>> pipe[1]["x"], pipe.column("y")
        ('dog.jpg', array([0, 1]))
    """

    def __init__(
        self,
        dataset: Any,
        fields: str = "x y",
        *,
        labels: Sequence[Any] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        has_items = hasattr(dataset, "__getitem__") or _getters_of(dataset)
        if isinstance(dataset, str | bytes | Mapping) or not hasattr(dataset, "__len__") or not has_items:
            raise TypeError(must_be("dataset", "a dataset with a length and positions", dataset, _hint_for(dataset)))
        if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
            raise TypeError(
                "`dataset` must be a dataset, but is a table. Use `kdp.from_table(table)`; if its rows name files, "
                '`kdp.from_table(table, path="path", label="label")`.'
            )
        if not isinstance(fields, str) or not fields.split():
            raise TypeError(must_be("fields", 'names in one string, like "x y"', fields))
        if labels is not None and len(labels) != len(dataset):
            raise ValueError(
                f"`labels` must be as long as `dataset`, but has {len(labels)} entries for "
                f"{len(dataset)} items. Pass one label per item, or -1 for an unlabeled one."
            )
        self._dataset = Shared(dataset)
        self._sketch = digest(sketch(dataset))  # before reading changes what the dataset holds
        self._use = _global_use(dataset)
        self._getters = list(_getters_of(dataset))
        self._fields = " ".join(self._getters) or fields
        self._labels: Shared[NDArray[Any]] | None = None
        self._targets: Shared[NDArray[Any]] | None = None  # labels used by plans, as long as items agree with them
        self._is_compared = labels is not None
        self._class_names = check_class_names(class_names) or class_names_in(dataset, self._fields.split())
        self._has_given_names = class_names is not None
        if labels is not None:
            column, self._class_names = number_labels(_in_order(labels), self._class_names)
            self._labels = Shared(column)
        self._has_texts = False
        if self._class_names is None and not self._is_compared and (candidate := self._candidate()) is not None:
            self._has_texts = is_text(next((label for label in candidate if label is not None), None))

    def fingerprint(self) -> Any:
        return len(self), self._fields, self.class_names(), self._known_labels(), self._sketch

    def value_fingerprint(self) -> Any:
        """Return the data that identifies values in caches: the dataset's class and attributes, and the class names."""
        dataset = self._dataset.value
        identity = dataset.value_fingerprint() if isinstance(dataset, SampleSource) else self._dataset
        return identity, self._fields, self.class_names()

    def __len__(self) -> int:
        return len(self._dataset.value)

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        dataset = self._dataset.value
        fields = {name: _getter(dataset, name) for name in self._getters} if self._getters else self._parts()
        labels = self._read_labels()
        if labels is not None:
            fields["y"] = filled(labels[rows.positions].tolist())
        elif self._class_names is not None and "y" in fields:
            fields["y"] = numbered(fields["y"], self._class_names, are_given=self._has_given_names)
        return (Block(fields, rows, key=str),)

    def _parts(self) -> dict[str, Column]:
        """Return the fields of the items, with labels as stored in the dataset."""
        dataset = self._dataset.value
        names = self._fields.split()
        item = Column(_loader(dataset, self._use), what=_LOADING, many=partial(_items_at_once, dataset, self._use))
        is_cheap = isinstance(dataset, _IN_MEMORY)
        return {name: _part(item, names, place, is_cheap) for place, name in enumerate(names)}

    def has_column(self, name: str) -> bool:
        if name == "y" and self._known_labels() is not None:
            return True
        return name in self.field_names() and type(self._dataset.value) in (list, tuple)

    def read_column(self, name: str) -> NDArray[Any]:
        labels = self._known_labels() if name == "y" else None
        return labels if labels is not None else super().read_column(name)

    def class_names(self) -> tuple[str, ...] | None:
        self._read_labels()
        return self._class_names

    def field_names(self) -> frozenset[str]:
        return frozenset(self._fields.split()) | (set() if self._labels is None else {"y"})

    def _read_labels(self) -> NDArray[Any] | None:
        """Return the labels that replace those in items: `labels=`, or texts that the dataset has for all items."""
        if self._has_texts:
            self._known_labels()
        return None if self._labels is None else self._labels.value

    def _known_labels(self) -> NDArray[Any] | None:
        """Return the labels of all items if they are known without loading all items, or None."""
        if not self._is_compared:
            self._is_compared = True
            targets = self._candidate()
            if targets is not None and self._agrees(targets):
                self._keep(targets)
            self._has_texts = False
        known = self._targets if self._labels is None else self._labels
        return None if known is None else known.value

    def _candidate(self) -> NDArray[Any] | None:
        """Return the attribute of the dataset that may hold its labels, or None."""
        dataset = self._dataset.value
        if "y" not in self._fields.split() or self._getters or getattr(dataset, "target_transform", None) is not None:
            return None
        known = (getattr(dataset, name, None) for name in _LABELS)
        labels = next((labels for labels in known if labels is not None and _is_column(labels, len(dataset))), None)
        column = None if labels is None else as_column(by_position("labels", labels))
        return column if column is not None and all(map(is_label, column[:1])) else None

    def _keep(self, targets: NDArray[Any]) -> None:
        if self._class_names is not None:
            with suppress(ValueError):  # reading the item raises an error that names the sample
                self._targets = Shared(number_labels(targets, self._class_names).column)
        elif self._has_texts:
            column, self._class_names = number_labels(targets)
            self._labels = Shared(column)
        else:
            self._targets = Shared(targets)

    def _agrees(self, targets: NDArray[Any]) -> bool:
        """Return whether some items hold the same labels as an attribute of the dataset."""
        compared = 0
        for index in _places_to_compare(targets):
            try:
                with using_key(SampleKey(0, 0, index)):
                    label = Sample(self._parts(), key=str(index), index=index)["y"]
            except Exception:  # the item cannot be loaded; `on_error` handles this
                continue
            compared += 1
            if not is_same(label, targets[index], self._class_names):
                kind = type(self._dataset.value).__name__
                warn(
                    f"The labels are read from the items of {kind}, because its `targets` or `labels` differ: item "
                    f"{index} holds {_shortened(label)}, not {_shortened(targets[index])}. If all labels are known, "
                    "pass `labels=`, so that a plan does not load the items.",
                )
                return False
        return compared > 0


def _places_to_compare(labels: NDArray[Any]) -> list[int]:
    """Return some positions of labels, from different classes if possible."""
    try:
        firsts = np.unique(labels, return_index=True)[1].tolist()
    except TypeError:  # objects that cannot be ordered
        firsts = list(range(len(labels)))
    chosen = (
        [firsts[place * (len(firsts) - 1) // (_NUM_COMPARED - 1)] for place in range(_NUM_COMPARED)] if firsts else []
    )
    return sorted({*chosen, *range(len(labels))[-1:]})


def _shortened(value: Any) -> str:
    plain = value.item() if isinstance(value, np.generic) else value
    text = " ".join(repr(plain).split())
    return text if len(text) < _SHOWN else f"{type(value).__name__} {text[:_SHOWN]}..."


def _in_order(labels: Any) -> Any:
    """Return labels. Raise ValueError for a shuffled pandas Series, whose order is ambiguous."""
    by_position("labels", labels)
    index = list(labels.index) if hasattr(labels, "iloc") else []
    if index != list(range(len(index))) and set(index) == set(range(len(index))):
        raise ValueError(
            "`labels` must be in the order of `dataset`, but is a Series whose index has another order. Write "
            "`labels.to_numpy()` if item n has the n-th label, or `labels.sort_index()` if it has `labels[n]`."
        )
    return labels


def _is_column(found: Any, size: int) -> bool:
    try:
        return bool(np.shape(found) == (size,))
    except (TypeError, ValueError):  # NumPy rejects lists of different lengths and bfloat16 tensors
        return False


def _hint_for(dataset: Any) -> str:
    """Return a hint on making a pipe of a dataset without positions."""
    if hasattr(dataset, "__iter__") and not isinstance(dataset, str | bytes | Mapping):
        return (
            "Read it as a stream: `from torch.utils.data.datapipes.iter import IterableWrapper`, "
            '`IterableWrapper(dataset, deepcopy=False).to_samples(fields="x y")`.'
        )
    return "Load it first, and pass what was loaded." if isinstance(dataset, str) else ""


def _getter(dataset: Any, name: str) -> Column:
    known = _getters_of(dataset)[name]

    def load(sample: Sample) -> Any:
        method = getattr(dataset, _PREFIX + name)
        if not known.may_draw:
            return method(sample.position)
        getter = known.method.with_function(method)
        ctx = sample.ctx
        is_recording = sample.block.is_recording
        return call_seeded(getter, sample, getter.name, sample.position, ctx=ctx, is_recorded=is_recording)

    return Column(load, what=known.what)


def _global_use(dataset: Any) -> GlobalUse | None:
    """Return whether a dataset was seen to draw from the global generators; None if it is known to draw nothing."""
    declared = getattr(dataset, "is_random", None)
    methods = (getattr(dataset, name, None) or () for name in ("__getitem__", "__getitems__"))
    if declared is False or (declared is None and all(map(draws_nothing, methods))):
        return None
    return GlobalUse(is_seen=declared is True)


def _loader(dataset: Any, use: GlobalUse | None) -> Callable[[Sample], Any]:
    def load(sample: Sample) -> Any:
        index = sample.position
        if use is None or isinstance(dataset, _IN_MEMORY):
            return dataset[index]
        is_watched = sample.is_watched  # the dataset may have random transforms of its own
        item, is_random = use.call(sample.key_of("dataset"), dataset.__getitem__, index, is_watched=is_watched)
        if is_random and is_watched:
            sample.record_key("dataset", is_recorded=sample.block.is_recording)
        return item

    return load


def _items_at_once(dataset: Any, use: GlobalUse | None, block: Block) -> Sequence[Any] | None:
    """Return all items of a block: from memory, or by `__getitems__`, which torch's DataLoader calls, too."""
    positions = block.positions
    if type(dataset) is TensorDataset:
        rows = torch.as_tensor(positions)
        return list(zip(*(tensor[rows].unbind() for tensor in dataset.tensors), strict=True))
    if type(dataset) in (list, tuple, np.ndarray):
        return [dataset[position] for position in positions]
    many = getattr(dataset, "__getitems__", None)
    if many is None or block.is_recording:
        return None
    items = many(list(positions)) if use is None else use.call_for_many(many, list(positions))
    return items if type(items) is list and len(items) == len(positions) else None


def _part(item: Column, names: list[str], place: int, is_cheap: bool) -> Column:
    def pick(sample: Sample, value: Any) -> Any:
        if value is None:
            raise DataError(
                f'Item {sample.position} is None: the dataset could not make it. `.on_error("skip")` skips it.'
            )
        if isinstance(value, Mapping):
            if names[place] not in value:
                known = " ".join(map(str, value))
                raise ChainError(
                    f"Item {sample.position} is a dictionary without the key {names[place]!r}. Name the keys that all "
                    f'items have: `kdp.from_dataset(dataset, "{known}")`.'
                )
            return value[names[place]]
        if isinstance(value, tuple | list):
            if len(value) != len(names):
                raise ChainError(
                    f"Item {sample.position} has {len(value)} parts, but `fields` names {len(names)}: "
                    f"{' '.join(names)!r}. Name each part, in order."
                )
            return value[place]
        if len(names) == 1:
            return value
        kind = type(value).__name__
        raise ChainError(
            f'Item {sample.position} is a single {kind}, but `fields` has {len(names)} names. Use `fields="x"`.'
        )

    def pick_all(_: Block, items: Sequence[Any]) -> Sequence[Any] | None:
        kinds = set(map(type, items))
        if kinds == {tuple} and set(map(len, items)) == {len(names)}:
            return [item[place] for item in items]
        if kinds == {dict}:
            return [item[names[place]] for item in items]
        is_single = len(names) == 1 and not any(isinstance(item, Mapping | tuple | list | None) for item in items)
        return items if is_single else None

    return Column(pick, item, what=f"reading field {names[place]!r}", is_cheap=is_cheap, many=pick_all)


class SampleSource(MapPipe):
    """The base class of users' own sources, which implement `__len__` and a method `getitem_NAME(index)` per field.

    A method is called only when its field is read. A parameter `ctx` gets the sample's ctx, `rng` a generator. Entries
    that a method writes into the ctx are returned by `select(..., return_ctx=True)`; random draws are recorded after
    `record_ctx`. A method that draws random numbers must take one of the two parameters (with `ctx`, the global
    generators are seeded). `__init__` need not call that of the base class. Attributes are shared with forked workers,
    and pickled for other workers. Override `class_names()` if classes have names, and `read_column(name)` if all values
    of a field are known at once; call `super()` for other fields.

    Example:
        >>> class Squares(kdp.SampleSource):
        ...     def __len__(self):
        ...         return 4
        ...     def getitem_x(self, index, ctx=None):
        ...         return index * index
        ...     def getitem_y(self, index, ctx=None):
        ...         return index % 2
        >>> Squares().filter_classes(valid=[1]).select("x y")[1]
        (9, 1)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if not callable(vars(cls)[name]):
                _reject_reserved(cls, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _reject_reserved(type(self), name)
        super().__setattr__(name, value)

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        getters = _getters_of(self)
        if not getters:
            raise ChainError(
                f"{type(self).__name__} has no fields: give it methods `getitem_x(index)`, `getitem_y(index)`, ..., or "
                "use `kdp.from_dataset(dataset)` instead of `kdp.SampleSource`."
            )
        sketch_of_attributes(self)
        fields: dict[str, Any] = {name: _getter(self, name) for name in getters}
        number_fields(fields, self._known_names())
        return (Block(fields, rows, key=self.key_of),)

    def column(self, name: str) -> NDArray[Any]:
        return number_column(super().column(name), name, self._known_names())

    def _known_names(self) -> tuple[str, ...] | None:
        """Return the class names. Determining them may take long."""
        if _NAMES not in self.__dict__:
            names = self.class_names()
            self.__dict__[_NAMES] = None if names is None else tuple(names)
        known: tuple[str, ...] | None = self.__dict__[_NAMES]
        return known

    def fingerprint(self) -> Any:
        """Return plain data that identify this source. If they change, a state of the chain is an error."""
        getters = [(name, getattr(type(self), _PREFIX + name)) for name in _getters_of(self)]
        return len(self), getters, sketch_of_attributes(self)

    def value_fingerprint(self) -> Any:
        """Return plain data that identifies values in caches: by default, the methods and attributes."""
        return (
            type(self).__qualname__,
            own_members(type(self)),
            settled_attributes(self),
        )

    def key_of(self, index: int) -> str:
        """Return the sample's key, which is stable and unique in the source. Override this if samples have names."""
        return str(index)

    def read_column(self, name: str) -> NDArray[Any]:
        if _getters_of(self) and name not in _getters_of(self) and name != "key":
            reject_field(name, type(self).__name__, _getters_of(self))
        return super().read_column(name)

    def field_names(self) -> frozenset[str]:
        return frozenset(_getters_of(self))

    def __getstate__(self) -> dict[str, Any]:
        if MapDataPipe.getstate_hook is not None:  # torch's graph traversal looks for pipes, and would pickle lists
            return {name: value for name, value in vars(self).items() if isinstance(value, IterDataPipe | MapDataPipe)}
        return {name: value for name, value in vars(self).items() if name != _SHARED}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_sharing() and MapDataPipe.reduce_ex_hook is None:  # a copy in this process is the same object
            shared: Shared[SampleSource] = self.__dict__.setdefault(_SHARED, Shared(self))
            return operator.attrgetter("value"), (shared,)
        return super().__reduce_ex__(protocol)


def _reject_reserved(owner: type, name: str) -> None:
    """Raise AttributeError if an attribute would hide a method."""
    is_method = not name.startswith("_") and callable(getattr(SampleSource, name, None))
    if is_method or name in owner.functions:  # type: ignore[attr-defined]
        raise AttributeError(
            f"`{name}` is a method of every source, which the attribute of {owner.__name__} would hide. Call it "
            f"`_{name}`" + (", and return it from a method `class_names(self)`." if name == "class_names" else ".")
        )


class _Getter(NamedTuple):
    """A method of a class that loads a field."""

    method: Callback
    may_draw: bool
    what: str


_getters: weakref.WeakKeyDictionary[type, dict[str, _Getter]] = weakref.WeakKeyDictionary()


def _getters_of(source: Any) -> dict[str, _Getter]:
    """Return the methods that load fields, by field name. They are looked up once per class."""
    kind = type(source)
    if kind not in _getters:
        found = {}
        for name in sorted(name for name in dir(kind) if name.startswith(_PREFIX)):
            method = Callback(name, getattr(kind, name))
            field = name.removeprefix(_PREFIX)
            found[field] = _Getter(method, bool({"ctx", "rng"} & method.parameters), f"loading field {field!r}")
        _getters[kind] = found
    return _getters[kind]
