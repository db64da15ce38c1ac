"""Read the rows of a table as samples. Columns become fields, and files at paths in a column are read lazily."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError, check_names, closest, must_be
from kdpipes.core.map_pipe import as_column
from kdpipes.core.registry import called_as
from kdpipes.core.sample import Lazy, Sample
from kdpipes.selection import UNLABELLED
from kdpipes.sources.from_ids import IdReaderMapDataPipe
from kdpipes.storage.access import Access, using
from kdpipes.storage.files import naming, read_url
from kdpipes.storage.urls import identity_of, is_local, join_url, path_of

try:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    import pyarrow.csv  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]
except ImportError:  # without the extra `table`
    pa = None

_PART = 1 << 16  # texts that are in memory as Python objects at a time
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


@called_as("from_table")
class TableReaderMapDataPipe(IdReaderMapDataPipe):
    """Reads the rows of a table as samples (`kdp.from_table("labels.csv", path="file", label="class")`).

    Columns become fields. They stay in Arrow's memory, so no Python loop runs over the rows. Needs the extra `table`.

    Args:
        table: The path or URL of a `.csv`, `.tsv` or `.parquet` file; or a DataFrame of pandas or polars, a table of
            pyarrow, a data set of Hugging Face, or a dictionary of columns.
        path: The column that holds the path or URL of each sample's file, which is loaded as field `x` when it is
            read: `.pt` as tensors (`weights_only`), `.npy` as an array, other files as bytes.
        root: The folder or URL that paths are relative to; by default, the folder of the table's file, or else the
            working directory.
        label: The column of labels, which becomes field `y`. Text becomes class numbers; a missing label becomes -1.
        key: The column whose text is the key of a sample. Each text must occur once. By default, it is the column
            `path`, or else the number of the row.
        columns: The columns to keep as fields; by default all of them.
        class_names: The names of the classes 0, 1, ...; by default, the sorted labels if these are text.
        header: Whether the first line of a text file names the columns; otherwise they are "f0", "f1", ...
        storage_options: The arguments of fsspec's file system, for the table and the files. They may be secrets, and
            are neither shown nor written.
        hedge_s: After how many seconds a read of a file without an answer is requested a second time; None is never.

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
        storage_options: Mapping[str, Any] | None = None,
        hedge_s: float | None = None,
    ) -> None:
        if pa is None:
            raise ImportError("`kdp.from_table` needs pyarrow. Install it: `pip install 'kdpipes[table]'`.")
        with using(Access(storage_options=storage_options)):
            rows = _as_arrow(table, header=header)
        known = rows.column_names
        kept = list(known if columns is None else columns)
        for param, name in (("path", path), ("label", label), ("key", key), *(("columns", name) for name in kept)):
            if name is not None and name not in known:
                raise ValueError(must_be(param, f"a column of {', '.join(known)}", name) + closest(str(name), known))
        self._columns = {name: _one(rows.column(name)) for name in kept}
        keys = key or path
        self._keys = None if keys is None else _Texts(_one(rows.column(keys)))
        if key is not None and self._keys is not None:
            self._keys.reject_doubles(key)
        self._num_rows = int(rows.num_rows)
        if path is None:
            super().__init__(range(self._num_rows), None, _no_file)
        else:
            own_folder = os.fspath(table).rpartition("/")[0] if isinstance(table, str | os.PathLike) else ""
            folder = own_folder if root is None else os.fspath(root)
            texts = _Texts(_one(rows.column(path)), folder)
            super().__init__(texts, None, "{id}", storage_options=storage_options, hedge_s=hedge_s)
        self._has_file = path is not None
        taken = {"x"} & set(self._columns) if self._has_file else set()
        if taken:
            raise ValueError(
                "The table has a column 'x', but field 'x' is the file of `path`. Leave it out of `columns`."
            )
        self._class_names = check_names("class_names", class_names)
        self._numbers: NDArray[Any] | None = None
        if label is not None:
            self._numbers, self._class_names = _numbered(_one(rows.column(label)), self._class_names)

    def fingerprint(self) -> Any:
        texts = [("keys", self._keys.values)] if self._keys is not None else []
        columns = [(name, _digest(values)) for name, values in [*texts, *self._columns.items()]]
        return columns, self._numbers, self._class_names

    def __len__(self) -> int:
        return self._num_rows

    def fetch(self, index: int) -> Sample:
        sample = super().fetch(index)
        if not self._has_file:
            del sample["x"]
        for name, values in self._columns.items():
            sample[name] = Lazy(lambda _, values=values: values[index].as_py(), what=f"reading {name!r}", is_cheap=True)
        if self._numbers is not None:
            sample["y"] = self._numbers[index].item()
        return sample if self._keys is None else sample.fork(key=identity_of(self._keys[index]))

    def has_column(self, name: str) -> bool:
        return name in ("key", *self._columns) or (name == "y" and self._numbers is not None)

    def read_column(self, name: str) -> NDArray[Any]:
        if name == "y" and self._numbers is not None:
            return self._numbers
        if name == "key" and name not in self._columns:
            if self._keys is None:
                return np.arange(len(self)).astype(f"<U{max(len(str(len(self) - 1)), 1)}")
            # In parts, because texts in a list take several times as much memory as in an array.
            parts = [np.asarray(list(map(identity_of, part)), dtype=np.str_) for part in self._keys.parts()]
            return np.concatenate([np.zeros(0, dtype="<U1"), *parts])
        return _as_numpy(self._columns[name]) if name in self._columns else super().read_column(name)

    def field_names(self) -> frozenset[str]:
        added = {"x": self._has_file, "y": self._numbers is not None}
        return frozenset(self._columns) | {name for name, is_there in added.items() if is_there}


