"""What a loader says of itself, and what it does besides giving batches."""

from __future__ import annotations

import gc
import socket
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp
from kdpipes.loader.channel import Kind, Message
from kdpipes.loader.worker import Options
from kdpipes.loader.worker_main import Sender
from tests.torchdata_parts import MultiProcessingReadingService

SERVICES = [
    pytest.param(lambda: None, id="inline"),
    pytest.param(lambda: kdp.ProcessReadingService(2), id="processes"),
    pytest.param(lambda: kdp.ThreadReadingService(2), id="threads"),
]


def numbers(size: int = 20) -> Any:
    return kdp.from_dataset([(number, 0) for number in range(size)]).select("x").deal(batch_size=3).collate_samples()


@pytest.mark.parametrize("service", SERVICES)
def test_the_statistics_count_what_was_delivered(service: Any) -> None:
    with kdp.Loader(numbers(), reading_service=service()) as loader:
        assert loader.stats()["batches"] == 0
        assert loader.stats()["samples_per_s"] == 0
        list(loader)
        next(iter(loader))
        stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (8, 23)
    assert stats["batches_per_s"] > 0
    assert 0 <= stats["wait_share"] <= 1
    assert stats["wait_s"] > 0
    assert stats["queue_depth"] >= 0
    assert {stats[name] for name in ("worker_deaths", "skipped_samples", "copied_batches", "slow_batches")} == {0}


def test_torchdatas_services_count_nothing() -> None:
    with kdp.Loader(numbers(), reading_service=MultiProcessingReadingService(1)) as loader:
        with pytest.raises(TypeError, match=r"`stats\(\)` needs one of kdpipes' reading services"):
            loader.stats()
        assert loader.skipped == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_warm_loader_gives_the_epoch_that_it_has_begun(service: Any) -> None:
    with kdp.Loader(numbers(), reading_service=service()) as loader:
        loader.warm_up()
        loader.warm_up()
        assert loader.stats()["batches"] == 0
        assert loader.state_dict()["epoch"] == 0
        assert [x.tolist() for (x,) in loader] == [x.tolist() for (x,) in numbers()]
        assert loader.state_dict()["epoch"] == 1
        loader.warm_up()
        loader.set_epoch(5)
        next(iter(loader))
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (5, 1)


def test_a_progress_bar_reaches_the_length_from_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    with kdp.Loader(numbers(), progress=True) as loader:
        assert len(list(loader)) == 7
        assert "7/7" in capsys.readouterr().err
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        del batches
        capsys.readouterr()
        loader.load_state_dict(state)
        assert len(list(loader)) == 6
    assert "7/7" in capsys.readouterr().err


def test_a_loader_that_is_warmed_up_shows_its_bar_once(capsys: pytest.CaptureFixture[str]) -> None:
    with kdp.Loader(numbers(), progress=True) as loader:
        loader.warm_up()
        assert capsys.readouterr().err == ""
        list(loader)
    assert "7/7" in capsys.readouterr().err


def test_a_state_makes_no_loader() -> None:
    with kdp.Loader(numbers()) as loader, pytest.raises(TypeError, match=r"call its `load_state_dict\(state\)`"):
        kdp.Loader.from_state(loader.state_dict(), None)


