"""Worker processes that die, and Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import kdpipes as kdp

SCRIPT = """
import os, signal, sys
import kdpipes as kdp
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
pipe = kdp.from_dataset([(n, 0) for n in range(100)]).select("x").deal(batch_size=1)
loader = kdp.Loader(pipe, num_workers=2)
for batch in loader:
    {}
print("after the loop")
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_killed_worker_is_an_error_and_the_next_epoch_runs(start_method: str, tmp_path: Path) -> None:
    deadly = tmp_path / "deadly"
    deadly.touch()

    def die_once(x: int) -> int:
        if x == 7 and deadly.exists():
            deadly.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    pipe = kdp.from_dataset([(number, 0) for number in range(10)]).transform("x", die_once).select("x")
    service = kdp.ProcessReadingService(2, start_method=start_method, on_worker_death="raise")
    with kdp.Loader(pipe.deal(batch_size=1), reading_service=service) as loader:
        told = r"Worker process \d+ was ended by signal SIGKILL.*, while applying 'die_once' to field 'x' of sample '7'"
        with pytest.raises(kdp.WorkerError, match=told):
            list(loader)
        assert list(loader) == [[(number,)] for number in range(10)]


def test_after_ctrl_c_the_next_epoch_runs(interpreter: Any) -> None:
    script = """
import os, signal
import kdpipes as kdp
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
pipe = kdp.from_dataset([(n, 0) for n in range(100)]).select("x").deal(batch_size=1)
loader = kdp.Loader(pipe, num_workers=2)
try:
    for number, batch in enumerate(loader):
        if number == 5:
            os.killpg(0, signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
print(len(list(loader)))
"""
    _, printed, told = interpreter.run(script)
    assert printed.split() == ["interrupted", "100"], told


def test_ctrl_c_ends_the_loop(interpreter: Any) -> None:
    status, printed, told = interpreter.run(SCRIPT.format("os.killpg(0, signal.SIGINT)"))
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in told
    assert "after the loop" not in printed


class Mine(Exception):
    """An error of the user's own, with arguments of its own."""

    def __init__(self, number: int, word: str) -> None:
        super().__init__(number, word)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_users_error_keeps_type_arguments_and_traceback(start_method: str) -> None:
    class Local(Exception):
        pass

    def explode(x: int) -> int:
        raise Mine(x, "boom") if x == 1 else Local("local")

    for number, kind in ((1, Mine), (2, Local)):
        pipe = kdp.from_dataset([(number, 0)]).transform("x", explode).select("x").deal(batch_size=1)
        loader = kdp.Loader(pipe, num_workers=1, start_method=start_method)
        with loader, pytest.raises(kind) as caught:
            list(loader)
        notes = "\n".join(caught.value.__notes__)
        assert "while applying 'explode' to field 'x' of sample '0'" in notes
        assert "In a worker:\nTraceback" in notes
        assert 'raise Mine(x, "boom")' in notes, notes
    [text] = caught.value.args
    assert text.partition("\n")[0] == "local"  # notes follow on Python 3.10


def test_an_error_that_does_not_travel_is_told_all_the_same() -> None:
    class Stuck(Exception):
        def __reduce__(self) -> str:
            raise TypeError("not me")

    def explode(x: int) -> int:
        raise Stuck("stuck in here")

    pipe = kdp.from_dataset([(1, 0)]).transform("x", explode).select("x").deal(batch_size=1)
    with kdp.Loader(pipe, num_workers=1) as loader, pytest.raises(RuntimeError, match="Stuck: stuck in here"):
        list(loader)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_batches_of_any_kind_arrive(start_method: str) -> None:
    @dataclass
    class Box:
        value: int

    weight = torch.ones(2, requires_grad=True)
    chain = kdp.from_dataset([(1, 0)]).transform("x", lambda x: (Box(x), weight * 2, lambda: 7, "word", b"bytes"))
    with kdp.Loader(chain.select("x").deal(1), num_workers=1, start_method=start_method) as loader:
        ((((box, tensor, function, word, content),),),) = list(loader)
    assert (box, tensor.tolist(), function(), word, content) == (Box(1), [2.0, 2.0], 7, "word", b"bytes")


def test_a_batch_that_cannot_be_sent_is_an_error_not_a_wait() -> None:
    chain = kdp.from_dataset([(1, 0)]).transform("x", lambda x: threading.Lock()).select("x")
    with (
        kdp.Loader(chain.deal(batch_size=1), num_workers=1) as loader,
        pytest.raises(TypeError, match=r"A batch cannot be sent from a worker: .*lock.* Return plain data"),
    ):
        list(loader)


@pytest.mark.parametrize("start_method", [None, "fork"])
def test_a_source_of_ones_own_needs_no_pickling(start_method: str | None) -> None:
    class Locked(kdp.SampleSource):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 3

        def getitem_x(self, index: int) -> int:
            with self.lock:
                return index

    pipe = Locked().select("x").deal(batch_size=2)
    with kdp.Loader(pipe, num_workers=2 if start_method else 0, start_method=start_method) as loader:
        assert [list(loader), list(loader)] == [[[(0,), (1,)], [(2,)]]] * 2


def test_a_local_source_reaches_workers_that_are_not_forked() -> None:
    class Local(kdp.SampleSource):
        def __len__(self) -> int:
            return 3

        def getitem_x(self, index: int) -> int:
            return index

    pipe = Local().select("x").deal(batch_size=2)
    with kdp.Loader(pipe, num_workers=2, start_method="forkserver") as loader:
        assert list(loader) == [[(0,), (1,)], [(2,)]]


def test_spawned_workers_print_nothing() -> None:
    script = """
import kdpipes as kdp
pipe = kdp.from_dataset([(n, 0) for n in range(4)]).select("x").deal(batch_size=1)
with kdp.Loader(pipe, num_workers=2, start_method="spawn") as loader:
    print(len(list(loader)))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("4\n", "")


def test_epochs_that_are_broken_off_leave_no_descriptors_open() -> None:
    pipe = kdp.from_dataset([(torch.ones(3), 0)] * 8).select("x y").deal(batch_size=1).collate_samples()
    with kdp.Loader(pipe, num_workers=1) as loader:

        def broken_off(times: int) -> list[int]:
            for _ in range(times):
                next(iter(loader))
            processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
            return [len(list(Path(f"/proc/{process}/fd").iterdir())) for process in processes]

        before, after = broken_off(3), broken_off(30)
    assert len(before) == 2
    assert all(late <= early + 8 for early, late in zip(before, after, strict=True)), (before, after)


def test_cuda_in_a_forked_worker_is_told_the_way_out() -> None:
    def touch(x: int) -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")

    pipe = kdp.from_dataset([(1, 0)]).transform("x", touch).select("x").deal(batch_size=1)
    with kdp.Loader(pipe, num_workers=1) as loader, pytest.raises(RuntimeError) as caught:
        list(loader)
    assert any('`.to_device("cuda")` at the end of the chain' in note for note in caught.value.__notes__)


def test_a_tensor_on_a_device_does_not_travel() -> None:
    pipe = kdp.from_dataset([(torch.empty(2, device="meta"), 0)]).select("x").deal(batch_size=1)
    with (
        kdp.Loader(pipe, num_workers=1) as loader,
        pytest.raises(TypeError, match=r"a tensor on meta cannot be sent .* put `\.to_device\(\.\.\.\)` at the end"),
    ):
        list(loader)
