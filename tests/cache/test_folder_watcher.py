"""Shared memory goes with the process that holds it, whatever ends that."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.cache import folder_watcher
from kdpipes.cache.shared_folder import SharedFolder, clear_named
from tests.cache.entries import open_memory
from tests.cache.test_lmdb_store import run_in_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere there is no watcher.")
PATIENCE_MS = 30_000


def watcher() -> int:
    return folder_watcher.watcher.pid


def wait_for_end(watching: int) -> None:
    """Wait until a process has ended whose descriptor this is."""
    poll = select.poll()
    poll.register(watching, select.POLLIN)
    assert poll.poll(PATIENCE_MS), "the watcher goes on"
    os.close(watching)


@pytest.fixture
def name() -> str:
    return f"test-watcher-{os.getpid()}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_a_signal_has_ended(number: signal.Signals, name: str) -> None:
    def work(pipe: Any) -> None:
        stores = [open_memory(), open_memory(name), open_memory(f"{name}-kept", keep=True)]
        cached = kdp.from_dataset([("heron", 0)]).transform("x", str.upper).cache_in_memory()
        for store in stores:
            store.put(b"a", [b"heron"])
        pipe.send(
            (
                [*(store.store.folder for store in stores), cached.operation.entries.store.folder, cached[0]["x"]],
                watcher(),
            )
        )
        pipe.recv()

    child, pipe = run_in_child(work)
    (*folders, _), pid = pipe.recv()
    watching = os.pidfd_open(pid)
    assert all(Path(folder).is_dir() for folder in folders)
    os.kill(child.pid or 0, number)
    child.join()
    wait_for_end(watching)
    assert [Path(folder).exists() for folder in folders] == [False, False, True, False]
    clear_named(f"{name}-kept")


def test_named_memory_stays_while_another_process_has_it(name: str) -> None:
    store = open_memory(name, max_bytes=1 << 20)

    def work(pipe: Any) -> None:
        other = open_memory(name)
        other.put(b"a", [b"heron"])
        pipe.send(watcher())
        pipe.recv()

    child, pipe = run_in_child(work)
    watching = os.pidfd_open(pipe.recv())
    os.kill(child.pid or 0, signal.SIGTERM)
    child.join()
    wait_for_end(watching)
    assert bytes(store.get(b"a") or b"") == b"heron"


def test_signals_to_a_terminals_group_spare_the_watcher() -> None:
    folder = SharedFolder()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watcher(), number)
    other = SharedFolder()
    assert os.waitpid(watcher(), os.WNOHANG) == (0, 0)
    assert Path(folder.path).is_dir()
    assert Path(other.path).is_dir()


def test_there_is_one_watcher_and_it_goes_with_the_last_folder() -> None:
    gc.collect()
    folders = [SharedFolder() for _ in range(3)]
    watching = os.pidfd_open(watcher())
    assert len({folder.path for folder in folders}) == 3
    folders.clear()
    gc.collect()
    wait_for_end(watching)
    assert watcher() == -1


def test_a_forked_process_has_none_of_its_parents(name: str) -> None:
    folder = SharedFolder()

    def work(pipe: Any) -> None:
        before = watcher()
        own = SharedFolder()
        pipe.send((before, watcher(), own.path))
        pipe.recv()

    child, pipe = run_in_child(work)
    before, theirs, path = pipe.recv()
    watching = os.pidfd_open(theirs)
    assert (before, Path(path).is_dir()) == (-1, True)
    assert theirs != watcher()
    pipe.send("end")
    child.join()
    wait_for_end(watching)
    assert (Path(path).exists(), Path(folder.path).is_dir()) == (False, True)


def test_a_watcher_that_was_killed_is_done_without() -> None:
    folder = SharedFolder()
    os.kill(watcher(), signal.SIGKILL)
    other = SharedFolder()
    paths = [Path(folder.path), Path(other.path)]
    assert all(path.is_dir() for path in paths)
    del folder, other
    gc.collect()
    assert not any(path.exists() for path in paths)


def release_under_a_stopped_watcher(pipe: Any) -> None:
    """Drop a folder while its watcher is stopped, and hold another one when the process ends."""
    folder = SharedFolder()
    stopped = [watcher()]
    os.kill(watcher(), signal.SIGSTOP)
    del folder
    gc.collect()
    held = SharedFolder()
    stopped.append(watcher())
    os.kill(watcher(), signal.SIGSTOP)
    pipe.send((stopped, held.path))
    pipe.recv()
    del held


def test_a_stopped_watcher_holds_up_neither_release_nor_exit() -> None:
    child, pipe = run_in_child(release_under_a_stopped_watcher)
    answered = pipe.poll(PATIENCE_MS / 1000)
    stopped, path = pipe.recv() if answered else ([], "")
    if answered:
        pipe.send("end")
    child.join(PATIENCE_MS / 1000)
    is_alive = child.is_alive()
    child.kill()
    assert (answered, is_alive) == (True, False)
    assert not Path(path).exists()
    for pid in stopped:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_where_no_process_can_be_started_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: Any, **__: Any) -> int:
        raise BlockingIOError("no more processes")

    gc.collect()
    monkeypatch.setattr(folder_watcher.subprocess, "Popen", reject)
    folder = SharedFolder()
    path = Path(folder.path)
    assert (path.is_dir(), watcher()) == (True, -1)
    del folder
    gc.collect()
    assert not path.exists()
