"""The form of the items that `select` makes: tuples, dictionaries or bare values, with or without the ctx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["ItemForm"]


class ItemForm(NamedTuple):
    """The form of the items and batches of a chain.

    Args:
        names: The names of the parts, in order.
        has_ctx: Whether items are pairs `(parts, ctx)`.
        kind: "tuple" if the parts form a tuple, "dict" if they form a dictionary by name, "bare" if there is only one
            part, which is the item.
    """

    names: tuple[str, ...]
    has_ctx: bool = False
    kind: Literal["tuple", "dict", "bare"] = "tuple"

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return the parts as one item, without the ctx."""
        if self.kind == "tuple":
            return tuple(parts)
        return dict(zip(self.names, parts, strict=True)) if self.kind == "dict" else parts[0]
