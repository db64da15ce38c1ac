"""The test kit finds a chain or a pipe that breaks each promise, and lets sound ones pass."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.testing import check_elastic, check_exactly_once, check_pipe, check_resumable, full_disk, slow_consumer

STOCK = "ignore:(Lambda|Local) function is not supported:UserWarning"


def numbers(size: int = 20) -> Any:
    return kdp.from_dataset([(n, n % 3) for n in range(size)])


def stream(size: int = 20) -> Any:
    return IterableWrapper([(n, n % 3) for n in range(size)]).to_samples(fields="x y")


def by_rng(x: int, rng: np.random.Generator) -> float:
    return x + float(rng.random())


def by_process(x: int) -> int:
    return x + os.getpid()


SOUND: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: numbers().transform("x", by_rng).select("x").deal(global_batch_size=4, shuffle=True),
    "collated": lambda: numbers().select("x y").deal(batch_size=4, shuffle=True).collate_samples(),
    "stream": lambda: stream().shuffle(buffer_size=5).select("x").deal(global_batch_size=4),
    "padded": lambda: numbers(19).select("x").deal(global_batch_size=4, uneven="pad"),
    "dropped": lambda: numbers(19).oversample(mode="exact").select("x").deal(global_batch_size=4, uneven="drop"),
    "mixed": lambda: numbers().mix(numbers(5), weights=[2, 1], seed=1).select("x").deal(batch_size=4, uneven="pad"),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("check", [check_elastic, check_resumable, check_exactly_once])
def test_sound_chains_pass(name: str, check: Any) -> None:
    check(SOUND[name])
    check(SOUND[name]())


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_streams_whose_ranks_do_not_end_together_pass(uneven: Any, tmp_path: Path) -> None:
    urls = kdp.write_shards(numbers(31), tmp_path / "%03d.tar", max_samples=7, fields="y").urls

    def make() -> Any:
        return kdp.stream_shards(urls).select("key").deal(global_batch_size=12, uneven=uneven)

    check_elastic(make, num_workers=[], num_ranks=[2, 4], threads=False)
    check_exactly_once(lambda: kdp.stream_shards(urls).select("key").deal(batch_size=3, uneven=uneven), num_workers=1)


def test_a_chain_that_depends_on_the_process_is_found() -> None:
    chain = numbers().transform("x", by_process).select("x").deal(batch_size=4)
    with pytest.raises(AssertionError, match="With 1 worker processes, epoch 0: batch 0 differs"):
        check_elastic(chain, threads=False)


class Counting(kdp.PlanPipe):
    """A plan that depends on how often one was made."""

    made = itertools.count()

    def plan(self, epoch: int) -> Any:
        return np.roll(np.arange(len(self.source)), next(self.made))[:10]


def test_a_plan_that_differs_between_ranks_is_found() -> None:
    def make() -> Any:
        return Counting(numbers()).select("x").deal(global_batch_size=2)

    with pytest.raises(AssertionError, match="With 2 ranks, epoch 0: batch 0 differs"):
        check_elastic(make, num_workers=[], threads=False, num_ranks=[2])
    with pytest.raises(AssertionError, match="of 10 samples were not delivered to 2 ranks"):
        check_exactly_once(make)
    with pytest.raises(AssertionError, match="Resumed after 0 of 5 batches"):
        check_resumable(make, num_workers=[0])


class Twice(kdp.BatchPipe):
    """Numbers batches by a count of its own, which no state knows."""

    def __init__(self, source_datapipe: Any) -> None:
        super().__init__(source_datapipe)
        self.count = 0

    def process(self, batch: Any, rng: Any) -> Any:
        self.count += 1
        return self.count, batch


def test_a_pipe_that_counts_for_itself_is_found() -> None:
    chain = Twice(numbers().select("x").deal(batch_size=4))
    with pytest.raises(AssertionError, match=r"Resumed after 1 of 5 batches, 0 then 0 workers: batch 0 differs"):
        check_resumable(chain, num_workers=[0])
    with pytest.raises(AssertionError, match="With 2 worker processes"):
        check_elastic(chain, num_workers=[2])


def test_a_chain_without_deal_is_an_error() -> None:
    for check in (check_elastic, check_resumable, check_exactly_once):
        with pytest.raises(kdp.ChainError, match="has no batches"):
            check(numbers().select("x"))


class Broken(IterDataPipe[Any]):
    """A stream that breaks one promise."""

    def __init__(self, source_datapipe: Any) -> None:
        self.source_datapipe = source_datapipe


class Drawing(Broken):
    def __iter__(self) -> Iterator[Any]:
        for sample in self.source_datapipe:
            sample["x"] = float(np.random.default_rng().random())
            yield sample


class Exhausted(Broken):
    left: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.left = self.left or iter(list(self.source_datapipe))
        yield from self.left
        self.left = None


class Unpicklable(Broken):
    def __iter__(self) -> Iterator[Any]:
        self.current = (sample for sample in self.source_datapipe)
        yield from self.current


class Short(Broken):
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        yield from self.source_datapipe


class Greedy(Broken):
    def __iter__(self) -> Iterator[Any]:
        yield from self.source_datapipe
        yield kdp.Sample({"x": 1.0}, key="end", index=0)


class Changing(Broken):
    def __iter__(self) -> Iterator[Any]:
        for sample in self.source_datapipe:
            value = sample["x"]
            value += 1
            sample["x"] = value
            yield sample


class Hiding(Broken):
    def __init__(self, source_datapipe: Any) -> None:
        super().__init__(source_datapipe)
        self.batch = 4

    def __iter__(self) -> Iterator[Any]:
        yield from self.source_datapipe


class PerProcess(Broken):
    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(self.source_datapipe):
            if number % 2 == os.getpid() % 2 or os.getpid() == MAIN:
                yield sample


MAIN = os.getpid()
BROKEN = {
    Drawing: "gives the same in every epoch",
    Exhausted: "begins anew after a break",
    Unpicklable: "pickles at any time",
    Short: "has an exact length or none",
    Greedy: "gives nothing of nothing",
    Changing: "leaves the input alone",
    PerProcess: "gives the same in workers",
    Hiding: "hides no method",
}


class Unseeded(kdp.PlanPipe):
    """A plan that draws from a generator without a seed."""

    goes_by = "number"

    def plan(self, epoch: int) -> Any:
        return np.random.default_rng().permutation(len(self.source))


@kdp.sample_pipe("test_undeclared_change", changes="x")
def undeclared(sample: kdp.Sample) -> kdp.Sample:
    sample["y"] = 9
    return sample


def test_a_plan_without_a_seed_is_found() -> None:
    with pytest.raises(AssertionError, match=r"is the same when made again: .* Draw random numbers from `rng`"):
        check_pipe(Unseeded)


def test_a_change_that_is_not_declared_is_found() -> None:
    with pytest.raises(AssertionError, match="has columns of its samples: Column 'y' differs from field 'y'"):
        check_pipe(lambda source: source.test_undeclared_change())


class SameKey(kdp.MapPipe):
    """A source whose samples all have one key."""

    traits = kdp.Traits(role="source")

    def __len__(self) -> int:
        return 4

    def fetch(self, index: int) -> kdp.Sample:
        return kdp.Sample({"x": index}, key="a", index=index)


def test_the_log_blames_no_memory_for_workers_that_it_killed(caplog: pytest.LogCaptureFixture) -> None:
    check_exactly_once(numbers().select("x").deal(batch_size=2, shuffle=True))
    assert "SIGKILL" not in caplog.text


def test_keys_that_are_not_unique_are_found() -> None:
    with pytest.raises(AssertionError, match=r"4 samples of `SameKey` have the key 'a': keys must be unique"):
        check_exactly_once(SameKey().select("x").deal(batch_size=2))


def test_what_is_no_function_from_pipe_to_pipe_is_rejected() -> None:
    pipe = kdp.from_dataset([1, 2], "x")
    with pytest.raises(TypeError, match=r"`build` must be a function from pipe to pipe.*lambda source: source.name"):
        check_pipe(pipe)
    with pytest.raises(ValueError, match=r"`build` must be a function that adds pipes to its argument.*check_elastic"):
        check_pipe(lambda source: pipe)


@pytest.mark.filterwarnings(STOCK)
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_pipe_that_breaks_a_promise_is_found(kind: Any) -> None:
    with pytest.raises((AssertionError, TypeError), match=BROKEN[kind]):
        check_pipe(kind)


def test_an_error_of_the_pipe_names_the_promise() -> None:
    class Fails(kdp.PlanPipe):
        def plan(self, epoch: int) -> Any:
            return np.concatenate([np.flatnonzero(self.source.column("y") == label)[:1] for label in self.labels()])

        def labels(self) -> list[int]:
            return sorted(set(self.source.column("y").tolist()))

    with pytest.raises(ValueError, match="at least one array") as raised:
        check_pipe(Fails)
    assert "kdpipes: while checking that the pipe gives nothing of nothing" in raised.value.__notes__


def test_sound_pipes_pass() -> None:
    class Plain(Broken):
        def __iter__(self) -> Iterator[Any]:
            yield from self.source_datapipe

    check_pipe(lambda source: source.transform("x", by_rng))
    check_pipe(lambda source: source.deal(batch_size=2, shuffle=True))
    check_pipe(lambda source: source.shuffle(), flavour="iter", is_random=True)
    check_pipe(Plain)


def test_no_file_grows_on_a_full_disk(tmp_path: Any) -> None:
    path = tmp_path / "a.bin"
    with full_disk(100), path.open("wb", buffering=0) as file:
        assert file.write(bytes(100)) == 100
        with pytest.raises(OSError, match="File too large"):
            file.write(b"1")
    path.write_bytes(bytes(200))
    cache = tmp_path / "cache"
    with full_disk(4096):
        chain = kdp.from_dataset([bytes(9000)] * 3, "x").cache_on_disk(str(cache), layout="files")
        assert [len(sample["x"]) for sample in chain] == [9000] * 3
    assert chain.stats().entries == 0


def test_a_slow_consumer_gets_every_batch_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    with kdp.Loader(numbers().select("x").deal(batch_size=4), num_workers=2) as loader:
        batches = list(slow_consumer(loader, seen.append))
    assert len(batches) == 5
    assert seen == batches
    monkeypatch.setattr(time, "sleep", lambda seconds: seen.append(seconds))
    assert (list(slow_consumer([1])), seen[-1]) == ([1], 0.1)
