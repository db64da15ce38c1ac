"""Files elsewhere, front to back: the bytes are those of the file, whatever goes wrong on the way."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from kdpipes.core.errors import DataError
from kdpipes.storage import remote
from kdpipes.storage.access import NUM_TRIES
from kdpipes.storage.remote import BrokenStreamError, RemoteStream, StreamsAhead
from tests.faulty_storage import Fault, faulty_storage
from tests.threads import threads_left

CONTENT = random.Random(0).randbytes(200_000)
PASSING = ["reset", "reset_midway", "timeout", "unavailable", "too_many_requests", "truncate"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 to 16 KiB, three at a time, and retries without waits."""
    monkeypatch.setattr(remote, "_FIRST_CHUNK", 1 << 12)
    monkeypatch.setattr(remote, "_LARGEST_CHUNK", 1 << 14)
    monkeypatch.setattr(remote, "_NUM_AHEAD", 3)
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with a file of 200,000 bytes."""
    (tmp_path / "a.tar").write_bytes(CONTENT)
    return str(tmp_path)


def read(url: str, size: int = 10_000) -> bytes:
    with RemoteStream(url) as stream:
        return b"".join(iter(lambda: stream.read(size), b""))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kdpipes-stream"]


def wait_for_none() -> None:
    assert threads_left(name="kdpipes-stream") == []


@pytest.mark.parametrize("errors", ["builtin", "s3fs"])
@pytest.mark.parametrize("kind", PASSING)
def test_requests_that_fail_are_made_again_where_they_broke_off(
    folder: str, kind: Any, errors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_NUM_AHEAD", 1)  # two threads that take turns would let one fail each time
    for fault in (Fault(kind, every=2), Fault(kind, probability=0.3), Fault(kind, times=NUM_TRIES - 1)):
        with faulty_storage(folder, faults=[fault], seed=3, errors=errors) as storage:
            assert read("faulty://a.tar") == CONTENT
        assert storage.stats().faults[kind] >= NUM_TRIES - 2
        assert storage.stats().bytes_delivered < 3 * len(CONTENT)  # no reading from the beginning


@pytest.mark.parametrize("kind", PASSING)
def test_what_fails_for_good_is_an_error_that_names_the_place(
    folder: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_NUM_AHEAD", 1)
    with faulty_storage(folder, faults=[Fault(kind, after=2, on="range")]) as storage:
        stream = RemoteStream("faulty://a.tar")
        assert stream.read(1 << 20) == CONTENT[: 1 << 12]
        assert stream.read(1 << 20) == CONTENT[1 << 12 : 1 << 13]
        with pytest.raises(BrokenStreamError, match=r"^cannot be read at offset 8192: \S"):
            stream.read(1)
        stream.close()
    assert storage.stats().faults[kind] == NUM_TRIES


@pytest.mark.parametrize("change", ["new_etag", "new_size"])
def test_a_file_that_is_replaced_meanwhile_is_an_error(folder: str, change: Any) -> None:
    changed = Fault(change, after=1, on="info")
    for faults in ([changed], [changed, Fault("reset", times=1, after=1, on="range")]):
        with (
            faulty_storage(folder, faults=faults),
            pytest.raises(BrokenStreamError, match=r"at offset \d+: it has changed since it was opened$"),
        ):
            read("faulty://a.tar")


def test_what_is_missing_or_cannot_be_reached_is_told_at_once(folder: str) -> None:
    with faulty_storage(folder) as storage, pytest.raises(FileNotFoundError, match=r"no file 'faulty://b.tar'"):
        read("faulty://b.tar")
    assert storage.stats().requests == 1
    with faulty_storage(folder, faults=[Fault("timeout")]), pytest.raises(DataError, match=r"'faulty://a.tar' cannot"):
        read("faulty://a.tar")


def test_an_empty_file_has_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    with faulty_storage(str(tmp_path)):
        assert read("faulty://a.tar") == b""


def test_the_threads_are_daemons_and_end_with_the_stream(folder: str) -> None:
    with faulty_storage(folder):
        for drop in (RemoteStream.close, lambda _: None):
            stream = RemoteStream("faulty://a.tar")
            stream.read(10)
            assert len(threads()) == remote._NUM_AHEAD
            assert all(thread.daemon for thread in threads())
            drop(stream)
            del stream
            gc.collect()
            wait_for_none()


def test_a_forked_process_goes_on_with_threads_of_its_own(folder: str) -> None:
    with faulty_storage(folder), RemoteStream("faulty://a.tar") as stream:
        begin = stream.read(100)
        child = os.fork()
        rest = b"".join(iter(lambda: stream.read(1 << 14), b""))
        if child == 0:
            os._exit(0 if begin + rest == CONTENT else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert begin + rest == CONTENT


def test_a_forked_process_waits_for_no_lock_of_a_thread(folder: str) -> None:
    streams = in_order(folder, "b.tar", "c.tar")
    with faulty_storage(folder), streams.open("faulty://b.tar") as stream:
        stream.read(10)
        coming, begun, is_held, is_done = (
            stream._coming[-1],
            streams._begun["faulty://c.tar"],
            threading.Event(),
            threading.Event(),
        )

        def hold() -> None:
            with coming._condition, begun._condition:
                is_held.set()
                is_done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # which ends one that waits
            while stream.read(1 << 14):
                pass
            stream.close()
            streams.close()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        is_done.set()
        holder.join()
        streams.close()
        assert status == 0


def in_order(folder: str, *names: str) -> StreamsAhead:
    for name in names:
        (Path(folder) / name).write_bytes(CONTENT)
    return StreamsAhead([f"faulty://{name}" for name in names])


def test_the_next_file_is_begun_while_one_is_read(folder: str) -> None:
    streams = in_order(folder, "b.tar", "c.tar", "d.tar")
    with faulty_storage(folder) as files, streams.open("faulty://b.tar") as stream:
        begun = streams._begun["faulty://c.tar"].result()
        assert next(chunk.result() for chunk in begun._coming) == CONTENT[: 1 << 12]
        assert {request.path for request in files.requests() if request.kind == "range"} == {"c.tar"}
        assert stream.read(100) == CONTENT[:100]
        with streams.open("faulty://c.tar") as following:
            assert following is begun
            assert following.read(100) == CONTENT[:100]
        streams.close()
    del begun, following, stream, streams
    gc.collect()
    wait_for_none()


def test_the_next_file_has_the_places_that_are_free(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_NUM_AHEAD", 6)
    monkeypatch.setattr(remote, "_NUM_BEGUN", 2)
    streams = in_order(folder, "b.tar", "c.tar")
    with faulty_storage(folder), streams.open("faulty://b.tar") as stream:
        begun = streams._begun["faulty://c.tar"].result()
        assert len(begun._coming) == 2
        assert b"".join(iter(lambda: stream.read(1 << 14), b"")) == CONTENT
        assert len(begun._coming) == 6
        with streams.open("faulty://c.tar") as following:
            assert b"".join(iter(lambda: following.read(1 << 14), b"")) == CONTENT


def test_small_files_leave_room_for_the_one_after_the_next(tmp_path: Path) -> None:
    names = ["a.tar", "b.tar", "c.tar", "d.tar", "e.tar"]
    for name in names:
        (tmp_path / name).write_bytes(CONTENT[:7000])  # a chunk, and a rest that is no request of its own
    streams = StreamsAhead([f"faulty://{name}" for name in names])
    with faulty_storage(str(tmp_path)) as storage:
        streams.begin("faulty://a.tar")
        for name in names:
            with streams.open(f"faulty://{name}") as stream:
                following = [future.result() for future in list(streams._begun.values())]
                assert len(following) == min(2, len(names) - 1 - names.index(name))
                assert all(each is not None and len(each._coming) == 1 for each in following)
                assert b"".join(iter(lambda stream=stream: stream.read(1 << 14), b"")) == CONTENT[:7000]  # type: ignore[misc]
        ranges = [request for request in storage.requests() if request.kind == "range"]
    assert sorted(request.path for request in ranges) == names
    assert storage.stats().bytes_repeated == 0
    streams.close()


def test_a_file_that_cannot_be_started_leaves_the_next_one_alone(tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_bytes(CONTENT)
    streams = StreamsAhead(["faulty://a.tar", "faulty://b.tar"])
    with faulty_storage(str(tmp_path)):
        streams.begin("faulty://a.tar")
        with pytest.raises(FileNotFoundError, match=r"a\.tar"):
            streams.open("faulty://a.tar")
        with streams.open("faulty://b.tar") as stream:
            assert stream.read(10) == CONTENT[:10]
        streams.close()


def test_a_next_file_that_fails_to_open_is_an_error_in_turn(folder: str) -> None:
    streams = in_order(folder, "b.tar", "c.tar")
    with faulty_storage(folder):
        (Path(folder) / "c.tar").unlink()
        with streams.open("faulty://b.tar") as stream:
            assert b"".join(iter(lambda: stream.read(1 << 14), b"")) == CONTENT
        with pytest.raises(FileNotFoundError, match=r"c\.tar"):
            streams.open("faulty://c.tar")


def test_a_forked_process_opens_the_next_file_itself(folder: str) -> None:
    streams = in_order(folder, "b.tar", "c.tar")
    with faulty_storage(folder), streams.open("faulty://b.tar"):
        child = os.fork()
        if child == 0:
            with streams.open("faulty://c.tar") as stream:
                os._exit(0 if b"".join(iter(lambda: stream.read(1 << 14), b"")) == CONTENT else 1)
        assert os.waitpid(child, 0)[1] == 0
        streams.close()


class Flaky:
    """A file that fails at every thirtieth reading, and gives fewer bytes than it is asked for."""

    def __init__(self, content: bytes, is_seekable: bool) -> None:
        self._content, self._at, self._is_seekable, self._num_reads = content, 0, is_seekable, 0

    def seekable(self) -> bool:
        return self._is_seekable

    def seek(self, offset: int) -> int:
        assert self._is_seekable
        self._at = offset
        return offset

    def read(self, size: int) -> bytes:
        self._num_reads += 1
        if self._num_reads % 30 == 0:
            raise ConnectionResetError("reset")
        part = self._content[self._at : self._at + min(size, 3_000)]
        self._at += len(part)
        return part

    def close(self) -> None:
        pass


class Unranged(LocalFileSystem):  # type: ignore[misc]
    """A file system that has files, and no ranges; nor sizes, if it is so set."""

    protocol: ClassVar[Any] = "unranged"
    has_sizes, is_seekable = True, True

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(CONTENT) if self.has_sizes else None, "type": "file"}

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return Flaky(CONTENT, self.is_seekable)


class Careless(Unranged):
    """A file system that gives the whole file, whichever range it is asked for."""

    protocol: ClassVar[Any] = "careless"
    num_asked: ClassVar[list[int]] = []

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        self.num_asked.append(end - start)
        return CONTENT


fsspec.register_implementation("unranged", Unranged, clobber=True)
fsspec.register_implementation("careless", Careless, clobber=True)


@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize("is_seekable", [True, False])
def test_files_without_ranges_are_opened_again(
    has_sizes: bool, is_seekable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unranged, "has_sizes", has_sizes)
    monkeypatch.setattr(Unranged, "is_seekable", is_seekable)
    if is_seekable:
        assert read("unranged://a.tar") == CONTENT
    else:  # reading up to the place takes more readings than come through
        with pytest.raises(BrokenStreamError, match=r"^cannot be read at offset \d+: reset$"):
            read("unranged://a.tar")


def test_a_server_that_ignores_ranges_is_read_as_one_file() -> None:
    assert read("careless://a.tar") == CONTENT
    assert 1 <= len(Careless.num_asked) <= remote._NUM_AHEAD


Response = Callable[[BaseHTTPRequestHandler, int], None]


@contextmanager
def http_server(response: Response) -> Iterator[str]:
    """Serve `CONTENT`, as `response` does; it is told how many requests there were before."""
    numbers = iter(range(1 << 20))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            response(self, next(numbers))

        def do_HEAD(self) -> None:
            response(self, next(numbers))

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.tar"
        server.shutdown()


def _begin(handler: BaseHTTPRequestHandler, status: int, length: int) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()


def rejects_and_breaks_off(handler: BaseHTTPRequestHandler, number: int) -> None:
    """Respond with 503 at first, and break off in the middle of the first two bodies."""
    if number < 4:
        _begin(handler, 503, 0)
        return
    _begin(handler, 200, len(CONTENT))
    if handler.command == "GET":
        handler.wfile.write(CONTENT[: 150_000 if number < 8 else None])
        handler.close_connection = True


def gives_ranges(handler: BaseHTTPRequestHandler, number: int) -> None:
    """Respond with the part that is asked for, of which every third one breaks off."""
    if handler.command == "HEAD":
        return _begin(handler, 200, len(CONTENT))
    start, stop = (int(text) for text in handler.headers["Range"].removeprefix("bytes=").split("-"))
    _begin(handler, 206, stop + 1 - start)
    handler.wfile.write(CONTENT[start : stop + 1 - 100 * (number % 3 == 0)])
    handler.close_connection = True
    return None


def is_not_there(handler: BaseHTTPRequestHandler, number: int) -> None:
    _begin(handler, 404, 0)


def test_http_servers_are_outlasted_too() -> None:
    for response in (rejects_and_breaks_off, gives_ranges):
        with http_server(response) as url:
            assert read(url) == CONTENT
    with http_server(is_not_there) as url, pytest.raises(FileNotFoundError, match="There is no file 'http://"):
        read(url)
