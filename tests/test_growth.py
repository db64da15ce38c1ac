"""What the main process keeps does not grow with epochs, batches, skips, threads and restarts."""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kdpipes as kdp
from kdpipes.core.errors import ChainError
from kdpipes.delivery import skipping
from kdpipes.delivery.skipping import Skip, SkipLimits
from kdpipes.loader import merge, profile
from kdpipes.loader.merge import SameDamage

CONTAINERS = (dict, list, set, deque)
NUM_BEFORE, NUM_AFTER = 60, 240  # in which caches of a fixed size are filled, and in which nothing may grow
SOME = 100  # entries that containers may gain once, such as pieces for a trace, up to their limit


def num_entries() -> int:
    """Return the number of entries of all containers of the process."""
    gc.collect()
    seen: dict[int, int] = {}
    for one in gc.get_objects():
        for held in (one, *gc.get_referents(one)):  # containers of plain data alone are not tracked
            if isinstance(held, CONTAINERS):
                seen[id(held)] = len(held)
    return sum(seen.values())


def growth(step: Callable[[], object], before: int = NUM_BEFORE, after: int = NUM_AFTER) -> int:
    """Return how many entries the containers gain while a function is called again and again."""
    for _ in range(before):
        step()
    at_first = num_entries()
    for _ in range(after):
        step()
    return num_entries() - at_first


