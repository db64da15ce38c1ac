"""What several sources have in common, for the plan pipes that join them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import ChainError

__all__ = ["joined_shards", "shared_class_names", "shared_fields"]


def shared_class_names(name: str, sources: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the class names of sources, or refuse those that number their classes differently."""
    known = [(place, found) for place, source in enumerate(sources) if (found := source.class_names()) is not None]
    different = next((entry for entry in known if entry[1] != known[0][1]), None)
    if different is not None:
        (first, one), (second, other) = known[0], different
        raise ChainError(
            f"The sources of `{name}` number their classes differently: source {first} has {', '.join(one)}, but "
            f"source {second} has {', '.join(other)}. `.map_classes(...)` makes them agree, or `class_names=` for both."
        )
    return known[0][1] if known else None


def shared_fields(sources: Sequence[Any]) -> frozenset[str] | None:
    """Return the fields that the samples of every source have, where all sources know them."""
    known = [source.field_names() for source in sources]
    return None if None in known else frozenset.intersection(*known)


def joined_shards(numbers: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """Return the shards of several sources, one source after the other, as different ones; None if one has none."""
    joined, start = [], 0
    for part in numbers:
        if part is None:
            return None
        joined.append(part + start)
        start += int(part.max()) + 1 if len(part) else 0
    return np.concatenate(joined)
