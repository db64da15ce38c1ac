"""Workers that are threads: nothing is pickled, streams are copied, data and functions are shared."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.chain import Chain

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


def threaded(pipe: Any, number: int = 2, **options: Any) -> kdp.Loader:
    return kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(number, **options))


def negative(x: int) -> int:
    return -x


def numbers(function: Any = negative, size: int = 9) -> Any:
    return kdp.from_dataset([(number, 0) for number in range(size)]).transform("x", function).select("x").deal(2)


def xs(batches: Any) -> list[int]:
    return [x for batch in batches for (x,) in batch]


class Locked(kdp.SampleSource):
    """A dataset that cannot be pickled, and knows which threads have read it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return 20

    def getitem_x(self, index: int) -> int:
        with self.lock:
            self.readers.add(threading.current_thread().name)
        return index


def test_nothing_is_pickled_and_the_data_is_shared() -> None:
    dataset = Locked()
    with threaded(dataset.select("x").deal(2), 3) as loader:
        assert [xs(loader), xs(loader)] == [[*range(20)]] * 2
    assert dataset.readers == {f"kdpipes worker {number}" for number in range(3)}


def test_an_error_keeps_type_and_traceback_and_epochs_continue() -> None:
    def invert(x: int) -> float:
        return 1 / (x - 5)

    with threaded(numbers(invert), 3) as loader:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as caught:
                list(loader)
            notes = "".join(caught.value.__notes__)
            assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "invert"
            assert "batch 2 of epoch" in notes
    with threaded(numbers(invert, 5), 3) as loader:
        assert len(list(loader)) == len(list(loader)) == 3


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_ends_a_program_ends_no_thread_in_silence(kind: type[BaseException]) -> None:
    is_broken = [True]

    def leave(x: int) -> int:
        if x == 5 and is_broken[0]:
            raise kind
        return x

    class Source(kdp.SampleSource):
        def __len__(self) -> int:
            return 9

        def getitem_x(self, index: int) -> int:
            return leave(index)

    with threaded(Source().select("x").deal(2)) as loader:
        with pytest.raises(RuntimeError, match=f"A worker raised {kind.__name__}"):
            list(loader)
        is_broken.clear()
        is_broken.append(False)
        assert xs(loader) == [*range(9)]


def test_epochs_that_are_left_early_are_followed_by_whole_ones() -> None:
    with threaded(numbers(), 3, prefetch=1) as loader:
        for taken in range(5):
            for number, _ in enumerate(loader):
                if number == taken:
                    break
            assert xs(loader) == [-x for x in range(9)]


def test_threads_end_with_their_loader() -> None:
    before = set(threading.enumerate())
    for end in (lambda loader: loader.close(), lambda loader: None):
        loader = threaded(numbers(), 3)
        next(iter(loader))
        workers = set(threading.enumerate()) - before
        assert len(workers) == 3
        end(loader)
        del loader
        for worker in workers:
            worker.join(20)
        assert not any(worker.is_alive() for worker in workers)


def test_threads_that_begin_an_epoch_together_do_not_disturb() -> None:
    """torch's graph traversal sets hooks on classes, which two threads must not do at once."""
    pipe = numbers(size=32).map(list).map(list).map(list)
    expected = [-x for x in range(32)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with threaded(pipe, 4) as loader:
            for _ in range(20):
                assert xs(loader) == expected
    finally:
        sys.setswitchinterval(interval)


def test_another_loader_is_made_while_threads_begin_an_epoch() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with threaded(numbers(size=8), 2) as loader:
            for _ in range(20):
                batches = iter(loader)
                with threaded(numbers(size=2), 1) as other:
                    assert xs(other) == [0, -1]
                assert len(xs(batches)) == 8
    finally:
        sys.setswitchinterval(interval)


def flat(items: Any) -> list[int]:
    """Return the numbers among the items, sorted; a shuffled stream pairs them otherwise each time."""
    return sorted(number for item in items for number in (item if isinstance(item, tuple) else (item,)))


def side_by_side(pipe: Any) -> tuple[list[Any], list[Any]]:
    """Return the items of two copies that are read in turns."""
    one, other = Chain.of(pipe).copy_streams(), Chain.of(pipe).copy_streams()
    pairs = list(zip(iter(one), iter(other), strict=True))
    return [first for first, _ in pairs], [second for _, second in pairs]


def shuffled() -> Any:
    return IterableWrapper(range(20)).shuffle()


def forked() -> Any:
    one, other = shuffled().fork(2)
    return one.zip(other.map(negative)).map(sum)


def demuxed() -> Any:
    even, odd = shuffled().demux(2, lambda x: x % 2)
    return even.map(negative).concat(odd)


def unzipped() -> Any:
    one, other = IterableWrapper([(n, -n) for n in range(20)]).shuffle().unzip(2)
    return one.zip(other)


class Weighted(IterDataPipe[Any]):
    """Keeps its sources in pairs, as torchdata's SampleMultiplexer does."""

    def __init__(self, *sources: Any) -> None:
        self.pairs = [(source, 1.0) for source in sources]

    def __iter__(self) -> Iterator[Any]:
        for source, _ in self.pairs:
            yield from source


class Both(NamedTuple):
    first: Any
    second: Any


class Paired(IterDataPipe[Any]):
    """Keeps its sources in a named tuple."""

    def __init__(self, *sources: Any) -> None:
        self.sources = Both(*sources)

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.sources, strict=True)


