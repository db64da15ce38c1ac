"""Read tables of any supported kind into pyarrow: text, JSON lines, Parquet, DataFrames and dictionaries of columns."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kdpipes.core.errors import DataError, must_be
from kdpipes.core.messages import counted, warn
from kdpipes.sources.image_folder import counts_of, shown_names
from kdpipes.storage.files import list_files, matching_urls, naming, read_url
from kdpipes.storage.urls import expand_urls, is_local, join_url, path_of, split_chain

try:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]
    import pyarrow.csv  # type: ignore[import-untyped]
    import pyarrow.json  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]
except ImportError:  # the extra `table` is not installed
    pa = None

_BLANK = " "  # used as a delimiter for any number of blanks and tabs
_DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": _BLANK}
_GUESSED = (",", "\t", ";", "|")
_JSON_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (".parquet", *_DELIMITERS, *_JSON_LINES)
_PACKED = (".gz", ".bz2", ".zst")
_CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}  # by the first bytes
_HEAD = 1 << 16  # number of bytes for guessing the delimiter
_BLOCK = 1 << 28  # bytes parsed together, if a row or a change of types does not fit pyarrow's blocks
_LARGE = 2.0**63  # integers from here on need all 64 bits
# Arrow raises these errors if it cannot convert values.
_ERRORS = (ValueError, TypeError, OverflowError, NotImplementedError)
_HUGGING_FACE = b"huggingface"  # the entry of a schema's metadata that holds the features


def read_files(urls: Sequence[str], *, texts: Collection[str], header: bool, sep: str | None) -> Any:
    """Return the rows of files as one pyarrow table.

    Args:
        urls: The paths or URLs of the files.
        texts: The columns whose entries remain text if they are read from a text file.
        header: Whether the first line of a text file names the columns.
        sep: The delimiter of text files; None guesses it.

    Raises:
        DataError: A file cannot be read, two columns have the same name, or the columns of files have different types.
    """
    parts = [(url, _with_unique_names(_read(url, texts=texts, header=header, sep=sep), repr(url))) for url in urls]
    for url, rows in parts[1:]:
        try:
            pa.unify_schemas([parts[0][1].schema, rows.schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{url!r} does not fit {parts[0][0]!r}: {error}. Give the columns the same types in all files."
            ) from error
    return (
        pa.concat_tables([rows for _, rows in parts], promote_options="permissive") if len(parts) > 1 else parts[0][1]
    )


def as_arrow(table: Any) -> Any:
    """Return a table in memory as a pyarrow table.

    Raises:
        DataError: The table cannot be converted, or two columns have the same name.
        TypeError: The object is not a table.
    """
    try:
        return _with_unique_names(_converted(table), "The table")
    except DataError:
        raise
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"The table cannot be read: {str(error).rstrip('.')}. Check its columns.") from error


def _columns_of(table: Any) -> Any:
    columns = {}
    for name in table:
        try:
            columns[name] = _as_column(table[name])
        except _ERRORS as error:
            raise DataError(
                f"Column {name!r} of the table cannot be read: {str(error).rstrip('.')}. Give its entries one type. "
                "Integers beyond 64 bits can be text: `list(map(str, column))`."
            ) from error
    return pa.table(columns)


def _with_unique_names(rows: Any, where: str) -> Any:
    twice = next((name for name, number in Counter(rows.column_names).items() if number > 1), None)
    if twice is not None:
        raise DataError(f"{where} has several columns named {twice!r}. Rename or remove all but one.")
    return rows


def class_names_of(rows: Any, column: str) -> tuple[str, ...] | None:
    """Return the names that a Hugging Face `ClassLabel` assigns to the numbers of a column, or None."""
    try:
        features = json.loads((rows.schema.metadata or {})[_HUGGING_FACE])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) else None


def files_of(table: Any, *, sep: str | None, names_files: bool) -> list[str]:
    """Return the paths or URLs of a table's files; globs, brace ranges and folders are expanded in sorted order.

    Return an empty list for a table in memory. A warning counts and names the other files in a folder, except with
    `names_files`, because the rows may name them.

    Raises:
        FileNotFoundError: No file matches.
        ValueError: A file has an unknown suffix.
    """
    parts = table if isinstance(table, list | tuple) and table else [table]
    if not all(isinstance(part, str | os.PathLike) for part in parts):
        return []
    urls = matching_urls(expand_urls(table, param="table"))
    files: list[str] = []
    for url in urls:
        is_folder = url != "" and Path(url).is_dir() if is_local(url) else url.endswith("/")
        files += _in_folder(url, names_files=names_files) if is_folder else [url]
    strange = next((file for file in files if _suffix(file) not in _SUFFIXES and sep is None), None)
    if strange is not None:
        hint = "For files of text with other names, pass the delimiter: `sep=`. For a remote folder, add a `/`."
        raise ValueError(must_be("table", f"a file that ends in {', '.join(_SUFFIXES)}", strange, hint))
    return files


def _in_folder(url: str, *, names_files: bool) -> list[str]:
    suffixes = [f"{suffix}{packed}" for suffix in _SUFFIXES for packed in ("", *_PACKED)]
    # Files like "_SUCCESS" are written by programs that write tables.
    files = [name for name in list_files(url, ("",)) if not name.rpartition("/")[2].startswith("_")]
    names = [name for name in files if name.lower().endswith(tuple(suffixes))]
    if not names:
        raise FileNotFoundError(f"No file in {url!r} ends in {', '.join(_SUFFIXES)}. Pass the path of a table.")
    kinds = sorted(set(map(_suffix, names)))
    if len(kinds) > 1:
        hint = f"Choose: {join_url(url, f'*{kinds[0]}')!r}."
        raise ValueError(must_be("table", f"a folder of files of one kind, not {' and '.join(kinds)}", url, hint))
    others = sorted({*files}.difference(names))
    if others and not names_files:
        warn(
            f"In {url!r}, `from_table` leaves out {counted(len(others), 'file')} without the suffix of a table"
            f"{counts_of(others)}: {shown_names(others)}. Rename tables among them, or name the files to read: "
            f"{join_url(url, f'*{kinds[0]}')!r}."
        )
    return [join_url(url, name) for name in names]


def _suffix(url: str) -> str:
    name = path_of(split_chain(url)[0]).lower()
    packed = next((packed for packed in _PACKED if name.endswith(packed)), "")
    return Path(name.removesuffix(packed)).suffix


class _File:
    """A file of a table, which is opened for each pass. A remote file is downloaded only once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._content = None if is_local(url) else read_url(url)

    def raw(self) -> Any:
        """Open the file."""
        with naming(self.url):
            return pa.OSFile(self.url) if self._content is None else pa.BufferReader(self._content)

    def unpacked(self) -> Any:
        """Open the file, with its contents decompressed if necessary."""
        with self.raw() as file:
            start = file.read(4)
        codec = next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)
        return self.raw() if codec is None else pa.CompressedInputStream(self.raw(), codec)


