"""Ctrl-C at any moment leaves no process and no descriptor, changes no batch, and ends no worker that starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core.processes import uninterrupted
from kdpipes.loader import processes
from kdpipes.loader.worker_main import work

STORM = """
import gc, os, random, select, signal
import torch
import kdpipes as kdp

def chain():
    rows = kdp.from_dataset([(torch.full([9000], number), 0) for number in range(12)])
    return rows.select("x").deal(batch_size=1, shuffle=True, seed=3)

def number_in(batch):
    return int(batch[0][0][-1])

def traces():
    gc.collect()
    children = "".join(open(f"/proc/self/task/{task}/children").read() for task in os.listdir("/proc/self/task"))
    return children.split(), len(os.listdir("/proc/self/fd"))

def attempt(action):
    # the other process interrupts it after a while, and nothing else
    global is_armed, num_interrupted
    os.write(say_begun, b"!")
    try:
        is_armed = True
        action()
    except KeyboardInterrupt:
        print("interrupted")
        num_interrupted += 1
    finally:
        is_armed = False
    os.read(sent, 1)

def interrupt(*_):
    if is_armed:
        raise KeyboardInterrupt

def run_on():
    global loader
    loader = kdp.Loader(chain(), reading_service=service)
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        place = loader.state_dict()
        delivered = place["epoch"] * 12 + place["batch"] - 1
        assert number_in(batch) == expected[delivered], (delivered, number_in(batch))
    loader.close()

is_armed, loader, state, pipe = False, None, None, chain()
num_interrupted = number = 0
expected = [number_in(batch) for _ in range(100) for batch in pipe]
(begun, say_begun), (sent, say_sent) = os.pipe(), os.pipe()
service = kdp.ProcessReadingService(2, start_method="fork")
run_on()  # starts what stays: multiprocessing's helpers
signal.signal(signal.SIGINT, interrupt)
killer = os.fork()
if not killer:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(say_begun)
    draw = random.Random(5)
    while os.read(begun, 1):
        select.select([], [], [], draw.random() * 0.1)
        os.killpg(0, signal.SIGINT)
        os.write(say_sent, b"!")
    os._exit(0)
helpers, num_files = traces()
while number < 20 or num_interrupted < 6:  # a fast machine is often done before the signal
    number += 1
    attempt(run_on)
    if loader is not None:
        if number % 3 == 0:
            attempt(loader.close)
        loader.close()
        state, loader = loader.state_dict(), None
    children, files = traces()
    assert set(children) <= set(helpers) and files <= num_files, (children, helpers, files, num_files)
run_on()
print("over")
"""


def test_interrupts_of_the_group_leave_nothing(interpreter: Any) -> None:
    status, printed, told = interpreter.run(STORM, timeout=120)
    assert status == 0, told
    assert printed.endswith("over\n")


def _interrupted_work(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    work(*arguments)


def test_a_worker_that_starts_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "work", _interrupted_work)
    pipe = kdp.from_dataset([(number, 0) for number in range(4)]).select("x").deal(batch_size=1)
    with kdp.Loader(pipe, num_workers=2, start_method="fork") as loader:
        assert len(list(loader)) == 4
        assert loader.stats()["worker_deaths"] == 0


def test_a_spawned_worker_that_starts_is_not_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, signal
if __name__ == "__mp_main__":
    os.kill(os.getpid(), signal.SIGINT)
import kdpipes as kdp
if __name__ == "__main__":
    pipe = kdp.from_dataset([(number, 0) for number in range(4)]).select("x").deal(batch_size=1)
    with kdp.Loader(pipe, num_workers=1, start_method="spawn") as loader:
        print(len(list(loader)), loader.stats()["worker_deaths"])
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("4 0\n", 0), done.stderr


def test_an_interrupt_is_held_off_until_the_block_ends() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    steps = []

    def interrupt() -> None:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
                steps.append("inner")
            steps.append("outer")

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["inner", "outer"]


def test_an_epoch_that_was_interrupted_as_it_began_is_still_due(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = kdp.from_dataset([(number, 0) for number in range(6)]).select("x").deal(batch_size=2, shuffle=True)
    epochs = [list(pipe) for _ in range(3)]
    pipe.set_epoch(0)
    with kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(2)) as loader:
        assert list(loader) == epochs[0]
        with monkeypatch.context() as patched:
            patched.setattr("kdpipes.loader.services.Merger", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        assert loader.epoch == 1
        assert [list(loader), list(loader)] == epochs[1:]


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt
