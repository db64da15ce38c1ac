"""What a loader leaves behind: nothing, however it ends; and processes that users fork while it lives."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kdpipes as kdp
from tests.processes import in_child

HEAD = """
import multiprocessing, os, signal, sys, torch
import kdpipes as kdp

def loader_of(service):
    rows = [(torch.full([10_000], n), 0) for n in range(20)]
    return kdp.Loader(kdp.from_dataset(rows).select("x").deal(batch_size=1), reading_service=service)

def tell():
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)

loader = loader_of(kdp.ProcessReadingService(2, start_method="fork"))
threaded = loader_of(kdp.ThreadReadingService(2))
batches = iter(loader)
held = [next(batches), next(iter(threaded))]
"""


def numbers(size: int = 20) -> Any:
    return kdp.from_dataset([(torch.full([5000], number), 0) for number in range(size)]).select("x").deal(batch_size=1)


def values(batches: Any) -> list[int]:
    return [int(batch[0][0][-1]) for batch in batches]


def is_gone(pid: int) -> bool:
    """Wait until a process that need not be a child has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(process, select.POLLIN)
    ended = bool(poll.poll(30_000))
    os.close(process)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    return ended


def in_a_fork(action: Callable[[], Any]) -> int:
    """Return the exit status of a forked child that does `action`."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def traces() -> tuple[int, int, int, set[str]]:
    gc.collect()
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("kdpipes worker")]
    for thread in workers:  # it has been told to end, and is about to
        thread.join(20)
    shared = {path.name for path in Path("/dev/shm").iterdir() if f"_{os.getpid()}_" in path.name}
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return len(multiprocessing.active_children()), descriptors, sum(map(threading.Thread.is_alive, workers)), shared


def drop(loader: Any) -> None:
    next(iter(loader))


def close(loader: Any) -> None:
    batches = iter(loader)
    next(batches)
    loader.close()


def leave(loader: Any) -> None:
    with loader:
        for _ in loader:
            break


def fail(loader: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        assert [1 / int(batch[0][0][0]) for batch in loader]


def turn_in_a_circle(loader: Any) -> None:
    circle = [loader, iter(loader)]
    next(circle[1])
    circle.append(circle)


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_fifty_loaders_that_end_in_any_way_leave_nothing(kind: str) -> None:
    def make() -> Any:
        processes = kdp.ProcessReadingService(2, start_method="fork")
        return kdp.Loader(numbers(4), reading_service=processes if kind == "processes" else kdp.ThreadReadingService(2))

    endings = [drop, close, leave, fail, turn_in_a_circle]
    for end in endings:
        end(make())
    before = traces()
    for number in range(50):
        endings[number % len(endings)](make())
    children, descriptors, workers, shared = traces()
    assert (children, workers, shared) == (before[0], before[2], before[3])
    assert descriptors <= before[1]  # what other tests have used may be closed meanwhile


@pytest.mark.parametrize(
    ("ending", "status", "told"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("raise ArithmeticError('boom')", 1, "ArithmeticError: boom"),
        (
            "signal.signal(signal.SIGINT, signal.default_int_handler); os.killpg(0, signal.SIGINT)",
            -2,
            "KeyboardInterrupt",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("loader.close(); threaded.close(); del held", 0, ""),
    ],
    ids=["end", "exit", "error", "interrupt", "kill", "close"],
)
def test_a_script_that_ends_without_a_word_leaves_no_process(
    ending: str, status: int, told: str, interpreter: Any
) -> None:
    code, out, err = interpreter.run(f"{HEAD}\ntell()\n{ending}")
    assert code == status, err
    assert err.count("Traceback") == bool(told)
    assert told in err
    assert told or not err
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    assert [is_gone(pid) for pid in pids] == [True, True]


def test_workers_end_with_their_parent_though_a_child_lives_on(interpreter: Any) -> None:
    script = (
        HEAD
        + """
tell()
if os.fork() == 0:
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    nowhere, (receiver, sender) = os.open(os.devnull, os.O_RDWR), os.pipe()
    process = interpreter.start(script, files=[nowhere, sender, nowhere])
    os.close(sender)
    os.close(nowhere)
    try:
        with os.fdopen(receiver) as told:
            pids = [int(pid) for pid in told.readline().split()]
        assert process.wait() == -signal.SIGKILL
        assert [is_gone(pid) for pid in pids] == [True, True]
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "action", ["sys.exit(0)", "loader.close()", "signal.alarm(5); list(loader)"], ids=["ends", "closes", "iterates"]
)
def test_a_forked_child_leaves_the_parents_workers_alone(action: str, interpreter: Any) -> None:
    script = f"""
child = os.fork()
if child == 0:
    {action}
    sys.exit(0)
status = os.waitpid(child, 0)[1]
assert [int(batch[0][0][-1]) for batch in batches] == list(range(1, 20))
assert loader.stats()["worker_deaths"] == 0
assert status == 0 or "list" in {action!r}, status  # an error would do for who iterates
loader.close()
"""
    status, _, told = interpreter.run(HEAD + script)
    assert status == 0, told