@pytest.fixture(autouse=True)
def keeps_few() -> Iterator[None]:
    """Limits that a test reaches."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(skipping, "MOST_SKIPS", 40))
        stack.enter_context(mock.patch.object(merge, "_MOST_WORKERS", 10))
        stack.enter_context(mock.patch.object(merge, "_MOST_PIECES", 20))
        stack.enter_context(mock.patch.object(profile, "_NUM_EVENTS", 20))
        logging.disable(logging.CRITICAL)  # pytest keeps what is logged
        yield
    logging.disable(logging.NOTSET)


def numbers(num: int = 20) -> Any:
    return kdp.from_dataset([(number, number % 3) for number in range(num)])


def fail(x: int) -> int:
    if x % 5 == 0:
        raise ValueError(f"{x} is bad")
    return x


def draw(x: int) -> float:
    return x + random.random()


CHAINS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda _: numbers(),
    "random": lambda _: numbers().transform("x", draw),
    "skip": lambda _: numbers().transform("x", fail).on_error("skip", max_share=1),
    "substitute": lambda _: numbers().transform("x", fail).on_error("substitute", max_share=1),
    "quarantine": lambda path: numbers().transform("x", fail).on_error("quarantine", path=path / "bad", max_share=1),
    "mix": lambda _: numbers().mix(numbers(30)),
    "disk": lambda path: numbers().transform("x", abs).cache_on_disk(path / "cache"),
}


def read(loader: Any) -> None:
    """Read an epoch with all that a training loop may ask for."""
    for _ in loader:
        loader.state_dict()
    loader.stats(), loader.skipped, loader.epoch
    if not loader.skipped:
        loader.receipt()


@pytest.mark.parametrize("name", CHAINS)
def test_epochs_and_skips_leave_nothing(name: str, tmp_path: Path) -> None:
    loader = kdp.Loader(CHAINS[name](tmp_path).select("x y").deal(batch_size=4, shuffle=True).collate_samples())
    assert growth(lambda: read(loader)) < SOME


@pytest.mark.parametrize("cut", [{}, {"num_batches": 3}, {"split": "samples"}])
def test_epochs_of_damaged_streams_leave_nothing(cut: Any, stream_urls: list[str]) -> None:
    stream = kdp.stream_shards(stream_urls).on_error("skip")
    loader = kdp.Loader(stream.select("cls").deal(batch_size=4, **cut))
    assert growth(lambda: read(loader)) < SOME
    assert loader.skipped


@pytest.fixture
def stream_urls(tmp_path: Path) -> list[str]:
    """Three shards, one of which is damaged."""
    rows = kdp.from_dataset([(f"heron {number}", number % 3) for number in range(24)])
    kdp.write_shards(rows, str(tmp_path / "%06d.tar"), max_samples=8, extensions={"x": "txt", "y": "cls"})
    with (tmp_path / "000001.tar").open("r+b") as file:
        file.seek(8 * 1024)  # the header of a member
        file.write(b"x" * 100)
    return sorted(map(str, tmp_path.glob("*.tar")))


def test_batches_of_an_endless_stream_leave_nothing(stream_urls: list[str]) -> None:
    stream = kdp.stream_shards(stream_urls).on_error("skip").cycle().select("cls")
    service = kdp.ThreadReadingService(2)
    with kdp.Loader(stream.deal(batch_size=4, split="samples"), reading_service=service) as loader:
        batches = iter(loader)
        with mock.patch("kdpipes.loader.receipt._MOST_PARTS", 20), mock.patch("kdpipes.loader.receipt._MAX_KEPT", 40):
            assert growth(lambda: next(batches), 300, 1200) < 2 * SOME
        assert loader.stats()["skipped_shards"] == 1  # each pass gives up the same shard


@pytest.mark.parametrize("is_profiled", [False, True])
@pytest.mark.parametrize("service", ["threads", "processes"])
def test_epochs_of_workers_leave_nothing(service: str, is_profiled: bool) -> None:
    services = {"threads": kdp.ThreadReadingService(2), "processes": kdp.ProcessReadingService(2)}
    chain = numbers().transform("x", fail).on_error("skip", max_share=1).select("x y").deal(batch_size=4, shuffle=True)
    with kdp.Loader(chain, reading_service=services[service], profile=is_profiled) as loader:
        assert growth(lambda: read(loader)) < SOME


def test_restarts_leave_nothing() -> None:
    loader = kdp.Loader(
        numbers().select("x").deal(batch_size=4), reading_service=kdp.ThreadReadingService(1), profile=True
    )

    def restart() -> None:
        list(loader)
        loader.shutdown()

    assert growth(restart, 30, 60) < SOME
    assert len(loader.measured().workers) <= 10


def test_threads_that_read_a_measured_loader_leave_nothing() -> None:
    loader = kdp.Loader(numbers().select("x").deal(batch_size=4).map(list), profile=True)

    def read_in_thread() -> None:
        thread = threading.Thread(target=list, args=(loader,))
        thread.start()
        thread.join()

    assert growth(read_in_thread) < SOME


def skip_of(ordinal: int, epoch: int = 0) -> Skip:
    return Skip(epoch, ordinal // 4, ordinal, str(ordinal), "ValueError: bad")


def test_the_latest_skips_are_kept_and_all_are_counted() -> None:
    loader = kdp.Loader(numbers().transform("x", fail).on_error("skip", max_share=1).select("x").deal(batch_size=4))
    for _ in range(30):
        list(loader)
    assert loader.stats()["skipped_samples"] == 30 * 4
    assert [skip["epoch"] for skip in loader.skipped] == [epoch for epoch in range(20, 30) for _ in range(4)]
    assert loader.receipt()["skipped"]["num_samples"] == 4


def test_a_receipt_without_all_skips_is_an_error() -> None:
    chain = numbers(210).transform("x", fail).on_error("skip", max_share=1).select("x").deal(batch_size=4)
    loader = kdp.Loader(chain)
    list(loader)
    assert len(loader.skipped) == 40
    with pytest.raises(ChainError, match="samples were skipped in epoch 0, and only the latest ones"):
        loader.receipt()


def test_limits_count_all_skips() -> None:
    handler = mock.Mock()
    limits = SkipLimits(handler, 1, 0, rejects_twins=False)
    for ordinal in range(100):
        limits.count(skip_of(ordinal))
        limits.count(skip_of(ordinal))  # a replaced worker reports it again
    assert handler.reject_many.call_args.args[0] == 100


def test_shards_that_all_workers_gave_up_are_forgotten() -> None:
    damage = SameDamage(2)

    def give_up(number: int) -> None:
        for worker in range(2):
            damage.note(worker, number, skip_of(number))
        for worker in range(2):
            damage.check(worker, number)

    steps = iter(range(10_000))
    assert growth(lambda: give_up(next(steps)), 100, 1000) < SOME
    damage.note(0, 10_000, skip_of(1_099))  # a replaced worker reads the stream again
    for worker in range(2):
        damage.check(worker, 20_000)
    damage.note(0, 20_001, skip_of(20_000))
    damage.check(0, 30_000)
    with pytest.raises(kdp.DataError, match="could be read by only one"):
        damage.check(1, 30_000)
