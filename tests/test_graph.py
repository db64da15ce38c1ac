"""Reading a chain finds the pipes that torch's traversal finds, and pickles nothing."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

import kdpipes as kdp
from kdpipes.core.chain import Chain
from kdpipes.core.stock import upstream_of


class Held(IterDataPipe[Any]):
    """A pipe that holds what it is given, and something that cannot be pickled."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.locks = [threading.Lock()]


def _source() -> IterableWrapper[Any]:
    return IterableWrapper([1])


def test_sources_are_found_in_attributes_and_collections() -> None:
    one, other = _source(), _source()
    for held in ([one, 3, other], (one, other), {"a": one, 4: (other, None)}):
        assert upstream_of(Held(held)) == [one, other]
    assert upstream_of(Held(one)) == [one]
    assert upstream_of(Held([1, "a", None])) == []


def test_each_pipe_is_listed_once_and_nearest_first() -> None:
    source = _source()
    left, right = Held(source), Held(source)
    left_again = Held(left)
    end = Held([left_again, right])
    found = Chain.of(end).pipes
    assert [id(pipe) for pipe in found] == [id(pipe) for pipe in (end, left_again, right, left, source)]


def test_a_chain_reads_as_torch_reads_it() -> None:
    one = kdp.from_dataset([(1, 0), (2, 1)]).transform("x", str).filter_classes(valid=[1]).deal(batch_size=1)
    end = IterableWrapper([3]).zip(one.map(str), _source()).batch(2)

    def ids(graph: Any) -> set[int]:
        return {found for key, (_, below) in graph.items() for found in {key, *ids(below)}}

    assert {id(pipe) for pipe in Chain.of(end).pipes} == ids(traverse_dps(end))
    assert len(Chain.of(end).pipes) == 9
