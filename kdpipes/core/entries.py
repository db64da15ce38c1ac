"""Entries of fields: `"json.size.width"` is `["size"]["width"]` of a dictionary, `"jpg.width"` of an image file."""

from __future__ import annotations

from typing import Any

from kdpipes.core.column import Column
from kdpipes.core.errors import DataError, FieldError
from kdpipes.core.on_use import call_slot
from kdpipes.core.sample import Block, Sample


def field_of(name: str, fields: Any) -> str | None:
    """Return the field that `name` is an entry of; None if it is a field itself, or no entry of any field.

    >>> field_of("json.width", {"jpg", "json"})
    'json'
    """
    if name in fields:
        return None
    ends = (place for place, letter in enumerate(name) if letter == "." and 0 < place < len(name) - 1)
    return next((name[:end] for end in ends if name[:end] in fields), None)


def entry_of(value: Any, path: str, name: str) -> Any:
    """Return the entry of nested dictionaries at a path such as "size.width". Errors name it `name`.

    The bytes of an image have the entries of its header: see `image_header`. Keys may contain dots. If the path can be
    split into existing keys in several ways, the split with the shortest first key is used.

    >>> entry_of({"size": {"width": 3}}, "size.width", "json.size.width"), entry_of({"m.w": 4}, "m.w", "json.m.w")
    (3, 4)
    """
    if isinstance(value, bytes | bytearray | memoryview):
        value = call_slot("image_header", value, name)
    if not isinstance(value, dict):
        key = path.partition(".")[0]
        raise DataError(
            f"Column {name!r} looks up {key!r} in a dictionary, but found {type(value).__name__}. Check its name."
        )
    ends = [place for place, letter in enumerate(path) if letter == "."]
    keys = [key for key in (*(path[:end] for end in ends), path) if key in value]
    for key in keys:
        if key == path:
            return value[key]
        try:
            return entry_of(value[key], path[len(key) + 1 :], name)
        except (DataError, FieldError):
            if key == keys[-1]:
                raise
    there = f"there is {', '.join(map(repr, value))}" if value else "the dictionary is empty"
    raise FieldError(f"Column {name!r}: there is no entry {path!r}; {there}. Check its name.")


def entry_column(block: Block, name: str) -> Column | None:
    """Return a lazy column of one entry of a field; None if there is no such field."""
    field = field_of(name, block.fields)
    if field is None:
        return None
    path = name[len(field) + 1 :]
    return Column(lambda _, value: entry_of(value, path, name), block.fields[field], what=f"reading {name!r}")


def value_of(sample: Sample, name: str) -> Any:
    """Return a field of a sample, an entry of a field, or the sample's key if `name` is "key"."""
    if name == "key" and name not in sample:
        return sample.key
    entry = entry_column(sample.block, name)
    return sample[name] if entry is None else entry.get(sample)
