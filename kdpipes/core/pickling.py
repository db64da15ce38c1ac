"""Pickle the contents of users' chains, including lambdas, closures and classes of a notebook."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from functools import cached_property
from types import CodeType
from typing import Any

import cloudpickle

_reduce_plain = cloudpickle.Pickler.dispatch_table[CodeType]


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, args = _reduce_plain(code)[:2]
    return _restore_code, (code.co_filename, make, args)


def _restore_code(filename: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return make(*args).replace(co_filename=filename)


def _restore_cached_property(function: Callable[[Any], Any], name: str) -> cached_property[Any]:
    restored = cached_property(function)
    restored.__set_name__(object, name)
    return restored


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle carries no types
    """cloudpickle's pickler, which also keeps the file names of functions: tracebacks of workers show their source.

    cloudpickle 3.1.3 replaces them with "<dynamic-code>". This class also pickles cached properties of classes, which
    Python 3.11 cannot.
    """

    dispatch_table = ChainMap(
        {
            CodeType: _reduce_code,
            cached_property: lambda each: (_restore_cached_property, (each.func, each.attrname)),
        },
        cloudpickle.Pickler.dispatch_table,
    )


def dumps(value: Any, buffer_callback: Callable[[Any], object] | None = None) -> bytes:
    """Return a pickle of a value, like `pickle.dumps`. Functions that cannot be imported are pickled by value."""
    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()
