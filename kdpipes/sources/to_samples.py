"""`to_samples`: convert the items of any stock pipe to samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from kdpipes.core.callback import Callback
from kdpipes.core.column import Column, Loaded
from kdpipes.core.errors import ChainError, DataError, check_class_names, check_type
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.labels import number_fields
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import Pipe, a_datapipe
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.traits import Traits
from kdpipes.storage.files import file_stamp, read_url
from kdpipes.storage.urls import identity_of


class Recipe(Fingerprinted):
    """Creates a sample from an item. The arguments are those of `to_samples`."""

    def __init__(
        self,
        key: Callable[[Any], Any] | None,
        label: Callable[[Any], Any] | None,
        fields: str | Mapping[str, Any] | None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.class_names = check_class_names(class_names)
        self._key = None if key is None else Callback("key", key)
        self._label = None if label is None else Callback("label", label)
        check_type("fields", fields, str | Mapping | None, 'names in one string, like "x y", or functions by name')
        self._names = fields.split() if isinstance(fields, str) else None
        named = fields if isinstance(fields, Mapping) else {}
        self._functions = {name: Callback(f"fields[{name!r}]", function) for name, function in named.items()}

    def fingerprint(self) -> Any:
        """Return the arguments."""
        return vars(self)

    def __call__(self, item: Any, index: int) -> Sample:
        if item is None:
            return self._missing(index)
        if isinstance(item, Sample):
            sample = item.fork(key=None if self._key is None else str(self._key(item)))
            fields = self._all_fields(sample)
            for name in tuple(sample):
                del sample[name]
            sample.update(fields)
            return sample
        is_path = isinstance(item, str) and not self._functions
        version = partial(file_stamp, item) if is_path else ""
        default = _default_key(item)  # for an item whose file is still open
        item = _without_files(item)
        key = default if self._key is None else str(self._key(item))
        return Sample(self._all_fields(item), key=key, index=index, version=version)

    def _missing(self, index: int) -> Sample:
        """Return a sample whose fields raise an error when they are read, for `on_error` to handle."""
        text = f"Item {index} is None: its source could not make it."

        def reject(_: Sample) -> NoReturn:
            raise DataError(f'{text} `.on_error("skip")` skips it.')

        names = [*(self._names or self._functions), *(["y"] if self._label is not None else [])]
        if not names:
            raise DataError(f'{text} Name the fields, like `.to_samples(fields="x y")`, for `.on_error("skip")`.')
        fields = {name: Column(reject, what=f"reading field {name!r}") for name in names}
        return Sample(fields, key=str(index), index=index)

    def _all_fields(self, item: Any) -> dict[str, Any]:
        functions = self._functions.items()
        fields: dict[str, Any] = {name: _computed(one, item, f"computing field {name!r}") for name, one in functions}
        fields = fields or self._fields(item)
        if self._label is not None:
            fields["y"] = _computed(self._label, item, "computing the label")
        number_fields(fields, self.class_names)
        return fields

    def _fields(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Sample):
            return self._chosen({name: item.lazy(name) for name in item})
        if isinstance(item, dict | Mapping):
            known = {str(name).lstrip("."): value for name, value in item.items() if not str(name).startswith("__")}
            return self._chosen(known)
        if isinstance(item, str):
            return {self._only_name("x"): Column(lambda sample: read_url(item), what="reading the file")}
        if isinstance(item, _PathAndContent) and self._names is None:
            return {"x": item[1]}
        if isinstance(item, tuple | list):
            if self._names is None or len(self._names) != len(item):
                raise ChainError(f'An item has {len(item)} parts; name each of them: `.to_samples(fields="x y ...")`.')
            return dict(zip(self._names, item, strict=True))
        return {self._only_name(None, item): item}

    def _chosen(self, known: dict[str, Any]) -> dict[str, Any]:
        if self._names is None:
            return known
        missing = next((name for name in self._names if name not in known), None)
        if missing is not None:
            raise ChainError(f"`fields` names {missing!r}, but an item has only {', '.join(map(repr, known))}.")
        return {name: known[name] for name in self._names}

    def _only_name(self, default: str | None, item: Any = None) -> str:
        names = self._names or ([default] if default else [])
        if len(names) != 1:
            raise ChainError(f'An item is one {type(item).__name__}; give it one name: `.to_samples(fields="x")`.')
        return names[0]


def _computed(function: Callback, item: Any, what: str) -> Column:
    """Return a column computed by a function of an item, which is called when the value is read."""
    if isinstance(item, Sample):
        return Column(function, what=what, scope=item.scope())
    return Column(lambda sample, item: function(item), Loaded(item), what=what)


def _content(value: Any) -> Any:
    """Return the content of an open file, because the file can neither be read later nor be sent to a worker."""
    if not hasattr(value, "read"):
        return value
    try:
        return value.read()
    finally:
        value.close()


class _PathAndContent(tuple[Any, ...]):
    """A pair of a path and the content of its file, made from a pair with an open file."""


def _without_files(item: Any) -> Any:
    """Return an item with open files replaced by their contents."""
    if isinstance(item, dict | Mapping):  # checking for `dict` first takes a tenth of the time
        return {name: _content(value) for name, value in item.items()}
    if isinstance(item, tuple | list) and any(hasattr(part, "read") for part in item):
        kind = _PathAndContent if len(item) == 2 and isinstance(item[0], str) else tuple
        return kind(_content(part) for part in item)
    return item


def _default_key(item: Any) -> str | None:
    if isinstance(item, dict | Mapping):
        return str(item["__key__"]) if "__key__" in item else None
    if isinstance(item, tuple) and item and isinstance(item[0], str) and hasattr(item[-1], "read"):
        return identity_of(item[0])
    return identity_of(item) if isinstance(item, str) else None


class _SampleMaker(Pipe):
    """The base class of `to_samples` in both flavours."""

    traits = Traits(role="source")

    def __init__(
        self,
        source_datapipe: Any,
        key: Callable[[Any], Any] | None = None,
        label: Callable[[Any], Any] | None = None,
        fields: str | Mapping[str, Callable[[Any], Any]] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.source = a_datapipe(source_datapipe)
        self._recipe = Recipe(key, label, fields, class_names)

    def __len__(self) -> int:
        return len(self.source)

    def class_names(self) -> tuple[str, ...] | None:
        return self._recipe.class_names


@functional_pipe("to_samples", flavour="map")
class SampleMakerMapDataPipe(_SampleMaker, MapPipe):
    """Converts the items of any stock pipe to samples (functional name: ``to_samples``).

    A string is the path or URL of a file, whose bytes become `x`. A dictionary holds fields by name; dots before names,
    as in the items of torchdata's `.webdataset()`, are removed. For a pair of a path and an open file, the path becomes
    the key, and the content of the file becomes `x`. For other tuples, pass `fields`. Open files are read and closed
    when an item passes, so `key`, `label` and the functions in `fields` get bytes.

    Args:
        source_datapipe: Any pipe, like `SequenceWrapper(paths)` or `FileLister("photos", "*.jpg", recursive=True)`.
        key: A function of an item that returns the sample's key, which must be stable and unique. By default, the key
            is the path, `__key__` or the index.
        label: A function of an item that returns `y`. It is called when `y` is read.
        fields: The names of a tuple's parts, or of the dictionary's entries to keep, in one string; or a dictionary of
            functions of the item by field name.
        class_names: The names of the classes 0, 1, ... Labels in the fields `y` and `cls` become these numbers. Without
            it, labels are unchanged.

    Length: that of the source, if it has one.

    Raises:
        ChainError: An item is a tuple or another value whose parts have no names, and `fields` is missing or does not
            match it.

    Example:
        >>> SequenceWrapper([(1, "a"), (2, "b")]).to_samples(fields="x y").select("y x")[1]
        ('b', 2)
        >>> stream = IterableWrapper(["a/1.jpg", "b/2.jpg"]).to_samples(label=lambda path: path[0])
        >>> [(sample.key, sample["y"]) for sample in stream]
        [('a/1.jpg', 'a'), ('b/2.jpg', 'b')]
    """

    def fetch(self, index: int) -> Sample:
        return self._recipe(self.source[index], index)


@functional_pipe("to_samples", flavour="iter", doc_of=SampleMakerMapDataPipe)
class SampleMakerIterDataPipe(_SampleMaker, IterPipe):
    def samples(self) -> Iterator[Sample]:
        for index, item in enumerate(self.source):
            yield self._recipe(item, index)
