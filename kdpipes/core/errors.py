"""Exception classes of kdpipes, and checks of arguments.

This module has no heavy imports, so that command-line help stays fast.
"""

from __future__ import annotations

import builtins
import difflib
import operator
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import Any, NoReturn

from kdpipes.core.secrets import masked, safe_text

_MEMBERS = {  # common names of these fields in tars, KappaData and Hugging Face datasets
    "x": ("jpg", "jpeg", "png", "webp", "wav", "txt", "npy"),
    "y": ("cls", "class", "label", "labels", "target"),
}

REPLACE_FILE = 'Replace the file, read it again if the storage truncated it, or skip such samples: `.on_error("skip")`.'


class KdpipesError(Exception):
    """Base class of the errors of kdpipes. Secrets of URLs and control characters are masked in their messages."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(safe_text(arg) if isinstance(arg, str) else arg for arg in args))

    def __str__(self) -> str:
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()  # KeyError would quote the message


class DataError(KdpipesError, ValueError):
    """Data cannot be read. The message names the sample and its location: file, shard, member, offset."""


class ChainError(KdpipesError, TypeError):
    """Pipes do not fit together. The message names the pipe and explains how to fix the chain."""


class WorkerError(KdpipesError, RuntimeError):
    """A worker process died. The message names the process and its exit status."""


class FieldError(KdpipesError, KeyError):
    """A sample does not have the requested field. The message names the field and the existing ones."""


class MissingMemberError(DataError, KeyError):
    """A sample lacks a field that other samples of its source have: an error in the data, not in the chain."""


def must_be(param: str, rule: str, value: object, hint: str = "") -> str:
    """Return the error message for an invalid argument.

    >>> must_be("size", "even", 3, "Add 1.")
    '`size` must be even, but is 3 instead. Add 1.'
    """
    try:
        if isinstance(value, Mapping):
            from kdpipes.core.call_text import shown_value  # imported here because `--help` does not need torch

            shown = shown_value(value)
        else:
            shown = masked(repr(value))
    except RecursionError:
        shown = f"a {type(value).__name__} that is nested too deeply to show"
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return safe_text(f"`{param}` must be {rule}, but is {shown} instead." + (f" {hint}" if hint else ""))


def check_count(param: str, value: Any, *, minimum: int = 1) -> int:
    """Return `value` as an int; raise unless it is an integer of at least `minimum`."""
    rule = f"an integer of at least {minimum}"
    # Up to version 2.2, NumPy's booleans pass as indices. NumPy is not imported here to keep command-line help fast.
    is_flag = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    if is_flag or not hasattr(value, "__index__"):
        raise TypeError(must_be(param, rule, value))
    count = operator.index(value)
    if count < minimum:
        raise ValueError(must_be(param, rule, value))
    return count


def check_seed(value: Any) -> int:
    """Return `value` as an int; raise unless it is a seed, an integer from 0 to 2**64 - 1."""
    seed = check_count("seed", value, minimum=0)
    if seed >= 1 << 64:
        raise ValueError(must_be("seed", "below 2**64", value))
    return seed


def check_choice(param: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(must_be(param, "one of " + ", ".join(map(repr, choices)), value))


def check_type(param: str, value: Any, kinds: Any, rule: str, hint: str = "") -> None:
    """Raise TypeError unless `value` is an instance of `kinds`, a class or a union. `rule` names them for the user."""
    if not isinstance(value, kinds):
        raise TypeError(must_be(param, rule, value, hint))


def check_flag(param: str, value: Any) -> bool:
    """Return `value`; raise TypeError unless it is True or False."""
    check_type(param, value, bool, "True or False")
    return bool(value)


def is_sequence(value: Any) -> bool:
    """Return whether a value is a list, a tuple or another sequence, such as OmegaConf's lists, but not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, including NumPy scalars, but not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(param: str, value: Any, rule: str, low: float, high: float, hint: str = "") -> float:
    """Return `value` as a float; raise unless it is a number from `low` to `high`."""
    if not is_number(value):
        raise TypeError(must_be(param, rule, value))
    if not low <= value <= high:
        raise ValueError(must_be(param, rule, value, hint if value > high else ""))
    return float(value)


