"""Samples that cannot be made: left out where the chain's `on_error` says so, an error elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kdpipes.core.masked import masked
from kdpipes.core.sample import Sample

__all__ = ["made_or_left_out"]

Made = TypeVar("Made")
_log = logging.getLogger("kdpipes")


def made_or_left_out(
    fetch: Callable[[], Sample], make: Callable[[Sample], Made], *, position: int, handler: Any, once: bool = False
) -> Made | None:
    """Return what is made of a sample; None, once that has been written down, for one that is left out.

    Args:
        fetch: Returns the sample, or fails.
        make: Makes something of it, or fails.
        position: Of the sample, for one that has no key yet.
        handler: Of the chain: see `_graph.handler_in`.
        once: Whether the sample may be tried again, and one line will do.
    """
    sample = None
    try:
        sample = fetch()
        return make(sample)
    except Exception as error:
        if handler is None or not handler.tolerates(error):
            raise
        key = f"position {position}" if sample is None else sample.key
        handler.write_down(key, f"{type(error).__name__}: {error}", once=once)
        _log.warning("Sample %r is left out: %s: %s", key, type(error).__name__, masked(str(error)))
        return None
