"""Storage that is silent is an error that names the URL and the seconds, whichever file system reaches it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage.access import Access, SilenceError, check_timeout, current_access, in_time, using
from kdpipes.storage.files import read_url, version_of
from kdpipes.storage.remote import BrokenStreamError, RangeReader, RemoteStream, Span, read_range
from tests.faulty_storage import Fault, faulty_storage
from tests.threads import threads_left

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 8192\r\nAccept-Ranges: bytes\r\nConnection: close\r\n\r\n"
PART = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes 0-%d/8192\r\n\r\n"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waits, and hardly more time for large responses."""
    monkeypatch.setattr("kdpipes.storage.access._SLOWEST", 1 << 27)
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)


class Silent:
    """A server that takes connections and says nothing, or no more than the beginning of a body."""

    def __init__(self, *, begins: bool = False) -> None:
        self._begins, self._kept = begins, list[socket.socket]()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.num_asked = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._kept.append(connection)
            asked = connection.recv(1 << 14)
            self.num_asked += 1
            if self._begins and asked.startswith(b"HEAD"):
                connection.sendall(HEAD)
            elif self._begins:
                connection.sendall(PART % (8192, 8191) + b"x" * 100)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
        for connection in self._kept:
            connection.close()


@contextmanager
def silent(**given: Any) -> Iterator[Silent]:
    server = Silent(**given)
    try:
        yield server
    finally:
        server.close()


def test_a_silent_server_is_an_error_with_url_and_seconds() -> None:
    with silent() as server, using(Access(0.05)):
        url = f"http://{server.address}/a.tar"
        for ask in (version_of, read_url, RemoteStream):
            with pytest.raises(
                DataError, match=rf"^'{url}' has not responded within 0\.(05|11)\d* s\. .*`timeout_s=` waits longer\.$"
            ):
                ask(url)
        with pytest.raises(DataError, match=r"a\.tar' cannot be read at offset 7: .* has not responded"):
            read_range(Span(url, 7, 9))


def test_a_body_that_stalls_is_an_error_too() -> None:
    with silent(begins=True) as server, using(Access(0.2)):
        url = f"http://{server.address}/a.tar"
        assert version_of(url).size == 8192
        with pytest.raises(DataError, match=r"cannot be read at offset 0: .* has not responded within 0\.2"):
            read_range(Span(url, 0, 8192))
        with (
            RemoteStream(url) as stream,
            pytest.raises(BrokenStreamError, match=r"at offset 0: .* has not responded within 0\.2"),
        ):
            stream.read(10)


def test_silence_is_outlasted_once() -> None:
    with silent() as server, using(Access(0.05)), pytest.raises(DataError, match="has not responded"):
        version_of(f"http://{server.address}/a.tar")
    assert server.num_asked >= 2


def test_s3_that_says_nothing_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent() as server:
        options = {"key": "a", "secret": "b", "endpoint_url": f"http://{server.address}"}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        with pytest.raises(DataError, match=r"'s3://silent/a\.tar' has not responded within 0\.3"):
            len(kdp.open_shards("s3://silent/a.tar", timeout_s=0.3))


class Gate:
    """What file systems wait with, until the test is done."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def __call__(self, seconds: float) -> None:
        self.is_open.wait(30)


@pytest.fixture
def gate() -> Iterator[Gate]:
    waiting = Gate()
    yield waiting
    waiting.is_open.set()
    assert threads_left(name="kdpipes-request") == []


def test_members_that_were_asked_for_ahead_are_no_reason_to_wait(tmp_path: Path, gate: Gate) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    hanging = Fault("latency", seconds=1)
    with faulty_storage(str(tmp_path), faults=[hanging], sleep=gate) as files, using(Access(0.05)):
        reader = RangeReader()
        reader.prefetch([Span("faulty://a.bin", 0, 10)])
        with pytest.raises(DataError, match=r"'faulty://a\.bin' cannot be read at offset 0: .* within 0\.05\d* s"):
            reader.read(Span("faulty://a.bin", 0, 10))
        assert files.stats().requests == 2


@pytest.mark.parametrize("open_source", [kdp.open_shards, kdp.stream_shards])
def test_sources_give_their_limit_to_all_that_they_ask(tmp_path: Path, gate: Gate, open_source: Any) -> None:
    (tmp_path / "a.tar").write_bytes(bytes(10_240))
    hanging = Fault("latency", seconds=1)
    with (
        faulty_storage(str(tmp_path), faults=[hanging], sleep=gate),
        pytest.raises(DataError, match=r"has not responded within 0\.0625"),
    ):
        list(open_source("faulty://a.tar", timeout_s=0.0625))
    assert current_access().timeout_s == 30


def test_large_responses_have_more_time(gate: Gate) -> None:
    with using(Access(0.01)), pytest.raises(SilenceError, match=r"'x' has not responded within 0\.0256\d s"):
        in_time(lambda: gate(1), "x", num_bytes=1 << 21)


def test_without_a_limit_nobody_looks_at_the_time() -> None:
    before = threading.active_count()
    with using(Access(None)):
        assert in_time(threading.active_count, "x") == before


def test_errors_of_the_storage_come_as_they_are() -> None:
    def reject() -> None:
        raise TimeoutError("of its own")

    with using(Access(5.0)), pytest.raises(TimeoutError, match="of its own"):
        in_time(reject, "x")


def test_limits_that_are_none_are_rejected() -> None:
    for value in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"`timeout_s` must be above 0 and finite, but is .*None waits for ever"):
            kdp.open_shards("a.tar", timeout_s=value)
    with pytest.raises(TypeError, match="`timeout_s` must be a number of seconds, or None"):
        kdp.stream_shards("a.tar", timeout_s="9")  # type: ignore[arg-type]
    assert check_timeout(None) is None
