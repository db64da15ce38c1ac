"""The script `kdpipes`, which answers `--help` and wrong arguments before torch is imported.

Importing a module of a package runs the package's `__init__` first, and that of kdpipes imports torch to register its
pipes. Therefore this module lies outside the package. It makes the package without running `__init__`, which a command
runs at its start (`kdpipes.cli._commands`). `kdpipes --help` takes 0.07 s of CPU time instead of 1.7 s, which
`python -m kdpipes --help` takes.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> int:
    """Run one command, and return its exit status."""
    spec = importlib.util.find_spec("kdpipes")
    if "kdpipes" not in sys.modules and spec is not None:
        sys.modules["kdpipes"] = importlib.util.module_from_spec(spec)
    from kdpipes.cli import main as run

    return run()
