"""`subset` and slicing: a fixed choice of positions, on indexed sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from tests.plan.test_oversample import Blind, epochs
from tests.torchdata_parts import needs_torchdata

ITEMS = [(letter, place % 3) for place, letter in enumerate("abcdefghijkl")]
XS = "abcdefghijkl"


@pytest.fixture
def pipe() -> Any:
    return kdp.from_dataset(ITEMS, class_names=["heron", "stork", "gull"])


def test_a_slice_is_a_slice_of_the_list(pipe: Any) -> None:
    assert epochs(pipe[5:-3:2]) == ["fh", "fh"]
    for parts in ((None,), (-2, None), (None, None, -1), (8, 2, -3), (4, 4), (50, None), (-50, 3)):
        cut = slice(*parts)
        assert epochs(pipe[cut]) == [XS[cut]] * 2, cut
        assert len(pipe[cut]) == len(XS[cut])


def test_positions_are_given_in_order_and_more_than_once(pipe: Any) -> None:
    assert epochs(pipe[[1, 1]]) == ["bb", "bb"]
    for indices in ([], [-1, 0], range(4, 0, -1), np.array([3, -12], dtype=np.int8), np.array([5, 2], dtype=np.uint64)):
        expected = [XS[int(index)] for index in indices]
        assert epochs(pipe[indices]) == ["".join(expected)] * 2, indices
        assert epochs(pipe.subset(indices)) == ["".join(expected)] * 2, indices
        assert pipe.subset(indices).column("x").tolist() == expected
    assert epochs(pipe.subset((2, 3))) == ["cd", "cd"]


def test_a_choice_of_a_choice_keeps_columns_names_and_index(pipe: Any) -> None:
    chosen = pipe[1::2][[-1, 0]]
    assert [sample.index for sample in chosen] == [11, 1]
    assert chosen.column("y").tolist() == [2, 1]
    assert chosen.class_names() == ("heron", "stork", "gull")
    assert (chosen[-1]["x"], chosen[np.int64(0)]["x"]) == ("b", "l")
    assert (pipe[-1].index, pipe[-1].ordinal, pipe[-1].key) == (11, 11, "11"), (
        "counted from the end, named from the start"
    )


def test_no_field_is_read() -> None:
    pipe: Any = Blind([0, 1, 4, 9, 16, 25])[4:0:-2]
    assert [[sample.index for sample in pipe] for _ in range(2)] == [[4, 2], [4, 2]]
    assert pipe.column("y").tolist() == [16, 4]


def test_a_position_outside_is_rejected_with_the_range(pipe: Any) -> None:
    for index in (12, -13):
        with pytest.raises(IndexError) as error:
            pipe[index]
        assert str(error.value) == f"`index` must be from -12 to 11, but is {index} instead."
        with pytest.raises(IndexError) as error:
            len(pipe.subset([0, index]))
        assert str(error.value) == f"`indices` must be from -12 to 11, but {index} is among them."
    with pytest.raises(IndexError):
        kdp.from_dataset([])[0]


def test_what_is_no_position_is_rejected(pipe: Any) -> None:
    for index in (1.0, "1", True, None, (1, 2)):
        with pytest.raises(TypeError, match="`index` must be an integer, a slice or a sequence of integers"):
            pipe[index]
    with pytest.raises(TypeError, match=r"`pipe\.column\('x'\)` .* `pipe\[0\]\['x'\]`"):
        pipe["x"]
    for indices in ([0.5], [[1, 2]], ["a"], np.ones(12, dtype=bool)):
        with pytest.raises(TypeError, match="`indices` must be a sequence of integers"):
            pipe.subset(indices)


def test_missing_columns_and_selected_sources_get_a_hint(pipe: Any) -> None:
    with pytest.raises(kdp.ChainError, match=r"`SequenceWrapper` has none. Make samples of it first: `.to_samples"):
        SequenceWrapper([1, 2]).subset([0])
    with pytest.raises(kdp.ChainError, match=r"Put `.subset\(\)` before `.select\(\)`"):
        pipe.select("x").subset([0])


@needs_torchdata
def test_a_stream_says_the_way_out() -> None:
    stream = IterableWrapper(ITEMS).to_samples(fields="x y")
    with pytest.raises(AttributeError, match=r"indexed source, but `to_samples` is a stream.*`kdp.open_shards`"):
        stream.subset([1])
    for index in (1, slice(2)):
        with pytest.raises(TypeError, match=r"is a stream and cannot be indexed\. .*`kdp\.open_shards` opens shards"):
            stream[index]
    assert "".join(sample["x"] for sample in stream.header(2)) == "ab", "the way out that the error names"


def test_a_mask_keeps_what_is_true() -> None:
    pipe: Any = kdp.from_dataset(["a", "b", "c"], "x")
    for mask in (np.array([True, False, True]), torch.tensor([True, False, True])):
        assert pipe[mask].column("x").tolist() == ["a", "c"]
    with pytest.raises(IndexError, match="one entry for each of 3 samples"):
        pipe[np.array([True])]