def check_one_of(**arguments: object) -> None:
    """Raise ValueError unless exactly one of the `arguments` is not None."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        names = " or ".join(f"`{name}`" for name in arguments)
        neither = "neither is" if len(arguments) == 2 else "none of them is"
        got = "both are" if given else neither
        raise ValueError(f"Exactly one of {names} must be given, but {got}.")


def check_class_names(names: Any) -> tuple[str, ...] | None:
    """Return `names` as a tuple of strings, or None if `names` is None.

    A single string is an error. So are sets and dictionaries, because the order of a set differs between processes.
    """
    if names is None:
        return None
    if isinstance(names, str | Set | Mapping) or not isinstance(names, Iterable):
        raise TypeError(must_be("class_names", "a sequence of names", names))
    given = tuple(names)
    if not all(isinstance(name, str) for name in given):
        raise TypeError(must_be("class_names", "a sequence of names", names))
    twice = next((name for name, number in Counter(given).items() if number > 1), None)
    if twice is not None:
        raise ValueError(must_be("class_names", "unique", names, f"{twice!r} occurs more than once."))
    return given


def check_callable(param: str, value: Any) -> None:
    """Raise TypeError if `value` is not callable, or is a class whose instances are callable."""
    if isinstance(value, type) and any("__call__" in vars(base) for base in value.__mro__):
        raise TypeError(must_be(param, "a callable", value, f"Write `{value.__name__}(...)` to make one."))
    if not callable(value):
        raise TypeError(must_be(param, "a callable", value))


def closest(name: str, names: Iterable[str]) -> str:
    """Return a hint that suggests the most similar of `names`, or an empty string."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def reject_field(name: str, owner: str, fields: Iterable[str], hint: str = "") -> NoReturn:
    """Raise FieldError for a missing field, naming the existing fields and a hint."""
    known = sorted(fields)
    entry = next((field for field in known if name.startswith(f"{field}.")), None)
    if entry is not None and not hint:
        inner = name.removeprefix(f"{entry}.")
        hint = f"Make a field of that entry: `.add_field({inner!r}, lambda sample: sample[{entry!r}][{inner!r}])`."
    members = [member for member in _MEMBERS.get(name, ()) if member in known]
    if members and not hint:  # the field seems to exist under the name of a shard member
        hint = f"Name it: `.rename_fields({name}={';'.join(members)!r})`."
    if name == "y" and not hint:
        hint = "It holds the labels: pass `labels=` to the source, or add it: `.add_field('y', function)`."
    if owner == "The source" and known == ["x", "y"] and not hint:
        hint = (
            '`.rename_fields(new="x")` renames a field. If the items of a dataset are dictionaries, name their keys: '
            '`kdp.from_dataset(dataset, "image label")`.'
        )
    there = "has " + ", ".join(map(repr, known)) if known else "has no fields"
    raise FieldError(f"{owner} has no field {name!r}; it {there}.{closest(name, known)}" + (f" {hint}" if hint else ""))


def add_note(error: BaseException, note: str) -> None:
    """Attach `note` to `error` once, like `add_note` of Python 3.11, because Python 3.10 does not have it."""
    note = safe_text(note)
    notes: list[str] = error.__dict__.setdefault("__notes__", [])
    if note in notes:
        return
    notes.append(note)
    if sys.version_info < (3, 11) and len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)  # Python 3.10 does not print notes


def without_notes(error: BaseException) -> str:
    """Return the message of an error without the notes that `add_note` appended to it on Python 3.10."""
    text = str(error)
    for note in reversed(getattr(error, "__notes__", [])):
        text = text.removesuffix(f"\n{note}")
    return text


def as_cause(error: BaseException) -> BaseException:
    """Return `error`, or a masked copy if its message contains a secret of a URL, for use in `raise ... from`.

    The causes of `error` are masked in the same way, so that tracebacks contain no secrets.
    """
    before = error.__cause__
    cause = None if before is None else as_cause(before)
    text = str(error)
    if cause is before and masked(text) == text:
        return error
    is_plain = type(error) in vars(builtins).values() and not isinstance(error, UnicodeError)
    stand_in = type(error)(masked(text)) if is_plain else KdpipesError(f"{type(error).__name__}: {masked(text)}")
    stand_in.__dict__["status"] = getattr(error, "status", None) or getattr(error, "code", None)
    stand_in.__cause__ = cause
    return stand_in
