"""Read the rows of a table as samples. Columns become fields, and files at paths in a column are read lazily."""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.column import Column, as_column
from kdpipes.core.errors import DataError, check_class_names, check_type, closest, must_be
from kdpipes.core.labels import number_labels
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Rows
from kdpipes.core.shared import Shared
from kdpipes.sources._tables import as_arrow, class_names_of, files_of, read_files
from kdpipes.sources.from_ids import FileLoader, IdReaderMapDataPipe
from kdpipes.storage.access import Access, using
from kdpipes.storage.filesystems import check_filesystems
from kdpipes.storage.urls import folder_of, identity_of, is_local, join_url

try:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]
except ImportError:  # the extra `table` is not installed
    pa = None

_EXACT = 2.0**53  # smaller integers are exact as floats
_HINT = "If paths in the table are relative to another folder, pass it: `root=`."
_LOCAL = ("", "file", "local")
# Protocols that rows of a remote table may name in addition to its own. Others may reach local files.
_REMOTE = frozenset({*("http", "https", "s3", "s3a", "gs", "gcs", "hf", "abfs", "abfss", "az", "adl"), "zip", "tar"})


@called_as("from_table")
class TableReaderMapDataPipe(IdReaderMapDataPipe):
    """Reads the rows of a table as samples (`kdp.from_table("labels.csv", path="file", label="class")`).

    Columns become fields. They stay in Arrow's memory, so no Python loop runs over the rows. Numbers, lists of numbers
    and tensors keep their types. Needs the extra `table`.

    Args:
        table: The path or URL of a file, of a folder or of files ("part-*.parquet"), or a list of them. These may be
            Parquet files (`.parquet`), text with delimiters (`.csv`, `.tsv`, `.txt`), or JSON objects (`.jsonl`,
            `.ndjson`); text may be compressed (`.gz`, `.bz2`, `.zst`). Or a table in memory: a DataFrame of pandas or
            polars, a table of pyarrow, a dataset of Hugging Face, or a dictionary of columns.
        path: The column that holds the path or URL of each sample's file, or a template with names of columns, such as
            "images/{id}.jpg". The file is loaded as field `x` when that is read: `.pt` as tensors (`weights_only`),
            `.npy` as an array, other files as bytes.
        root: The folder or URL for relative paths; by default, the folder of the table's files, or else the working
            directory.
        label: The column of labels, which becomes field `y`. Text becomes class numbers; a missing label becomes -1.
        key: The column whose text is the key of a sample. Each text must occur once. By default, it is the column
            `path`, or else the number of the row. If a path repeats, as it does with several boxes or captions for an
            image, the later rows have the keys "PATH #2", "PATH #3", ...
        columns: The columns to keep as fields; by default all of them.
        class_names: The names of the classes 0, 1, ...; by default, the sorted labels if these are text, or the names
            that Hugging Face's `ClassLabel` gives them.
        header: Whether the first line of a text file names the columns; otherwise they are "f0", "f1", ...
        sep: The delimiter of text files, one character. By default, it is the one that divides the first lines evenly:
            usually "," in `.csv`, a tab in `.tsv`, and blanks in `.txt`. Of blanks, any number counts as one delimiter.
        storage_options: The arguments of fsspec's file system, for the table and the files. They may be secrets, and
            are neither shown nor written.
        hedge_s: The seconds after which a read of a file without a response is requested a second time; None means
            never.

    In files of text, entries of the columns for labels, keys and paths are read as text: "00012", "1e5", "NA" and
    "true" are unchanged, and only an empty entry is missing. Other columns become numbers if all of their entries are.

    Rows of a remote table may name remote files, but neither local files (except below a local `root`) nor hosts of a
    network more private than the table's.

    Raises:
        ValueError: A column does not exist; or a label is not among `class_names`.
        DataError: The file is not a table; or a key occurs twice.
        ImportError: pyarrow is not installed.

    Example:
        >>> birds = {"file": ["a.jpg", "b.jpg"], "bird": ["stork", "heron"], "width": [640, 480]}
        >>> pipe = kdp.from_table(birds, path="file", label="bird")
        >>> pipe.column("y"), pipe.class_names(), pipe[1]["width"]
        (array([1, 0]), ('heron', 'stork'), 480)
    """

    def __init__(
        self,
        table: Any,
        *,
        path: str | None = None,
        root: str | os.PathLike[str] | None = None,
        label: str | None = None,
        key: str | None = None,
        columns: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        header: bool = True,
        sep: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
    ) -> None:
        if pa is None:
            raise ImportError("`kdp.from_table` needs pyarrow. Install it: `pip install 'kdpipes[table]'`.")
        if sep is not None and (not isinstance(sep, str) or len(sep) != 1):
            raise ValueError(must_be("sep", "one character", sep))
        for param, name in {"path": path, "label": label, "key": key}.items():
            check_type(param, name, str | None, "the name of one column")
        template = _template_of(path)
        texts = {name for name in (label, key, path, *(name for _, name in template)) if name is not None}
        with using(Access(storage_options=storage_options)):
            files = files_of(table, sep=sep, names_files=path is not None)
            rows = read_files(files, texts=texts, header=header, sep=sep) if files else as_arrow(table)
        template = [] if path in rows.column_names else template
        kept = list(rows.column_names if columns is None else columns)
        paths_of = [name for _, name in template] or [path]
        _check_columns(rows, path=paths_of, label=[label], key=[key], columns=kept)
        _check_fields(kept, has_file=path is not None, label=label)
        self._columns = {name: _Column(_one(rows.column(name))) for name in kept if name != "y" or label is None}
        self._num_rows = int(rows.num_rows)
        paths = None
        if template:
            paths = _filled(template, rows)
        elif path is not None:
            paths = _texts_of("path", path, rows)
        keys = paths if key is None else _texts_of("key", key, rows)
        self._keys = None if keys is None else _Texts(keys)
        if key is not None and self._keys is not None:
            self._keys.reject_doubles(key)
        self._has_file = paths is not None
        if paths is None:
            super().__init__(range(self._num_rows), None, _no_file)
        else:
            folder = _own_folder(files) if root is None else os.fspath(root).removeprefix("file://")
            origin = next((file for file in files if _protocols_of(file)[-1] not in _LOCAL), "")
            located = _Paths(paths, folder, origin)
            check_filesystems("path", list(located[:1]))
            access = Access(storage_options=storage_options, hedge_s=hedge_s, origin=origin)
            super().__init__(located, None, FileLoader("{id}", access, _HINT))
        self._class_names = check_class_names(class_names)
        if label is not None:
            names = self._class_names or class_names_of(rows, label)
            numbers, self._class_names = number_labels(_labels_in(rows, label), names, param="label")
            self._labels = Shared(numbers)

    def fingerprint(self) -> Any:
        keys = None if self._keys is None else _digest(self._keys.values)
        columns = [(name, _digest(column.values)) for name, column in self._columns.items()]
        return keys, columns, self._labels, self._class_names

    def __len__(self) -> int:
        return self._num_rows

    def _columns_of(self, rows: Rows, ids: tuple[Column, ...]) -> dict[str, Column]:
        fields = super()._columns_of(rows, ids)
        if not self._has_file:
            del fields["x"]
        for name, column in self._columns.items():
            fields[name] = Column(
                lambda sample, column=column: column[sample.position],
                what=f"reading {name!r}",
                is_cheap=True,
                many=lambda block, column=column: column.take(block.positions),
            )
        return fields

    def _name(self, index: int) -> str:
        return str(index) if self._keys is None else identity_of(self._keys[index])

    def _names(self) -> Sequence[str] | None:
        return None if self._keys is None or self._keys.differ() else self._keys.names()

    def has_column(self, name: str) -> bool:
        return name in ("key", *self._columns) or super().has_column(name)

    def read_column(self, name: str) -> NDArray[Any]:
        if name == "key" and name not in self._columns:
            if self._keys is None:
                return np.arange(len(self)).astype(f"<U{max(len(str(len(self) - 1)), 1)}")
            if self._numbers_of_keys() is None:
                return as_column(list(map(identity_of, self._keys)))
        return self._columns[name].as_numpy() if name in self._columns else super().read_column(name)

    def field_names(self) -> frozenset[str]:
        return frozenset(self._columns) | super().field_names().difference(() if self._has_file else "x")


