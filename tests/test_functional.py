"""Functional names: ours may be registered again, and nobody else's is taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from torch.utils.data import IterDataPipe, MapDataPipe, functional_datapipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.registry import _checked_ours as checked_here
from kdpipes.core.registry import _ours as registered_here
from kdpipes.core.registry import functional_pipe, register, registered


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    registries: list[dict[Any, Any]] = [MapDataPipe.functions, IterDataPipe.functions, registered_here, checked_here]
    before = [dict(registry) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


def _define(factor: int) -> Any:
    def times(source_datapipe: Any, shift: int = 0) -> Any:
        return [item * factor + shift for item in source_datapipe]

    return times


def test_a_function_becomes_a_method_of_pipes_of_its_flavour() -> None:
    times = _define(2)
    register("sentence_times", times, flavour="map")
    assert SequenceWrapper([1, 2]).sentence_times(shift=1) == [3, 5]
    assert registered()["sentence_times", "map"] is times
    assert not hasattr(IterableWrapper([1]), "sentence_times")


def test_a_class_is_registered_and_stays_what_it_is() -> None:
    class Doubler(kdp.MapPipe):
        def __init__(self, source_datapipe: Any) -> None:
            self.source = source_datapipe

    assert functional_pipe("sentence_double", flavour="map")(Doubler) is Doubler
    source = SequenceWrapper([1])
    pipe = source.sentence_double()
    assert (type(pipe), pipe.source) == (Doubler, source)


def test_the_same_definition_replaces_itself() -> None:
    for factor in (2, 3):
        register("sentence_times", _define(factor), flavour="iter")
    assert IterableWrapper([1, 2]).sentence_times() == [3, 6]


def test_another_definition_of_our_name_is_an_error_naming_both() -> None:
    register("sentence_times", _define(2), flavour="map")
    with pytest.raises(ValueError, match=r"is already registered by .*times\. Rename builtins\.sorted"):
        register("sentence_times", sorted, flavour="map")
    assert SequenceWrapper([1]).sentence_times() == [2]
    register("sentence_times", sorted, flavour="iter")


def test_names_of_torch_and_torchdata_are_rejected() -> None:
    taken: list[tuple[str, Literal["map", "iter"], Any]] = [
        ("batch", "iter", IterDataPipe),
        ("shuffle", "map", MapDataPipe),
        ("register_function", "map", MapDataPipe),
    ]
    for name, flavour, base in taken:
        before = base.functions.get(name), getattr(base, name, None)
        with pytest.raises(
            ValueError, match=rf"`\.{name}\(\)` already belongs to torch or torchdata\. Rename builtins\.sorted"
        ):
            register(name, sorted, flavour=flavour)
        assert (base.functions.get(name), getattr(base, name, None)) == before
        assert (name, flavour) not in registered()


def test_a_flavour_is_map_or_iter() -> None:
    with pytest.raises(ValueError, match=r"`flavour` must be one of 'map', 'iter', but is 'stream' instead\."):
        register("sentence_times", sorted, flavour="stream")  # type: ignore[arg-type]


def test_a_pipe_for_indexed_sources_alone_says_so_on_streams() -> None:
    @functional_pipe("sentence_seek", flavour="map", otherwise="Read tars with `kdp.open_shards`.")
    class SentenceSeekerMapDataPipe(PlanPipe):
        pass

    stream = IterableWrapper([1]).to_samples(fields="x")
    for pipe, rest in (
        (stream, "needs an indexed source, but `to_samples` is a stream. Read tars with `kdp.open_shards`."),
        (
            stream.deal(batch_size=1),
            "takes samples, but `deal` gives batches. Put `.sentence_seek()` before `.deal()`.",
        ),
    ):
        with pytest.raises(AttributeError) as caught:
            pipe.sentence_seek(3, by="key")
        assert str(caught.value) == f"`.sentence_seek()` {rest}"


def test_the_registry_that_is_given_out_is_a_copy() -> None:
    registered().clear()
    assert ("oversample", "map") in registered()


def test_a_name_that_one_flavour_rejects_is_registered_on_none() -> None:
    with pytest.raises(ValueError, match="already belongs to torch"):
        kdp.sample_pipe("routed_decode")(lambda sample: sample)
    assert ("routed_decode", "map") not in registered()


def of_notebook(definition: Any) -> Any:
    definition.__module__ = "__main__"
    return definition


def test_a_notebook_may_replace_its_own_pipe() -> None:
    def first(source_datapipe: Any) -> str:
        return "function"

    class Second(kdp.MapPipe):
        def __init__(self, source_datapipe: Any) -> None:
            self.source = source_datapipe

    def third(source_datapipe: Any, *, by: int) -> str:
        return f"function by {by}"

    source = kdp.from_dataset([(1, 0)])
    register("sentence_dim", of_notebook(first), flavour="map")
    assert source.sentence_dim() == "function"
    register("sentence_dim", of_notebook(Second), flavour="map")
    assert type(source.sentence_dim()) is Second
    register("sentence_dim", of_notebook(third), flavour="map")
    assert source.sentence_dim(by=2) == SequenceWrapper([1]).sentence_dim(by=2) == "function by 2"


def test_torchs_decorator_replaces_pipes_of_a_notebook() -> None:
    def numbered(number: int) -> Any:
        class Numbered(IterDataPipe[Any]):
            def __init__(self, source_datapipe: Any) -> None:
                self.number = number

        return of_notebook(Numbered)

    ours, stock = kdp.from_dataset([(1, 0)]).deal(batch_size=1), IterableWrapper([1])
    by_torch, by_kdpipes = functional_datapipe("sentence_six"), kdp.functional_pipe("sentence_six", flavour="iter")
    for number, decorate in enumerate([by_torch, by_torch, by_kdpipes, by_kdpipes, by_torch]):
        decorate(numbered(number))
        assert ours.sentence_six().number == stock.sentence_six().number == number


@pytest.mark.parametrize("name", ["oversample", "batch"])
def test_a_notebook_replaces_no_pipe_of_kdpipes_or_torch(name: str) -> None:
    with pytest.raises(ValueError, match=r"is already registered|already belongs to torch"):
        register(name, of_notebook(_define(1)), flavour="map")


def test_a_notebook_may_replace_its_own_function() -> None:
    def times(sample: Any, *, factor: int) -> Any:
        sample["x"] *= factor
        return sample

    def shift(sample: Any, *, by: int) -> Any:
        sample["x"] += by
        return sample

    kdp.sample_pipe("sentence_change")(of_notebook(times))
    kdp.sample_pipe("sentence_change")(of_notebook(shift))
    for source in (kdp.from_dataset([(1, 0)]), IterableWrapper([(1, 0)]).to_samples(fields="x y")):
        assert [sample["x"] for sample in source.sentence_change(by=5)] == [6]


class _OfOthers:
    def __init__(self, source_datapipe: Any, *arguments: Any) -> None:
        self.arguments = arguments


@pytest.mark.parametrize("name", ["transform", "select", "deal"])
@pytest.mark.parametrize(("base", "stock"), [(MapDataPipe, SequenceWrapper), (IterDataPipe, IterableWrapper)])
def test_another_library_may_register_a_name_after_kdpipes(name: str, base: Any, stock: Any) -> None:
    source = kdp.from_dataset([(1, 0)])
    samples = source if base is MapDataPipe else IterableWrapper([(1, 0)]).to_samples(fields="x y")
    theirs = functional_datapipe(name)(type("Theirs", (_OfOthers, base), {}))
    assert type(getattr(stock([1]), name)("argument")) is theirs
    assert samples.transform("x", abs).select("x").deal(batch_size=1).collate_samples().traits.gives == "batches"
    with pytest.raises(Exception, match=f"{name} as it is already taken"):
        functional_datapipe(name)(theirs)


def test_a_name_of_torch_stays_taken_for_other_libraries() -> None:
    with pytest.raises(Exception, match="batch as it is already taken"):
        functional_datapipe("batch")(type("Theirs", (_OfOthers, IterDataPipe), {}))


def test_a_pipe_of_ones_own_takes_no_name_of_another_library() -> None:
    theirs = type("Theirs", (_OfOthers, IterDataPipe), {"__module__": __name__})
    functional_datapipe("sentence_sample")(theirs)
    with pytest.raises(ValueError, match=r"`\.sentence_sample\(\)` already belongs to tests\.test_functional\.Theirs"):
        register("sentence_sample", _define(1), flavour="iter")


OTHERS_FIRST = """
from torch.utils.data import IterDataPipe, MapDataPipe, functional_datapipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
kinds = [
    functional_datapipe(name)(type("Theirs", (base,), {"__init__": lambda self, source, *args: None}))
    for name in ("transform", "deal", "peek") for base in (MapDataPipe, IterDataPipe)
]
import kdpipes as kdp
for source in (kdp.from_dataset([(1, 0), (2, 0)]), IterableWrapper([(1, 0), (2, 0)]).to_samples(fields="x y")):
    batches = source.transform("x", lambda x: x + 1).select("x").deal(batch_size=2).collate_samples()
    assert [x.tolist() for x, in batches] == [[2, 3]]
assert [type(stock.transform()) for stock in (SequenceWrapper([]), IterableWrapper([]))] == kinds[:2]
"""


def test_kdpipes_imports_after_a_library_with_the_same_names() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", OTHERS_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
