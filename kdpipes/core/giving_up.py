"""Shards that a stream cannot read on: told to the `deal` that reads it, if `.on_error(...)` says so, else raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["are_given_up", "give_up", "given_up_by"]

Tell = Callable[[str, int, Exception], bool]
_current: ContextVar[Tell | None] = ContextVar("kdpipes_giving_up", default=None)


def are_given_up() -> bool:
    """Return whether somebody is told of shards that cannot be read."""
    return _current.get() is not None


def give_up(key: str, index: int, error: Exception) -> None:
    """Tell who reads the stream that the rest of a shard is left out, or raise the error, where nobody allows that.

    Args:
        key: What the shard is called in keys.
        index: How many samples the stream has given before.
        error: Why.
    """
    tell = _current.get()
    if tell is None or not tell(key, index, error):
        raise error


def given_up_by(tell: Tell, items: Iterator[Any]) -> Iterator[Any]:
    """Yield `items`; `tell` is told of the shards that are given up meanwhile, in this thread."""
    end = object()
    while True:
        token = _current.set(tell)
        try:
            item = next(items, end)
        finally:
            _current.reset(token)
        if item is end:
            return
        yield item
