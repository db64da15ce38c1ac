"""Worker processes that die, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kdpipes as kdp

SCRIPT = """
import os, signal, sys
import kdpipes as kdp
pipe = kdp.from_dataset([(n, 0) for n in range(100)]).select("x").deal(batch_size=1)
loader = kdp.Loader(pipe, num_workers=2)
for batch in loader:
    {}
print("after the loop")
"""


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_worker_that_is_killed_is_an_error_and_the_next_epoch_runs(start_method: str, tmp_path: Path) -> None:
    deadly = tmp_path / "deadly"
    deadly.touch()

    def die_once(x: int) -> int:
        if x == 7 and deadly.exists():
            deadly.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    pipe = kdp.from_dataset([(number, 0) for number in range(10)]).transform("x", die_once).select("x")
    with kdp.Loader(pipe.deal(batch_size=1), num_workers=2, multiprocessing_context=start_method) as loader:
        with pytest.raises(kdp.WorkerError, match=r"Worker process \d+ was ended by signal SIGKILL"):
            list(loader)
        assert list(loader) == [[(number,)] for number in range(10)]


def test_after_ctrl_c_the_next_epoch_runs() -> None:
    script = """
import os, signal
import kdpipes as kdp
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
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False, start_new_session=True
    )
    assert done.stdout.split() == ["interrupted", "100"], done.stderr


def test_ctrl_c_ends_the_loop() -> None:
    script = SCRIPT.format("os.killpg(0, signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=60, capture_output=True, check=False, start_new_session=True
    )
    assert done.returncode == -signal.SIGINT or b"KeyboardInterrupt" in done.stderr
    assert b"after the loop" not in done.stdout
