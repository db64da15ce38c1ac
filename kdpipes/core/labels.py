"""The rules for labels of all sources: which values are classes, and the number and name of each class.

Every source passes its labels through `number_labels`, if it knows all of them, or through `class_of`, if it reads
them sample by sample and has class names. Plan pipes, which need classes, use `as_classes`.

| labels | without class names | with class names |
|---|---|---|
| integers of any width, from any first number, with gaps | unchanged | the same, checked |
| whole floats (`2.0`) | integers | the same, checked |
| other floats | stay numbers, not classes | an error |
| booleans | 0 and 1 | those of the names "true" and "false", or else 0 and 1 |
| texts | numbered in sorted order (by code point) | the number of the name |
| texts that are all numbers, as Python writes them | these numbers | the same, unless a name is a number |
| texts that only look like numbers (`"007"`, `"1e5"`) | texts | texts |
| byte strings | text, decoded as UTF-8 | text, decoded as UTF-8 |
| members of an `Enum` | numbered in order of definition; names are the members' names | the number of its name |
| categories of pandas, Arrow or polars | their own order and names; numbers stay numbers | the number of the name |
| missing: None, NaN, `pandas.NA`, NaT, null, masked, empty text | -1; among floats that are not classes, NaN | -1 |
| vectors, lists, dictionaries and other values | unchanged | unchanged |

Without class names, the second column applies if all labels are known at once. Labels that are read sample by sample
are left unchanged, because the classes and types of the other labels are unknown. A plan pipe reads all labels and
interprets them by the second column.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import UNLABELLED
from kdpipes.core.column import Column, Loaded, as_column
from kdpipes.core.errors import DataError, closest, is_sequence
from kdpipes.core.messages import counted
from kdpipes.core.sample import Block, Sample

LABEL_FIELDS = ("y", "cls")  # fields that hold labels: of samples, and of webdataset's shards
RANGES = (
    " Classes must be whole numbers. Turn ranges of numbers into classes: `.transform('y', lambda y: int(y // 10))`."
)
Names = tuple[str, ...] | None

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_EXACT = 2.0**53  # all integers below are exact as floats


class Labels(NamedTuple):
    """The labels of a source, `[num_samples]`, and the names of the classes 0, 1, ..."""

    column: NDArray[Any]
    names: Names


class _Factors(NamedTuple):
    """Labels as positions in a list of distinct values. The last value is None if a label is missing (position -1)."""

    values: list[Any]
    codes: NDArray[Any]
    are_categories: bool = False


@runtime_checkable
class _ClassLabel(Protocol):
    """A Hugging Face feature with class names."""

    names: Any


def number_labels(labels: Any, names: Names = None, *, param: str = "labels") -> Labels:
    """Return all labels of a source by the rules of this module.

    Args:
        labels: A sequence, array, tensor, or column of pandas, polars or Arrow, `[num_samples]`.
        names: The names of the classes 0, 1, ..., if they are known.
        param: The argument that holds the labels, for errors.

    Raises:
        ValueError: A label is neither one of `names` nor a class number below `len(names)`.

    >>> number_labels(["stork", None, "heron"])
    Labels(column=array([ 1, -1,  0]), names=('heron', 'stork'))
    >>> number_labels([2.0, 7.0]).column, number_labels(["b", "a"], ("b", "a")).column
    (array([2, 7]), array([0, 1]))
    """
    labels = _as_array(labels)
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iuf" and _needs_no_names(labels, names):
        return Labels(_whole(labels), names)
    factors = _factors(labels)
    if factors is None:
        return Labels(_objects(labels), names)
    if names is None:
        table, names = _numbered(factors)
    else:
        table = _named(factors, names, param)
    return Labels(_objects(labels) if table is None else table[factors.codes], names)


def class_of(label: Any, names: tuple[str, ...]) -> Any:
    """Return the number of a label's class, -1 for a missing label; vectors and dictionaries are returned unchanged.

    Raises:
        ValueError: The label is neither one of `names` nor a class number below `len(names)`.

    >>> [class_of(label, ("heron", "stork")) for label in ("stork", 1.0, b"heron", None)]
    [1, 1, 0, -1]
    """
    if type(label) is int and UNLABELLED <= label < len(names):
        return label
    numbers, have_integers, _ = _numbers_of(names)
    named = next((numbers[text] for text in _texts_of(label) if text in numbers), None)
    if named is not None:
        return named
    plain = _plain(label)
    value = plain
    if isinstance(plain, str) and not have_integers:
        (value,) = _numbers_in([plain]) or [plain]
    if value is None:
        return UNLABELLED
    if isinstance(value, int) and not UNLABELLED <= value < len(names):
        remedy = "Add the missing names, or change the label: `.map_classes(...)`."
        raise ValueError(f"{value}, but `class_names` names {counted(len(names), 'class')}. {remedy}")
    if isinstance(value, str | float):
        raise ValueError(f"{plain!r}, which is not among the classes {', '.join(names)}.{closest(str(plain), names)}")
    return value if isinstance(value, int) else label


def numbered(label: Column, names: tuple[str, ...], *, are_given: bool = True) -> Column:
    """Return a label that is converted to a class number when it is read.

    Args:
        label: The label.
        names: The names of the classes 0, 1, ...
        are_given: Whether the user has passed the names. Names that come from a dataset may not fit its labels
            (`target_transform`), so numbers without a name are returned unchanged.
    """

    def number(sample: Sample, value: Any, _: str) -> Any:
        try:
            return class_of(value, names)
        except ValueError as error:
            if not are_given and not is_text(value):
                return value
            raise DataError(f"Sample {sample.key!r} has class {error}") from None

    def number_all(_: Block, values: Sequence[Any], __: Any) -> Sequence[Any]:
        return [class_of(value, names) for value in values]

    # Caches identify the number by this input as well.
    named = _numbers_of(names).column
    return Column(number, label, named, what="reading the label", is_cheap=label.is_cheap, many=number_all)


def number_fields(fields: dict[str, Any], names: Names) -> None:
    """Replace the labels among the fields of a sample by class numbers, if the names of the classes are known."""
    for field in LABEL_FIELDS:
        if names is not None and field in fields:
            label = fields[field]
            fields[field] = numbered(label if isinstance(label, Column) else Loaded(label), names)


def number_column(column: NDArray[Any], name: str, names: Names) -> NDArray[Any]:
    """Return a field of all samples; labels are replaced by class numbers if the names of the classes are known."""
    is_label = names is not None and name in LABEL_FIELDS
    return number_labels(column, names, param=name).column if is_label else column


def is_text(label: Any) -> bool:
    """Return whether a label is the name of a class: a text, a byte string or a member of an `Enum`."""
    return isinstance(_plain(label), str)


def is_label(value: Any) -> bool:
    """Return whether a value can be a label: a number, a name, or missing; vectors and dictionaries cannot."""
    return _are(int | float | str, [_plain(value)])


def is_same(one: Any, other: Any, names: Names) -> bool:
    """Return whether two labels are the same class or number. Vectors and dictionaries never are."""
    values = [_plain(one), _plain(other)]
    if names is not None and isinstance(values[0], str) != isinstance(values[1], str):
        with suppress(ValueError):
            values = [class_of(value, names) for value in values]
    if all(isinstance(value, int | float) for value in values):
        return math.isclose(*values, rel_tol=1e-6)  # tolerance for float32 against float64
    return _are(str, values) and values[0] == values[1]


def as_classes(column: NDArray[Any]) -> NDArray[Any]:
    """Return labels of any source as the integers or texts that plan pipes use as classes, with -1 or "" if missing.

    Labels that are not classes are returned unchanged, or as floats.

    >>> as_classes(np.array([1.0, np.nan])), as_classes(np.array([0.5, 1.0])), as_classes(np.array(["a", None]))
    (array([ 1, -1]), array([0.5, 1. ]), array(['a', ''], dtype='<U1'))
    """
    if column.dtype.kind in "iuf":
        return _whole(column)
    factors = _factors(column)
    if factors is None:
        return column
    values = [None if type(value) is int and value == UNLABELLED else value for value in map(_plain, factors.values)]
    numbers, names = _numbered(factors._replace(values=values))
    if numbers is None:
        return column
    if names is not None or (numbers.dtype.kind != "f" and not _are(int | float, values)):
        pairs = zip(numbers.tolist(), values, strict=True)
        numbers = as_column(["" if number == UNLABELLED else value for number, value in pairs])
    classes: NDArray[Any] = numbers[factors.codes]
    return classes


def are_classes(labels: NDArray[Any]) -> bool:
    """Return whether labels, as `as_classes` returns them, are classes."""
    return labels.dtype.kind in "iuU" or set(map(type, labels.tolist())) in ({int}, {str})


def labels_of(source: Any, name: str) -> NDArray[Any]:
    """Return the labels of an indexed source for the plan pipe `name`.

    Raises:
        DataError: The labels are not all numbers or all names, or exceed the class names of the source.
    """
    labels = as_classes(source.column("y"))
    if not are_classes(labels):
        kinds = [type(label_of(label)) for label in labels]
        usual = kinds[0] if kinds[0] in (int, str) else None
        place = next((place for place, kind in enumerate(kinds) if kind is not usual), 0)
        raise DataError(no_class(name, source.fetch(place), labels[place]))
    names = source.class_names()
    unnamed = []
    if names is not None and labels.dtype.kind in "iu":
        unnamed = np.flatnonzero((labels >= len(names)) | (labels < UNLABELLED)).tolist()
    if names is not None and unnamed:
        place = unnamed[0]
        raise DataError(
            f"The source has only the classes {', '.join(names)}, but sample "
            f"{source.fetch(place).key!r} has class {labels[place]}. Classes are numbered from 0, so "
            f"labels must be below {len(names)}: add the missing names, or fix the labels."
        )
    return labels


def no_class(name: str, sample: Sample, label: Any) -> str:
    """Return the error message for a label that is not a class."""
    hint = RANGES if isinstance(label_of(label), float) else ""
    label = label.item() if isinstance(label, np.generic) else label
    return f"`{name}` takes labels that are all numbers or all names, but sample {sample.key!r} has {label!r}.{hint}"


def label_of(value: Any) -> Any:
    """Return one label as plan pipes use it: an integer, a text, or -1 if missing; other values are unchanged.

    >>> [label_of(value) for value in (2.0, True, b"heron", None, 0.5)]
    [2, 1, 'heron', -1, 0.5]
    """
    plain = _plain(value)
    return UNLABELLED if plain is None else plain


def class_names_in(dataset: Any, fields: Sequence[str]) -> Names:
    """Return the names of a dataset's classes, or None if the dataset does not have them.

    These are its `classes` (torchvision) or `class_names` (KappaData), or the names of the only `ClassLabel` among
    `fields` (Hugging Face).
    """
    for attribute in ("classes", "class_names"):
        try:
            names = getattr(dataset, attribute, None)
            names = names() if callable(names) else names
        except (NotImplementedError, TypeError):
            continue
        if is_sequence(names) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping):
        return None
    labeled = (feature for field in fields if isinstance(feature := features.get(field), _ClassLabel))
    known = [feature.names for feature in labeled if feature.names is not None]
    return tuple(known[0]) if len(known) == 1 else None


def _as_array(labels: Any) -> Any:
    """Return labels as an array; pandas categories, and Arrow columns other than numbers, are returned unchanged."""
    if hasattr(labels, "to_arrow"):  # polars
        labels = labels.to_arrow()
    if hasattr(labels, "dictionary_encode"):
        return _numbers_of_arrow(labels)
    if isinstance(labels, np.ma.MaskedArray):
        return as_column(labels.tolist())  # masked entries become None
    if _categories_of(labels) is not None:
        return labels
    return as_column(labels.to_numpy() if hasattr(labels, "to_numpy") else labels)


def _categories_of(labels: Any) -> Any:
    return getattr(getattr(labels, "dtype", None), "categories", None)


def _numbers_of_arrow(labels: Any) -> Any:
    kind = str(labels.type)
    is_float = kind in ("double", "float", "halffloat")
    is_int = kind.startswith(("int", "uint")) and not labels.null_count
    return np.asarray(labels) if is_float or is_int else labels


def _objects(labels: Any) -> NDArray[Any]:
    return as_column(labels.to_pylist() if hasattr(labels, "to_pylist") else labels)


def _needs_no_names(column: NDArray[Any], names: Names) -> bool:
    """Return whether all labels are class numbers already, so that names do not change them."""
    if names is None or not len(column):
        return True
    return column.dtype.kind in "iu" and bool(column.min() >= UNLABELLED) and bool(column.max() < len(names))


def _whole(column: NDArray[Any]) -> NDArray[Any]:
    """Return floats as integers if all are whole or missing; other columns are returned unchanged."""
    if column.dtype.kind != "f":
        return column
    is_missing = np.isnan(column)
    is_whole = (np.abs(column) < _EXACT) & (np.rint(column) == column)
    return np.where(is_missing, UNLABELLED, column).astype(np.int64) if (is_whole | is_missing).all() else column


def _factors(labels: Any) -> _Factors | None:
    """Return the distinct labels and their occurrences; None if labels are vectors, dictionaries or dates."""
    categories = _categories_of(labels)
    if categories is not None:
        codes = getattr(labels, "cat", labels).codes
        return _of_categories(categories.tolist(), np.asarray(codes, dtype=np.intp))
    if hasattr(labels, "dictionary_encode"):
        return _factors_of_arrow(labels)
    if labels.dtype.kind in "biuf":
        values, codes = np.unique(labels, return_inverse=True)
        return _Factors(values.tolist(), codes.reshape(-1))
    if labels.dtype.kind not in "OUS":
        return None
    entries = [None if label is np.ma.masked else label for label in labels.tolist()]
    try:
        places = {value: place for place, value in enumerate(dict.fromkeys(entries))}
    except TypeError:  # lists, arrays and dictionaries are not hashable
        return None
    codes = np.fromiter((places[value] for value in entries), dtype=np.intp, count=len(entries))
    return _Factors([*places], codes)


def _factors_of_arrow(labels: Any) -> _Factors | None:
    if hasattr(labels, "chunks"):
        labels = labels.unify_dictionaries().combine_chunks()
    are_categories = hasattr(labels, "dictionary")
    try:
        encoded = labels if are_categories else labels.dictionary_encode()
    except NotImplementedError:  # lists and structs
        return None
    codes = encoded.indices.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False)
    factors = _of_categories(encoded.dictionary.to_pylist(), codes)
    return factors._replace(are_categories=are_categories)


def _of_categories(values: list[Any], codes: NDArray[Any]) -> _Factors:
    return _Factors(values if (codes >= 0).all() else [*values, None], codes, are_categories=True)


def _numbered(factors: _Factors) -> tuple[NDArray[Any] | None, Names]:
    """Return the class number of each distinct label, and the class names; None if the labels are not classes."""
    plain = list(map(_plain, factors.values))
    if _are(int | float, plain):
        return _with_missing(plain), None
    if not _are(str, plain):
        return None, None
    kinds = {type(value) for value in factors.values if not _is_missing(value)}
    if factors.are_categories:
        names = tuple(value for value in plain if value is not None)
    elif len(kinds) == 1 and issubclass(kind := kinds.pop(), Enum) and not issubclass(kind, str):
        names = tuple(member.name for member in kind)
    else:
        numbers = _numbers_in([value for value in plain if value is not None])
        if numbers is not None:
            known = iter(numbers)
            return _with_missing([None if value is None else next(known) for value in plain]), None
        names = tuple(sorted({value for value in plain if value is not None}))
    places = {name: number for number, name in enumerate(names)}
    return _with_missing([None if value is None else places[value] for value in plain]), names


def _named(factors: _Factors, names: tuple[str, ...], param: str) -> NDArray[Any] | None:
    """Return the class number of each distinct label by the given class names; None if the labels are not classes."""
    used = set(np.unique(factors.codes % max(len(factors.values), 1)).tolist())
    values = [value if place in used else None for place, value in enumerate(factors.values)]
    try:
        table = as_column([class_of(value, names) for value in values])
    except ValueError as error:
        raise ValueError(f"`{param}` has {error}") from None
    return table if table.dtype.kind == "i" else None


def _are(kinds: Any, plain: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, kinds) for value in plain)


def _with_missing(numbers: Sequence[int | float | None]) -> NDArray[Any]:
    """Return numbers as an array. Missing values are -1, or NaN if there are floats that are not classes."""
    if not numbers:
        return np.zeros(0, dtype=np.int64)
    missing = math.nan if any(isinstance(number, float) for number in numbers) else UNLABELLED
    return as_column([missing if number is None else number for number in numbers])


def _plain(label: Any) -> Any:
    """Return a label as an integer, a non-whole float, a text, or None if it is missing; other values unchanged."""
    label = label.as_py() if hasattr(label, "as_py") else label
    if _is_missing(label):
        return None
    if getattr(label, "shape", None) == () and not isinstance(label, np.datetime64 | np.timedelta64):
        return _plain(label.item())  # a NumPy scalar, or a tensor
    if isinstance(label, bytes | str | Enum) and not isinstance(label, int):
        return next(iter(_texts_of(label)), label) or None
    if isinstance(label, int):
        return int(label)
    if isinstance(label, float | Decimal):
        number = float(label)
        return int(number) if number.is_integer() and abs(number) < _EXACT else number
    return label


def _is_missing(label: Any) -> bool:
    pandas = sys.modules.get("pandas")
    if label is None or label is np.ma.masked or (pandas is not None and label is pandas.NA):
        return True
    is_ordered = isinstance(label, float | Decimal | datetime | np.datetime64 | np.timedelta64)
    return is_ordered and bool(label != label)


def _texts_of(label: Any) -> tuple[str, ...]:
    """Return the names that a label may stand for, the likeliest first."""
    if getattr(label, "shape", None) == ():
        return _texts_of(label.item())
    if isinstance(label, bool):
        return str(label).lower(), str(label), str(label).upper()
    if isinstance(label, bytes):
        try:
            return (label.decode(),)
        except UnicodeDecodeError:
            return ()
    if isinstance(label, Enum) and not isinstance(label, int | str):
        return (label.name, *_texts_of(label.value))
    text = label.value if isinstance(label, Enum) else label
    return (str(text),) if isinstance(text, str) else ()


class _Numbers(NamedTuple):
    """The class numbers by name, whether a name is itself a number, and all names as a column of one text."""

    by_name: dict[str, int]
    have_integers: bool
    column: Column


@lru_cache(maxsize=64)
def _numbers_of(names: tuple[str, ...]) -> _Numbers:
    numbers = {name: number for number, name in enumerate(names)}
    return _Numbers(numbers, any(_numbers_in([name]) for name in names), Loaded(repr(names)))


def _numbers_in(texts: Sequence[str]) -> list[Any] | None:
    """Return the numbers that texts represent, with None for "nan"; return None if a text does not represent a number.

    >>> _numbers_in(["1", "10"]), _numbers_in(["0.50", "1e-05"]), _numbers_in(["007"]), _numbers_in(["1e5"])
    ([1, 10], [0.5, 1e-05], None, None)
    """
    if all(map(_INTEGER.fullmatch, texts)):
        return list(map(int, texts))
    if any("." in text for text in texts) and all(text == "nan" or _DECIMAL.fullmatch(text) for text in texts):
        return [_plain(float(text)) for text in texts]
    return None