class _Texts(Sequence[str]):
    """A column of Arrow as a sequence of text, each made when it is read. Relative paths start from `folder`."""

    def __init__(self, values: Any, folder: str = "") -> None:
        self.values, self._folder = values, folder

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self._text(index, self.values[index].as_py())

    def parts(self) -> Iterator[list[str]]:
        """Yield the texts in lists of at most `_PART`."""
        for begin in range(0, len(self), _PART):
            values = self.values.slice(begin, _PART).to_pylist()
            yield [self._text(begin + place, value) for place, value in enumerate(values)]

    def _text(self, index: Any, value: Any) -> str:
        if value is None:
            raise DataError(f"Row {index} of the table has no key or path. Drop such rows, or fill them in.")
        text = str(value)
        is_relative = self._folder and is_local(text) and not Path(text).is_absolute()
        return join_url(self._folder, text) if is_relative else text

    def reject_doubles(self, key: str) -> None:
        """Raise DataError if a text occurs twice."""
        if pc.count_distinct(self.values, mode="all").as_py() == len(self.values):
            return
        counts = pc.value_counts(self.values)
        double = counts.filter(pc.greater(counts.field("counts"), 1))[0]
        raise DataError(
            f"`key` must name a column whose entries occur once each, but {double['values'].as_py()!r} occurs "
            f"{double['counts'].as_py()} times in {key!r}. Without `key`, the key is the path or the number of the row."
        )


def _no_file(name: Any) -> Any:
    raise DataError("The table has no column of paths: name it by `path=`.")


def _as_arrow(table: Any, *, header: bool) -> Any:
    """Return a table of any supported kind as one of pyarrow."""
    if isinstance(table, str | os.PathLike):
        return _read(os.fspath(table), header=header)
    if isinstance(table, pa.Table):
        return table
    try:
        if isinstance(table, Mapping):
            is_array = {name: isinstance(values, np.ndarray) and values.ndim == 1 for name, values in table.items()}
            return pa.table({name: values if is_array[name] else list(values) for name, values in table.items()})
        if hasattr(table, "iloc") and hasattr(table, "columns"):  # pandas
            return pa.Table.from_pandas(table, preserve_index=False)
        if hasattr(table, "to_arrow"):  # polars
            return table.to_arrow()
        if hasattr(table, "with_format"):  # Hugging Face
            return table.with_format("arrow")[:]
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"The table cannot be read: {error}") from error
    raise TypeError(must_be("table", "a path, a DataFrame, or a dictionary of columns", table))


def _read(url: str, *, header: bool) -> Any:
    suffix = Path(path_of(url)).suffix.lower()
    suffixes = (".parquet", *_DELIMITERS)
    if suffix not in suffixes:
        raise ValueError(must_be("table", f"a file that ends in {', '.join(suffixes)}", url))
    with naming(url):
        path = os.path.expanduser(url)  # noqa: PTH111 - of a text that may be a URL
        opened = pa.OSFile(path) if is_local(url) else pa.BufferReader(read_url(url))
    try:
        with opened as file:
            if suffix == ".parquet":
                return pyarrow.parquet.read_table(file)
            options = pyarrow.csv.ReadOptions(autogenerate_column_names=not header)
            parsing = pyarrow.csv.ParseOptions(delimiter=_DELIMITERS[suffix], newlines_in_values=True)
            converting = pyarrow.csv.ConvertOptions(strings_can_be_null=True)  # an empty label is a missing one
            return pyarrow.csv.read_csv(file, options, parsing, converting)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{url!r} is not a table that pyarrow can read: {error}. Check the file, or pass a table."
        ) from error


def _one(column: Any) -> Any:
    """Return a column as one array, which is faster to index than chunks."""
    found = column.combine_chunks()
    return found.chunk(0) if hasattr(found, "chunk") else found


def _numbered(values: Any, names: tuple[str, ...] | None) -> tuple[NDArray[Any], tuple[str, ...] | None]:
    """Return labels as numbers, -1 where one is missing, and the names of the classes."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        return pc.fill_null(values.cast(pa.int64()), UNLABELLED).to_numpy(zero_copy_only=False), names
    texts = values.cast(pa.string())
    known = pa.array(sorted(pc.unique(texts).drop_null().to_pylist()) if names is None else names, pa.string())
    numbers = pc.index_in(texts, known)
    strange = pc.and_(pc.is_null(numbers), pc.is_valid(texts))
    if pc.any(strange).as_py():
        label = texts.filter(strange)[0].as_py()
        found = tuple(known.to_pylist())
        raise ValueError(
            f"`label` has {label!r}, which is not among the classes {', '.join(found)}.{closest(label, found)}"
        )
    return pc.fill_null(numbers, UNLABELLED).to_numpy(zero_copy_only=False).astype(np.int64), tuple(known.to_pylist())


def _as_numpy(values: Any) -> NDArray[Any]:
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if pa.types.is_string(values.type) and not values.null_count:
        return np.asarray(found, dtype=np.str_)
    return found if found.ndim == 1 and found.dtype != object else as_column(values.to_pylist())


def _digest(values: Any) -> bytes:
    """Return a digest of a column that does not depend on its layout in memory."""
    sink = _Hashing()
    batch = pa.record_batch([values], names=["values"])
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), batch.schema) as writer:
        writer.write_batch(batch)
    return sink.hash.digest()


class _Hashing(io.RawIOBase):
    """A file that hashes what is written to it."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.hash.update(content)
        return len(content)
