"""The script `kdpipes`: help and mistakes are answered before torch is imported, which takes seconds.

Importing any module of a package runs the package's `__init__` first, and that of kdpipes imports torch to register its
pipes. So this module lies beside the package: here `__init__` waits until something asks for a name that it gives,
which every command does before it begins (`kdpipes.cli._commands`). `python -m kdpipes` does the same, slower.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

__all__ = ["main"]


class _Waiting(ModuleType):
    """A package whose modules can be imported, and whose `__init__` runs when one of its names is first asked for."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module(self)
        return getattr(self, name)


def _let_wait(package: str) -> None:
    spec = importlib.util.find_spec(package)
    if package in sys.modules or spec is None:
        return
    waiting = importlib.util.module_from_spec(spec)
    waiting.__class__ = _Waiting
    sys.modules[package] = waiting


def main() -> int:
    """Run one command, and return its exit status."""
    _let_wait("kdpipes")
    from kdpipes.cli import main as run

    return run()
