"""How large and how tangled is the package? Prints the numbers that its design is judged by.

    python tools/structure.py              a table
    python tools/structure.py --json       the same as JSON, to compare two commits
    python tools/structure.py --list       where the traversals and the undeclared attribute reads are

Sizes and calls are read from the source. A traversal is a function that follows a chain's sources by a loop or by
recursion of its own, or asks torch to. An undeclared attribute read is `getattr(x, "name")` or `hasattr(x, "name")`,
where some pipe or operation of kdpipes has an attribute `name`: part of a protocol between pipes that no type declares.
"Modules per sample" is measured: the modules of kdpipes in which at least one Python function runs while one more
sample of a typical chain is read.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "kdpipes"
Function = ast.FunctionDef | ast.AsyncFunctionDef
_PREFIXES = {"startswith", "endswith", "partition"}


def length(node: Any) -> int:
    """Return the number of source lines of a definition, decorators left out."""
    return int(node.end_lineno - node.lineno + 1)


def called_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module reads, as a variable or as an attribute: a call, or a reference passed on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr


def name_of(node: ast.AST) -> str:
    """Return the last part of a name: `c` of `a.b.c`, of a call of it, and of a generic class of it."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def operations_in(tree: ast.AST) -> Iterator[str]:
    """Yield the classes that are registered as sample-wise operations, by decorator or by a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "sample_pipe" in map(name_of, node.decorator_list):
            yield node.name
        elif isinstance(node, ast.Call) and name_of(node) == "register_operation":
            yield from (name_of(argument) for argument in node.args[1:2])


def pipe_classes(trees: Iterable[ast.AST]) -> list[ast.ClassDef]:
    """Return the classes of pipes and operations: those that inherit from one, and those that one inherits from."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {"Operation", *(each.name for each in classes if each.name.endswith("Pipe"))}
    names |= {"IterDataPipe", "MapDataPipe", *(name for tree in trees for name in operations_in(tree))}
    while True:
        heirs = {each.name for each in classes if names & set(map(name_of, each.bases))}
        if heirs <= names:
            break
        names |= heirs
    of_torch = {"IterDataPipe", "MapDataPipe"}
    while True:
        bases = {name_of(base) for each in classes if each.name in names for base in each.bases} - of_torch
        if bases <= names:
            return [each for each in classes if each.name in names]
        names |= bases


def attributes_of(definition: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that a class defines in its body or sets on `self`."""
    for statement in definition.body:
        if isinstance(statement, Function):
            yield statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(definition):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def undeclared_reads(tree: ast.AST, attributes: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each `getattr` and `hasattr` with the literal name of a pipe's attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in {"getattr", "hasattr"} and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if name in attributes and not name.startswith("__"):
                yield node.lineno, name


def name_comparisons(tree: ast.AST) -> int:
    """Count decisions by the name of a class or module: `type(x).__name__ == ...`, `.__module__.startswith(...)`."""
    names = {"__module__", "__name__", "__qualname__"}
    return sum(
        (isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and name_of(node.func) in _PREFIXES))
        and any(isinstance(part, ast.Attribute) and part.attr in names for part in ast.walk(node))
        for node in ast.walk(tree)
    )


def is_traversal(function: Any) -> bool:
    """Return whether a function follows the sources of pipes itself."""
    calls = {name_of(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    attributes = {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    repeats = function.name in calls or any(isinstance(node, ast.While) for node in ast.walk(function))
    follows = bool(calls & {"sources_of", "_pipes_in"} or attributes & {"_source", "_sources"})
    return bool(calls & {"traverse", "traverse_dps", "list_dps"}) or (repeats and follows)


def places() -> tuple[list[str], list[str]]:
    """Return where the traversals and the undeclared attribute reads are, as `path:line: name`."""
    trees = parsed()
    known = {name for each in pipe_classes(trees.values()) for name in attributes_of(each)}
    known.discard("_make")  # read to recognise named tuples
    traversals, reads = [], []
    for path, tree in trees.items():
        place = path.relative_to(ROOT.parent)
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        traversals += [f"{place}:{each.lineno}: {each.name}" for each in functions if is_traversal(each)]
        reads += [f"{place}:{line}: {name}" for line, name in undeclared_reads(tree, known)]
    return traversals, reads


def parsed() -> dict[Path, ast.Module]:
    """Return the syntax tree of each module."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


PUBLIC = {
    "_replace",
    "_asdict",
    "_make",
    "_fields",
    "_exit",
}  # of named tuples and `os`: documented despite their names


def foreign_private_reads(tree: ast.AST) -> int:
    """Count reads of `x._name` where `x` is another object and `_name` is not an attribute that the module defines."""
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    own = {node.attr for node in stores} | {node.name for node in ast.walk(tree) if isinstance(node, Function)}
    own |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}  # slots
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own | PUBLIC
        and ast.unparse(node.value) not in {"self", "cls", "super()", "type(self)"}
        for node in ast.walk(tree)
    )


