"""Remember what attributes and globals were before calls upstream of a cache changed them.

A dataset that counts its reads, or a function that fills a global dictionary, must not get other cache keys each time.
Keys therefore depend on the first values. They are kept per process, for as long as the objects live.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "MISSING",
    "PLAIN",
    "Change",
    "first_global",
    "note_changed_attribute",
    "note_changed_global",
    "with_first_values",
]

MISSING: Any = object()  # the first value of an attribute that did not exist at first
PLAIN = (bytes, str, bool, int, float, complex, np.generic)


class Change(NamedTuple):
    """A value that reading a sample has changed.

    Args:
        before: The value before the change; `MISSING` if there was none.
        first: The first known value: `before`, or a copy of it, because collections may be changed in place.
        last: The value after the change.
    """

    before: Any
    first: Any
    last: Any

    def known_by(self, value: Any) -> Any:
        """Return the value to hash: the first one, unless the user has since assigned another object."""
        return self.first if value is self.last or value is MISSING or isinstance(value, PLAIN) else value

    def after(self, known: Change | None) -> Change:
        """Return this change, merged with an earlier one: it then starts at the first value of that."""
        is_first = known is None or known.known_by(self.before) is self.before
        return self if known is None or is_first else self._replace(first=known.first)


_changed_attributes: dict[int, tuple[weakref.ref[Any], dict[str, Change]]] = {}  # by the identity of the object
_changed_globals: dict[tuple[str, str], Change] = {}  # by module and name


def note_changed_attribute(holder: Any, name: str, change: Change) -> None:
    """Make caches identify an object by the value of an attribute before a read changed it."""
    key = id(holder)
    try:
        known = _changed_attributes.get(key) or (weakref.ref(holder, lambda _: _changed_attributes.pop(key, None)), {})
    except TypeError:  # its class does not support weak references
        return
    changed = _changed_attributes.setdefault(key, known)[1]
    changed[name] = change.after(changed.get(name))


def note_changed_global(namespace: dict[str, Any], name: str, change: Change) -> None:
    """Make caches identify a function by the value of a global before a call changed it."""
    key = namespace.get("__name__") or "", name
    _changed_globals[key] = change.after(_changed_globals.get(key))


def first_global(namespace: dict[str, Any], name: str) -> Any:
    """Return the value of a global, or its first value if calls have changed it."""
    changed = _changed_globals.get((namespace.get("__name__") or "", name))
    return namespace[name] if changed is None else changed.known_by(namespace[name])


def with_first_values(holder: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object, with the first values of those that reading from it has changed."""
    known = _changed_attributes.get(id(holder))
    if known is None or known[0]() is not holder:
        return attributes
    first = {name: changed.known_by(attributes.get(name, MISSING)) for name, changed in known[1].items()}
    return {name: value for name, value in {**attributes, **first}.items() if value is not MISSING}
