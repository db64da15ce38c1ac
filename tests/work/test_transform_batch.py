"""`transform_batch`: one call for many samples, with the results of calls for single samples."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.testing import check_elastic, check_resumable

ITEMS = [(number, f"word {number}") for number in range(50)]


def doubled(values: list[Any]) -> Any:
    return 2 * np.asarray(values)


def jittered(values: list[Any], rngs: list[np.random.Generator]) -> list[Any]:
    return [(value, int(rng.integers(1 << 40))) for value, rng in zip(values, rngs, strict=True)]


def drawing(values: list[Any]) -> list[Any]:
    return [(value, random.getrandbits(40)) for value in values]


class Counted:
    """Notes how many values each call gets."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, values: list[Any]) -> list[Any]:
        self.sizes.append(len(values))
        return values


def chain(function: Any, mode: str = "x y") -> Any:
    return kdp.from_dataset(ITEMS).permute(1).transform_batch("x", function).select(mode)


def test_a_batch_takes_one_call() -> None:
    pipe = chain(Counted()).deal(batch_size=32)
    sizes = pipe.source.source.operation._function.function.sizes
    list(pipe)
    assert sizes == [32, 18]


@pytest.mark.parametrize("function", [doubled, jittered, drawing])
@pytest.mark.parametrize("mode", ["x y", "y", "key x"])
def test_results_are_those_of_single_samples(function: Any, mode: str) -> None:
    def items(size: int) -> list[str]:
        pipe = chain(function, mode).deal(batch_size=size, shuffle=True)
        return [repr(item) for _ in range(2) for batch in pipe for item in batch]

    assert items(1) == items(16) == items(50)


@pytest.mark.parametrize("function", [doubled, jittered, drawing])
def test_batches_do_not_depend_on_workers_or_resumes(function: Any) -> None:
    def build() -> Any:
        return chain(function).deal(global_batch_size=8, shuffle=True)

    check_elastic(build)
    check_resumable(build)


def test_each_sample_has_a_generator_of_its_own() -> None:
    pipe = chain(jittered, "x").deal(batch_size=50, shuffle=True)
    first, second = (dict(x for (x,) in next(iter(pipe))) for _ in range(2))
    assert len(set(first.values())) == 50
    assert set(first.values()).isdisjoint(second.values())


def test_tensors_and_lists_are_cut_into_values() -> None:
    for function in (torch.tensor, list, np.asarray, tuple):
        pipe = chain(lambda values, function=function: function(values), "x")
        assert [int(x) for (x,) in next(iter(pipe.deal(batch_size=50)))] == [int(pipe[at][0]) for at in range(50)]


def test_a_stream_is_transformed_sample_by_sample() -> None:
    pipe = IterableWrapper(ITEMS).to_samples(fields="x y").transform_batch("x", doubled).select("x")
    assert [int(x) for (x,) in pipe] == [2 * number for number in range(50)]


def test_a_cache_holds_the_results_and_follows_the_function() -> None:
    calls = Counted()
    pipe = kdp.from_dataset(ITEMS).transform_batch("x", calls).cache_in_memory().select("x")
    assert list(pipe) == list(pipe)
    assert len(pipe.source.source.operation._function.function.sizes) == 50


def test_draws_are_recorded_in_the_ctx_and_replayed() -> None:
    pipe = kdp.from_dataset(ITEMS).record_ctx().transform_batch("x", jittered).select("x", return_ctx=True)
    (x,), ctx = next(iter(pipe.deal(batch_size=20, shuffle=True)))[3]
    assert list(ctx) == ["draw"]
    again, _ = kdp.replay(str(x[0]), ctx, pipe)
    assert again == (x,)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda values: values[1:], r"`lambda` must return .* for each of 1 values, but returned 0 of them"),
        (lambda values: None, r"`lambda` must return .* but returned NoneType"),
        (lambda values: "a", r"`lambda` must return .* but returned str"),
        (lambda values: [None for _ in values], r"`lambda` must return the new values, but returned None for one"),
    ],
    ids=["few", "none", "text", "nones"],
)
def test_wrong_results_are_errors_that_name_the_function(function: Any, error: str) -> None:
    pipe = chain(function).deal(batch_size=20)
    with pytest.raises(TypeError, match=error) as caught:
        list(pipe)
    assert "sample '" in str(caught.value.__notes__)


def test_an_error_names_the_sample() -> None:
    def inverse(values: list[Any]) -> list[float]:
        return [1 / value for value in values]

    with pytest.raises(ZeroDivisionError) as caught:
        list(chain(inverse).deal(batch_size=50))
    assert "'0'" in str(caught.value.__notes__)


def test_wrong_arguments_are_rejected_when_the_chain_is_built() -> None:
    pipe = kdp.from_dataset(ITEMS)
    with pytest.raises(TypeError, match="`field` must be the name of one field, but is 'x y' instead"):
        pipe.transform_batch("x y", doubled)
    with pytest.raises(kdp.FieldError, match="has no field 'z'"):
        pipe.transform_batch("z", doubled)
    with pytest.raises(TypeError, match="`function` must be"):
        pipe.transform_batch("x", "double")
    with pytest.raises(TypeError, match=r"without a parameter `rng`.* Name it `rngs`"):
        pipe.transform_batch("x", lambda values, rng: values)
    with pytest.raises(TypeError, match=r"without a parameter `ctx`.* Use `transform`"):
        pipe.transform_batch("x", lambda values, ctx: values)
