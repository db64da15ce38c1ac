"""Ceilings of size and tangle: no figure of `tools/structure.py` rises, and one that fell becomes the new ceiling."""

from __future__ import annotations

import ast
import json
import sys
from types import ModuleType

import pytest

from tests.tools import load_tool

ASKS = "Run `python tools/structure.py --ceilings`, and commit tests/structure.json."
# f-strings are one token before Python 3.12, and comprehensions are calls.
on_one_python = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the ceilings are those of Python 3.11")
SLACK = 0.01  # a ceiling follows when a figure has fallen by more than this share


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("structure")


def complaints(figures: dict[str, float], ceilings: dict[str, float], tolerance: float = 0.0) -> list[str]:
    """Return a sentence for each figure that rose, or fell for good."""
    texts = []
    for name, figure in figures.items():
        ceiling = ceilings.get(name)
        if ceiling is None:
            texts.append(f"{name}: {figure} has no ceiling. {ASKS}")
        elif figure > ceiling * (1 + tolerance):
            texts.append(f"{name}: rose from {ceiling} to {figure}. Ceilings only fall: simplify this or other code.")
        elif figure < ceiling * (1 - tolerance - SLACK):
            texts.append(f"{name}: fell from {ceiling} to {figure}. {ASKS}")
    return texts


def ceilings_of(tool: ModuleType) -> dict[str, float]:
    ceilings: dict[str, float] = json.loads(tool.CEILINGS.read_text(encoding="utf-8"))
    return ceilings


@on_one_python
def test_the_source_stays_below_its_ceilings(tool: ModuleType) -> None:
    figures = tool.source_figures() | tool.interface_figures() | tool.test_figures()
    ceilings = {name: ceiling for name, ceiling in ceilings_of(tool).items() if not name.startswith("walk: ")}
    wrong = complaints(figures, ceilings)
    assert not wrong, "\n".join(wrong)
    assert ceilings.keys() == figures.keys()


@on_one_python
def test_a_sample_takes_no_longer_way(tool: ModuleType) -> None:
    figures = load_tool("walks").figures(tool.ROOT)
    # Waiting for other processes takes a varying number of calls.
    assert complaints(figures, ceilings_of(tool), tolerance=0.05) == []


def test_a_ceiling_only_falls() -> None:
    assert complaints({"a": 100.0}, {"a": 100.0}) == []
    assert complaints({"a": 99.5}, {"a": 100.0}) == []
    assert complaints({"a": 101.0}, {"a": 100.0})[0].startswith("a: rose from 100.0 to 101.0.")
    assert complaints({"a": 98.0}, {"a": 100.0})[0].startswith("a: fell from 100.0 to 98.0.")
    assert complaints({"a": 1.0}, {}) == [f"a: 1.0 has no ceiling. {ASKS}"]


def test_docstrings_comments_and_layout_are_no_tokens(tool: ModuleType) -> None:
    text = '"""A module."""\n\n# why\n\n\ndef f(x):\n    """Return x."""\n    return x  # the same\n'
    assert [token.string for token in tool.tokens_of(text)] == ["def", "f", "(", "x", ")", ":", "return", "x"]


def test_imports_for_type_checkers_alone_do_not_count(tool: ModuleType) -> None:
    text = (
        "from kdpipes.core import errors\n"
        "if TYPE_CHECKING:\n    from kdpipes.loader import loader\n"
        "else:\n    import kdpipes.core.chain\n"
        "def f():\n    import_module('kdpipes.look.peek')\n"
    )
    names = set(tool.imported_names(tool.ROOT / "work" / "fields.py", ast.parse(text)))
    assert names == {"kdpipes.core.errors", "kdpipes.core.chain", "kdpipes.look.peek"}


def test_circles_are_the_modules_that_import_each_other(tool: ModuleType) -> None:
    paths = [tool.ROOT / "core" / f"{name}.py" for name in "abc"]
    texts = ["import kdpipes.core.b", "def f():\n    from kdpipes.core import a", "import kdpipes.core.a"]
    graph = tool.import_graph(dict(zip(paths, map(ast.parse, texts), strict=True)))
    assert tool.circles(graph) == [["kdpipes.core.a", "kdpipes.core.b"]]
    assert tool.import_depth(graph) == 2