class _Column:
    """A column of Arrow. Numbers without a Python type, and lists of them, are returned as NumPy values."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self._value_of = _reader_of(values.type)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Column, (self.values,)

    def __getitem__(self, index: int) -> Any:
        return self._value_of(self.values[index])

    def take(self, indices: Sequence[int]) -> list[Any]:
        """Return the values at some positions."""
        return list(map(self._value_of, self.values.take(pa.array(indices, pa.int64()))))

    def as_numpy(self) -> NDArray[Any]:
        """Return all values, `[n]`."""
        values = self.values.dictionary_decode() if pa.types.is_dictionary(self.values.type) else self.values
        if _is_text(values.type) and not values.null_count and not pc.any(pc.ends_with(values, "\0")).as_py():
            return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.str_)
        if pa.types.is_nested(values.type) or isinstance(values.type, pa.BaseExtensionType):
            column = np.empty(len(values), dtype=object)
            for index, value in enumerate(values):
                column[index] = self._value_of(value)
            return column
        found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        is_rounded = pa.types.is_integer(values.type) and found.dtype.kind == "f" and (np.abs(found) >= _EXACT).any()
        return as_column(values.to_pylist()) if is_rounded or found.dtype == object else found


def _reader_of(kind: Any) -> Callable[[Any], Any]:
    """Return a function that returns the value of an Arrow entry."""
    shape, of = _shape_of(kind)
    if shape and _is_number(of):
        return partial(_tensor_in, shape)
    if isinstance(kind, pa.BaseExtensionType) and hasattr(kind, "shape"):  # Hugging Face's `Array2D`
        return partial(_array_in, str(kind.value_type))
    if _is_short_number(kind):
        return partial(_number_in, kind.to_pandas_dtype())
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return _numbers_in if is_list and _is_short_number(kind.value_type) else methodcaller("as_py")


def _shape_of(kind: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape of entries that are fixed-shape tensors, and the type of their numbers."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape), kind.value_type
    shape: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(kind):
        shape = (*shape, kind.list_size)
        kind = kind.value_type
    return shape, kind


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_short_number(kind: Any) -> bool:
    return _is_number(kind) and kind not in (pa.int64(), pa.float64())


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _number_in(kind: Any, entry: Any) -> Any:
    return kind(entry.as_py()) if entry.is_valid else None


def _numbers_in(entry: Any) -> Any:
    if not entry.is_valid or entry.values.null_count:
        return entry.as_py()
    return entry.values.to_numpy(zero_copy_only=False).copy()


def _array_in(dtype: str, entry: Any) -> Any:
    return np.asarray(entry.as_py(), dtype) if entry.is_valid else None


def _tensor_in(shape: tuple[int, ...], entry: Any) -> Any:
    if not entry.is_valid:
        return None
    if hasattr(entry, "to_numpy"):  # a tensor; before pyarrow 17, only its storage can be converted to NumPy
        array: NDArray[Any] = entry.to_numpy()
        return array.copy()
    values = getattr(entry, "value", entry).values
    while pa.types.is_fixed_size_list(values.type) and not values.null_count:
        values = values.flatten()
    return entry.as_py() if values.null_count else values.to_numpy(zero_copy_only=False).reshape(shape).copy()


class _Texts(Sequence[str]):
    """A column of Arrow as a sequence of texts, each created when it is read."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        return self._text(index, self.values[index].as_py())

    def __iter__(self) -> Iterator[str]:
        return map(self._text, range(len(self)), self.values.to_pylist())

    def _text(self, index: Any, value: Any) -> str:
        if value is None or value == "":
            raise DataError(f"Row {index} of the table has no key or path. Drop such rows, or fill them in.")
        return str(value)

    def names(self) -> list[str]:
        """Return all texts with secrets removed, and empty texts for missing ones."""
        return [identity_of("" if value is None else str(value)) for value in self.values.to_pylist()]

    def differ(self) -> bool:
        """Return whether all texts are known to be unique."""
        is_url = len(self) > 0 and "://" in str(self.values[0].as_py())  # URLs may differ only in secrets
        return not is_url and bool(pc.count_distinct(self.values, mode="all").as_py() == len(self.values))

    def reject_doubles(self, key: str) -> None:
        """Raise DataError if a text occurs twice."""
        counts = pc.value_counts(self.values)
        for double in counts.filter(pc.greater(counts.field("counts"), 1)):
            raise DataError(
                f"`key` must name a column whose entries occur once each, but {double['values'].as_py()!r} occurs "
                f"{double['counts'].as_py()} times in {key!r}. Without `key`, the key is the path or the number of the "
                "row."
            )


