"""Functional names: ours may be registered again, and nobody else's is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.core.errors import ChainError
from kdpipes.core.registry import _ours as registered_here
from kdpipes.core.registry import functional_pipe, register, registered, reject_flavour


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    registries: list[dict[Any, Any]] = [MapDataPipe.functions, IterDataPipe.functions, registered_here]
    before = [set(registry) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        for name in set(registry) - known:
            registry.pop(name)


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
    reject_flavour("sentence_seek", flavour="iter", hint="Read tars with `kdp.open_shards`.")
    with pytest.raises(ChainError) as caught:
        IterableWrapper([1]).sentence_seek(3, by="key")
    assert str(caught.value) == (
        "`.sentence_seek()` needs an indexed source, but `IterableWrapper` is a stream. "
        "Read tars with `kdp.open_shards`."
    )


def test_the_registry_that_is_given_out_is_a_copy() -> None:
    registered().clear()
    assert ("oversample", "map") in registered()


def test_a_name_that_one_flavour_rejects_is_registered_on_none() -> None:
    with pytest.raises(ValueError, match="already belongs to torch"):
        kdp.sample_pipe("routed_decode")(lambda sample: sample)
    assert ("routed_decode", "map") not in registered()
