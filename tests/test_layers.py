"""Dependencies point one way: leaves, stages that know nothing of each other, the loader, what shows and runs them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdpipes
from tests.tools import load_tool

ROOT = Path(kdpipes.__file__).parent
STAGES = {"sources", "plan", "work", "cache", "delivery", "write"}
TOP = {"look", "demo", "cli", "testing", "__main__"}
LOADER = {"loader"}
ENTRY = "__init__"  # the package's own: it imports everything

# What each module still does besides importing: reads of attributes of pipes that no type declares, decisions by the
# names of classes and modules, reads of other objects' private attributes. New modules have none of them, and numbers
# only go down.
STILL: dict[str, tuple[int, int, int]] = {
    "cache/watched_calls.py": (0, 0, 1),
    "storage/jobs.py": (0, 0, 3),
    "loader/torch_loaders.py": (0, 0, 1),
    "sources/from_webdataset.py": (0, 0, 3),
    "storage/codec.py": (0, 1, 0),
    "storage/filesystems.py": (0, 0, 6),
    "storage/retries.py": (0, 2, 0),
    "work/adapters.py": (0, 8, 1),
}


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
    assert names >= {"core", "selection"}
    assert names >= {"storage", "sources", "plan", "work", "delivery", "loader", "look", "demo", "cli"}
    assert {parts_of(path)[0] for path in modules("leaf")} & (STAGES | LOADER | TOP) == set()
    assert set(imports_of(ROOT / "demo.py")) >= {"sources", "work", "look", "loader", "core"}


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


def ways_around_imports() -> dict[str, tuple[int, int, int]]:
    tool = load_tool("structure")
    undeclared = Counter(place.partition(":")[0] for place in tool.locations()[1])
    counted = {
        path.relative_to(ROOT).as_posix(): (
            undeclared[path.relative_to(ROOT.parent).as_posix()],
            tool.name_comparisons(tree),
            tool.foreign_private_reads(tree),
        )
        for path, tree in tool.parsed().items()
    }
    return {name: numbers for name, numbers in counted.items() if any(numbers)}


def test_no_module_goes_around_what_others_declare() -> None:
    found = ways_around_imports()
    rules = "undeclared attributes of pipes, comparisons of names, private attributes of other objects"
    wrong = [
        f"{name} has {found.get(name, (0, 0, 0))} of ({rules}), but STILL says {STILL.get(name, (0, 0, 0))}."
        for name in sorted(found.keys() | STILL.keys())
        if found.get(name) != STILL.get(name)
    ]
    assert not wrong, "\n".join(["Fix what is new; lower the numbers of what is gone.", *wrong])


def test_the_core_goes_around_nothing() -> None:
    assert not [name for name in STILL if name.startswith("core/")]


def test_ways_around_imports_are_found() -> None:
    tool = load_tool("structure")
    names = ast.parse(
        "type(x).__name__ == 'Deal'; kind.__module__.startswith('a'); __name__ == '__main__'; f(x.__name__)"
    )
    assert tool.name_comparisons(names) == 2
    private = ast.parse("other._a; self._b; cls._c; super()._d; type(self)._e; x.y._f; x.__dict__")
    assert tool.foreign_private_reads(private) == 2
    reads = ast.parse("getattr(pipe, 'column', None); hasattr(pipe, 'other'); getattr(pipe, name)")
    assert list(tool.undeclared_reads(reads, {"column"})) == [(1, "column")]