class _Paths(_Texts):
    """A column of paths. Relative paths start from `folder`.

    Args:
        values: The paths.
        folder: A folder or URL.
        origin: The URL of the table if it is remote. Its rows are not trusted to name local files.
    """

    def __init__(self, values: Any, folder: str, origin: str) -> None:
        super().__init__(values)
        self._folder = folder
        self._origin = origin

    def _text(self, index: Any, value: Any) -> str:
        text = super()._text(index, value)
        is_relative = self._folder and is_local(text) and not Path(text).is_absolute()
        url = join_url(self._folder, text) if is_relative else text
        if self._origin and not self._may_name(url):
            raise DataError(
                f"Row {index} of the remote table {self._origin!r} names {text!r}, which is not a remote file. If you "
                "trust the table, pass the folder of the files as `root`, or read it first: "
                "`kdp.from_table(pandas.read_csv(...), ...)`."
            )
        return url

    def _may_name(self, url: str) -> bool:
        if is_local(url):
            folder = os.path.abspath(self._folder)  # noqa: PTH100 - links stay
            return is_local(self._folder) and Path(os.path.abspath(url)).is_relative_to(folder)  # noqa: PTH100
        known = {*_REMOTE, *_protocols_of(self._origin), *_protocols_of(self._folder)}
        return set(_protocols_of(url)) <= known.difference(_LOCAL)


