"""`repeat_until`: whole rounds of the source, until there are enough samples or rounds."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.plan.test_filter_classes import FLAVOURS, indexed, stream
from tests.plan.test_oversample import Blind, epochs, jitter, unreadable

ITEMS = [("a", 0), ("b", 1), ("c", 0)]


@FLAVOURS
@pytest.mark.parametrize("param", ["min_size", "repetitions"])
def test_whole_rounds_follow_each_other(make: Any, param: str) -> None:
    for value, rounds in [(1, 1), (3, 1), (4, 2), (9, 3)] if param == "min_size" else [(1, 1), (2, 2)]:
        pipe = make(ITEMS).repeat_until(**{param: value})
        assert epochs(pipe) == ["abc" * rounds] * 2
        assert len(pipe) == 3 * rounds


def test_an_indexed_source_repeats_its_columns_too(letters: kdp.MapPipe) -> None:
    pipe: Any = letters.repeat_until(min_size=7)
    assert pipe.column("y").tolist() == [0, 1, 0, 2, 0, 1] * 2
    assert (pipe[7]["x"], pipe[-1]["x"], pipe[7].index) == ("b", "f", 1)
    assert pipe.class_names() == ("heron", "stork", "gull")


def test_no_field_is_read() -> None:
    pipe: Any = Blind([0, 1, 2]).repeat_until(min_size=4)
    assert [[sample.index for sample in pipe] for _ in range(2)] == [[0, 1, 2, 0, 1, 2]] * 2
    assert pipe.column("y").tolist() == [0, 1, 2, 0, 1, 2]
    blind = IterableWrapper(range(3)).to_samples(fields={"x": unreadable}).repeat_until(repetitions=2)
    assert [[sample.key for sample in blind] for _ in range(2)] == [["0", "1", "2", "0", "1", "2"]] * 2


@FLAVOURS
def test_a_repeated_sample_is_augmented_anew(make: Any) -> None:
    work_first = make(ITEMS).transform("x", jitter).repeat_until(min_size=9)
    plan_first = make(ITEMS).repeat_until(min_size=9).transform("x", jitter)
    for repeated in (work_first, plan_first):
        dealt = repeated.select("x").deal(batch_size=2)
        drawn = [x for _ in range(2) for batch in dealt for (x,) in batch]
        assert len(drawn) == len(set(drawn)) == 18


@pytest.mark.filterwarnings("ignore:.* keeps none of:UserWarning")
def test_an_empty_source_cannot_reach_a_size() -> None:
    for make in (indexed, stream):
        for source in (make([]), make(ITEMS).filter_classes(valid=[])):
            pipe = source.repeat_until(min_size=5)
            for _ in range(2):
                with pytest.raises(
                    kdp.DataError, match=r"cannot reach `min_size=5` because its source is empty.*too strict\?"
                ):
                    list(pipe)
            assert epochs(source.repeat_until(repetitions=3)) == ["", ""]


def test_bad_arguments_are_rejected_when_the_chain_is_built() -> None:
    for make in (indexed, stream):
        for arguments in ({}, {"min_size": 2, "repetitions": 2}):
            with pytest.raises(ValueError, match="Exactly one of `min_size` or `repetitions` must be given"):
                make(ITEMS).repeat_until(**arguments)
        for param in ("min_size", "repetitions"):
            with pytest.raises(ValueError, match=f"`{param}` must be an integer of at least 1, but is 0 instead"):
                make(ITEMS).repeat_until(**{param: 0})
            with pytest.raises(TypeError, match=f"`{param}` must be an integer of at least 1, but is 2.0 instead"):
                make(ITEMS).repeat_until(**{param: 2.0})
        with pytest.raises(kdp.ChainError, match=r"Put `.repeat_until\(\)` before `.select\(\)`"):
            make(ITEMS).select("x").repeat_until(repetitions=2)
