"""Fixtures of all tests: the shipped photos on disk, scripts, and the proof that a test leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import settings

import kdpipes as kdp
from kdpipes.core.stock import NAMES_OF_TORCHDATA
from kdpipes.demo import write_photo_folder, write_photo_shards
from tests.s3_server import s3_server
from tests.tiers import tier_of
from tests.torchdata_parts import HAS_TORCHDATA

pytest.register_assert_rewrite(  # so that their asserts, too, show what they have compared
    "tests.resuming", "tests.storage.kept_shards", "tests.work.replaying", "tests.write.copies"
)
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # which asks the network for its newest version on import
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
settings.register_profile("kdpipes", deadline=None, database=None)  # a busy machine is slow, not wrong
settings.load_profile("kdpipes")
multiprocessing.set_forkserver_preload(["kdpipes"])  # what starts so gets its chain as spawned ones do, but at once
if sys.platform == "linux":
    multiprocessing.set_start_method("fork")  # also on Python 3.14: many tests give workers what only this process has

# It imports what takes seconds, once, and forks a process for each script, which goes on as `python -c` would: it ends
# where this text does.
INTERPRETER = """
import json, os, socket, sys
import kdpipes

def next_script():
    calls = socket.socket(fileno=0)
    while True:
        request, descriptors, *_ = socket.recv_fds(calls, 1 << 20, 3)
        if not request:
            os._exit(0)
        told = json.loads(request)
        if "wait" in told:
            calls.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(told["wait"], 0)[1]))
        elif child := os.fork():
            calls.send(b"%d" % child)
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            break
    calls.detach()
    os.setsid()
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv[1:] = told["arguments"]
    return compile(told["script"], "<string>", "exec")

script = next_script()
del json, kdpipes, next_script, os, socket, sys
exec(script)
"""


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist see the end of a worker, whose pipes the processes that it has forked would keep open."""
    if hasattr(config, "workerinput"):
        pipes = [number for number in range(3, 64) if Path(f"/proc/self/fd/{number}").is_fifo()]
        os.register_at_fork(after_in_child=functools.partial(_close, pipes))


def _close(pipes: list[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for pipe in pipes:
        os.dup2(nowhere, pipe)
    os.close(nowhere)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules that `-m` leaves out as a whole: that takes several seconds."""
    tier = tier_of(collection_path.relative_to(Path(__file__).parent.parent).as_posix())
    wanted = config.option.markexpr
    return True if tier is not None and "not full" in wanted and f"not {tier}" in wanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that some of `make quick` and `make test` leave out."""
    for item in items:
        tier = tier_of(item.nodeid)
        if tier is not None:
            item.add_marker(tier)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test that uses one of torchdata's pipes where torchdata is not installed."""
    try:
        return (yield)
    except AttributeError as error:
        missing = re.search(r"has no (?:pipe or )?attribute '(\w+)", str(error))
        if HAS_TORCHDATA or missing is None or missing[1] not in NAMES_OF_TORCHDATA:
            raise
        pytest.skip(f"torchdata 0.9 is not installed, which has `.{missing[1]}()`")


class Script:
    """A process that runs a script, in a session of its own."""

    def __init__(self, calls: socket.socket, pid: int) -> None:
        self.pid = pid
        self._calls = calls
        self._ended = os.pidfd_open(pid)

    def wait(self, timeout: float = 60) -> int:
        """Return the exit status, negative for a signal; kill what takes longer than `timeout` seconds and say so."""
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        is_late = not poll.poll(timeout * 1000)
        if is_late:
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._ended)
        self._calls.send(json.dumps({"wait": self.pid}).encode())
        status = int(self._calls.recv(64))
        if is_late:
            pytest.fail("The script hangs.")
        return status


class Interpreter:
    """Runs scripts as `python -c` does, in forks of a process that has imported kdpipes before.

    All have the same hash seed. What is said of the import itself, and of spawned processes, needs an interpreter.
    """

    def __init__(self) -> None:
        self._calls, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", INTERPRETER], stdin=theirs)

    def start(self, script: str, *arguments: str, files: list[int]) -> Script:
        """Start a script with the descriptors of its standard input, output and errors."""
        told = {"script": script, "arguments": arguments, "environment": dict(os.environ)}
        socket.send_fds(self._calls, [json.dumps(told).encode()], files)
        return Script(self._calls, int(self._calls.recv(64)))

    def run(self, script: str, *arguments: str, stdin: bytes = b"", timeout: float = 60) -> tuple[int, str, str]:
        """Return the exit status, the output and the errors of a script."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as told:
            given.write(stdin)
            given.seek(0)
            files = [file.fileno() for file in (given, printed, told)]
            status = self.start(script, *arguments, files=files).wait(timeout)
            printed.seek(0)
            told.seek(0)
            return status, printed.read().decode(), told.read().decode()

    def close(self) -> None:
        """End the process that forks."""
        self._calls.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs scripts in processes of their own."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 photos in 8 class folders."""
    return write_photo_folder(tmp_path_factory.mktemp("photos") / "folder")


@pytest.fixture(scope="session")
def photo_shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same photos as 4 tars, as a brace range."""
    return write_photo_shards(tmp_path_factory.mktemp("photos") / "shards")


@pytest.fixture
def letters() -> kdp.MapPipe:
    """Six samples whose x are letters, with classes 0, 1, 0, 2, 0, 1."""
    return kdp.from_dataset(
        list(zip("abcdef", [0, 1, 0, 2, 0, 1], strict=True)), class_names=["heron", "stork", "gull"]
    )


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waits."""
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URL of a bucket of a real S3 store."""
    with s3_server() as url:
        yield url


@pytest.fixture
def s3(bucket: str) -> Iterator[str]:
    """The URL of an empty folder of an S3 store, which fsspec reaches without being told how."""
    yield f"{bucket}/{secrets.token_hex(8)}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="session", autouse=True)
def has_a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what kdpipes keeps for later runs out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDPIPES_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def keeps_collections_quick() -> None:
    """Take what imports have made, also those of tests, out of the collections that the fixture below asks for."""
    gc.collect()
    gc.freeze()


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """After each test there is no process and no shared memory that was not there before."""
    before = _shared_memory()
    yield
    gc.collect()
    children = multiprocessing.active_children()
    for child in children:
        child.join(10)
    left = multiprocessing.active_children()
    for child in left:
        child.kill()  # one that hangs would hold up the tests after this one, too
    assert not left
    mine = {name for name in _shared_memory() - before if f"_{os.getpid()}_" in name}
    assert not mine
