"""`from_ids`: make samples from a list of IDs and a dictionary of labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.callback import Callback
from kdpipes.core.column import Column, as_column, filled
from kdpipes.core.errors import DataError, add_note, check_class_names, must_be
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.keys import repetitions, unique_key
from kdpipes.core.labels import number_labels
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.order import Order
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Block, Rows
from kdpipes.core.shared import Shared
from kdpipes.core.traits import Traits
from kdpipes.sources._file_reader import FileReader
from kdpipes.storage.access import Access
from kdpipes.storage.decoding import decode_array
from kdpipes.storage.files import file_stamp
from kdpipes.storage.filesystems import check_filesystems
from kdpipes.storage.urls import identity_of, is_local, path_of


@called_as("from_ids")
class IdReaderMapDataPipe(MapPipe):
    """Makes one sample per ID: `x` is loaded from the ID, `y` is looked up (`kdp.from_ids(ids, labels, load)`).

    This is the `partition`/`labels` pattern of "A detailed example of how to generate your data in parallel with
    PyTorch" (Amidi and Amidi, Stanford).

    Args:
        ids: The IDs, in order. The key of a sample is `str(id)`. If the ID is a URL, its user name, password, signature
            and expiry are removed from the key. If an ID repeats, the later samples have the keys "ID #2", "ID #3", ...
        labels: The label of each ID: a dictionary or a pandas Series by ID, or a sequence as long as `ids`. Text labels
            become class numbers: see "Labels" in docs/sources.md. Without labels, samples have no field `y`.
        load: A function that returns `x` for an ID; or a path or URL that contains `{id}`: `.pt` files are read as
            tensors (`weights_only`), `.npy` files as arrays, other files as bytes.
        class_names: The names of the classes 0, 1, ...; by default, the sorted labels if these are text.
        storage_options: The arguments of fsspec's file system, such as `{"key": ..., "secret": ...}` or
            `{"anon": True}` for S3. Workers get them; no `repr`, state, fingerprint or error contains them.
        hedge_s: The seconds after which a read without a response is requested a second time; the first one counts.

    Raises:
        ValueError: A label is not among `class_names`; an ID has no label; `labels` and `ids` differ in length; or
            `labels` is a Series whose index does not say which ID a label belongs to.

    Example:
        >>> pipe = kdp.from_ids(["id-1", "id-2"], {"id-1": 0, "id-2": 2}, load=lambda id: id.upper())
        >>> pipe[1]["x"], pipe.column("y")
        ('ID-2', array([0, 2]))
    """

    def __init__(
        self,
        ids: Sequence[Any],
        labels: Mapping[Any, Any] | Sequence[Any] | None = None,
        load: Callable[[Any], Any] | str | os.PathLike[str] = "{id}",
        *,
        class_names: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
    ) -> None:
        if isinstance(ids, str) or not hasattr(ids, "__getitem__") or isinstance(ids, Mapping):
            raise TypeError(must_be("ids", "a sequence of IDs", ids))
        load = os.fspath(load) if isinstance(load, os.PathLike) else load
        if isinstance(load, str) and "{id}" not in load:
            raise ValueError(must_be("load", "a callable, or a path with '{id}' in it", load))
        if isinstance(load, str):
            check_filesystems("load", [load.replace("{id}", str(ids[0])) if len(ids) else load])
        labels = _aligned(ids, labels)
        self._ids = Shared(by_position("ids", ids))
        self._class_names = check_class_names(class_names)
        self._labels: Shared[NDArray[Any]] | None = None
        if labels is not None:
            column, self._class_names = number_labels(labels, self._class_names)
            self._labels = Shared(column)
        if isinstance(load, str):
            load = FileLoader(load, Access(storage_options=storage_options, hedge_s=hedge_s))
        self._files = load if isinstance(load, FileLoader) else None
        self._load = Callback("load", load)
        self._repetitions: Shared[NDArray[np.int32] | None] | None = None

    def fingerprint(self) -> Any:
        ids = self._ids.value
        are_urls = len(ids) > 0 and isinstance(ids[0], str) and "://" in ids[0]
        names = [identity_of(str(name)) for name in ids] if are_urls else self._ids
        return names, self._labels, self._load, self._class_names

    def __len__(self) -> int:
        return len(self._ids.value)

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        ids = [self._ids.value[position] for position in rows.positions.tolist()]
        are_texts = [isinstance(name, str) for name in ids]
        if any(are_texts) and not all(are_texts):
            return [block for number in range(len(rows)) for block in self.read_blocks(rows.part([number]))]
        return (self._block(rows, () if all(are_texts) else (filled(ids),)),)

    def _block(self, rows: Rows, ids: tuple[Column, ...]) -> Block:
        """Return a block of samples. `ids` contains IDs that are not strings, because caches distinguish 1 from "1"."""
        files = self._files
        known = self._ids.value
        if files is None:
            return Block(self._columns_of(rows, ids), rows, key=self._key)
        return Block(
            self._columns_of(rows, ids),
            rows,
            key=self._key,
            version=lambda position: file_stamp(files.path_of(known[position])),
            shared_key=lambda position: identity_of(str(known[position])),
        )

    def _columns_of(self, rows: Rows, ids: tuple[Column, ...]) -> dict[str, Column]:
        known = self._ids.value
        load = self._load
        fields = {"x": Column(lambda sample, *_: load(known[sample.position]), *ids, what="loading field 'x'")}
        if self._labels is not None:
            fields["y"] = filled(self._labels.value[rows.positions].tolist())
        return fields

    def value_fingerprint(self) -> Any:
        """Return the data that identifies values in caches, in addition to the versions of the files."""
        return self._load

    def prepare_for_workers(self) -> None:
        """Resolve the keys and labels before workers start."""
        self._numbers_of_keys()

    def _key(self, index: int) -> str:
        """Return the key of a sample, which is unique in the source."""
        name = self._name(index)
        numbers = self._numbers_of_keys()
        return name if numbers is None else unique_key(name, int(numbers[index]))

    def _name(self, index: int) -> str:
        """Return the text from which the key of a sample is made."""
        return identity_of(str(self._ids.value[index]))

    def _names(self) -> Sequence[str] | None:
        """Return the texts from which keys are made; None if they are known to be unique."""
        ids = self._ids.value
        return None if isinstance(ids, range) else list(map(self._name, range(len(ids))))

    def _numbers_of_keys(self) -> NDArray[np.int32] | None:
        if self._repetitions is None:
            names = self._names()
            self._repetitions = Shared(None if names is None else repetitions(names))
        return self._repetitions.value

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        is_remote = self._files is not None and self._files.is_remote(self._ids.value)
        return Traits(role="source", is_remote=is_remote, reads_files=self._files is not None and not is_remote)

    def prefetch(self, order: Order) -> None:
        if self._files is not None:
            self._files.prefetch(order, self._ids.value)

    def has_column(self, name: str) -> bool:
        return name == "y" and self._labels is not None

    def read_column(self, name: str) -> NDArray[Any]:
        if name == "key":
            return as_column(list(map(self._key, range(len(self)))))
        return self._labels.value if name == "y" and self._labels is not None else super().read_column(name)

    def class_names(self) -> tuple[str, ...] | None:
        return self._class_names

    def field_names(self) -> frozenset[str]:
        return frozenset({"x"} if self._labels is None else {"x", "y"})


def by_position(param: str, values: Any) -> Any:
    """Return a pandas Series as an array, because `series[0]` looks up the index; other values unchanged."""
    if hasattr(values, "iloc") and hasattr(values, "columns"):
        raise TypeError(must_be(param, "one column", type(values).__name__, 'Pass a column, like `table["id"]`.'))
    return values.to_numpy() if hasattr(values, "iloc") else values


def _aligned(ids: Any, labels: Any) -> Any:
    """Return the label of each ID."""
    if labels is None:
        return None
    if hasattr(labels, "iloc"):
        return _aligned_series(ids, labels)
    if isinstance(labels, Mapping):
        missing = next((name for name in ids if name not in labels), None)
        if missing is not None:
            raise ValueError(
                f"`labels` must have a label for every ID, but has none for {missing!r}. Add it: -1 is unlabeled."
            )
        return [labels[name] for name in ids]
    if len(labels) != len(ids):
        raise ValueError(
            f"`labels` must be as long as `ids`, but has {len(labels)} entries for {len(ids)} IDs. "
            "Pass one label per ID, in the same order, or a dictionary of labels by ID."
        )
    return labels


def _aligned_series(ids: Any, labels: Any) -> Any:
    """Return the labels of a Series, one for each ID.

    If the index holds the IDs, labels are looked up there. Otherwise, they are matched by position if `ids` has the
    same index or none.
    """
    by_position("labels", labels)
    names = list(by_position("ids", ids))
    index = labels.index
    if hasattr(ids, "iloc") and index.equals(ids.index):  # columns of the same table
        return labels
    has_no_index = list(index) == list(range(len(names)))
    places = index.get_indexer(names) if index.is_unique else np.full(len(names), -1)
    holds_ids = bool((places >= 0).all())
    if holds_ids and (not has_no_index or names == list(index)):
        return labels.iloc[places]
    if has_no_index and not holds_ids and not hasattr(ids, "iloc"):
        return labels
    raise ValueError(
        "`labels` must be a Series whose index holds the IDs, or be the column of `ids` in the same table, but its "
        f"index is {list(index[:3])!r}, .... Write `labels.to_numpy()` for labels in the order of `ids`, or "
        "`labels.to_dict()` for labels by ID."
    )


class FileLoader(Fingerprinted):
    """Reads the file of an ID according to its suffix. No code in the file is executed."""

    def __init__(self, template: str, access: Access, hint: str = "") -> None:
        self._template = template
        self._hint = hint
        self._reader = FileReader(access)

    def is_remote(self, names: Sequence[Any]) -> bool:
        """Return whether the files are remote, judging by the first one."""
        return len(names) > 0 and not is_local(self.path_of(names[0]))

    def prefetch(self, order: Order, names: Sequence[Any]) -> None:
        """Start to read the files at the next positions."""

        def files_at(indices: list[int]) -> list[tuple[str, int]]:
            files = []
            for index in indices:
                with suppress(DataError):  # a row without a path raises an error when it is read
                    files.append((self.path_of(names[index]), -1))
            return files

        self._reader.prefetch(order, files_at)

    def fingerprint(self) -> Any:
        """Return the file name template, without its folder."""
        return identity_of(self._template).rsplit("/", 1)[-1]

    def path_of(self, name: Any) -> str:
        """Return the path of the file of an ID."""
        return self._template.replace("{id}", str(name))

    def __call__(self, name: Any) -> Any:
        path = self.path_of(name)
        try:
            content = self._reader.read(path)
        except FileNotFoundError as error:
            if self._hint:
                add_note(error, self._hint)
            raise
        try:
            suffix = path_of(path).rpartition(".")[2]
            return decode_array(suffix, content) if suffix in ("npy", "pt") else content
        except ValueError as error:
            raise DataError(f"{path!r} cannot be read: {str(error).rstrip('.')}. Replace the file.") from error
