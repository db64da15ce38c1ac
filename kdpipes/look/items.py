"""The items that a chain gives as named fields: of samples, of tuples of `select`, of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kdpipes.core.chain import Chain
from kdpipes.core.item_form import ItemForm
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import form_of
from kdpipes.core.sample import Sample

__all__ = ["Fields", "class_names_of", "fields_of", "names_of", "rows_of"]


class Fields(NamedTuple):
    """The fields of one item.

    Args:
        values: By name, or by position where the chain does not say.
        ctx: What was recorded; empty where nothing was.
    """

    values: dict[str, Any]
    ctx: Mapping[str, Any]


def names_of(chain: Any) -> ItemForm | None:
    """Return the form that `select` has given the items; None without `select`."""
    return next((form for form in map(form_of, Chain.of(chain).pipes) if form is not None), None)


def class_names_of(chain: Any) -> tuple[str, ...] | None:
    """Return the names of the classes 0, 1, ..., where the chain knows them."""
    known = (pipe.class_names() for pipe in Chain.of(chain).of_type(MapPipe, IterPipe))
    return next(known, None)


def fields_of(item: Any, form: ItemForm | None = None) -> Fields:
    """Return the fields of one item: a sample, a tuple, a dictionary, a collated batch of those, or anything else."""
    if isinstance(item, Sample):
        values = dict(item)  # which records their ctx
        return Fields({"key": item.key, **values}, item.ctx)
    item, ctx = _without_ctx(item, form)
    if form is not None and form.kind == "bare":
        return Fields({form.names[0]: item}, ctx)
    if isinstance(item, Mapping):
        return Fields({str(name): value for name, value in item.items()}, ctx)
    if isinstance(item, tuple):
        known = form.names if form is not None and len(form.names) == len(item) else None
        return Fields(dict(zip(known or (f"[{place}]" for place in range(len(item))), item, strict=True)), ctx)
    return Fields({"value": item}, ctx)


def _without_ctx(item: Any, form: ItemForm | None) -> tuple[Any, Mapping[str, Any]]:
    """Return an item of `select(..., return_ctx=True)` without its ctx, and the ctx."""
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[1], Mapping):
        return item, {}
    fields, ctx = item
    has_ctx = isinstance(fields, tuple | list | Mapping) if form is None else form.has_ctx
    if not has_ctx:
        return item, {}
    is_tuple = isinstance(fields, list) and (form is None or form.kind == "tuple")  # torch's collate makes lists
    return tuple(fields) if is_tuple else fields, ctx


def rows_of(batch: list[Any], form: ItemForm | None = None) -> Fields:
    """Return the fields of a batch that is a list of items, each field a list."""
    items = [fields_of(item, form) for item in batch]
    fields = dict.fromkeys(name for item in items for name in item.values)
    return Fields({name: [item.values.get(name) for item in items] for name in fields}, {})
