"""What follows from the table of names: typing stubs and the README's table of pipes."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest

from kdpipes._names import PIPES
from kdpipes.core.registry import registered
from tests.tools import load_module, load_tool
from tests.torchdata_parts import needs_torchdata

ROOT = Path(__file__).parent.parent
outputs = functools.cache(load_tool("names").outputs)
Shape = list[tuple[str, Any, Any]]


def pipes(flavour: str) -> dict[str, Any]:
    """What kdpipes registers, without the names that only say the way out."""
    return {
        name: pipe
        for (name, at), pipe in registered().items()
        if at == flavour and pipe.__module__.split(".")[0] == "kdpipes"
    }


def real_shape(pipe: Any) -> Shape:
    parameters = list(inspect.signature(pipe).parameters.values())[1:]
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@needs_torchdata
@pytest.mark.parametrize("path", ["kdpipes/_fluent.pyi", "kdpipes/__init__.pyi", "README.md"])
def test_what_follows_from_the_table_of_names_is_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == outputs()[path], "Run `make names`."


def test_the_table_of_names_has_every_pipe() -> None:
    ours = {name for (name, _), pipe in registered().items() if pipe.__module__.split(".")[0] == "kdpipes"}
    assert {pipe.name for pipe in PIPES} == ours, "Add or remove the pipe in kdpipes/_names.py."


@pytest.mark.parametrize("flavour", ["map", "iter"])
def test_the_typed_flavour_is_that_of_the_pipe_that_is_made(flavour: str) -> None:
    made = {"few_shot": "MapChain", "deal": "IterChain", "peek": "Peek", "mix": "MixerMapChain"}
    if flavour == "iter":
        made = {"filter_classes": "IterChain", "cache_on_disk": "CacheIterChain"}
    stub = (ROOT / "kdpipes" / "_fluent.pyi").read_text(encoding="utf-8")
    chain = next(
        node
        for node in ast.parse(stub).body
        if isinstance(node, ast.ClassDef) and node.name == f"{flavour.title()}Chain"
    )
    returns = {
        node.name: ast.unparse(node.returns)
        for node in chain.body
        if isinstance(node, ast.FunctionDef) and node.returns
    }
    assert {name: returns[name] for name in made} == made


def test_both_flavours_of_a_name_agree_in_their_parameters() -> None:
    indexed, streamed = pipes("map"), pipes("iter")
    for name in sorted(set(indexed) & set(streamed)):
        only_streams = {"class_counts", "split"}
        shared = [entry for entry in real_shape(streamed[name]) if entry[0] not in only_streams]
        only_indexed = {
            "mix": {"redraw", "temperature", "num_samples", "batches"},
            "deal": {"batching"},
        }.get(name, set())
        assert shared == [entry for entry in real_shape(indexed[name]) if entry[0] not in only_indexed], name


def test_the_typed_chains_run(photo_folder: Path, photo_shards: str, tmp_path: Path) -> None:
    chains = load_module(Path(__file__).with_name("typing") / "chains.py")
    assert chains.hero(str(photo_folder), num_workers=0) == 4
    assert chains.streamed(photo_shards) == 64
    assert chains.shards(photo_shards) == ("cat", 5)
    assert chains.own_source() == [(1, 1), (9, 1)]
    assert chains.cached(str(photo_folder), str(tmp_path / "cache")) == (6, 4)