CHAINS: dict[str, Any] = {
    "shuffle": shuffled,
    "zip": lambda: shuffled().zip(shuffled()),
    "fork": forked,
    "demux": demuxed,
    "unzip": unzipped,
    "mux": lambda: shuffled().mux(shuffled()),
    "batch": lambda: shuffled().batch(3).unbatch(),
    "cycle": lambda: IterableWrapper(range(3)).cycle(4),
    "pairs": lambda: Weighted(shuffled(), shuffled()),
    "named tuple": lambda: Paired(shuffled(), shuffled()),
}


@pytest.mark.parametrize("name", CHAINS)
def test_copies_of_a_stream_do_not_touch_each_other(name: str) -> None:
    make = CHAINS[name]
    one, other = side_by_side(make())
    assert flat(one) == flat(other) == flat(make())


def test_a_copy_of_a_stream_being_read_begins_anew() -> None:
    pipe = shuffled()
    items = iter(pipe)
    seen = [next(items) for _ in range(3)]
    assert sorted(Chain.of(pipe).copy_streams()) == [*range(20)]
    assert sorted([*seen, *items]) == [*range(20)]


@pytest.mark.parametrize("name", ["shuffle", "zip", "fork", "demux", "mux", "unzip", "pairs"])
def test_a_stream_has_the_same_epochs_in_threads_as_alone(name: str) -> None:
    def chain() -> Any:
        return CHAINS[name]().map(lambda x: (x,)).to_samples(fields="x").select("x").deal(3, seed=4)

    pipe = chain()
    expected = [list(pipe) for _ in range(2)]
    assert flat(xs(expected[0])) == flat(CHAINS[name]())
    with threaded(chain(), 3) as loader:
        assert [list(loader), list(loader)] == expected


class Gated(Locked):
    """A dataset that makes nothing before somebody opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def getitem_x(self, index: int) -> int:
        self.gate.wait()
        return index


def test_a_thread_that_makes_nothing_is_an_error_with_a_hint() -> None:
    dataset = Gated()
    with threaded(dataset.select("x").deal(2), 1, timeout_s=0.05) as loader:
        with pytest.raises(kdp.WorkerError, match="Threads cannot be killed"):
            next(iter(loader))
        dataset.gate.set()


def test_a_function_that_holds_a_lock_is_called_as_it_is() -> None:
    lock = threading.Lock()

    def guarded(x: int) -> int:
        with lock:
            return -x

    with threaded(numbers(guarded)) as loader:
        assert xs(loader) == [-x for x in range(9)]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_threads": 0}, ValueError, "`num_threads` must be an integer of at least 1"),
        ({"num_threads": 1.5}, TypeError, "`num_threads` must be an integer"),
        ({"num_threads": 1, "prefetch": 0}, ValueError, "`prefetch` must be"),
        ({"num_threads": 1, "timeout_s": 0}, ValueError, "`timeout_s` must be above 0"),
        ({"num_threads": 1, "timeout_s": "1"}, TypeError, "`timeout_s` must be a number"),
    ],
)
def test_bad_arguments_are_rejected(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kdp.ThreadReadingService(**arguments)
