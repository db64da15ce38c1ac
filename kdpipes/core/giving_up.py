"""Report shards that a stream cannot read to the `deal` downstream, which may leave them out (`.on_error(...)`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["are_given_up", "give_up", "given_up_by"]

Report = Callable[[str, int, Exception], bool]
_current: ContextVar[Report | None] = ContextVar("kdpipes_giving_up", default=None)


def are_given_up() -> bool:
    """Return whether a pipe downstream may leave out shards that cannot be read."""
    return _current.get() is not None


def give_up(key: str, index: int, error: Exception) -> None:
    """Report that the rest of a shard is left out. Raise `error` if no pipe downstream allows that.

    Args:
        key: The name of the shard in the keys of samples.
        index: The number of samples that the stream has yielded so far.
        error: Why the shard cannot be read.
    """
    report = _current.get()
    if report is None or not report(key, index, error):
        raise error


def given_up_by(report: Report, items: Iterator[Any]) -> Iterator[Any]:
    """Yield `items`. Shards that are given up meanwhile in this thread are passed to `report`.

    Args:
        report: Called with the arguments of `give_up`; returns whether the shard may be left out.
        items: The items of the stream.
    """
    end = object()
    while True:
        token = _current.set(report)
        try:
            item = next(items, end)
        finally:
            _current.reset(token)
        if item is end:
            return
        yield item
