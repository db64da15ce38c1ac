"""Without torchdata and what only Linux and macOS have, kdpipes imports, and chains run in threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What Windows lacks and the standard library of Linux does not need; and torchdata, which has no wheels for Python 3.13
# and later.
HIDE = """
import asyncio, os, select, signal, socket, subprocess, sys, tempfile, warnings
import fsspec, lmdb, platformdirs, torch, torch.multiprocessing, torch.utils.data, webdataset
warnings.simplefilter("ignore")
for name in ("fcntl", "resource", "pwd", "grp", "termios", "torchdata"):
    sys.modules[name] = None
for module, names in {
    os: "fork memfd_create register_at_fork getuid sysconf pidfd_open pread pwrite setsid",
    select: "poll epoll",
    signal: "pidfd_send_signal SIGKILL",
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
try:
    kdp.Loader(chain, num_workers=2)
except RuntimeError as error:
    print(error)
birds.cache_on_disk(f"{folder}/cache")[0]["x"]
kdp.write_shards(kdp.from_ids([1], load=str), f"{folder}/a-%d.tar", max_samples=9)
print([sample.key for sample in kdp.stream_shards(f"{folder}/a-0.tar")], kdp.open_shards(f"{folder}/a-0.tar")[0].key)
"""

# A spawned worker runs this file again, so it lacks the same. Batches grow, so that arenas are replaced.
ON_MACOS = """
import os, signal, sys
for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (os, "posix_fallocate"), (signal, "pidfd_send_signal")):
    delattr(module, name)
import torch, kdpipes as kdp

class Load:
    def __init__(self, marker):
        self.marker = marker

    def __call__(self, number):
        if number == 20 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((1 << (14 + number // 10),), number)

if __name__ == "__main__":
    chain = kdp.from_ids(list(range(40)), load=Load(sys.argv[1])).select("x").deal(batch_size=2).collate_samples()
    with kdp.Loader(chain, num_workers=2, start_method="spawn") as loader:
        print([x[:, -1].tolist() for (x,) in loader] == [[n, n + 1] for n in range(0, 40, 2)])
        stats = loader.stats()
        print(int(stats["worker_deaths"]), int(stats["slow_batches"]))
"""


def test_processes_share_batches_without_what_macos_lacks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ON_MACOS, encoding="utf-8")
    run = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "marker")]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.splitlines() == ["True", "1 0"], done.stderr


def test_without_what_windows_lacks_chains_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDE + SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # the second sample is left out, and tried no more
    *batches, error, keys = done.stdout.splitlines()
    assert batches == ["[-1.0, 0] [1.0, 0]"] * 2
    assert error.endswith("Use threads: `reading_service=kdp.ThreadReadingService(2)`.")
    assert keys == "['a-0.tar/1'] a-0.tar/1"