def in_source() -> dict[str, float]:
    """Return what can be read from the source alone."""
    trees = parsed()
    traversals, undeclared = places()
    modules = [len(path.read_text(encoding="utf-8").splitlines()) for path in trees]
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = sorted(map(length, functions))
    reads = Counter(name for tree in trees.values() for name in called_names(tree))
    private = [node.name for node in functions if node.name.startswith("_") and not node.name.startswith("__")]
    return {
        "lines": sum(modules),
        "modules": len(modules),
        "module length, median": statistics.median(modules),
        "module length, 90th percentile": sorted(modules)[len(modules) * 9 // 10],
        "functions": len(functions),
        "function length, median": statistics.median(lengths),
        "function length, 90th percentile": lengths[len(lengths) * 9 // 10],
        "private functions": len(private),
        "private functions used once": sum(reads[name] == 1 for name in private),
        "traversals": len(traversals),
        "modules with traversals": len({place.partition(":")[0] for place in traversals}),
        "calls of walk": reads["walk"],
        "modules that call walk": sum("walk" in called_names(tree) for tree in trees.values()),
        "undeclared attribute reads": len(undeclared),
        "comparisons of names of classes and modules": sum(map(name_comparisons, trees.values())),
        "private attributes of other objects": sum(map(foreign_private_reads, trees.values())),
    }


def when_run() -> dict[str, float]:
    """Return what shows only when the package runs: its public names, and what one sample passes through."""
    sys.path.insert(0, str(ROOT.parent))
    import kdpipes as kdp
    from kdpipes.demo import write_photo_folder

    with tempfile.TemporaryDirectory() as folder:
        write_photo_folder(folder)
        chain = (
            kdp.image_folder(folder)
            .filter_classes(invalid=["brick"])
            .oversample()
            .decode_images("x")
            .record_ctx()
            .transform("x", kdp.RandomResizedCrop(64), kdp.HorizontalFlip())
            .select("x y", return_ctx=True)
            .deal(batch_size=1, shuffle=True, seed=0)
            .collate_samples()
        )
        batches = iter(chain)
        next(batches)  # what is done once is done
        seen: Counter[str] = Counter()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
                seen[frame.f_code.co_filename] += 1

        sys.setprofile(note)
        next(batches)
        sys.setprofile(None)
    return {
        "public names": len(kdp.__all__),
        "modules per sample": len(seen),
        "Python calls per sample": sum(seen.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="print where traversals and undeclared reads are")
    arguments = parser.parse_args()
    if arguments.list:
        for title, found in zip(("Traversals", "Undeclared attribute reads"), places(), strict=True):
            print(f"{title}: {len(found)}", *found, sep="\n  ")
        return
    numbers = in_source() | when_run()
    if arguments.json:
        print(json.dumps(numbers, indent=1))
        return
    for name, number in numbers.items():
        print(f"{name:<40}{number:>10,.0f}")


if __name__ == "__main__":
    main()
