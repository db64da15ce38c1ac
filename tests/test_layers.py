"""Dependencies point one way: leaves, stages that know nothing of each other, the loader, what shows and runs them."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import kdpipes
from tests.tools import load_tool

ROOT = Path(kdpipes.__file__).parent
STAGES = {"sources", "plan", "work", "cache", "delivery", "write"}
LAYERS = [  # each imports from those before it, and from itself; the parts of the stages know nothing of each other
    {"core", "_names", "_version"},
    {"storage"},
    STAGES,
    {"loader"},
    {"hosts", "look", "demo", "cli", "testing", "__main__"},
]

# What each module still does besides importing: reads of attributes of pipes that no type declares, decisions by the
# names of classes and modules, reads of other objects' private attributes. New modules have none of them, and numbers
# only go down.
STILL: dict[str, tuple[int, int, int]] = {
    "storage/jobs.py": (0, 0, 3),
    "sources/from_webdataset.py": (0, 0, 3),
    "storage/codec.py": (0, 1, 0),
    "storage/filesystems.py": (0, 0, 7),
    "storage/access.py": (0, 2, 0),
    "work/adapters.py": (0, 8, 1),
}


def layer_of(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def import_edges() -> list[tuple[list[str], list[str]]]:
    """Return which module imports which, also for type checkers and by a string, as the parts of their names."""
    tool = load_tool("structure")
    graph = tool.import_graph(tool.parsed(), by_checkers=True)
    return [(importer.split(".")[1:], target.split(".")[1:]) for importer, target in graph.edges]


def test_every_module_belongs_to_a_layer() -> None:
    parts = {path.relative_to(ROOT).with_suffix("").parts[0] for path in ROOT.rglob("*.py")}
    assert parts - {"__init__"} == set().union(*LAYERS)


def test_imports_point_down() -> None:
    edges = import_edges()
    assert (["demo"], ["work", "transforms"]) in edges
    wrong = [
        f"{'.'.join(importer)} imports {'.'.join(target)}"
        for importer, target in edges
        if layer_of(target[0]) > layer_of(importer[0])
        or (importer[0] != target[0] and {importer[0], target[0]} <= STAGES)
    ]
    assert wrong == []


def test_only_the_top_imports_the_package_itself() -> None:
    tool = load_tool("structure")
    importers = {
        tool.name_of_module(path).split(".")[1]
        for path, tree in tool.parsed().items()
        if path != ROOT / "__init__.py" and {"kdpipes"} & set(tool.imported_names(path, tree))
    }
    assert importers <= LAYERS[-1]


def test_one_module_imports_the_datapipes_of_torch() -> None:
    tool = load_tool("structure")
    pipes = ("torch.utils.data.datapipes", "torch.utils.data.IterDataPipe", "torch.utils.data.MapDataPipe")
    importers = {
        tool.name_of_module(path)
        for path, tree in tool.parsed().items()
        if any(name.startswith(pipes) for name in tool.imported_names(path, tree, by_checkers=True))
    }
    assert importers == {"kdpipes.core.torch_pipes"}


def test_no_modules_or_folders_import_each_other() -> None:
    tool = load_tool("structure")
    graph = tool.import_graph(tool.parsed())
    assert tool.circles(graph) == []
    assert tool.circles(tool.folders_of(graph)) == []


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
