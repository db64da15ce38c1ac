"""How large and how tangled is the package? Prints the numbers that its design is judged by.

    python tools/structure.py              a table
    python tools/structure.py --json       the same as JSON, to compare two commits
    python tools/structure.py --list       the circles of imports, traversals, undeclared reads and empty names
    python tools/structure.py --ceilings   write today's values to tests/structure.json, which tests compare with

Most numbers are read from the source. A token is one of Python's tokenizer, without comments, docstrings and layout. A
circle is a strongly connected set of modules; an import counts wherever it is in a module, also one by a string
(`import_module("kdpipes.look.peek")`), but not one for type checkers alone. An empty name says that something was
found, made or given, but not what it is. A traversal is a function that follows a chain's sources by a loop or by
recursion of its own, or asks torch to. An undeclared attribute read is `getattr(x, "name")` or `hasattr(x, "name")`,
where some pipe or operation of kdpipes has an attribute `name`: part of a protocol between pipes that no type declares.
Six walks are measured (`tools/walks.py`): the modules in which a Python function runs, and the calls in all processes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import keyword
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import networkx

ROOT = Path(__file__).resolve().parent.parent / "kdpipes"
CEILINGS = ROOT.parent / "tests" / "structure.json"
EMPTY_NAMES = frozenset(
    """begun both coming drawn each every few found given here joined kept known least left made many most named now
    one other others own place places read rest shown some taken then there thus what where who whole
    written""".split()  # noqa: SIM905  # a list of 40 names is easier to read so
)
BASES = {  # the classes that users subclass or hold, and the modules that define them
    "BatchPipe": "kdpipes.delivery.batch_pipe",
    "CacheStore": "kdpipes.cache.store",
    "IterPipe": "kdpipes.core.iter_pipe",
    "Loader": "kdpipes.loader.loader",
    "MapPipe": "kdpipes.core.map_pipe",
    "Operation": "kdpipes.core.operation",
    "PlanPipe": "kdpipes.core.plan_pipe",
    "SampleSource": "kdpipes.sources.from_dataset",
}
WIDE = 8  # arguments that a function may have without being listed
Function = ast.FunctionDef | ast.AsyncFunctionDef
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_PREFIXES = {"startswith", "endswith", "partition"}


def parsed() -> dict[Path, ast.Module]:
    """Return the syntax tree of each module."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


# Text


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of a module, without comments, docstrings and layout."""
    tokens = []
    previous = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begins_a_line = previous is None or previous.type in _LAYOUT
        is_docstring = token.type == tokenize.STRING and token.string.endswith('"""') and begins_a_line
        if token.type not in _LAYOUT and not is_docstring:
            tokens.append(token)
        previous = token
    return tokens


def text_figures(texts: Iterable[str]) -> dict[str, float]:
    """Return the figures that the text of the modules gives."""
    count: Counter[str] = Counter()
    for text in texts:
        tokens = tokens_of(text)
        names = [t.string.lstrip("_") for t in tokens if t.type == tokenize.NAME and not keyword.iskeyword(t.string)]
        count["tokens"] += len(tokens)
        count["code"] += len({row for token in tokens for row in range(token.start[0], token.end[0] + 1)})
        count["names"] += len(names)
        count["empty"] += sum(name in EMPTY_NAMES for name in names)
        count["comments"] += len(re.findall(r"^\s*#", text, re.MULTILINE))
        count["conditionals"] += sum(isinstance(node, ast.IfExp) for node in ast.walk(ast.parse(text)))
    return {
        "tokens": count["tokens"],
        "tokens per line of code": round(count["tokens"] / count["code"], 2),
        "empty names per 1,000 names": round(1000 * count["empty"] / count["names"], 1),
        "conditional expressions per 1,000 lines of code": round(1000 * count["conditionals"] / count["code"], 1),
        "lines of code per own-line comment": round(count["code"] / count["comments"]),
    }


# Imports


def name_of_module(path: Path) -> str:
    """Return the dotted name of a module of the package."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, without those for type checkers alone."""
    nodes: list[Any]
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes = node.orelse
        else:
            nodes = [node]
        for run_time_node in nodes:
            yield run_time_node
            yield from run_time_nodes(run_time_node)


def imported_names(path: Path, tree: ast.AST, *, by_checkers: bool = False) -> Iterator[str]:
    """Yield the dotted name of each import of a module, and each text that names a module of the package.

    With `by_checkers`, imports for type checkers alone count, too.
    """
    package = ("kdpipes", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree) if by_checkers else run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [".".join(package[: len(package) - node.level + 1])] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^kdpipes(?:\.\w+)+$", node.value)


def import_graph(trees: dict[Path, ast.Module], *, by_checkers: bool = False) -> networkx.DiGraph:
    """Return which module imports which. The package's own module imports all, and is left out."""
    modules = {name_of_module(path) for path in trees} - {"kdpipes"}
    graph = networkx.DiGraph()
    graph.add_nodes_from(modules)
    for path, tree in trees.items():
        importer = name_of_module(path)
        for name in imported_names(path, tree, by_checkers=by_checkers):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and importer in modules and target != importer:
                graph.add_edge(importer, target)
    return graph


def circles(graph: networkx.DiGraph) -> list[list[str]]:
    """Return the sets of modules, or of folders, that import each other."""
    return sorted(sorted(each) for each in networkx.strongly_connected_components(graph) if len(each) > 1)


