"""Dependencies point one way: leaves, stages that know nothing of each other, the loader, what shows and runs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdpipes

ROOT = Path(kdpipes.__file__).parent
STAGES = {"sources", "plan", "work", "cache", "delivery", "write"}
TOP = {"look", "demo", "cli", "testing", "__main__"}
LOADER = {"loader"}
ENTRY = "__init__"  # the package's own: it imports everything


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


MODULES = sorted(path for path in ROOT.rglob("*.py") if parts_of(path) != (ENTRY,))


def imports_of(path: Path) -> Iterator[str]:
    """Yield the part of kdpipes (`work`, `errors`, ...) that each import names, wherever in the module it stands."""
    package = ("kdpipes", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [".".join(package[: len(package) - node.level + 1])] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "kdpipes":
                part = (name + ".").split(".")[1]
                is_module = (ROOT / part).is_dir() or any(ROOT.glob(f"{part}.py*"))
                yield part if part and is_module else ENTRY


LAYERS = {"leaf": set[str](), "stage": STAGES, "loader": LOADER, "top": TOP}
# `state_dict()` of a chain makes the state that a loader makes; the import is in the function.
UPWARDS = {("delivery/dealer.py", "loader")}


def modules(layer: str) -> list[Path]:
    if layer == "leaf":
        return [path for path in MODULES if parts_of(path)[0] not in STAGES | LOADER | TOP]
    return [path for path in MODULES if parts_of(path)[0] in LAYERS[layer]]


def test_every_module_belongs_to_a_layer_that_is_not_empty() -> None:
    names = {part for layer in LAYERS for path in modules(layer) for part in parts_of(path)[:1]}
    assert names >= {"core", "errors", "sample", "selection"}
    assert names >= {"callback", "storage", "sources", "plan", "work", "delivery", "loader", "look", "demo", "cli"}
    assert {parts_of(path)[0] for path in modules("leaf")} & (STAGES | LOADER | TOP) == set()
    assert set(imports_of(ROOT / "demo.py")) >= {"sources", "work", "look", "loader", "errors"}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer: str) -> None:
    below = {"leaf": set[str](), "stage": set[str](), "loader": STAGES | LOADER, "top": STAGES | LOADER | TOP}[layer]
    wrong = []
    for path in modules(layer):
        own = {parts_of(path)[0]} if layer == "stage" else set()
        forbidden = (STAGES | LOADER | TOP | {ENTRY}) - below - own
        place = path.relative_to(ROOT).as_posix()
        found = {name for name in imports_of(path) if name in forbidden and (place, name) not in UPWARDS}
        wrong += [f"{place} imports {name}" for name in found]
    assert not wrong