def _protocols_of(url: str) -> list[str]:
    """Return the protocol of each part of a URL, which is empty for a local path."""
    return [part.partition("://")[0] if "://" in part else "" for part in url.split("::")]


def _own_folder(files: Sequence[str]) -> str:
    """Return the common folder of a table's files."""
    folders = list(dict.fromkeys(map(folder_of, files)))
    if len(folders) > 1:
        rule = "given, because the files of the table are in several folders"
        raise ValueError(must_be("root", rule, None, f"Paths may be relative to {folders[0]!r}."))
    return folders[0] if folders else ""


def _template_of(path: str | None) -> list[tuple[str, str | None]]:
    """Return the parts of a path template, each a text and the following column name; empty if it is not a template."""
    try:
        parts = list(string.Formatter().parse(path or ""))
    except ValueError:
        return []
    is_plain = all(not spec and conversion is None for _, _, spec, conversion in parts)
    has_names = any(name is not None for _, name, _, _ in parts)
    return [(text, name) for text, name, _, _ in parts] if is_plain and has_names else []


def _check_columns(rows: Any, **columns: Sequence[str | None]) -> None:
    """Raise ValueError if the table has no column of a name. The parameters are those that name them."""
    known = rows.column_names
    for param, names in columns.items():
        for name in names:
            if name is not None and name not in known:
                raise ValueError(must_be(param, f"a column of {', '.join(known)}", name) + closest(str(name), known))


def _check_fields(columns: Sequence[str], *, has_file: bool, label: str | None) -> None:
    """Raise ValueError if a column has the name of a field that is filled from other columns."""
    taken = {"x": "the file of `path`"} if has_file else {}
    if label not in (None, "y"):
        taken["y"] = "the label"
    for name, what in taken.items():
        if name in columns:
            hint = "Leave it out of `columns`, or rename it."
            raise ValueError(f"The table has a column {name!r}, but field {name!r} is {what}. {hint}")


def _labels_in(rows: Any, label: str) -> Any:
    """Return the column of labels. Vectors keep their number types."""
    values = _one(rows.column(label))
    is_plain = not pa.types.is_nested(values.type) and not isinstance(values.type, pa.BaseExtensionType)
    return values if is_plain or pa.types.is_dictionary(values.type) else _Column(values).as_numpy()


def _filled(template: Sequence[tuple[str, str | None]], rows: Any) -> Any:
    """Return a column with the template filled in for each row; missing if an entry is missing or empty."""
    parts: list[Any] = []
    for text, name in template:
        parts.append(pa.scalar(text))
        if name is not None:
            entries = _texts_of("path", name, rows).cast(pa.string())
            parts.append(pc.if_else(pc.equal(entries, ""), None, entries))
    return pc.binary_join_element_wise(*parts, "")


def _texts_of(param: str, name: str, rows: Any) -> Any:
    """Return a column in which each entry is a single text.

    Raises:
        DataError: The entries are lists, tensors or the like.
    """
    values = _one(rows.column(name))
    kind = values.type
    if pa.types.is_dictionary(kind):
        return values.dictionary_decode()
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or _is_text(kind):
        return values
    try:
        return values.cast(pa.string())
    except pa.ArrowException as error:
        rule = "name a column of text or numbers"
        raise DataError(
            f"`{param}` must {rule}, but column {name!r} has entries of type {kind}. Choose another."
        ) from error


def _no_file(name: Any) -> Any:
    raise DataError("The table has no column of paths: name it by `path=`.")


def _one(column: Any) -> Any:
    """Return a column as one array, because indexing it is faster than indexing chunks."""
    found = column.combine_chunks()
    return found.chunk(0) if hasattr(found, "chunk") else found


def _digest(values: Any) -> bytes:
    """Return a digest of a column that is independent of its layout in memory."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([values], names=["values"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return hashlib.blake2b(sink.getvalue(), digest_size=16).digest()
