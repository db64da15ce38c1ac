"""The scripts of tools/ as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parent.parent / "tools"


def load_tool(name: str) -> ModuleType:
    """Return a script of tools/ as a module."""
    return load_module(TOOLS / f"{name}.py")


def load_module(path: Path) -> ModuleType:
    """Return a file of Python code as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
