"""Responses of storage: no bytes of another version, of another range, or without an end are taken for a file's."""

from __future__ import annotations

import hashlib
import io
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage import catalog, index_home, remote
from kdpipes.storage.files import ReplacedError, read_url, version_of
from kdpipes.storage.readers import is_other
from kdpipes.storage.remote import RemoteStream, Span, read_range
from kdpipes.write import copy
from kdpipes.write.localize import FileLocalizer
from tests.http_server import Served, serving

NUMBER = 60


def shard(letter: str) -> bytes:
    """Return a tar of samples of one letter; of another letter, it has the same size."""
    file = io.BytesIO()
    with TarWriter(file, mtime=0) as writer:
        for n in range(NUMBER):
            writer.write({"__key__": f"{n:02}", "bin": letter.encode() * 2_000, "cls": ord(letter)})
    return file.getvalue()


OLD, NEW = shard("a"), shard("b")


def tag_of(method: str, content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}-1"'


@pytest.fixture(autouse=True)
def small_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 16 KiB, two at a time, without waits, and an empty local cache."""
    monkeypatch.setattr(remote, "_FIRST_CHUNK", 1 << 14)
    monkeypatch.setattr(remote, "_LARGEST_CHUNK", 1 << 14)
    monkeypatch.setattr(remote, "_NUM_AHEAD", 2)
    monkeypatch.setattr(copy, "_STEP", 1 << 14)
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=["http", "s3fs", "obstore"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with `bucket/a.tar`, as a web server or as S3; `url` is that of the bucket."""
    if request.param == "obstore":
        pytest.importorskip("obstore")
    if request.param == "s3fs":
        monkeypatch.setattr("kdpipes.storage.object_store._library", lambda: None)
    with serving() as has:
        has.files["/bucket/a.tar"], has.tag_of = OLD, tag_of
        has.headers["Last-Modified"] = "Wed, 25 Nov 2026 12:00:00 GMT"
        options = {"anon": True, "endpoint_url": has.url, "use_listings_cache": False}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        has.url = f"{has.url}/bucket" if request.param == "http" else "s3://bucket"
        yield has


def replaced_at(number: int) -> Callable[[Served, str], None]:
    """Replace the shard before the request of this number for its content."""
    numbers = iter(range(1 << 20))

    def before(has: Served, request: str) -> None:
        if request.startswith("GET /bucket/a.tar") and "index" not in request and next(numbers) == number:
            has.files["/bucket/a.tar"] = NEW

    return before


def letters_of(samples: Any) -> set[str]:
    """Return the letters of samples, none of which may have two."""
    found = set()
    for sample in samples:
        letters = set(bytes(sample["bin"]).decode())
        assert len(letters) == 1
        assert ord(min(letters)) == sample["cls"]
        found |= letters
    return found


def consume(samples: Any, into: list[Any]) -> None:
    for sample in samples:
        into.append({"bin": sample["bin"], "cls": sample["cls"]})


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_stream_joins_no_two_versions(served: Served, number: int) -> None:
    served.before = replaced_at(number)
    got: list[Any] = []
    with pytest.raises(DataError, match="it has changed since it was opened"):
        consume(kdp.stream_shards(f"{served.url}/a.tar"), got)
    assert len(got) < NUMBER
    assert letters_of(got) <= {"a"}


def test_members_of_a_replaced_shard_are_an_error(served: Served) -> None:
    shards = kdp.open_shards(f"{served.url}/a.tar", fetch="members")
    assert letters_of([shards[0]]) == {"a"}
    served.files["/bucket/a.tar"] = NEW
    with pytest.raises(ReplacedError, match=r"has been replaced since its index was read.* Open the shards again\."):
        shards[40]["bin"]
    again = kdp.open_shards(f"{served.url}/a.tar", fetch="members")
    assert letters_of(again[n] for n in range(NUMBER)) == {"b"}


@pytest.mark.parametrize("number", [1, 2, 5])
def test_whole_shards_join_no_two_versions(served: Served, number: int, tmp_path: Path) -> None:
    version = version_of(f"{served.url}/a.tar")
    shards = kdp.open_shards(f"{served.url}/a.tar", fetch="shards", cache_dir=tmp_path / "kept")
    served.before = replaced_at(number)
    got: list[Any] = []
    with suppress(DataError):
        consume((shards[n] for n in range(NUMBER)), got)
    assert len(letters_of(got)) <= 1
    kept = [path.read_bytes() for path in (tmp_path / "kept").glob("*.tar")]
    assert kept in ([], [OLD], [NEW]), version


