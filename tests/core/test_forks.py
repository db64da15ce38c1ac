"""Locks are free in forked processes, and hooks run around each fork in a fixed order."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kdpipes
from kdpipes.core.processes import ForkLock

ROOT = Path(kdpipes.__file__).parent
HOOKS = """
import os
from kdpipes.core.processes import at_fork, forget_after_fork

class One:
    def forget(self):
        print("forget", flush=True)

one = One()
forget_after_fork(one)
for name in "ab":
    at_fork(
        before=lambda name=name: print("before", name, flush=True),
        after_in_parent=lambda name=name: order.append(name),
        after_in_child=lambda name=name: print("child", name, flush=True),
    )
    at_fork(before=lambda: 1 / 0, after_in_parent=lambda: 1 / 0, after_in_child=lambda: 1 / 0)
order = []
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print("parent", *order)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system cannot fork.")
def test_a_lock_is_free_in_a_forked_process() -> None:
    lock = ForkLock()
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.lock:
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.lock.acquire(timeout=10) else 1)
    is_free_here = lock.lock.acquire(blocking=False)
    may_end.set()
    thread.join()
    assert (os.waitpid(child, 0)[1], is_free_here) == (0, False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system cannot fork.")
def test_hooks_run_in_order_even_if_others_fail() -> None:
    shown = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stderr.count("ZeroDivisionError") == 6
    assert shown.stdout.splitlines() == ["before b", "before a", "forget", "child a", "child b", "parent a b"]


def test_hooks_are_registered_in_one_module() -> None:
    assert [path.name for path in ROOT.rglob("*.py") if "os.register_at_fork(" in path.read_text()] == ["processes.py"]
