"""Without torchdata and what only Linux and macOS have, kdpipes imports, and chains run in threads and processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What Windows lacks and the standard library of Linux does not need; and torchdata, which has no wheels for Python 3.13
# and later.
HIDE = """
import asyncio, multiprocessing.popen_spawn_posix, os, select, signal, socket, subprocess, sys, tempfile, warnings
import fsspec, lmdb, platformdirs, torch, torch.multiprocessing, torch.utils.data, webdataset
warnings.simplefilter("ignore")
for name in ("fcntl", "resource", "pwd", "grp", "termios", "torchdata"):
    sys.modules[name] = None
for module, names in {
    os: "fork memfd_create register_at_fork getuid sysconf pidfd_open pread pwrite setsid",
    select: "poll epoll",
    signal: "pidfd_send_signal",
    socket: "AF_UNIX MSG_DONTWAIT MSG_CTRUNC recv_fds send_fds",
}.items():
    for name in names.split():
        delattr(module, name)

def socketpair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]

socket.socketpair = socketpair
import kdpipes as kdp
"""
SCRIPT = """
import kdpipes.cli, kdpipes.testing
for name in kdp.__all__:
    getattr(kdp, name)

folder = sys.argv[1]
birds = kdp.from_ids([1, 2, 3], [0, 1, 0], load=lambda n: 1 / (n - 2))
birds = birds.on_error("quarantine", path=f"{folder}/bad.jsonl").cache_in_memory()
chain = birds.select("x y").deal(batch_size=2).collate_samples()
for service in (None, kdp.ThreadReadingService(2)):
    with kdp.Loader(chain, reading_service=service) as loader:
        print(*(x.tolist() + y.tolist() for x, y in loader))
birds.cache_on_disk(f"{folder}/cache")[0]["x"]
kdp.write_shards(kdp.from_ids([1], load=str), f"{folder}/a-%d.tar", max_samples=9)
print([sample.key for sample in kdp.stream_shards(f"{folder}/a-0.tar")], kdp.open_shards(f"{folder}/a-0.tar")[0].key)
"""

# A spawned worker runs this file again, so it lacks the same; its batches come in files of `TMPDIR`.
SPAWNED = (
    HIDE
    + """
import kdpipes as kdp

def die_once(n, path):
    if n == 20 and not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), kill)
    return n

class Load:
    def __init__(self, path):
        self.path = path

    def __call__(self, n):
        return torch.full((1 << 14 + (n > 9),), die_once(n, self.path))

def main(folder, end):
    chain = kdp.from_ids(list(range(40)), load=Load(f"{folder}/died")).select("x").deal(batch_size=4).collate_samples()
    service = kdp.ProcessReadingService(2, start_method="spawn", worker_restarts=end != "error")
    with kdp.Loader(chain, reading_service=service) as loader:
        for epoch in range(2):
            found = [batch for batch in map(tuple, loader)]
            assert [x[:, 0].tolist() for (x,) in found] == [list(range(n, n + 4)) for n in range(0, 40, 4)]
            del found
        stats = loader.stats()
        print(stats)
        if end == "killed":
            it = iter(loader)
            next(it)
            os.kill(os.getpid(), kill)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""
)

# A spawned worker runs this file again, so it lacks the same. Batches grow, so that arenas are replaced.
SPAWNED = (
    HIDE
    + """
class Load:
    def __init__(self, marker):
        self.marker = marker

    def __call__(self, number):
        if number == 20 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((1 << (14 + number // 10),), number)

def main(folder, end):
    chain = kdp.from_ids(list(range(40)), load=Load(f"{folder}/marker")).select("x").deal(batch_size=2)
    service = kdp.ProcessReadingService(2, start_method="spawn")
    with kdp.Loader(chain.collate_samples(), reading_service=service) as loader:
        held = []
        for _ in range(2):
            for batch, (x,) in enumerate(loader):
                assert x[:, -1].tolist() == [2 * batch, 2 * batch + 1], x
                held = [*held[-5:], (x, x.clone())]
                assert all(one.equal(other) for one, other in held)
        stats = loader.stats()
        print(int(stats["batches"]), int(stats["worker_deaths"]), int(stats["slow_batches"]))
        if end == "killed":
            batches = iter(loader)
            next(batches)
            print(len(os.listdir(tempfile.gettempdir())), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""
)


def test_without_what_windows_lacks_chains_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDE + SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # the second sample is left out, and tried no more
    assert done.stdout.splitlines() == ["[-1.0, 0] [1.0, 0]"] * 2 + ["['a-0.tar/1'] a-0.tar/1"]


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_spawned_workers_share_batches_by_files_and_leave_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    script, files = tmp_path / "script.py", tmp_path / "files"
    script.write_text(SPAWNED, encoding="utf-8")
    files.mkdir()
    monkeypatch.setenv("TMPDIR", str(files))
    run = [sys.executable, str(script), str(tmp_path), end]
    # The pipes are closed when the workers have ended, too.
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=100)
    is_killed = end == "killed"
    assert (done.returncode < 0) == is_killed, done.stderr
    assert done.stdout.splitlines() == ["40 1 0", *(["2"] if is_killed else [])], (
        done.stderr
    )  # a folder for each worker
    assert not list(files.iterdir())
