"""What every registered pipe promises, whatever it does: one test for all of them, on both flavours."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torch.utils.data.graph import DataPipeGraph, traverse_dps

from kdpipes.cache import FileStore
from kdpipes.core.registry import registered
from kdpipes.core.sample import Sample
from kdpipes.testing.checks import PROMISES

ITEMS = [(float(number), number % 3) for number in range(7)]
Build = Callable[[Any], Any]
LOCAL = tempfile.TemporaryDirectory()  # for files; it goes when the tests end


def _own_path(sample: Sample) -> str:
    return __file__


# One example of each pipe; both flavours take the same arguments, or say so here.
EXAMPLES: dict[str, Build] = {
    "add_field": lambda source: source.add_field("twice", lambda sample: 2 * sample["x"]),
    "cache": lambda source: source.transform("x", lambda x: 2 * x).cache(FileStore("memory://own")),
    "cache_in_memory": lambda source: source.transform("x", lambda x: 2 * x).cache_in_memory(),
    "cache_on_disk": lambda source: source.transform("x", lambda x: 2 * x).cache_on_disk("memory://contract"),
    "collate_samples": lambda source: source.select("x y").deal(batch_size=2).collate_samples(),
    "cutmix": lambda source: (
        source.transform("x", lambda x: np.full((3, 4, 5), x))
        .select("x y")
        .deal(batch_size=2)
        .collate_samples()
        .cutmix(num_classes=3)
    ),
    "deal": lambda source: source.select("x y").deal(batch_size=2),
    "decode_images": lambda source: source.add_field("image", lambda sample: None).decode_images("image"),
    "filter_classes": lambda source: source.filter_classes(invalid=[1]),
    "mixup": lambda source: (
        source.transform("x", float).select("x y").deal(batch_size=2).collate_samples().mixup(num_classes=3)
    ),
    "on_error": lambda source: source.on_error("skip"),
    "few_shot": lambda source: source.few_shot(shots=1, seed=1),
    "filter_samples": lambda source: source.filter_samples(columns=["x", "y"], keep=lambda x, y: (x > 1) & (y != 1)),
    "join": lambda source: source.join(_source("map").rename_fields(other="x", label="y")),
    "localize_files": lambda source: source.map(_own_path).localize_files(LOCAL.name).to_samples(),
    "map_classes": lambda source: source.map_classes({0: 1, 2: 0}, unmapped="keep"),
    "mix": lambda source: source.mix(copy.deepcopy(source), weights=[2, 1], seed=2, stop="all"),
    "permute": lambda source: source.permute(seed=3),
    "record_ctx": lambda source: source.record_ctx(),
    "rename_fields": lambda source: source.rename_fields(image="x"),
    "repeat_until": lambda source: source.repeat_until(repetitions=2),
    "sample_weighted": lambda source: source.sample_weighted({0: 1, 1: 2.5}),
    "select": lambda source: source.select("y key x", return_ctx=True),
    "subset": lambda source: source.subset(range(0, len(source), 2)),
    "take_per_class": lambda source: source.take_per_class(share=0.5, seed=1),
    "take_percent": lambda source: source.take_percent(from_percent=0.2),
    "to_device": lambda source: source.select("x y").deal(batch_size=2).collate_samples().to_device("cpu"),
    "to_samples": lambda source: source.to_samples(key=lambda sample: sample.key + "!"),
    "transform": lambda source: source.transform("x", lambda x, rng: x + rng.random()),
    "transform_batch": lambda source: source.transform_batch("x", _jittered),
}
EXAMPLES_BY_FLAVOUR: dict[tuple[str, str], Build] = {
    ("oversample", "map"): lambda source: source.oversample(mode="exact"),
    ("oversample", "iter"): lambda source: source.oversample(mode="exact", class_counts={0: 3, 1: 2, 2: 2}),
}
AFTER_DEAL = {"collate_samples", "cutmix", "mixup", "to_device"}
RANDOM = {"cutmix", "mixup", "oversample", "transform", "transform_batch"}  # those whose epochs may differ
ELSEWHERE = {"cache_in_redis", "peek"}  # one needs a server, one is no pipe: see their own tests
REJECTED = {("subset", "iter"), *((name, "map") for name in AFTER_DEAL)} | {
    (name, "iter") for name in ("few_shot", "join", "permute", "sample_weighted", "take_per_class", "take_percent")
}


def _ours() -> list[tuple[str, str]]:
    return sorted(
        (name, flavour)
        for (name, flavour), function in registered().items()
        if function.__module__.startswith("kdpipes.") and name not in ELSEWHERE
    )


def _source(flavour: str, items: list[Any] = ITEMS) -> Any:
    stock = SequenceWrapper(items, deepcopy=False) if flavour == "map" else IterableWrapper(items, deepcopy=False)
    return stock.to_samples(fields="x y")


def _build(name: str, flavour: str, items: list[Any] = ITEMS) -> Any:
    build = EXAMPLES_BY_FLAVOUR.get((name, flavour)) or EXAMPLES[name]
    return build(_source(flavour, items))


every_pipe = pytest.mark.parametrize(("name", "flavour"), _ours())


def test_every_registered_pipe_has_an_example() -> None:
    examples = set(EXAMPLES) | {name for name, _ in EXAMPLES_BY_FLAVOUR}
    assert {name for name, _ in _ours()} == examples, "Add the pipe to EXAMPLES."


@every_pipe
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_each_pipe_keeps_what_the_test_kit_checks(name: str, flavour: Any, promise: Any) -> None:
    promise(partial(_build, name, flavour), name in RANDOM)


def _found_in(graph: DataPipeGraph) -> list[Any]:
    return [found for pipe, upstream in graph.values() for found in (pipe, *_found_in(upstream))]


@every_pipe
def test_torch_finds_the_source_behind_a_pipe(name: str, flavour: str) -> None:
    pipe = _build(name, flavour)
    assert any("SampleMaker" in type(found).__name__ for found in _found_in(traverse_dps(pipe)))


@every_pipe
def test_what_is_no_pipe_is_rejected_where_the_chain_is_built(name: str, flavour: str) -> None:
    function = registered()[name, flavour]
    recorder = MagicMock()
    (EXAMPLES_BY_FLAVOUR.get((name, flavour)) or EXAMPLES[name])(recorder)
    call = next(call for call in recorder.mock_calls if call[0].endswith(name))
    with pytest.raises(TypeError, match="source"):
        function([1, 2, 3], *call.args, **call.kwargs)


def test_both_flavours_take_the_same_arguments() -> None:
    flavours: dict[str, dict[str, inspect.Signature]] = {}
    for name, flavour in _ours():
        flavours.setdefault(name, {})[flavour] = inspect.signature(registered()[name, flavour])
    for name, signatures in flavours.items():
        if len(signatures) == 2:
            indexed, stream = (set(signatures[flavour].parameters) for flavour in ("map", "iter"))
            # A stream can neither leave out what earlier epochs had nor be read in an order of the user's.
            only_indexed = {
                "mix": {"redraw", "temperature", "num_samples", "batches"},
                "deal": {"batching"},
            }.get(name, set())
            assert indexed - only_indexed == stream - {"class_counts", "split"}, name


@every_pipe
def test_a_docstring_names_the_pipe(name: str, flavour: str) -> None:
    documentation = inspect.getdoc(registered()[name, flavour]) or ""
    assert f"(functional name: ``{name}``)" in documentation.split("\n\n")[0]


@pytest.mark.parametrize(("name", "flavour"), sorted(REJECTED))
def test_what_a_flavour_cannot_do_says_what_to_do_instead(name: str, flavour: str) -> None:
    rejection = r"needs an? (stream|indexed source), but `to_samples` is (indexed|a stream)\. .*`"
    with pytest.raises(AttributeError, match=rejection):
        getattr(_source(flavour), name)([0])


def _jittered(values: list[Any], rngs: list[np.random.Generator]) -> list[float]:
    return [value + rng.random() for value, rng in zip(values, rngs, strict=True)]