def _read(url: str, *, texts: Collection[str], header: bool, sep: str | None) -> Any:
    file = _File(url)
    suffix = _suffix(url)
    try:
        if sep is None and suffix == ".parquet":
            with file.raw() as opened:
                return pyarrow.parquet.read_table(opened)
        if sep is None and suffix in _JSON_LINES:
            return _read_json(file)
        return _read_text(file, texts=texts, header=header, delimiter=sep or _delimiter(file, _DELIMITERS[suffix]))
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"The names of columns in {url!r} are not UTF-8. {_encoding_hint(url)}") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{url!r} is not a table that pyarrow can read: {str(error).rstrip('.')}. Check the file, or pass a table."
        ) from error


def _read_json(file: _File) -> Any:
    options = pyarrow.json.ReadOptions(block_size=_BLOCK)
    with file.unpacked() as opened:
        rows = pyarrow.json.read_json(opened, options)
    texts = {field.name: _with_texts(field.type) for field in rows.schema}

    def read(types: Mapping[str, Any]) -> Any:
        schema = pa.schema([pa.field(name, types.get(name, kind)) for name, kind in texts.items()])
        if schema.equals(rows.schema):
            return rows
        with file.unpacked() as opened:
            return pyarrow.json.read_json(opened, options, pyarrow.json.ParseOptions(explicit_schema=schema))

    return _with_large_integers(read)


