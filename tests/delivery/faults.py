"""Chains of numbers whose workers die, get stuck or raise, for tests, and the services that they run in."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp

Step = Callable[[Any], Any]


def numbers(*steps: Step, size: int = 20, shuffle: bool = False) -> Any:
    chain = kdp.from_dataset([(number, 0) for number in range(size)])
    for step in steps:
        chain = chain.transform("x", step)
    return chain.select("x").deal(batch_size=2, shuffle=shuffle, seed=3 if shuffle else 0)


def end_process(how: str) -> None:
    faulthandler.disable()
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))


def while_armed(flag: Path, at: int, act: Callable[[], Any], *, once: bool = False) -> Step:
    """Return a step that does something to the number `at` as long as `flag` is there."""
    flag.touch()

    def step(x: int) -> int:
        if x == at and flag.exists():
            if once:
                flag.unlink()
            act()
        return x

    return step


def wait_for_ever(fifo: str) -> Callable[[], None]:
    return lambda: os.close(os.open(fifo, os.O_RDONLY))


def within_patience(function: Callable[[], Any]) -> Any:
    """Return what `function` returns, or fail where it hangs; its workers are ended then."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if not result:
        for child in multiprocessing.active_children():
            child.kill()
        pytest.fail("it hangs")
    value, error = result[0]
    if error is not None:
        raise error
    return value


def services() -> Any:
    return pytest.mark.parametrize(
        "service",
        [kdp.ProcessReadingService(2, start_method="fork"), kdp.ThreadReadingService(2)],
        ids=["processes", "threads"],
    )
