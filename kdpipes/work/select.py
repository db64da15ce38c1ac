"""Select the fields of items, and their form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from kdpipes.core.errors import check_flag, must_be, refuse_field
from kdpipes.core.item_form import ItemForm
from kdpipes.core.operation import Operation
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import work_pipe
from kdpipes.core.traits import Traits

__all__ = ["Selector"]

_SPECIAL: dict[str, Callable[[Sample], Any]] = {
    "index": lambda sample: sample.index,
    "key": lambda sample: sample.key,
    "ordinal": lambda sample: sample.ordinal,
    "is_padding": lambda sample: sample.draw.is_padding,
    "ctx": lambda sample: dict(sample.ctx),
}
_CTX = "ctx."


@work_pipe("select")
class Selector(Operation):
    """Turns samples into tuples or dictionaries of some of their fields (functional name: ``select``).

    No other field is loaded.

    Args:
        mode: The names of the fields, in order, in one string: "x y". Besides fields: `key`, `index` (the position in
            the source), `ordinal` (the position in the dealt epoch), `is_padding`, `ctx`, and `ctx.NAME`, one entry of
            the ctx, and `ctx.NAME.PART`. A field with such a name takes precedence. With `as_dict`, parts can be
            renamed: "pixel_values=x labels=y".
        return_ctx: Whether to give `((x, y), ctx)`, ctx being what the operations on these fields recorded.
        as_dict: Whether to return dictionaries, `{"x": x, "y": y}`, instead of tuples. `collate_samples` makes a
            dictionary of batches from them.
        bare: Whether to return the value of a single field itself: `y` instead of `(y,)`.

    Raises:
        FieldError: There is no such field.
        ValueError: Two parts of a dictionary have the same name; a part of a tuple is renamed; or `bare` is used with
            several fields or with `as_dict`.

    Source: KappaData's ModeWrapper.

    Example:
        >>> kdp.from_dataset([("a", 7)]).select("y key")[0]
        (7, '0')
        >>> kdp.from_dataset([("a", 7)]).select("labels=y key", as_dict=True)[0]
        {'labels': 7, 'key': '0'}
        >>> kdp.from_dataset([("a", 7)]).select("y", bare=True)[0]
        7
    """

    def __init__(self, mode: str, return_ctx: bool = False, *, as_dict: bool = False, bare: bool = False) -> None:
        if not isinstance(mode, str):
            raise TypeError(must_be("mode", 'names in one string, like "x y"', mode))
        if not mode.split():
            raise ValueError(must_be("mode", 'at least one name, like "x y"', mode))
        if not isinstance(return_ctx, bool):
            raise TypeError(must_be("return_ctx", "True or False", return_ctx, 'Names go into one string: "x y".'))
        if "," in mode:
            raise ValueError(must_be("mode", 'names with spaces between, like "x y"', mode))
        if check_flag("as_dict", as_dict) and check_flag("bare", bare):
            raise ValueError(must_be("bare", "False if `as_dict` is True", bare, "Choose one of the two."))
        if check_flag("bare", bare) and len(mode.split()) > 1:
            raise ValueError(must_be("mode", "a single name if `bare` is True", mode, "Omit `bare` to get a tuple."))
        if "=" in mode and not as_dict:
            hint = "The parts of a tuple have no names: add `as_dict=True`."
            raise ValueError(must_be("mode", 'names like "x y"', mode, hint))
        pairs = [name.rpartition("=") for name in mode.split()]
        self.names = tuple(field for _, _, field in pairs)
        labels = tuple(label if equals else field for label, equals, field in pairs)
        if as_dict and (len(set(labels)) < len(labels) or not all(labels) or not all(self.names)):
            raise ValueError(must_be("mode", 'different names, like "x y" or "pixel_values=x labels=y"', mode))
        self.return_ctx = return_ctx
        self.form = ItemForm(labels, return_ctx, "dict" if as_dict else "bare" if bare else "tuple")
        self.traits = Traits(gives="items", item_form=self.form, changes=frozenset())

    def __call__(self, sample: Sample) -> Any:
        if not self.return_ctx and "ctx" not in self.names:
            return self.form.joined([_value(sample, name) for name in self.names])
        values = {
            name: _value(sample, name) for name in sorted(self.names, key="ctx".__eq__)
        }  # the ctx when all is read
        selected = self.form.joined([values[name] for name in self.names])
        return (selected, dict(sample.ctx)) if self.return_ctx else selected

    def fingerprint(self) -> Any:
        """Return the arguments that change the items; for tuples, in the form that earlier releases saved."""
        parts: dict[str, Any] = {"names": self.names, "return_ctx": self.return_ctx}
        return parts if self.form.kind == "tuple" else {**parts, "form": tuple(self.form)}

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