def folders_of(graph: networkx.DiGraph) -> networkx.DiGraph:
    """Return which folder imports which."""
    folders = networkx.DiGraph()
    for importer, target in graph.edges:
        pair = importer.split(".")[1], target.split(".")[1]
        if pair[0] != pair[1]:
            folders.add_edge(*pair)
    return folders


def import_depth(graph: networkx.DiGraph) -> int:
    """Return the length of the longest chain of imports, in modules or circles of them."""
    return int(networkx.dag_longest_path_length(networkx.condensation(graph))) + 1


# Protocols between pipes


def name_of(node: ast.AST) -> str:
    """Return the last part of a name: `c` of `a.b.c`, of a call of it, and of a generic class of it."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


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


def locations() -> tuple[list[str], list[str]]:
    """Return where the traversals and the undeclared attribute reads are, as `path:line: name`."""
    trees = parsed()
    attributes = {name for each in pipe_classes(trees.values()) for name in attributes_of(each)}
    attributes.discard("_make")  # read to recognise named tuples
    traversals, reads = [], []
    for path, tree in trees.items():
        file = path.relative_to(ROOT.parent)
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        traversals += [f"{file}:{each.lineno}: {each.name}" for each in functions if is_traversal(each)]
        reads += [f"{file}:{line}: {name}" for line, name in undeclared_reads(tree, attributes)]
    return traversals, reads


PUBLIC = {"_replace", "_asdict", "_make", "_fields", "_exit"}  # of named tuples and `os`, which documents them


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


def source_figures() -> dict[str, float]:
    """Return what can be read from the source of the package."""
    trees = parsed()
    graph = import_graph(trees)
    traversals, undeclared = locations()
    texts = [path.read_text(encoding="utf-8") for path in trees]
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    return {
        **text_figures(texts),
        "modules": len(trees),
        "functions": len(functions),
        "circles of modules": len(circles(graph)),
        "modules in circles": sum(map(len, circles(graph))),
        "circles of folders": len(circles(folders_of(graph))),
        "import depth": import_depth(graph),
        "traversals": len(traversals),
        "undeclared attribute reads": len(undeclared),
        "comparisons of names of classes and modules": sum(map(name_comparisons, trees.values())),
        "private attributes of other objects": sum(map(foreign_private_reads, trees.values())),
    }


# Tests


def test_figures() -> dict[str, float]:
    """Return how strongly the tests depend on the inside of the package."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT.parent / "tests").rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        "tokens of tests": sum(len(tokens_of(text)) for text in texts),
        "tests: private attributes of other objects": sum(map(foreign_private_reads, trees)),
        "tests: calls of monkeypatch": sum(
            isinstance(call.func, ast.Attribute) and name_of(call.func.value) == "monkeypatch" for call in calls
        ),
        "tests: match=": sum(word.arg == "match" for call in calls for word in call.keywords),
    }


# Interfaces


def interface_figures() -> dict[str, float]:
    """Return the sizes of interfaces: members of base classes, and arguments of pipes and public functions."""
    import kdpipes as kdp
    from kdpipes.core.registry import registered

    figures: dict[str, float] = {"public names": len(kdp.__all__)}
    for name, module in BASES.items():
        base = getattr(import_module(module), name)
        owners = [owner for owner in base.__mro__ if owner.__module__.startswith("kdpipes")]
        members = {member for owner in owners for member in vars(owner) if not member.startswith("_")}
        figures[f"public members of {name}"] = len(members)
    functions = {f"{flavour}.{name}": function for (name, flavour), function in registered().items()}
    functions |= {f"kdp.{name}": getattr(kdp, name) for name in kdp.__all__}
    for name, function in sorted(functions.items()):
        number = len(inspect.signature(function).parameters)
        if number > WIDE:
            figures[f"arguments of {name}"] = number
    return figures


def figures() -> dict[str, float]:
    """Return all figures."""
    walks = import_module("walks")  # beside this script
    return {**source_figures(), **interface_figures(), **test_figures(), **walks.figures(ROOT)}


def listings() -> dict[str, list[str]]:
    """Return what some figures count, by title."""
    trees = parsed()
    graph = import_graph(trees)
    traversals, undeclared = locations()
    hollow = Counter(
        token.string
        for path in trees
        for token in tokens_of(path.read_text(encoding="utf-8"))
        if token.type == tokenize.NAME and token.string.lstrip("_") in EMPTY_NAMES
    )
    return {
        "Circles of modules": [", ".join(circle) for circle in circles(graph)],
        "Circles of folders": [", ".join(circle) for circle in circles(folders_of(graph))],
        "Traversals": traversals,
        "Undeclared attribute reads": undeclared,
        "Empty names": [f"{name}: {number}" for name, number in hollow.most_common(30)],
    }


def main() -> None:
    sys.path.insert(0, str(ROOT.parent))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="print circles, traversals, undeclared reads, empty names")
    parser.add_argument("--ceilings", action="store_true", help="write the figures to tests/structure.json")
    arguments = parser.parse_args()
    if arguments.list:
        for title, lines in listings().items():
            print(f"{title}: {len(lines)}", *lines, sep="\n  ")
        return
    numbers = figures()
    if arguments.ceilings:
        CEILINGS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(numbers, indent=1))
        return
    for name, number in numbers.items():
        print(f"{name:<60}{number:>10,.10g}")


if __name__ == "__main__":
    main()
