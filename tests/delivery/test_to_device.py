"""Batches on a device: on the CPU nothing happens; the order of sending and receiving is tested with a stand-in."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe, _ahead, _mapped, _OnStream
from tests.torchdata_parts import InProcessReadingService

Pair = namedtuple("Pair", "x y")


def chain() -> Any:
    pipe = kdp.from_dataset([(number, 0) for number in range(10)]).select("x y").deal(batch_size=4)
    return pipe.collate_samples().to_device("cpu")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_the_cpu_batches_stay_what_they_are(num_workers: int) -> None:
    with kdp.Loader(chain(), num_workers=num_workers) as loader:
        assert len(loader) == 3
        assert [x.tolist() for x, y in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_only_tensors_move_and_containers_keep_their_form() -> None:
    batch = {"a": [torch.ones(1), "word"], "b": Pair(torch.zeros(1), None), "c": (1, b"x")}
    moved = _mapped(batch, lambda tensor: tensor + 1)
    assert repr(moved) == repr({"a": [torch.ones(1) + 1, "word"], "b": Pair(torch.ones(1), None), "c": (1, b"x")})


class StandIn:
    """A stream that notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("end")

    def send(self, batch: Any) -> Any:
        self.log.append(f"send {batch}")
        return batch

    def receive(self, batch: Any) -> Any:
        self.log.append(f"receive {batch}")
        return batch


def test_the_next_batch_is_sent_before_one_is_received() -> None:
    stream = StandIn()
    assert list(_ahead(iter([1, 2, 3]), stream)) == [1, 2, 3]
    assert stream.log == ["send 1", "send 2", "receive 1", "send 3", "receive 2", "receive 3", "end"]
    assert list(_ahead(iter([]), StandIn())) == []


class Late:
    """Batches of which the next one is there only when somebody waits for it."""

    def __init__(self, batches: list[int], ready: list[bool]) -> None:
        self._batches, self._ready = iter(batches), iter(ready)

    def __iter__(self) -> Late:
        return self

    def __next__(self) -> int:
        return next(self._batches)

    def is_ready(self) -> bool:
        return next(self._ready)


def test_a_batch_is_received_before_one_that_is_late() -> None:
    stream = StandIn()
    assert list(_ahead(Late([1, 2, 3], [False, True, False]), stream)) == [1, 2, 3]
    assert stream.log == ["send 1", "receive 1", "send 2", "send 3", "receive 2", "receive 3", "end"]


def test_a_batch_left_behind_ends_the_stream() -> None:
    stream = StandIn()
    batches = _ahead(iter([1, 2, 3]), stream)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert stream.log == ["send 1", "send 2", "receive 1", "end"]


def _wait_for(path: Path, batch: Any) -> Any:
    deadline = time.monotonic() + 60
    while int(batch[0][0]) >= 4 and not path.exists():
        assert time.monotonic() < deadline, "the first batch was held back until the second one was made"
        time.sleep(0.01)
    return batch


@pytest.mark.parametrize("service", [kdp.ThreadReadingService(1), kdp.ProcessReadingService(1)], ids=["thread", "fork"])
@pytest.mark.parametrize("is_profiled", [False, True], ids=["plain", "profiled"])
def test_a_batch_does_not_wait_for_the_worker_to_make_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Any, is_profiled: bool
) -> None:
    monkeypatch.setattr(DeviceMoverIterDataPipe, "iterate", lambda self: _ahead(iter(self.source), StandIn()))
    pipe = kdp.from_dataset([(number, 0) for number in range(10)]).select("x").deal(batch_size=4).collate_samples()
    pipe = pipe.map(partial(_wait_for, tmp_path / "go")).to_device("cpu")
    with kdp.Loader(pipe, reading_service=service, profile=is_profiled) as loader:
        batches = iter(loader)
        assert next(batches)[0].tolist() == [0, 1, 2, 3]
        (tmp_path / "go").touch()
        assert [x.tolist() for (x,) in batches] == [[4, 5, 6, 7], [8, 9]]