def _with_large_integers(read: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return the rows of a text file. pyarrow reads integers from 2**63 on as floats; they become unsigned integers."""
    rows = read({})
    types = dict[str, Any]()
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_float64(field.type) and (pc.max(column).as_py() or 0) >= _LARGE:
            # Floats, and integers beyond 64 bits, remain floats.
            with suppress(pa.ArrowInvalid):
                rows = read({**types, field.name: pa.uint64()})
                types[field.name] = pa.uint64()
    return rows


def _with_texts(kind: Any) -> Any:
    """Return a type in which texts that pyarrow parsed as times are texts again, because JSON has no times."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _with_texts(field.type)) for field in kind])
    return pa.list_(_with_texts(kind.value_type)) if pa.types.is_list(kind) else kind


def _delimiter(file: _File, usual: str) -> str:
    """Return a delimiter that splits all first lines into equally many entries: if possible, the usual one."""
    with file.unpacked() as opened:
        head = bytes(opened.read(_HEAD))
    lines = head.decode("utf-8-sig", "replace").splitlines(keepends=True)
    lines = lines[:-1] if len(head) == _HEAD else lines
    fitting = (mark for mark in (usual, *_GUESSED) if mark != _BLANK and _fits(mark, lines))
    return next(fitting, usual)


def _fits(delimiter: str, lines: Sequence[str]) -> bool:
    try:
        widths = {len(row) for row in csv.reader(lines, delimiter=delimiter) if row}
    except csv.Error:
        return False
    return len(widths) == 1 and max(widths) > 1


def _read_text(file: _File, *, texts: Collection[str], header: bool, delimiter: str) -> Any:
    def read(texts: Collection[str], block_size: int | None = None, types: Mapping[str, Any] | None = None) -> Any:
        options = pyarrow.csv.ReadOptions(autogenerate_column_names=not header, block_size=block_size)
        parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        column_types = {**dict.fromkeys(texts, pa.string()), **(types or {})}
        converting = pyarrow.csv.ConvertOptions(column_types=column_types)
        with file.unpacked() as opened:
            lines = opened
            if delimiter == _BLANK:
                content = re.sub(rb"[ \t]+", b" ", opened.read())
                lines = pa.BufferReader(re.sub(rb"(?m)^ | (?=\r?$)", b"", content))
            return pyarrow.csv.read_csv(lines, options, parsing, converting)

    block = None
    try:
        rows = read(texts)
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            texts = ()  # columns that are not UTF-8 become binary
        block = _BLOCK  # types are guessed from the first block, and a row must fit into one block
        rows = read(texts, block)
    binary = next((field.name for field in rows.schema if pa.types.is_binary(field.type)), None)
    if binary is not None:
        raise DataError(f"Column {binary!r} of {file.url!r} has text that is not UTF-8. {_encoding_hint(file.url)}")
    empty = {field.name for field in rows.schema if pa.types.is_null(field.type)}
    rows = read({*texts, *empty}, block) if empty else rows  # these columns may hold "NA"
    rows = _with_large_integers(lambda types: read({*texts, *empty}, block, types) if types else rows)
    columns = [_with_missing(column) for column in rows.columns]
    return pa.Table.from_arrays(columns, names=rows.column_names)


def _with_missing(column: Any) -> Any:
    """Return a column in which only empty texts are missing: "NA" or "null" may be a class, a country or a name."""
    return pc.if_else(pc.equal(column, ""), None, column) if pa.types.is_string(column.type) else column


def _encoding_hint(url: str) -> str:
    return (
        "Save it as UTF-8, or pass a table that you have read with its encoding: "
        f"`kdp.from_table(pandas.read_csv({url!r}, encoding='latin-1'), ...)`."
    )


def _converted(table: Any) -> Any:
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, Mapping):
        parts = [name for name, part in table.items() if hasattr(part, "column_names") or hasattr(part, "columns")]
        if parts:
            raise TypeError(must_be("table", "one table, not several", table, f"Choose one: `table[{parts[0]!r}]`."))
        return _columns_of(table)
    if hasattr(table, "iloc") and hasattr(table, "columns"):  # pandas
        try:
            return pa.Table.from_pandas(table, preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # not for two columns of the same name
            return _columns_of(table)
    if hasattr(table, "to_arrow"):  # polars
        return table.to_arrow()
    if hasattr(table, "with_format") and hasattr(table, "__len__"):  # Hugging Face
        return table.with_format("arrow")[:]
    raise TypeError(must_be("table", "a path, a DataFrame, or a dictionary of columns", table))


def _as_column(values: Any) -> Any:
    """Return an entry of a dictionary of columns as an Arrow column of the same type."""
    if hasattr(values, "to_arrow"):  # polars
        return values.to_arrow()
    values = values.numpy() if hasattr(values, "numpy") and hasattr(values, "detach") else values
    if isinstance(values, np.ndarray) and values.ndim > 1 and values.dtype.kind in "iuf":
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))
    values = values if hasattr(values, "dtype") and np.ndim(values) == 1 else list(values)
    try:
        return pa.array(values)
    except _ERRORS:
        for options in ({"type": pa.uint64()}, {"from_pandas": True}):  # missing values may be NaN or NaT
            with suppress(*_ERRORS):
                return pa.array(values, **options)
        raise
