"""How large and how tangled is the package? Prints the numbers that its design is judged by.

    python tools/structure.py              a table
    python tools/structure.py --json       the same as JSON, to compare two commits

Sizes and calls are read from the source. "Modules per sample" is measured: the modules of kdpipes in which at least
one Python function runs while one more sample of a typical chain is read.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "kdpipes"
Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def undeclared_reads(tree: ast.AST) -> int:
    """Count `getattr(x, "name")` and `hasattr(x, "name")` with a literal name: an attribute that no type declares."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"getattr", "hasattr"}
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        for node in ast.walk(tree)
    )


def foreign_private_reads(tree: ast.AST) -> int:
    """Count reads of `x._name` where `x` is neither `self` nor `cls`: private attributes of other objects."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
        for node in ast.walk(tree)
    )


def in_source() -> dict[str, float]:
    """Return what can be read from the source alone."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
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
        "calls of walk": reads["walk"],
        "undeclared attribute reads": sum(map(undeclared_reads, trees.values())),
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
    is_json = parser.parse_args().json
    numbers = in_source() | when_run()
    if is_json:
        print(json.dumps(numbers, indent=1))
        return
    for name, number in numbers.items():
        print(f"{name:<40}{number:>10,.0f}")


if __name__ == "__main__":
    main()