@pytest.mark.parametrize("name", ["prefetch", "start_method", "timeout_s"])
def test_what_is_for_workers_is_rejected_without_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` needs workers, but `num_workers` is 0"):
        kdp.Loader(numbers(), **{name: "fork" if name == "start_method" else 1})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_workers": 0}, "`num_workers` must be an integer of at least 1"),
        ({"num_workers": 1, "prefetch": 0}, "`prefetch` must be an integer of at least 1"),
        ({"num_workers": 1, "max_bytes": 0}, "`max_bytes`"),
        ({"num_workers": 1, "start_method": "thread"}, "`start_method` must be one of 'fork'"),
        ({"num_workers": 1, "on_worker_death": "ignore"}, "`on_worker_death` must be one of 'restart', 'raise'"),
        ({"num_workers": 1, "timeout_s": 0}, "`timeout_s` must be above 0"),
        ({"num_workers": 1, "threads_per_worker": 0}, "`threads_per_worker`"),
        ({"num_workers": 1, "num_deaths": 0}, "`num_deaths`"),
    ],
)
def test_bad_arguments_of_a_service_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kdp.ProcessReadingService(**arguments)
    with pytest.raises(TypeError, match="`timeout_s` must be a number of seconds"):
        kdp.ThreadReadingService(1, timeout_s="1")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_torch_uses_as_many_threads_in_a_worker_as_it_is_told(num_threads: int) -> None:
    pipe = kdp.from_dataset([(0, 0)]).transform("x", lambda x: [torch.get_num_threads(), float(torch.ones(999).sum())])
    service = kdp.ProcessReadingService(1, threads_per_worker=num_threads)
    with kdp.Loader(pipe.select("x").deal(batch_size=1), reading_service=service) as loader:
        assert list(loader) == [[([num_threads, 999.0],)]]


@pytest.mark.parametrize(
    ("prefetch", "max_bytes", "sizes", "is_room_left"),
    [
        (2, 10**9, [10**5], True),
        (2, 10**9, [10**5, 10**5], False),
        (9, 250_000, [10**5], True),
        (9, 250_000, [10**5, 10**5], False),
        (9, 1, [], True),
        (9, 1, [10**5], False),
        (2, 10**9, [10] * 63, True),
        (2, 10**9, [10] * 64, False),
    ],
)
def test_a_worker_is_ahead_by_so_many_batches_and_bytes(
    prefetch: int, max_bytes: int, sizes: list[int], is_room_left: bool
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Sender(theirs, Options(0, 1, prefetch, is_profiled=False, num_buffers=64, max_bytes=max_bytes))
        for number, size in enumerate(sizes):
            sender.send(Message(Kind.ITEM, number, np.zeros(size, dtype=np.uint8)))
        assert sender.is_far_ahead() is not is_room_left


@pytest.mark.parametrize("service", SERVICES)
def test_what_was_counted_outlives_an_error(service: Any, tmp_path: Any) -> None:
    flag = tmp_path / "flag"
    flag.touch()

    def fail(x: int) -> int:
        if x == 1:
            raise OSError("broken")
        if x == 7 and flag.exists():
            raise kdp.ChainError("a mistake")
        return x

    pipe = kdp.from_dataset([(number, 0) for number in range(9)]).transform("x", fail).on_error("skip").select("x")
    with kdp.Loader(pipe.deal(batch_size=3), reading_service=service()) as loader:
        with pytest.raises(kdp.ChainError):
            list(loader)
        flag.unlink()
        list(loader)
        assert [(skip["epoch"], skip["key"]) for skip in loader.skipped] == [(0, "1"), (1, "1")]
        assert loader.stats()["batches"] == 2 + 3


def test_small_batches_are_aligned_and_not_called_slow() -> None:
    def odd(x: int) -> Any:
        return np.zeros(3, dtype=np.uint8), np.arange(4.0), torch.arange(4), np.zeros(x, dtype=np.uint8)

    sizes = [5, 13, 20_000, 7] * 10
    pipe = kdp.from_dataset([(size, 0) for size in sizes]).transform("x", odd).select("x").deal(batch_size=1)
    with kdp.Loader(pipe, num_workers=1) as loader:
        for (((_, array, tensor, _),),), size in zip(loader, sizes, strict=True):
            assert array.flags.aligned, size
            assert tensor.data_ptr() % 8 == 0
            assert (array.tolist(), tensor.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
        assert loader.stats()["slow_batches"] == 0


def test_a_loader_shows_its_chain_and_counts_its_epochs() -> None:
    with kdp.Loader(numbers(), num_workers=2) as loader:
        assert repr(loader) == "<kdpipes.Loader of from_dataset → select → deal → collate_samples; 2 workers>"
        assert loader.epoch == 0
        next(iter(loader))
        assert loader.epoch == 0
        state = loader.state_dict()
    with kdp.Loader(numbers()) as loader:
        loader.load_state_dict(state)
        seen = []
        while loader.epoch < 2:
            seen.append((loader.epoch, len(list(loader))))
        assert seen == [(0, 6), (1, 7)]


def test_a_stream_has_no_length_and_says_what_has() -> None:
    with (
        kdp.Loader(kdp.stream_shards(["a.tar"]).select("key").deal(batch_size=1)) as loader,
        pytest.raises(TypeError, match=r"The loader has no length.*`kdp\.open_shards`"),
    ):
        len(loader)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"progress": "yes"}, "`progress` must be True or False"),
        ({"reading_service": kdp.ThreadReadingService}, r"Write `ThreadReadingService\(\.\.\.\)` to make one"),
    ],
)
def test_bad_arguments_of_a_loader_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        kdp.Loader(numbers(), **arguments)


@pytest.mark.parametrize("ends", ["closed", "dropped", "left early"])
@pytest.mark.parametrize("service", SERVICES)
def test_a_chain_is_freed_at_once_after_its_loader(service: Any, ends: str) -> None:
    class Numbers:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            return index

    def use() -> weakref.ref[Numbers]:
        numbers = Numbers()
        chain = kdp.from_dataset(numbers, fields="x").on_error("skip").cache_in_memory().select("x").deal(batch_size=3)
        loader = kdp.Loader(chain, reading_service=service())
        for count, _ in enumerate(loader):
            if ends == "left early" and count == 2:
                break
        if ends == "closed":
            loader.close()
        return weakref.ref(numbers)

    use()  # what is imported now makes no cycles below
    gc.disable()
    try:
        assert use()() is None
    finally:
        gc.enable()
