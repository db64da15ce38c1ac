"""Format the arguments of a pipe as short text without secrets. The arguments themselves are not stored."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from kdpipes.core.secrets import HIDDEN, masked
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.user_code import is_users_module

CALLED = "_kdpipes_called"  # an attribute of all pipes that is not part of their fingerprint
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, np.ufunc)
_LONGEST = 72
_ENTRIES = 6
_SECRET = re.compile(
    r"passw|passphrase|pwd|secret|token(?!i[sz])|credential|signature|cookie|(api|access|account|private)[-_]?key"
    r"|storage_options|(^|[-_])pass$|^auth|^sig$|^sas$",
    re.I,
)


def note_call(pipe: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Store the text of the arguments that a pipe was created with, except for pipes, which are its sources."""
    given = [("", value) for value in args] + list(kwargs.items())
    pipe.__dict__[CALLED] = tuple(_argument(name, value) for name, value in given if not _is_of_pipes(value))


def call_arguments(pipe: Any) -> tuple[str, ...]:
    """Return the arguments that a kdpipes pipe was created with, as text."""
    arguments: tuple[str, ...] = vars(pipe).get(CALLED, ())
    return arguments


def copy_call(pipe: Any, other: Any) -> None:
    """Show the arguments of `pipe` for another pipe instead of its own."""
    vars(other)[CALLED] = vars(pipe)[CALLED]


def _argument(name: str, value: Any, depth: int = 0) -> str:
    text = HIDDEN if _is_secret(name, value) else shown_value(value, depth)
    return f"{name}={text}" if name else text


def _is_secret(name: str, value: Any) -> bool:
    """Return whether a value must not be shown. Numbers, arrays and functions are never secrets."""
    is_harmless = value is None or isinstance(value, Number | np.generic | np.ndarray | torch.Tensor) or callable(value)
    return not is_harmless and bool(_SECRET.search(name))


def _is_of_pipes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_of_pipes, value[:_ENTRIES]))
    return isinstance(value, IterDataPipe | MapDataPipe)


@runtime_checkable
class _Called(Protocol):
    """A class that users know by another name, such as `kdp.by_length`."""

    call: Any


def shown_value(value: Any, depth: int = 0) -> str:
    """Return short text for a value: for an object that is not plain data, its class and arguments.

    No user code is called.

    >>> shown_value([1, "a", None]), shown_value(range(3)), shown_value(len), shown_value(np.zeros((2, 3)))
    ("[1, 'a', None]", 'range(0, 3)', 'len', '<float64 [2, 3]>')
    """
    if isinstance(value, str | PurePath):
        return repr(_shortened(masked(str(value))))
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if value is None or isinstance(value, bool | int | float | complex | range | slice | torch.dtype | torch.device):
        return _shortened(repr(value))
    if isinstance(value, np.generic):
        return _shortened(str(value))
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)}>"
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
    # Show lists of libraries, such as OmegaConf's. A user's own sequence may be a large dataset.
    is_of_library = is_sequence and not is_users_module(type(value).__module__)
    if isinstance(value, list | tuple | Set | Mapping) or is_of_library:
        return _collection(value, depth)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, functools.partial):
        return shown_value(value.func, depth)
    if isinstance(value, _FUNCTIONS):
        return value.__name__.replace("<lambda>", "lambda")
    arguments = list(arguments_of(value, depth + 1)) if depth < 2 else []  # objects may refer to their parents
    kind: Any = type(value)
    name = kind.call if isinstance(kind, _Called) and isinstance(kind.call, str) else kind.__name__
    return _shortened(f"{name}({', '.join(arguments)})")


def _shortened(text: str) -> str:
    """Return a text, with its middle cut out if it is longer than `_LONGEST`."""
    kept = (_LONGEST - 1) // 2
    return text if len(text) <= _LONGEST else f"{text[:kept]}…{text[-kept:]}"


def _collection(value: Any, depth: int) -> str:
    opening, closing = "()" if isinstance(value, tuple) else "[]" if isinstance(value, Sequence) else "{}"
    if depth >= 3:
        return f"{opening}…{closing}"
    entries = list[str]()
    length = 0
    for entry in islice(value.items() if isinstance(value, Mapping) else value, _ENTRIES):
        if isinstance(value, Mapping):
            name, held = entry
            text = str(name, "latin-1") if isinstance(name, bytes) else name
            is_secret = isinstance(text, str) and _is_secret(text, held)
            shown = f"{shown_value(name, depth + 1)}: {HIDDEN if is_secret else shown_value(held, depth + 1)}"
        else:
            shown = shown_value(entry, depth + 1)
        if entries and length + len(shown) > _LONGEST:
            break
        entries.append(shown)
        length += len(shown) + 2
    if len(entries) < len(value):
        entries.append(f"… {len(value):,} in all")
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{opening}{', '.join(entries)}{comma}{closing}"


def arguments_of(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the arguments that an object was apparently created with: attributes named like its parameters.

    Default values and pipes are left out.
    """
    held = getattr(value, "__dict__", {})
    for parameter in _parameters(type(value)):  # type: ignore[arg-type]  # mypy takes no class for hashable
        name = next((name for name in (f"_{parameter.name}", parameter.name) if name in held), None)
        if name is None or _is_of_pipes(held[name]) or _is_default(held[name], parameter.default):
            continue
        yield _argument(parameter.name, held[name], depth)


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    is_plain = isinstance(value, bool | int | float | str) or type(value) is tuple
    return is_plain and type(value) is type(default) and repr(value) == repr(default)


@functools.lru_cache(maxsize=512)
def _parameters(kind: Any) -> tuple[inspect.Parameter, ...]:
    try:
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    except (TypeError, ValueError):  # a class written in C
        return ()
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return tuple(parameter for parameter in parameters if parameter.kind not in variable)
