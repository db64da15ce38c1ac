"""Columns that indexes of shards keep: one value of each sample, a number, boolean, text or null, or none at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.entries import entry_of, field_of
from kdpipes.core.errors import DataError, FieldError
from kdpipes.core.map_pipe import as_column
from kdpipes.storage.decoding import decode_member
from kdpipes.storage.shared import PackedStrings

__all__ = ["MISSING", "Column", "ColumnBuilder", "check_columns"]

MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "<missing>"})()
_MISSING, _NULL, _BOOL, _INT, _FLOAT, _TEXT = range(6)  # of the file format
_KINDS = {type(MISSING): _MISSING, type(None): _NULL, bool: _BOOL, int: _INT, float: _FLOAT, str: _TEXT}


def _kind_of(value: Any) -> int:
    """Return the type of a value, as the file format numbers it.

    Raises:
        ValueError: The value is of another type, or cannot be stored.
    """
    kind = _KINDS.get(type(value))
    if kind is None:
        raise ValueError(f"it is a {type(value).__name__}")
    if kind == _INT and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("the integer does not fit into 64 bits")
    if kind == _TEXT and not value.isascii():
        value.encode("utf-8", "surrogateescape")  # raises UnicodeEncodeError, a ValueError
    return kind


@dataclass(frozen=True)
class Column:
    """One value of each sample.

    Args:
        kinds: The type of each value, `[n] uint8`.
        numbers: The integers, booleans, and the bits of the floats, `[n] int64`; None if there are none.
        texts: The texts, `[n]`, empty for other values; None if there are none.
    """

    kinds: NDArray[np.uint8]
    numbers: NDArray[np.int64] | None
    texts: PackedStrings | None

    @classmethod
    def of(cls, values: Sequence[Any]) -> Column:
        """Return the column of some values, of which `MISSING` is one that a sample lacks.

        Raises:
            ValueError: A value is of another type, or an integer of more than 64 bits.
        """
        kinds = np.fromiter(map(_kind_of, values), dtype=np.uint8, count=len(values))
        numbers = np.zeros(len(values), dtype=np.int64)
        for place in np.flatnonzero((kinds == _INT) | (kinds == _BOOL)).tolist():
            numbers[place] = values[place]
        for place in np.flatnonzero(kinds == _FLOAT).tolist():
            numbers.view(np.float64)[place] = values[place]
        texts = PackedStrings([value if isinstance(value, str) else "" for value in values])
        has_numbers = bool(((kinds >= _BOOL) & (kinds <= _FLOAT)).any())
        return cls(kinds, numbers if has_numbers else None, texts if bool((kinds == _TEXT).any()) else None)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Column:
        """Return the column whose `arrays` these are.

        Raises:
            KeyError: An array is missing.
            ValueError: They do not make a column.
        """
        kinds, numbers, texts = arrays["kinds"], arrays.get("numbers"), None
        if "ends" in arrays:
            texts = PackedStrings.of_arrays(arrays["ends"], arrays["letters"])
        are_whole = all(part is None or len(part) == len(kinds) for part in (numbers, texts))
        present = set(np.unique(kinds).tolist())
        if not are_whole or kinds.dtype != np.uint8 or (numbers is not None and numbers.dtype != np.int64):
            raise ValueError("a column is not whole")
        if max(present, default=0) > _TEXT or (_TEXT in present and texts is None):
            raise ValueError("a column has values of unknown types")
        if numbers is None and present & {_BOOL, _INT, _FLOAT}:
            raise ValueError("a column lacks its numbers")
        return cls(kinds, numbers, texts)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return arrays of integers that hold the column, by name."""
        found: dict[str, NDArray[Any]] = {"kinds": self.kinds}
        if self.numbers is not None:
            found["numbers"] = self.numbers
        if self.texts is not None:
            found["ends"], found["letters"] = self.texts.arrays()
        return found

    @classmethod
    def joined(cls, parts: Sequence[Column]) -> Column:
        """Return the values of several columns, one column after the other."""
        kinds = np.concatenate([np.zeros(0, dtype=np.uint8), *(part.kinds for part in parts)])
        numbers = texts = None
        if any(part.numbers is not None for part in parts):
            zeros = (np.zeros(len(part), dtype=np.int64) if part.numbers is None else part.numbers for part in parts)
            numbers = np.concatenate(list(zeros))
        if any(part.texts is not None for part in parts):
            texts = PackedStrings.joined([part.texts or PackedStrings([""] * len(part)) for part in parts])
        return cls(kinds, numbers, texts)

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def missing(self) -> NDArray[np.intp]:
        """The positions of the samples that lack the value."""
        return np.flatnonzero(self.kinds == _MISSING)

    def values(self) -> NDArray[Any]:
        """Return the values as `as_column` returns them. None may be missing."""
        present = set(np.unique(self.kinds).tolist())
        if self.numbers is not None and present == {_INT}:
            return self.numbers
        if self.numbers is not None and present == {_BOOL}:
            return self.numbers.astype(bool)
        if self.numbers is not None and present <= {_INT, _FLOAT} and present:
            floats = self.numbers.view(np.float64)
            return floats if present == {_FLOAT} else np.where(self.kinds == _FLOAT, floats, self.numbers)
        return as_column([self._value(place, kind) for place, kind in enumerate(self.kinds.tolist())])

    def _value(self, place: int, kind: int) -> Any:
        if kind == _TEXT and self.texts is not None:
            return self.texts[place]
        if kind in (_MISSING, _NULL) or self.numbers is None:
            return None
        number = self.numbers[place]
        return float(number.view(np.float64)) if kind == _FLOAT else bool(number) if kind == _BOOL else int(number)


class ColumnBuilder:
    """Collects the columns of one shard, sample by sample.

    Args:
        url: Of the shard, for errors.
        names: Of the columns: fields, "cls", or entries of fields, "json.width".
    """

    def __init__(self, url: str, names: Iterable[str]) -> None:
        self._url = url
        self._values: dict[str, list[Any]] = {name: [] for name in names}
        self._there: set[str] = set()  # what could have been meant by a column that no sample has

    def needs(self, field: str) -> bool:
        """Return whether the content of a field is needed."""
        return any(name == field or name.startswith(f"{field}.") for name in self._values)

    def add(self, key: str, contents: Mapping[str, bytes]) -> None:
        """Add a sample.

        Args:
            key: Of the sample.
            contents: Of its members, by field; those that are not needed may be left out.

        Raises:
            DataError: A member cannot be decoded, or a value cannot be kept.
        """
        decoded: dict[str, Any] = {}
        for name, values in self._values.items():
            field = name if name in contents else field_of(name, contents)
            try:
                if field is not None and field not in decoded:
                    decoded[field] = decode_member(field, contents[field])
                value = MISSING if field is None else self._entry(decoded[field], name, field)
                _kind_of(value)
            except ValueError as error:
                raise DataError(
                    f"Column {name!r} of sample {key!r} in {self._url!r} cannot be kept in the index: {error}. Columns "
                    "hold numbers, booleans, texts and null."
                ) from error
            values.append(value)

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
        return {name: Column.of(values) for name, values in self._values.items()}


def check_columns(columns: Any) -> tuple[str, ...]:
    """Return the names of columns, each once.

    Raises:
        TypeError: They are not names.
    """
    names = columns.split(",") if isinstance(columns, str) else columns
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip(". ") for name in names):
        raise TypeError(
            f'`columns` must be the names of columns, like "json.label,json.width" or a list, but is {columns!r} '
            "instead."
        )
    return tuple(dict.fromkeys(name.strip() for name in names))
