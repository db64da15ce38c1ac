"""Columns in the indexes of shards: one number, boolean, string or null per sample."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.entries import entry_of, field_of
from kdpipes.core.errors import DataError, FieldError, is_sequence
from kdpipes.core.map_pipe import as_column
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.decoding import decode_member

MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "<missing>"})()
# An array if all values are numbers of one type; otherwise the values in JSON, with an empty text for a missing one.
Column: TypeAlias = NDArray[Any] | PackedStrings


def column_of(values: Sequence[Any]) -> Column:
    """Return the column of the given values, where `MISSING` marks a missing value."""
    kinds = set(map(type, values))
    if kinds in ({int}, {float}, {bool}):
        return np.array(values, dtype={int: np.int64, float: np.float64, bool: np.bool_}[kinds.pop()])
    return PackedStrings(["" if value is MISSING else json.dumps(value) for value in values])


def joined_column(parts: Sequence[Column]) -> Column:
    """Return the values of several columns, concatenated."""
    parts = [part for part in parts if len(part)] or parts[:1]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts) and len({part.dtype for part in arrays}) == 1:
        return np.concatenate(arrays)
    texts = (
        PackedStrings(list(map(json.dumps, part.tolist()))) if isinstance(part, np.ndarray) else part for part in parts
    )
    return PackedStrings.joined(list(texts))


def missing_in(column: Column) -> NDArray[np.intp]:
    """Return the positions of the samples without the value."""
    ends = np.arange(1, len(column) + 1) if isinstance(column, np.ndarray) else column.arrays()[0]
    return np.flatnonzero(np.diff(ends, prepend=0) == 0)


def values_of(column: Column) -> NDArray[Any]:
    """Return the values in the form of `as_column`, with None for missing ones."""
    if isinstance(column, np.ndarray) and len(column):
        return column
    return as_column([json.loads(text) if text else None for text in column])


class ColumnBuilder:
    """Collects the columns of one shard, sample by sample.

    Args:
        url: The URL of the shard, for errors.
        names: The names of the columns: fields, "cls", or entries of fields, "json.width".
    """

    def __init__(self, url: str, names: Iterable[str]) -> None:
        self._url = url
        self._values: dict[str, list[Any]] = {name: [] for name in names}
        self._there: set[str] = set()  # entries to suggest for a column that no sample has

    def needs(self, field: str) -> bool:
        """Return whether the content of a field is needed."""
        return any(name == field or name.startswith(f"{field}.") for name in self._values)

    def add(self, key: str, contents: Mapping[str, bytes], number: int | None = None) -> None:
        """Add a sample, or members of an earlier one, given the contents of the members by field.

        Fields that are not needed may be missing. `number` is the number of the sample; None adds a new one.

        Raises:
            DataError: A member cannot be decoded, or a value cannot be stored.
        """
        decoded: dict[str, Any] = {}
        for name, values in self._values.items():
            field = name if name in contents else field_of(name, contents)
            try:
                if field is not None and field not in decoded:
                    decoded[field] = decode_member(field, contents[field])
                value = MISSING if field is None else self._entry(decoded[field], name, field)
                if value is not MISSING and type(value) not in (type(None), bool, int, float, str):
                    raise ValueError(f"it is a {type(value).__name__}")
                if type(value) is int and not -(1 << 63) <= value < 1 << 63:
                    raise ValueError("the integer does not fit into 64 bits")
                if type(value) is str:
                    value.encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates
            except ValueError as error:
                raise DataError(
                    f"Column {name!r} of sample {key!r} in {self._url!r} cannot be kept in the index: {error}. Columns "
                    "hold numbers, booleans, texts and null."
                ) from error
            if number is None or number == len(values):
                values.append(value)
            elif value is not MISSING:
                values[number] = value

    def _entry(self, value: Any, name: str, field: str) -> Any:
        if name == field:
            return value
        try:
            return entry_of(value, name[len(field) + 1 :], name)
        except (DataError, FieldError):
            if isinstance(value, dict):
                self._there.update(f"{field}.{entry}" for entry in value)
            return MISSING

    def columns(self) -> dict[str, Column]:
        """Return the columns.

        Raises:
            FieldError: No sample has a value of a column.
        """
        for name, values in self._values.items():
            if values and all(value is MISSING for value in values):
                known = f" It has {', '.join(map(repr, sorted(self._there)[:20]))}." if self._there else ""
                raise FieldError(f"No sample of shard {self._url!r} has a value for the column {name!r}.{known}")
        return {name: column_of(values) for name, values in self._values.items()}


def check_columns(columns: Any) -> tuple[str, ...]:
    """Return the column names without duplicates.

    Raises:
        TypeError: They are not names.
    """
    names = columns.split(",") if isinstance(columns, str) else columns
    if not is_sequence(names) or not all(isinstance(name, str) and name.strip(". ") for name in names):
        raise TypeError(
            f'`columns` must be the names of columns, like "json.label,json.width" or a list, but is {columns!r} '
            "instead."
        )
    return tuple(dict.fromkeys(name.strip() for name in names))