@pytest.mark.parametrize("number", [1, 3])
def test_an_index_is_of_one_version(served: Served, number: int) -> None:
    url = f"{served.url}/a.tar"
    served.before = replaced_at(number)
    with suppress(DataError):
        catalog.make_index(url)
    assert letters_of(kdp.open_shards(url)[n] for n in range(NUMBER)) == {"b"}


def test_a_copy_is_of_one_version(served: Served, tmp_path: Path) -> None:
    served.before = replaced_at(1)
    with pytest.raises(DataError, match="it has changed since it was opened"):
        FileLocalizer(tmp_path / "copy")(f"{served.url}/a.tar")
    assert not list((tmp_path / "copy").rglob("*.tar"))


def test_servers_may_give_head_and_get_other_tags(served: Served) -> None:
    served.tag_of = lambda method, content: f'"{method}{len(content)}"'
    url = f"{served.url}/a.tar"
    assert letters_of(kdp.stream_shards(url)) == {"a"}
    shards = kdp.open_shards(url, fetch="members")
    assert letters_of(shards[n] for n in range(NUMBER)) == {"a"}
    num_before = len(served.asked)
    assert read_range(Span(url, 0, 10, version_of(url))) == OLD[:10]
    assert len(served.asked) - num_before == 2, "whether the tags differ is found out once"


def test_a_response_of_another_range_is_an_error(served: Served) -> None:
    url = f"{served.url}/a.tar"
    served.shift = 512
    with pytest.raises(DataError, match="cannot be read at offset 512: "):
        read_range(Span(url, 512, 1024))
    with pytest.raises(DataError):
        list(kdp.stream_shards(url))

    def passes(has: Served, request: str) -> None:
        has.shift = 512 if len(has.asked) % 2 else 0

    served.before = passes
    assert read_range(Span(url, 512, 1024)) == OLD[512:1024]


def test_a_store_that_ignores_ranges_is_named(served: Served) -> None:
    url = f"{served.url}/a.tar"
    served.has_ranges = False
    with pytest.raises(DataError, match=r"^Shard '.*a\.tar' is on a server that does not support range requests: "):
        read_range(Span(url, 512, 1024))
    with RemoteStream(url) as stream:
        assert b"".join(iter(lambda: stream.read(1 << 16), b"")) == OLD
    assert letters_of(kdp.stream_shards(url)) == {"a"}


def test_a_file_without_an_end_is_an_error(served: Served) -> None:
    served.files["/bucket/large"] = bytes(100_000)
    assert len(read_url(f"{served.url}/large", max_bytes=100_000)) == 100_000
    with pytest.raises(DataError, match=r"large' cannot be read: it has more than 99,999 bytes, too many"):
        read_url(f"{served.url}/large", max_bytes=99_999)


def test_an_index_that_is_too_large_is_no_index(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_home, "_LARGEST_HEADER", 0)
    served.files["/bucket/a.tar.index"] = bytes(3 * len(OLD))
    assert letters_of(kdp.open_shards(f"{served.url}/a.tar")[n] for n in range(NUMBER)) == {"a"}


def test_a_body_is_compared_with_its_md5() -> None:
    with serving() as has:
        has.files["/a.bin"] = b"heron"
        has.headers["Content-MD5"] = b64encode(hashlib.md5(b"heron", usedforsecurity=False).digest()).decode()
        assert read_url(f"{has.url}/a.bin") == b"heron"
        has.files["/a.bin"] = b"stork"
        with pytest.raises(DataError, match=r"the body has the MD5 '.*', but its header says"):
            read_url(f"{has.url}/a.bin")


def test_tags_of_other_kinds_are_not_compared() -> None:
    assert is_other('tag:"1"', 'tag:"2"')
    assert not is_other('tag:"1"', 'tag:"1"')
    assert not is_other('gcs:"1"', 'tag:"2"')
    assert not is_other("tag:Wed, 25 Nov 2026", 'tag:"2"')
    assert is_other("tag:Wed, 25 Nov 2026", "tag:Wed, 26 Nov 2026")
