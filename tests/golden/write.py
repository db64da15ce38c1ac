"""Golden files: public behaviour that must not change by accident, as JSON beside this module.

    python -m tests.golden.write            write all of them anew, after a change on purpose
    python -m tests.golden.write --check    print what differs, and fail if anything does

Each file has one line per entry. See `docs/contributing.md`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden import draws, files, orders, versioned

FILES: dict[str, dict[str, Callable[[Path], Any]]] = {
    "orders": orders.ENTRIES,
    "draws": draws.ENTRIES,
    "files": files.ENTRIES,
    "versioned": versioned.ENTRIES,
}


def path_of(file: str) -> Path:
    return Path(__file__).with_name(f"{file}.json")


def computed(file: str, entry: str) -> Any:
    """Return what an entry is now, as it comes back from JSON."""
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(json.dumps(plain(FILES[file][entry](Path(folder)))))


def plain(value: Any) -> Any:
    """Return data for JSON. Floats have nine digits: the last ones of a logarithm depend on the machine."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return plain(value.tolist())
    return float(f"{value:.9g}") if isinstance(value, float) else value


def recorded(file: str) -> dict[str, Any]:
    """Return what a golden file holds."""
    entries: dict[str, Any] = json.loads(path_of(file).read_text(encoding="utf-8"))
    return entries


def differences() -> list[str]:
    """Return the names of the entries that are not what was recorded."""
    return [
        f"{file}: {entry}"
        for file, entries in FILES.items()
        for entry in entries
        if computed(file, entry) != recorded(file).get(entry)
    ]


def write() -> None:
    for file, entries in FILES.items():
        lines = [f"{json.dumps(entry)}: {json.dumps(computed(file, entry), ensure_ascii=False)}" for entry in entries]
        path_of(file).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if "--check" not in sys.argv:
        write()
    elif differing := differences():
        sys.exit("These differ from the golden files: " + "; ".join(differing))
