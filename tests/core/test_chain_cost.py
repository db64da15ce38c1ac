"""Reading a chain costs the same however much data its pipes hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.core.chain import Chain


def num_calls(function: Callable[[], Any]) -> int:
    """Return how many Python functions run, counting each time that a generator continues."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def documents(number: int, length: int) -> list[list[int]]:
    return [list(range(length)) for _ in range(number)]


@pytest.mark.parametrize("collect", [list, tuple, lambda held: dict(enumerate(held))])
@pytest.mark.parametrize("wrap", [SequenceWrapper, IterableWrapper])
def test_documents_in_a_stock_pipe_are_not_searched(wrap: Any, collect: Callable[[Any], Any]) -> None:
    few, many = (wrap(collect(documents(*size)), deepcopy=False) for size in ((10, 10), (1000, 500)))
    assert len(Chain.of(many)) == 1
    # A few calls more or less are the collector's and the caches of abstract classes.
    assert num_calls(lambda: Chain.of(many)) <= num_calls(lambda: Chain.of(few)) + 20 < 500


def test_pipes_in_a_long_collection_are_found() -> None:
    class Joined(kdp.MapPipe):
        def __init__(self, sources: Any) -> None:
            self.sources = sources

    sources = [kdp.from_dataset([number], "x") for number in range(1200)]
    assert len(Chain.of(Joined(sources))) == len(Chain.of(Joined(dict(enumerate(sources))))) == 1201


class Document:
    num_pickled: ClassVar[int] = 0

    def __reduce__(self) -> Any:
        Document.num_pickled += 1
        return Document, ()


@pytest.mark.parametrize("how", [{}, {"reading_service": kdp.ThreadReadingService(2)}], ids=["inline", "threads"])
def test_later_epochs_pickle_no_data(how: dict[str, Any]) -> None:
    source = SequenceWrapper([(Document(), number) for number in range(100)], deepcopy=False)
    with kdp.Loader(source.to_samples(fields="x y").select("y").deal(batch_size=10), **how) as loader:
        assert len(list(loader)) == 10
        Document.num_pickled = 0  # the first epoch looks for pipes that are to be sharded by torch's own functions
        assert [len(list(loader)) for _ in range(2)] == [10, 10]
    assert Document.num_pickled == 0
