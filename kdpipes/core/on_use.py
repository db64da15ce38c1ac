"""Import modules on first use: for names that a package exports, and for slots that upper layers fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_slots: dict[str, str] = {}


def fill_slots(module: str, *names: str) -> None:
    """Register the module that implements the named slots. It is imported on the first call."""
    _slots.update(dict.fromkeys(names, module))


def call_slot(name: str, *subjects: Any) -> Any:
    """Call the function that fills a slot."""
    return getattr(import_module(_slots[name]), name)(*subjects)


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that exports names from the given modules."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return find
