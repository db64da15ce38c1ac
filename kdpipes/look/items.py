"""The items that a chain gives as named fields: of samples, of tuples of `select`, of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kdpipes._graph import walk
from kdpipes.sample import Sample

__all__ = ["Fields", "class_names_of", "fields_of", "names_of", "rows_of"]

Names = tuple[tuple[str, ...], bool]


class Fields(NamedTuple):
    """The fields of one item.

    Args:
        values: By name, or by position where the chain does not say.
        ctx: What was recorded; empty where nothing was.
    """

    values: dict[str, Any]
    ctx: Mapping[str, Any]


def names_of(chain: Any) -> Names | None:
    """Return the names that `select` has given the parts of an item, and whether a ctx follows; None without it."""
    for pipe in walk(chain):
        find = getattr(type(pipe), "item_names", None)
        if find is not None and (names := find(pipe)) is not None:
            found: Names = names
            return found
    return None


def class_names_of(chain: Any) -> tuple[str, ...] | None:
    """Return the names of the classes 0, 1, ..., where the chain knows them."""
    for pipe in walk(chain):
        find = getattr(type(pipe), "class_names", None)
        if find is not None:
            names: tuple[str, ...] | None = find(pipe)
            return names
    return None


def fields_of(item: Any, names: Names | None = None) -> Fields:
    """Return the fields of one item: a sample, a tuple, a dictionary, a collated batch of those, or anything else."""
    if isinstance(item, Sample):
        values = dict(item)  # which records their ctx
        return Fields({"key": item.key, **values}, item.ctx)
    if names is None or names[1]:
        item, ctx = _without_ctx(item)
    else:
        ctx = {}
    if isinstance(item, Mapping):
        return Fields({str(name): value for name, value in item.items()}, ctx)
    if isinstance(item, tuple):
        known = names[0] if names is not None and len(names[0]) == len(item) else None
        return Fields(dict(zip(known or (f"[{place}]" for place in range(len(item))), item, strict=True)), ctx)
    return Fields({"value": item}, ctx)


def _without_ctx(item: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return an item of `select(..., return_ctx=True)` without its ctx, and the ctx."""
    is_pair = isinstance(item, tuple | list) and len(item) == 2
    if is_pair and isinstance(item[0], tuple | list) and isinstance(item[1], Mapping):
        return tuple(item[0]), item[1]
    return item, {}


def rows_of(batch: list[Any], names: Names | None = None) -> Fields:
    """Return the fields of a batch that is a list of items, each field a list."""
    items = [fields_of(item, names) for item in batch]
    fields = dict.fromkeys(name for item in items for name in item.values)
    return Fields({name: [item.values.get(name) for item in items] for name in fields}, {})
