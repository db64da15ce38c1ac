"""A proxy on this machine that delays and counts the requests to a server.

Run as a program, this module is the proxy, in a process of its own so that its work is not measured. It ends when its
standard input does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest

__all__ = ["Proxy", "slow_proxy"]

_METHODS = (b"GET ", b"HEAD", b"PUT ", b"POST", b"DELE")


class Proxy:
    """A running proxy.

    Args:
        url: Where it listens.
        log: The file to which it writes the requests.
    """

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log

    def requests(self) -> list[str]:
        """Return the requests so far, each as method and path: "GET /bucket/a.tar"."""
        return self._log.read_text(encoding="utf-8").splitlines()


@contextmanager
def slow_proxy(server: str, seconds: float = 0.0) -> Iterator[Proxy]:
    """Run a proxy before an HTTP server.

    Args:
        server: Its URL.
        seconds: How long each request waits.
    """
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with tempfile.TemporaryDirectory(prefix="kdpipes-proxy-") as folder:
        log = Path(folder) / "requests"
        log.touch()
        command = [sys.executable, str(Path(__file__).resolve()), str(urlsplit(server).port), str(seconds), str(log)]
        with subprocess.Popen(command, **pipes) as process:
            assert process.stdout is not None
            yield Proxy(f"http://127.0.0.1:{process.stdout.readline().strip()}", log)


class _Side(asyncio.Protocol):
    """One side of a connection."""

    transport: Any = None
    other: _Side | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.send(data)

    def send(self, data: bytes) -> None:
        """Pass data on to the peer of this side."""
        self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _Client(_Side):
    """The side of the client, whose data wait."""

    def __init__(self, port: int, seconds: float, log: Any) -> None:
        self._port, self._seconds, self._log = port, seconds, log

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        server = _Side()
        server.other = self
        await asyncio.get_running_loop().create_connection(lambda: server, "127.0.0.1", self._port)
        self.other = server

    def data_received(self, data: bytes) -> None:
        if data.startswith(_METHODS):
            self._log.write(b" ".join(data.split(b" ", 2)[:2]) + b"\n")
        asyncio.get_running_loop().call_later(self._seconds, self._pass_on, data)

    def _pass_on(self, data: bytes) -> None:
        if self.other is None:
            self._connecting.add_done_callback(lambda _: self._pass_on(data))
        elif not self.other.transport.is_closing():
            self.other.send(data)


async def _main(port: int, seconds: float, log: str) -> None:
    loop = asyncio.get_running_loop()
    with open(log, "ab", buffering=0) as file:  # noqa: PTH123 - before the loop runs anything else
        server = await loop.create_server(lambda: _Client(port, seconds, file), "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))


@contextmanager
def counted_s3(shards: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Put files into the S3 server of the tests, and yield a proxy that counts the requests to it."""
    fsspec.filesystem("s3").pipe(dict(shards))
    options = fsspec.config.conf["s3"]
    with slow_proxy(options["endpoint_url"]) as proxy:
        monkeypatch.setitem(fsspec.config.conf, "s3", {**options, "endpoint_url": proxy.url})
        yield proxy
