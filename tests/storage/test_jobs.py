"""Jobs by processes and executors: in order, few at a time, and the first error ends it all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kdpipes.core.errors import WorkerError
from kdpipes.storage.jobs import run_jobs

WAYS: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 3}]

INTERRUPTED = """
import multiprocessing, os, signal, threading
from kdpipes.storage.jobs import run_jobs

def work(job):
    if job == 3:
        os.kill(os.getppid(), signal.SIGINT)
        threading.Event().wait()
    return job

done = []
try:
    for result in run_jobs(work, range(1000), executor=None, num_workers=2, what="working"):
        done.append(result)
except KeyboardInterrupt:
    print(done, multiprocessing.active_children())
"""

ORPHANED = """
import os, signal, sys, threading
from kdpipes.storage.jobs import run_jobs

def work(job):
    os.write(1, f"{os.getpid()}\\n".encode())
    if job:
        os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()

list(run_jobs(work, range(2), executor=None, num_workers=2, what="working"))
"""

HALF_SENT = """
import multiprocessing, os, struct, sys, threading
from contextlib import closing
from kdpipes.storage.jobs import run_jobs

(wait_to_send, send), (wait_until_sent, is_sent) = os.pipe(), os.pipe()

def work(job):
    if not job:
        return job
    os.read(wait_to_send, 1)
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:
        frame = frame.f_back
    os.write(frame.f_locals["result_queue"]._writer.fileno(), struct.pack("!i", 1000) + b"half")
    os.write(is_sent, b"-")
    threading.Event().wait()

with closing(run_jobs(work, range(2), executor=None, num_workers=2, what="working")) as results:
    print(next(results))
    os.write(send, b"-")
    os.read(wait_until_sent, 1)
print(multiprocessing.active_children())
"""


class OddError(Exception):
    """One that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def run(function: Any, jobs: Any, **ways: Any) -> list[Any]:
    return list(run_jobs(function, jobs, **{"executor": None, "num_workers": 0, "what": "working", **ways}))


@pytest.fixture(params=["threads", "processes"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    kind = {"threads": ThreadPoolExecutor, "processes": ProcessPoolExecutor}[request.param]
    with kind(2) as executor:
        yield executor


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_results_come_in_the_order_of_the_jobs(ways: dict[str, Any]) -> None:
    power = 2
    assert run(lambda job: job**power, range(30), **ways) == [job**2 for job in range(30)]
    assert run(lambda job: job, [], **ways) == []


def test_an_executor_does_the_same(executor: Executor) -> None:
    power = 2
    assert run(lambda job: job**power, range(30), executor=executor) == [job**2 for job in range(30)]


def test_an_executor_with_large_jobs_causes_a_warning() -> None:
    data = bytes(17 << 20)
    with ThreadPoolExecutor(1) as executor, pytest.warns(UserWarning, match="18 MB of the chain .* go with each job"):
        assert run(lambda job: data[job], [3], executor=executor) == [0]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_the_first_error_ends_it_and_names_the_job(ways: dict[str, Any]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(lambda job: 1 / (job - 2), range(1000), **ways)
    notes = caught.value.__notes__
    assert "kdpipes: while working: 2" in notes
    assert len(notes) == (1 if not ways["num_workers"] else 2)
    assert "1 / (job - 2)" in "".join(notes) or not ways["num_workers"]


def test_the_first_error_of_an_executor_cancels_what_waits(executor: Executor, tmp_path: Path) -> None:
    def work(job: int) -> None:
        (tmp_path / str(job)).touch()
        if job == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        run(work, range(1000), executor=executor)
    assert "kdpipes: while working: 1" in caught.value.__notes__
    executor.shutdown()
    assert len(list(tmp_path.iterdir())) <= 8


def test_an_error_that_cannot_be_sent_comes_as_text() -> None:
    def work(job: int) -> None:
        raise OddError("odd")

    with pytest.raises(WorkerError, match="OddError: odd"):
        run(work, [1], num_workers=1)


def test_classes_that_only_this_process_knows_come_back() -> None:
    class Own(Exception):
        pass

    def work(job: int) -> None:
        raise Own(job)

    Own.__module__ = work.__module__ = "__main__"
    with pytest.raises(Own):
        run(work, [1], num_workers=1)


def test_a_worker_that_dies_is_an_error_that_names_a_job() -> None:
    with pytest.raises(WorkerError, match="while working, at 0"):
        run(lambda job: os.kill(os.getpid(), signal.SIGKILL), [0], num_workers=1)


def test_no_more_than_two_jobs_a_worker_are_begun_ahead(executor: Executor) -> None:
    seen: list[int] = []

    def jobs_seen() -> Any:
        class Jobs(list):  # type: ignore[type-arg]
            def __iter__(self) -> Iterator[int]:
                for job in super().__iter__():
                    seen.append(job)
                    yield job

        return Jobs(range(100))

    with closing(run_jobs(abs, jobs_seen(), executor=executor, num_workers=2, what="working")) as results:
        assert next(results) == 0
        assert seen == [0, 1, 2, 3]
        assert next(results) == 1
        assert seen == [0, 1, 2, 3, 4]


def test_leaving_early_ends_the_processes() -> None:
    with closing(run_jobs(lambda job: job, range(1000), executor=None, num_workers=2, what="working")) as results:
        assert next(results) == 0
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()


def test_leaving_early_does_not_wait_for_a_job() -> None:
    def work(job: int) -> int:
        return threading.Event().wait() if job else job

    with closing(run_jobs(work, range(1000), executor=None, num_workers=2, what="working")) as results:
        assert next(results) == 0
    assert not multiprocessing.active_children()


def python(code: str, **kwargs: Any) -> Any:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, **kwargs
    )


def test_an_interrupt_leaves_no_process() -> None:
    done = python(INTERRUPTED)
    assert done.stdout.endswith(" []\n"), done.stderr
    assert done.returncode == 0


def test_a_worker_that_was_sending_its_result_is_not_waited_for() -> None:
    done = python(HALF_SENT)
    assert done.stdout == "0\n[]\n", done.stderr


def test_workers_do_not_take_the_signals_handler_of_the_parent() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert run(lambda job: signal.getsignal(signal.SIGTERM), [0], num_workers=1) == [signal.SIG_DFL]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_end_with_a_parent_that_was_killed() -> None:
    done = python(ORPHANED)  # comes back once nobody holds its standard output any more
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2


def test_what_is_no_executor_is_rejected_at_once() -> None:
    with pytest.raises(TypeError, match=r"`executor` must be a concurrent.futures.Executor, but is 'dask' instead"):
        run_jobs(abs, [], executor="dask", num_workers=0, what="working")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`num_workers` must be an integer of at least 0"):
        run_jobs(abs, [], executor=None, num_workers=-1, what="working")


AFTER_THREADS = """
import torch
from concurrent.futures import ProcessPoolExecutor
from kdpipes.storage.jobs import run_jobs

def work(job):
    return float(torch.ones(2_000_000).add(job).sum())

torch.set_num_threads(4)
expected = [work(job) for job in range(4)]  # which leaves threads behind, that a fork does not have
assert list(run_jobs(work, range(4), executor=None, num_workers=2, what="working")) == expected
with ProcessPoolExecutor(2) as executor:
    assert list(run_jobs(work, range(4), executor=executor, num_workers=0, what="working")) == expected
print("done")
"""


def test_workers_do_not_wait_for_threads_of_their_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_THREADS], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "done\n"