@pytest.mark.parametrize("kind", ["processes", "threads", "inline"])
def test_a_forked_child_cannot_go_on_with_an_iterator(kind: str) -> None:
    service = {"processes": kdp.ProcessReadingService(2, start_method="fork"), "threads": kdp.ThreadReadingService(2)}
    with kdp.Loader(numbers(), reading_service=service.get(kind)) as loader:
        batches = iter(loader)
        first = values([next(batches)])

        def go_on() -> None:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"belongs to process \d+.* Make a loader in this process"):
                    next(batches)
            assert values(loader) == list(range(20))  # an epoch of its own

        assert in_child(go_on) == 0
        assert first + values(batches) == list(range(20))
        assert loader.stats()["worker_deaths"] == 0


@pytest.mark.parametrize(
    "trouble",
    [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "[(child.kill(), os.waitpid(child.pid, 0)) for child in multiprocessing.active_children()]",
    ],
    ids=["ignored", "killed and waited for"],
)
def test_a_loader_works_where_others_wait_for_its_workers(trouble: str, interpreter: Any) -> None:
    script = (
        HEAD
        + f"""
{trouble}
assert [int(batch[0][0][-1]) for batch in batches] == list(range(1, 20))
loader.close()
"""
    )
    status, _, told = interpreter.run(script)
    assert (status, told.count("Traceback")) == (0, 0), told


def test_children_of_the_user_that_end_leave_the_workers_alone() -> None:
    with kdp.Loader(numbers(), num_workers=2, start_method="fork") as loader:
        delivered = []
        for batch in loader:
            delivered.append(batch)
            assert in_a_fork(lambda: None) == 0
            child = multiprocessing.get_context("fork").Process(target=gc.collect)
            child.start()
            child.join()
            assert child.exitcode == 0
            child.close()
        assert values(delivered) == list(range(20))
        assert loader.stats()["worker_deaths"] == 0


def test_a_batch_that_a_forked_child_holds_is_not_written_over() -> None:
    go_on, say_go = os.pipe()
    with kdp.Loader(numbers(200), num_workers=1, start_method="fork") as loader:
        batches = iter(loader)
        held = next(batches)
        child = os.fork()
        if child == 0:
            os.read(go_on, 1)
            os._exit(int(held[0][0].ne(0).any()))
        del held
        assert values(batches) == list(range(1, 200))
        os.write(say_go, b"!")
        assert os.waitpid(child, 0)[1] == 0
    os.close(go_on)
    os.close(say_go)


def test_a_dead_worker_is_replaced_though_its_child_lives_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    once = tmp_path / "once"
    once.touch()

    def leave_a_child(x: torch.Tensor) -> torch.Tensor:
        if x[0] == 5 and once.exists():
            once.unlink()
            if os.fork() == 0:
                os.read(os.open(tmp_path / "fifo", os.O_RDONLY), 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    chain = kdp.from_dataset([(torch.full([2], number), 0) for number in range(20)]).transform("x", leave_a_child)
    delivered: list[int] = []
    with kdp.Loader(chain.select("x").deal(batch_size=1), num_workers=2, start_method="fork") as loader:
        thread = threading.Thread(target=lambda: delivered.extend(values(loader)), daemon=True)
        thread.start()
        thread.join(60)
        came = list(delivered)
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY))
        thread.join()
    assert came == delivered == list(range(20))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dropped_loader_ends_without_a_garbage_collection(num_workers: int) -> None:
    gc.collect()
    gc.disable()
    try:
        loader = kdp.Loader(kdp.from_dataset(range(8), "x").select("x").deal(batch_size=2), num_workers=num_workers)
        assert len(list(loader)) == len(loader)
        loader.state_dict(), loader.receipt()
        dropped = weakref.ref(loader)
        del loader
        assert dropped() is None
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_kept_batches_survive_their_loader_and_its_workers() -> None:
    kept = []
    for end in (lambda loader: loader.close(), lambda loader: None):
        loader = kdp.Loader(numbers(), num_workers=2, start_method="fork")
        for batch in loader:
            kept.append(batch)
        for child in multiprocessing.active_children():
            child.kill()
        end(loader)
        del loader
        gc.collect()
    assert values(kept) == 2 * list(range(20))
    assert all(bool((batch[0][0] == batch[0][0][0]).all()) for batch in kept)
