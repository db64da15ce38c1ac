"""Which fields leave the chain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from kdpipes._sample_pipe import sample_pipe
from kdpipes.errors import must_be, refuse_field
from kdpipes.sample import Sample

__all__ = ["Selector"]

_SPECIAL: dict[str, Callable[[Sample], Any]] = {
    "index": lambda sample: sample.index,
    "key": lambda sample: sample.key,
    "ordinal": lambda sample: sample.ordinal,
    "is_padding": lambda sample: sample.draw.is_padding,
    "ctx": lambda sample: dict(sample.ctx),
}
_CTX = "ctx."


@sample_pipe("select")
class Selector:
    """Turns samples into tuples of some of their fields, and loads nothing else (functional name: ``select``).

    Args:
        mode: The names of the fields, in order, in one string: "x y". Besides fields: `key`, `index` (the position in
            the source), `ordinal` (the position in the dealt epoch), `is_padding`, `ctx`, and `ctx.NAME`, one entry of
            the ctx, and `ctx.NAME.PART`. A field of such a name comes first.
        return_ctx: Whether to give `((x, y), ctx)`, ctx being what the operations on these fields recorded.

    Raises:
        FieldError: There is no such field.

    Source: KappaData's ModeWrapper.

    Example:
        >>> kdp.from_dataset([("a", 7)]).select("y key")[0]
        (7, '0')
    """

    is_selector = True

    def __init__(self, mode: str, return_ctx: bool = False) -> None:
        if not isinstance(mode, str):
            raise TypeError(must_be("mode", 'names in one string, like "x y"', mode))
        if not mode.split():
            raise ValueError(must_be("mode", 'at least one name, like "x y"', mode))
        if not isinstance(return_ctx, bool):
            raise TypeError(must_be("return_ctx", "True or False", return_ctx, 'Names go into one string: "x y".'))
        if "," in mode:
            raise ValueError(must_be("mode", 'names with spaces between, like "x y"', mode))
        self.names = tuple(mode.split())
        self.return_ctx = return_ctx

    def __call__(self, sample: Sample) -> Any:
        if not self.return_ctx and "ctx" not in self.names:
            return tuple([_value(sample, name) for name in self.names])
        values = {
            name: _value(sample, name) for name in sorted(self.names, key="ctx".__eq__)
        }  # the ctx when all is read
        selected = tuple(values[name] for name in self.names)
        return (selected, dict(sample.ctx)) if self.return_ctx else selected

    def field_names(self, known: frozenset[str]) -> frozenset[str]:
        return known

    def column_name(self, name: str) -> str | None:
        return name

    def check(self, known: frozenset[str]) -> None:
        for name in self.names:
            if name not in known and name not in _SPECIAL and not name.startswith(_CTX):
                refuse_field(name, "The source", known)


def _part(entry: Any, name: str) -> Any:
    if not isinstance(entry, Mapping) or name not in entry:
        refuse_field(name, "That entry of the ctx", entry if isinstance(entry, Mapping) else ())
    return entry[name]


def _value(sample: Sample, name: str) -> Any:
    if name not in sample:
        if name in _SPECIAL:
            return _SPECIAL[name](sample)
        if name.startswith(_CTX):
            entry, *within = name[len(_CTX) :].split(".")
            return functools.reduce(_part, within, sample.recorded(entry))
    return sample[name]
