"""Slots for the functions that show chains and loaders: the package fills them from an upper layer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_modules: dict[str, str] = {}


def show_by(module: str, *names: str) -> None:
    """Set the module that holds functions by which objects are shown. It is imported when one of them is called."""
    _modules.update(dict.fromkeys(names, module))


def shown(name: str, subject: Any) -> Any:
    """Return what the function of a name makes of a chain or a loader."""
    return getattr(import_module(_modules[name]), name)(subject)
