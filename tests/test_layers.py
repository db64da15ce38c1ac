"""Dependencies point one way: leaves, then stages that know nothing of each other, then what shows and runs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdpipes

ROOT = Path(kdpipes.__file__).parent
STAGES = {"sources", "plan", "work", "cache", "delivery", "write"}
TOP = {"look", "demo", "cli", "testing", "__main__"}
ENTRY = "__init__"  # the package's own: it imports everything


def parts_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


MODULES = sorted(path for path in ROOT.rglob("*.py") if parts_of(path) != (ENTRY,))


def imports_of(path: Path) -> Iterator[str]:
    """Yield the part of kdpipes (`work`, `errors`, ...) that each import names, wherever in the module it stands."""
    package = ("kdpipes", *parts_of(path)[:-1])
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


def modules(layer: str) -> list[Path]:
    kinds = {"stage": STAGES, "top": TOP}
    if layer == "leaf":
        return [path for path in MODULES if parts_of(path)[0] not in STAGES | TOP]
    return [path for path in MODULES if parts_of(path)[0] in kinds[layer]]


def test_every_module_belongs_to_a_layer_that_is_not_empty() -> None:
    names = {part for layer in ("leaf", "stage", "top") for path in modules(layer) for part in parts_of(path)[:1]}
    assert names >= {"core", "selection"}
    assert names >= {"storage", "sources", "plan", "work", "delivery", "look", "demo", "cli"}
    assert {parts_of(path)[0] for path in modules("leaf")} & (STAGES | TOP) == set()
    assert set(imports_of(ROOT / "demo.py")) >= {"sources", "work", "look", "delivery", "core"}


@pytest.mark.parametrize("layer", ["leaf", "stage", "top"])
def test_imports_point_down(layer: str) -> None:
    allowed_above = {"leaf": set(), "stage": set(), "top": STAGES | TOP}[layer]
    wrong = []
    for path in modules(layer):
        own = {parts_of(path)[0]} if layer == "stage" else set()
        forbidden = (STAGES | TOP | {ENTRY}) - allowed_above - own
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in imports_of(path) if name in forbidden]
    assert not wrong
