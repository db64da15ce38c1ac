"""`add_field`: one more field, computed from the sample as it is at this place of the chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

ITEMS = [(1, 0), (2, 1), (3, 0)]


def indexed() -> Any:
    return kdp.from_dataset(list(ITEMS))


def stream() -> Any:
    return IterableWrapper(list(ITEMS)).to_samples(fields="x y")


FLAVOURS = pytest.mark.parametrize("make", [indexed, stream])


def epochs(pipe: Any) -> list[list[Any]]:
    return [list(pipe) for _ in range(2)]


def times_ten(x: int) -> int:
    return 10 * x


@FLAVOURS
def test_the_function_sees_the_fields_as_of_its_place(make: Any) -> None:
    pipe = (
        make()
        .add_field("before", lambda sample: sample["x"])
        .transform("x", times_ten)
        .add_field("after", lambda sample: sample["x"] + sample["before"])
        .transform("x", times_ten)
        .transform("before", lambda x: -x)
    )
    for mode in ("before after x", "x after before"):  # whatever is read first
        expected = [{"before": -x, "after": 11 * x, "x": 100 * x} for x, _ in ITEMS]
        assert epochs(pipe.select(mode)) == [[tuple(item[name] for name in mode.split()) for item in expected]] * 2


def test_a_field_of_that_name_is_replaced_and_seen_by_function() -> None:
    for make in (indexed, stream):
        pipe = make().add_field("x", lambda sample: sample["x"] + sample["y"]).select("x")
        assert epochs(pipe) == [[(1,), (3,), (3,)]] * 2


def test_it_is_computed_when_it_is_read_and_once() -> None:
    calls: list[str] = []

    def count(sample: kdp.Sample) -> int:
        calls.append(sample.key)
        return len(calls)

    for source in (indexed(), stream()):
        calls.clear()
        samples = list(source.add_field("z", count))
        assert calls == []
        assert [samples[1]["z"], samples[1]["z"], samples[0]["z"]] == [1, 1, 2]
        assert calls == ["1", "0"]


def test_columns_hold_the_new_field_and_pass_the_others_by(only_columns: Any) -> None:
    pipe = indexed().add_field("z", lambda sample: 2 * sample["x"])
    assert pipe.column("z").tolist() == [2, 4, 6]
    failing = only_columns.add_field("z", lambda sample: 1)
    assert failing.column("y").tolist() == ["y0", "y1"]
    with pytest.raises(OSError, match="a sample was made"):
        failing.column("z")


def noise(sample: kdp.Sample, rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 60))


def test_randomness_is_new_in_each_epoch_but_not_in_each_run() -> None:
    def draws(source: Any, seed: int) -> list[int]:
        dealt = source.add_field("a", noise).add_field("b", noise).select("a b").deal(batch_size=2, seed=seed)
        return [number for _ in range(2) for batch in dealt for item in batch for number in item]

    assert draws(indexed(), 0) == draws(indexed(), 0) == draws(stream(), 0)
    assert len({*draws(indexed(), 0), *draws(indexed(), 1)}) == 24


def test_ctx_is_handed_to_a_function_that_asks_for_it() -> None:
    for make in (indexed, stream):

        def note(sample: kdp.Sample, ctx: dict[str, Any]) -> int:
            ctx["noted"] = sample["x"]
            return len(ctx)

        pipe = make().record_ctx().add_field("z", note).select("z", return_ctx=True)
        assert epochs(pipe) == [[((1,), {"noted": x}) for x, _ in ITEMS]] * 2
        assert epochs(make().add_field("z", note).select("z", return_ctx=True)) == [[((1,), {})] * 3] * 2


def test_an_error_in_the_function_keeps_type_and_names_sample() -> None:
    for make in (indexed, stream):
        pipe = make().add_field("z", lambda sample: 1 // (sample["x"] - 2)).select("z")
        with pytest.raises(ZeroDivisionError) as error:
            list(pipe)
        assert error.value.__notes__ == ["kdpipes: while computing field 'z' of sample '1' (ordinal 1)"]


def test_bad_arguments_are_rejected_when_the_chain_is_built() -> None:
    for source in (indexed(), stream()):
        for name in ("", "a b", "1a", 3):
            with pytest.raises((TypeError, ValueError), match="`name` must be a valid name of a field"):
                source.add_field(name, times_ten)
        with pytest.raises(TypeError, match="`function` must be a callable, but is 3 instead"):
            source.add_field("z", 3)
        with pytest.raises(TypeError, match=r"`\.add_field`: missing a required argument: 'function'"):
            source.add_field("z")