class FakeCuda:
    """The parts of `torch.cuda` that a stream uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(_OnStream, "_send", self.send)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("keep"))
        monkeypatch.setattr("kdpipes.delivery.to_device._check_device", lambda device: None)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread() is not threading.main_thread()
        if tensor.dtype is torch.bool:
            raise MemoryError("no pinned memory")
        return tensor + 100

    def record_event(self) -> str:
        return "event"

    def wait_event(self, event: str) -> None:
        self.log.append(f"wait for {event}")


def test_a_thread_copies_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, before = FakeCuda(monkeypatch), threading.active_count()
    pipe = chain().source.to_device("cuda")
    with kdp.Loader(pipe, num_workers=1, profile=True) as loader:
        assert [x.tolist() for x, _ in loader] == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
        found = kdp.profile(loader)
    assert cuda.log == ["wait for event", "keep", "keep"] * 3
    assert threading.active_count() == before
    assert [step.what for step in found.pipes[-1].steps] == ["beginning an epoch", "copying batches in a thread"]
    assert "A thread copied batches to the device for " in str(found)


def test_an_error_in_the_thread_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    before = threading.active_count()
    with pytest.raises(MemoryError, match="no pinned memory"):
        list(IterableWrapper([torch.ones(2), torch.ones(2) > 0]).to_device("cuda"))
    assert threading.active_count() == before


def test_an_error_comes_after_the_batches_before_it() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    received = _ahead(batches(), StandIn())
    assert next(received) == 1
    with pytest.raises(KeyError, match="lost"):
        next(received)


def test_the_state_ignores_a_batch_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = DeviceMoverIterDataPipe
    monkeypatch.setattr(mover, "iterate", lambda self: _ahead(iter(self.source), StandIn()))
    for num_workers in (0, 2):
        with kdp.Loader(chain(), num_workers=num_workers) as loader:
            next(iter(loader))
            assert loader.state_dict()["batch"] == 1


def test_it_is_rejected_in_a_worker_of_the_dataloader() -> None:
    loader = DataLoader(chain(), batch_size=None, num_workers=1)
    with pytest.raises(kdp.ChainError, match=r"`\.to_device\(\)` runs in the main process") as caught:
        list(loader)
    traceback.clear_frames(caught.tb)  # or torch's iterator waits seconds for its workers when it is collected


@pytest.mark.parametrize(
    ("device", "error"), [("gpu", ValueError), (0, TypeError), (None, TypeError)], ids=["gpu", "0", "None"]
)
def test_what_is_no_device_is_rejected(device: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match='`device` must be a device like "cuda"'):
        IterableWrapper([1]).to_device(device)


def test_a_missing_device_is_an_error_when_iteration_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipes = {name: chain().source.to_device(name) for name in ("cuda", "cuda:2", "xla")}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ValueError, match=r"`device` must be one that this machine has, but is 'cuda' instead.* no CUDA"
    ):
        kdp.Loader(pipes["cuda"]).__iter__().__next__()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"but is 'cuda:2' instead\. torch .* finds 2 CUDA devices here"):
        iter(pipes["cuda:2"])
    with pytest.raises(ValueError, match=r"one that this machine has, but is 'xla' instead\."):
        iter(pipes["xla"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_a_gpu() -> None:
    pipe = kdp.from_dataset([(torch.full((3, 64, 64), number), 0) for number in range(40)]).select("x y")
    with kdp.Loader(pipe.deal(batch_size=4).collate_samples().to_device("cuda"), num_workers=2) as loader:
        assert not torch.cuda.is_initialized()
        batches = [x for x, y in loader]
    assert all(x.is_cuda for x in batches)
    assert torch.stack([x.float().mean() for x in batches]).cpu().tolist() == [4 * n + 1.5 for n in range(10)]


def test_pipes_after_it_run_in_the_main_process_with_state() -> None:
    pipe = chain().map(_process_of).filter(_is_here)
    with kdp.Loader(pipe, num_workers=2) as loader:
        batches = iter(loader)
        assert next(batches)[1] == os.getpid()
        assert loader.state_dict()["batch"] == 1
        assert len(list(batches)) == 2


def test_batches_that_are_joined_behind_it_count_as_many() -> None:
    with kdp.Loader(chain().batch(2), num_workers=2) as loader:
        batches = iter(loader)
        assert len(next(batches)) == 2
        state = loader.state_dict()
        assert state["batch"] == 2
        assert len(next(batches)) == 1


def test_a_main_process_pipe_aside_is_an_error_with_workers() -> None:
    pipe = chain().zip(chain())
    for service in (None, InProcessReadingService()):
        with kdp.Loader(pipe, reading_service=service) as loader:
            assert len(list(loader)) == 3
    with pytest.raises(kdp.ChainError, match="`to_device` must run in the main process, so it must be at the end"):
        kdp.Loader(pipe, num_workers=1)


def _process_of(batch: Any) -> Any:
    return batch, os.getpid()


def _is_here(item: Any) -> bool:
    return item[1] == os.getpid()
