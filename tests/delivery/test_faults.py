"""Workers that die, get stuck, run out of memory or raise: what is delivered stays that of `list(pipe)`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.loader import buffers
from kdpipes.loader.channel import Channel
from kdpipes.loader.merge import Merger
from kdpipes.loader.processes import WorkerProcess
from tests.delivery.faults import end_process, numbers, services, wait_for_ever, while_armed, within_patience


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
@pytest.mark.parametrize("at", [0, 9, 19])
def test_a_worker_that_dies_once_is_replaced_without_a_trace(how: str, at: int, tmp_path: Path) -> None:
    pipe = numbers(while_armed(tmp_path / "flag", at, lambda: end_process(how), once=True))
    with kdp.Loader(pipe, num_workers=2, start_method="fork") as loader:
        assert list(loader) == list(loader) == list(numbers())
        assert loader.stats()["worker_deaths"] == 1


def test_a_dead_spawned_worker_is_replaced_in_the_same_order(tmp_path: Path) -> None:
    pipe = numbers(while_armed(tmp_path / "flag", 9, lambda: end_process("SIGSEGV"), once=True), shuffle=True)
    with kdp.Loader(pipe, num_workers=2, start_method="spawn") as loader:
        assert list(loader) == list(numbers(shuffle=True))
        assert loader.stats()["worker_deaths"] == 1


@pytest.mark.parametrize("kind", ["one_to_one", "several_items", "stream"])
def test_workers_killed_at_any_moment_change_nothing(kind: str) -> None:
    def chain() -> Any:
        if kind == "stream":
            source = IterableWrapper(range(40), deepcopy=False).to_samples(fields="x")
        else:
            source = kdp.from_dataset([(number, 0) for number in range(40)])
        grown = source.transform("x", lambda x: torch.full([6000 * (x % 3)], x)).select("x")
        dealt = grown.deal(batch_size=2) if kind == "stream" else grown.deal(batch_size=2, shuffle=True, seed=1)
        return dealt.unbatch() if kind == "several_items" else dealt

    draw, kills, reference = random.Random(7), 0, chain()
    with kdp.Loader(chain(), num_workers=2, start_method="fork") as loader:
        while kills < 30:
            delivered = []
            for item in loader:
                delivered.append(item)
                if draw.random() < 0.2:
                    os.kill(draw.choice(multiprocessing.active_children()).pid or 0, signal.SIGKILL)
                    kills += 1
            assert same(delivered, list(reference))


def test_a_sample_that_always_kills_is_named_and_left_out(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    service = kdp.ProcessReadingService(2, start_method="fork", num_deaths=2)
    with kdp.Loader(numbers(while_armed(flag, 5, lambda: end_process("SIGSEGV"))), reading_service=service) as loader:
        told = r"SIGSEGV, while applying 'step' to field 'x' of sample '5'.*2 workers have died at this point"
        with pytest.raises(kdp.WorkerError, match=told):
            list(loader)
        assert loader.stats()["worker_deaths"] == 2
        with pytest.raises(kdp.WorkerError, match=told):
            list(loader)
        flag.unlink()
        assert list(loader) == list(numbers())


@pytest.mark.parametrize("limit", [4, 12])
def test_the_number_of_successive_deaths_can_be_chosen(limit: int, tmp_path: Path) -> None:
    def die_one_later(x: int) -> int:
        if x == len(list(tmp_path.iterdir())):
            (tmp_path / str(x)).touch()
            end_process("SIGKILL")
        return x

    pipe = kdp.from_dataset([(number, 0) for number in range(20)]).transform("x", die_one_later).select("x")
    service = kdp.ProcessReadingService(1, start_method="fork", max_worker_deaths=limit)
    told = rf"{limit} workers have died without a batch in between; `max_worker_deaths` of .* is {limit}"
    with (
        kdp.Loader(pipe.deal(batch_size=20), reading_service=service) as loader,
        pytest.raises(kdp.WorkerError, match=told),
    ):
        list(loader)


@pytest.mark.parametrize("error", [BrokenPipeError, ProcessLookupError])
@pytest.mark.parametrize("num_deaths", [2, 3])
def test_a_spawned_worker_that_dies_before_it_begins_is_a_death(
    num_deaths: int, error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*arguments: Any) -> WorkerProcess:
        if len(tried) < 2:
            tried.append(True)
            raise error
        return whole(*arguments)

    tried: list[bool] = []
    whole = WorkerProcess.start
    monkeypatch.setattr(WorkerProcess, "start", start)
    service = kdp.ProcessReadingService(1, start_method="fork", num_deaths=num_deaths)
    with kdp.Loader(numbers(), reading_service=service) as loader:
        if num_deaths == 2:
            with pytest.raises(kdp.WorkerError, match=r"before it had read its chain.* 2 workers have died"):
                list(loader)
        assert list(loader) == list(numbers())
        assert loader.stats()["worker_deaths"] == 2


def test_more_deaths_at_a_sample_than_in_all_cannot_be_asked_for() -> None:
    with pytest.raises(
        ValueError, match=r"`max_worker_deaths` must be at least 50, which is `num_deaths`, but is 10 instead"
    ):
        kdp.ProcessReadingService(1, num_deaths=50)
    assert kdp.ProcessReadingService(1, num_deaths=50, max_worker_deaths=50).num_deaths == 50


def test_a_death_is_an_error_at_once_where_that_is_asked_for(tmp_path: Path) -> None:
    pipe = numbers(while_armed(tmp_path / "flag", 5, lambda: end_process("exit"), once=True))
    service = kdp.ProcessReadingService(2, on_worker_death="raise")
    with kdp.Loader(pipe, reading_service=service) as loader:
        with pytest.raises(kdp.WorkerError, match=r"ended with status 3 before its work was done.*sample '5'"):
            list(loader)
        assert list(loader) == list(numbers())


def test_a_worker_that_gets_stuck_once_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    stuck = while_armed(tmp_path / "flag", 9, wait_for_ever(str(tmp_path / "fifo")), once=True)
    with kdp.Loader(numbers(stuck), num_workers=2, timeout_s=1) as loader:
        assert list(loader) == list(loader) == list(numbers())
        assert loader.stats()["worker_deaths"] >= 1


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_worker_that_always_gets_stuck_is_an_error(kind: str, tmp_path: Path) -> None:
    flag, fifo = tmp_path / "flag", tmp_path / "fifo"
    os.mkfifo(fifo)
    processes = kdp.ProcessReadingService(2, timeout_s=1, num_deaths=2)
    service = processes if kind == "processes" else kdp.ThreadReadingService(2, timeout_s=1)
    with kdp.Loader(numbers(while_armed(flag, 9, wait_for_ever(str(fifo)))), reading_service=service) as loader:
        with pytest.raises(kdp.WorkerError, match="made no batch in 1 s"):
            list(loader)
        flag.unlink()
        if kind == "threads":
            os.close(os.open(fifo, os.O_WRONLY))  # lets go of the thread
        assert list(loader) == list(numbers())


def test_without_shared_memory_batches_arrive_with_one_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reject(file: int, start: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(buffers, "_allocate", reject)
    pipe = numbers(lambda x: torch.full([50_000], x), size=8)
    with (
        caplog.at_level(logging.WARNING, "kdpipes"),
        kdp.Loader(pipe, num_workers=1, start_method="fork") as loader,
    ):
        assert same([list(loader), list(loader)], [list(pipe), list(pipe)])
        assert [record.name for record in caplog.records] == ["kdpipes"]
        assert "Cannot allocate memory" in caplog.text
        assert loader.stats()["slow_batches"] == 8  # "batches that found no shared memory": 4 in each epoch


@services()
def test_who_keeps_every_batch_gets_memory_of_its_own(service: Any) -> None:
    pipe = numbers(lambda x: torch.full([1 << 17], x), size=24)
    with kdp.Loader(pipe, reading_service=service) as loader:
        kept, again = list(loader), list(loader)
        for (tensor,), _ in kept:
            tensor += 100  # reaches nothing else
        assert same(again, list(pipe))
        for child in multiprocessing.active_children():
            child.kill()
        third = list(loader)
    del loader
    expected = list(pipe)
    assert same([again, third], [expected, expected])
    assert [int(tensor[-1]) for ((tensor,), _) in kept] == [100 + 2 * number for number in range(12)]


class Tagged(torch.Tensor):
    """A tensor with an attribute."""


@dataclass
class Box:
    """A dataclass around a tensor."""

    content: torch.Tensor
    name: str | None = None


def any_kind(x: int) -> Any:
    tagged = torch.full([3], float(x)).as_subclass(Tagged)
    tagged.tag = ("tag", x)
    frozen = np.full(5000 * x, x)
    frozen.flags.writeable = False
    objects = np.empty(2, dtype=object)
    objects[:] = ["word", torch.tensor(x)]
    return {
        "growing": torch.full([x * 4000, 2], x),
        "empty": (torch.empty(0, 3), np.empty((2, 0)), torch.empty(0, dtype=torch.bool)),
        "nested": {"deep": [{"scalar": torch.tensor(x), "flag": torch.tensor([True, False])}, None]},
        "half": torch.full([3], x, dtype=torch.bfloat16),
        "strided": torch.arange(12).reshape(3, 4).t()[::2],
        "complex": torch.full([2], x + 1j).conj(),
        "fortran": np.asfortranarray(np.full((30, 40), x)),
        "frozen": frozen,
        "objects": objects,
        "dates": np.array(["2020-01-01"], dtype="M8[D]"),
        "record": np.zeros(2, dtype=[("a", "f4"), ("b", "S3")]),
        "bytes": bytes([x]) * (1 << 20),
        "words": ("word", "ä" * x, 1.5, x),
        "tagged": tagged,
        "box": Box(torch.full([2], x)),
        "sparse": torch.eye(3).to_sparse(),
    }


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        attributes = vars(one) == vars(other) and one.dtype == other.dtype and one.shape == other.shape
        return attributes and bool((one.to_dense() == other.to_dense()).all())
    if isinstance(one, np.ndarray) and one.dtype != object:
        layout = one.flags.writeable == other.flags.writeable and one.flags.f_contiguous == other.flags.f_contiguous
        return layout and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Box):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | np.ndarray):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@services()
def test_batches_of_any_kind_and_size_travel(service: Any) -> None:
    pipe = kdp.from_dataset([(x, 0) for x in (0, 5, 1, 4, 2, 3)]).transform("x", any_kind).select("x").deal(1)
    with kdp.Loader(pipe, reading_service=service) as loader:
        assert same([list(loader), list(loader)], [list(pipe), list(pipe)])


@services()
def test_interrupted_epochs_and_loaders_keep_their_order(service: Any) -> None:
    expected = list(numbers())
    with (
        kdp.Loader(numbers(), reading_service=service) as one,
        kdp.Loader(numbers(), reading_service=service) as other,
    ):
        for number in range(30):
            assert [batch for batch, _ in zip(one, range(number % 11), strict=False)] == expected[: number % 11]
        assert list(zip(one, other, strict=True)) == list(zip(expected, expected, strict=True))
        first, second = iter(one), iter(one)
        assert list(second) == expected
        with pytest.raises(RuntimeError, match="invalidated"):
            next(first)


def test_the_first_batches_of_very_many_epochs_do_not_block() -> None:
    pipe = numbers(lambda x: torch.full([10_000], x), size=8)
    with kdp.Loader(pipe, num_workers=2, start_method="fork") as loader:
        first = within_patience(lambda: [next(iter(loader)) for _ in range(600)])
    assert all(int(batch[0][0][0]) == 0 for batch in first)


@services()
def test_an_iterator_that_outlives_its_loader_ends_with_an_error(service: Any) -> None:
    loader = kdp.Loader(numbers(), reading_service=service)
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(RuntimeError):
        within_patience(lambda: list(batches))


@services()
def test_ctrl_c_while_waiting_surfaces_and_next_epoch_is_whole(service: Any, tmp_path: Path) -> None:
    main = os.getpid()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = while_armed(tmp_path / "flag", 9, lambda: os.kill(main, signal.SIGINT), once=True)
    try:
        with kdp.Loader(numbers(interrupt), reading_service=service) as loader:
            with pytest.raises(KeyboardInterrupt):
                assert [list(loader) for _ in range(1000)]
            assert list(loader) == list(numbers())
    finally:
        signal.signal(signal.SIGINT, before)


@services()
def test_ctrl_c_ends_the_workers_and_the_iterator_continues(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(merger: Merger) -> Any:
        raise KeyboardInterrupt

    with kdp.Loader(numbers(), reading_service=service) as loader:
        batches = iter(loader)
        delivered = [next(batches) for _ in range(3)]
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(Merger, "_next", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    next(batches)
            assert multiprocessing.active_children() == []
            assert loader.state_dict()["batch"] == len(delivered)
            delivered.append(next(batches))
        assert [*delivered, *batches] == list(numbers())
        assert loader.epoch == 1
        assert list(loader) == list(numbers())
        assert (loader.epoch, loader.stats()["batches"]) == (2, 20)


def test_an_interrupted_iterator_gives_way_to_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(merger: Merger) -> Any:
        raise KeyboardInterrupt

    with kdp.Loader(numbers(), num_workers=2, start_method="fork") as loader:
        batches = iter(loader)
        with monkeypatch.context() as patched:
            patched.setattr(Merger, "_next", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        later = iter(loader)
        first = next(later)
        with pytest.raises(RuntimeError, match="invalidated"):
            next(batches)
        assert [first, *later] == list(numbers())


def test_ctrl_c_within_an_order_leaves_a_working_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    with kdp.Loader(numbers(), num_workers=2, start_method="fork") as loader:
        list(loader)
        with monkeypatch.context() as patched:

            def half(channel: Channel, content: bytes) -> None:
                channel.link.send(content[:40])
                patched.undo()  # while workers end, Ctrl-C is held off
                raise KeyboardInterrupt

            patched.setattr(Channel, "post", half)
            with pytest.raises(KeyboardInterrupt):
                list(loader)
        assert within_patience(lambda: list(loader)) == list(numbers())
