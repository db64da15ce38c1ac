"""The typed view of the chain, `_fluent.pyi`, against what is registered."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe, MapDataPipe

import kdpipes as kdp
from kdpipes.cache.cache import CacheIterDataPipe, CacheMapDataPipe
from kdpipes.core.registry import registered
from tests.torchdata_parts import needs_torchdata

VIEW = Path(kdp.__file__).with_name("_fluent.pyi")
CLASSES = {"map": "MapChain", "iter": "IterChain"}
PLAIN_METHODS = {"column", "class_names", "field_names", "set_epoch", "state_dict", "load_state_dict"}  # not registered
Shape = list[tuple[str, Any, Any]]


def typed_methods(flavour: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(VIEW.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASSES[flavour]).body
    methods = [node for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")]
    return {node.name: node for node in methods if node.name not in PLAIN_METHODS}


def pipes(flavour: str) -> dict[str, Any]:
    """What kdpipes registers, without the names that only say the way out."""
    return {
        name: pipe
        for (name, at), pipe in registered().items()
        if at == flavour
        and pipe.__module__.split(".")[0] == "kdpipes"
        and not (pipe.__doc__ or "").startswith("Not where the source is ")
    }


def typed_shape(method: ast.FunctionDef) -> Shape:
    """Names, kinds and defaults of the parameters behind `self`."""
    given, empty, kinds = method.args, inspect.Parameter.empty, inspect.Parameter
    plain = [*given.posonlyargs, *given.args]
    defaults = [empty] * (len(plain) - len(given.defaults)) + [ast.literal_eval(node) for node in given.defaults]
    shape: Shape = [
        (argument.arg, kinds.POSITIONAL_OR_KEYWORD, default) for argument, default in zip(plain, defaults, strict=True)
    ]
    shape += [(given.vararg.arg, kinds.VAR_POSITIONAL, empty)] if given.vararg else []
    for argument, node in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        shape.append((argument.arg, kinds.KEYWORD_ONLY, empty if node is None else ast.literal_eval(node)))
    shape += [(given.kwarg.arg, kinds.VAR_KEYWORD, empty)] if given.kwarg else []
    return shape[1:]


def real_shape(pipe: Any) -> Shape:
    parameters = list(inspect.signature(pipe).parameters.values())[1:]
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("flavour", ["map", "iter"])
def test_the_typed_view_names_exactly_what_is_registered(flavour: str) -> None:
    assert sorted(typed_methods(flavour)) == sorted(pipes(flavour))


@needs_torchdata
@pytest.mark.parametrize(("flavour", "base"), [("map", MapDataPipe), ("iter", IterDataPipe)])
def test_the_typed_view_lists_the_stock_pipes(flavour: str, base: Any) -> None:
    stubs = ast.parse(Path(inspect.getfile(base)).with_suffix(".pyi").read_text(encoding="utf-8"))
    by_torch = next(node for node in stubs.body if isinstance(node, ast.ClassDef) and node.name == base.__name__).body
    declared = {node.name for node in by_torch if isinstance(node, ast.FunctionDef)}
    ours = {name for name, at in registered() if at == flavour}
    stock = {name for name in base.functions if not name.startswith("_")} - ours - declared
    tree = ast.parse(VIEW.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASSES[flavour]).body
    assert {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)} == stock


@pytest.mark.parametrize("flavour", ["map", "iter"])
def test_parameters_have_the_same_names_kinds_and_defaults(flavour: str) -> None:
    methods = typed_methods(flavour)
    assert {name: real_shape(pipe) for name, pipe in pipes(flavour).items()} == {
        name: typed_shape(method) for name, method in methods.items()
    }


@pytest.mark.parametrize("flavour", ["map", "iter"])
def test_the_typed_flavour_is_that_of_the_pipe_that_is_made(flavour: str) -> None:
    for name, pipe in pipes(flavour).items():
        result = ast.unparse(typed_methods(flavour)[name].returns or ast.Constant(None))
        if name == "peek":  # which ends a chain
            assert result == "Peek"
            continue
        base: Any = (MapDataPipe if flavour == "map" else IterDataPipe) if not isinstance(pipe, type) else pipe
        chain = "MapChain" if issubclass(base, MapDataPipe) else "IterChain"
        prefix = "Cached" if name.startswith("cache_") else "Mixed" if (name, flavour) == ("mix", "map") else ""
        assert result == prefix + chain, name


@pytest.mark.parametrize(
    ("typed", "real"), [("CachedMapChain", CacheMapDataPipe), ("CachedIterChain", CacheIterDataPipe)]
)
def test_the_methods_of_a_cache_are_typed_as_they_are(typed: str, real: Any) -> None:
    tree = ast.parse(VIEW.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == typed).body
    shapes = {node.name: typed_shape(node) for node in body if isinstance(node, ast.FunctionDef)}
    assert shapes == {name: real_shape(getattr(real, name)) for name in ("stats", "warm_up")}


def test_both_flavours_of_a_name_agree_in_their_parameters() -> None:
    indexed, streamed = pipes("map"), pipes("iter")
    for name in sorted(set(indexed) & set(streamed)):
        only_streams = {"class_counts", "lanes", "max_ranks", "split"}
        shared = [entry for entry in real_shape(streamed[name]) if entry[0] not in only_streams]
        only_indexed = {
            "mix": {"redraw", "temperature", "num_samples", "batches"},
            "deal": {"order", "classes_per_batch", "samples_per_class", "pack"},
        }.get(name, set())
        assert shared == [entry for entry in real_shape(indexed[name]) if entry[0] not in only_indexed], name


def test_the_typed_chains_run(photo_folder: Path, photo_shards: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("chains", Path(__file__).with_name("typing") / "chains.py")
    assert spec is not None
    assert spec.loader is not None
    chains = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chains)
    assert chains.hero(str(photo_folder), num_workers=0) == 4
    assert chains.streamed(photo_shards) == 64
    assert chains.shards(photo_shards) == ("cat", 5)
    assert chains.own_source() == [(1, 1), (9, 1)]
    assert chains.cached(str(photo_folder), str(tmp_path / "cache")) == (6, 4)
