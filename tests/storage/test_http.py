"""Servers of HTTP: which version of a file they have is told by what they say, and what they reject is named."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage import remote
from kdpipes.storage.access import is_rejected, retried, what_went_wrong
from kdpipes.storage.files import read_url, version_of
from kdpipes.storage.remote import RemoteStream, Span, read_range
from tests.http_server import Served, serving, tar

DATES = ["Wed, 01 Jul 2026 10:00:00 GMT", "Thu, 02 Jul 2026 10:00:00 GMT"]


@pytest.fixture
def served() -> Iterator[Served]:
    """A server of ranges on this machine."""
    with serving() as has:
        yield has


@pytest.mark.parametrize("fetch", ["members", "shards"])
@pytest.mark.parametrize("header", ["Last-Modified", "ETag"])
def test_a_shard_of_equal_size_and_another_date_is_another(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: Any, header: str
) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path))
    for letter, date in zip("ab", DATES, strict=True):
        served.files["/a.tar"], served.headers[header] = tar(letter), date
        pipe = kdp.open_shards(f"{served.url}/a.tar", fetch=fetch).select("jpg").deal(batch_size=10)
        assert list(pipe) == [[(letter.encode() * 3_000,)] * 10]
        first = len(served.asked)
        assert len(kdp.open_shards(f"{served.url}/a.tar")) == 10
        assert served.asked[first:].count("/a.tar") == 1, "the index is kept as long as the date is the same"


def test_a_date_is_a_version_where_there_is_no_etag(served: Served) -> None:
    served.files["/a"] = b"heron"
    assert version_of(f"{served.url}/a") == (5, "")
    served.headers["Last-Modified"] = DATES[0]
    assert version_of(f"{served.url}/a") == (5, f"tag:{DATES[0]}")
    served.headers["ETag"] = '"1"'
    assert version_of(f"{served.url}/a") == (5, 'tag:"1"')


def rejection(status: int) -> str:
    return rf"it is rejected \({status}, .*\)\. .*`fsspec\.config\.conf\[\"http\"\] = \{{\"client_kwargs\""


@pytest.mark.parametrize("status", [401, 403])
def test_what_is_rejected_is_named_at_once_with_what_to_look_at(served: Served, status: int) -> None:
    served.files["/a.tar"], served.rejected["/a.tar"] = tar("a"), status
    url = f"{served.url}/a.tar"
    for read in (version_of, read_url, RemoteStream, lambda url: len(kdp.open_shards(url))):
        before = len(served.asked)
        with pytest.raises(DataError, match=rf"^'{url}' cannot be read: {rejection(status)}"):
            read(url)
        assert len(served.asked) - before <= 2, "asking again is of no use"
    with pytest.raises(DataError, match=rf"^Shard '{url}' cannot be read at offset 3: {rejection(status)}"):
        read_range(Span(url, 3, 5))


def test_an_index_that_is_rejected_is_none(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path))
    served.files["/a.tar"], served.rejected["/a.tar.index"] = tar("a"), 403  # as buckets say that cannot be listed
    assert len(kdp.open_shards(f"{served.url}/a.tar")) == 10


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s3://birds/a.tar", r"`AWS_ACCESS_KEY_ID`.*`FSSPEC_S3='\{\"anon\": true\}'`"),
        ("gs://birds/a.tar", r"`GOOGLE_APPLICATION_CREDENTIALS`.*`FSSPEC_GS='\{\"token\": \"anon\"\}'`"),
        ("tar://x::sftp://birds/a.tar", r'`fsspec\.config\.conf\["sftp"\]`'),
    ],
)
def test_each_storage_has_a_hint_of_its_own(url: str, hint: str) -> None:
    text = what_went_wrong(url, PermissionError("Forbidden"))
    assert text.startswith("it is rejected (Forbidden). ")
    assert re.search(hint, text)
    assert what_went_wrong(url, OSError("reset")) == "reset"


@pytest.mark.parametrize("chunk", [4_096, 1 << 20])
def test_whole_shards_come_from_a_server_without_ranges(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(remote, "_FIRST_CHUNK", chunk)
    served.has_ranges, served.files["/a.tar"] = False, tar("a")
    want = [(b"a" * 3_000, n % 2) for n in range(10)]
    for _ in range(2):  # the second time, an index is there that has no tag to be known by
        shards = kdp.open_shards(f"{served.url}/a.tar", fetch="shards")
        assert list(shards.select("jpg cls").deal(batch_size=10)) == [want]
    assert [path.read_bytes() for path in tmp_path.glob("shards/*.tar")] == [tar("a")]
    assert len(list(kdp.stream_shards(f"{served.url}/a.tar"))) == 10
    before = len(served.asked)
    other = kdp.open_shards(f"{served.url}/a.tar", fetch="members")
    assert len(other) == 10
    assert [path for path in served.asked[before:] if path == "/a.tar"] == ["/a.tar"] * 3, (
        "its version, a range of which nothing is read, and all of it once"
    )
    before = len(served.asked)
    with pytest.raises(
        DataError, match=r"not support range requests: 3000 bytes were .* the whole file\. Use `kdp\.open_shards\("
    ):
        other[3]["jpg"]
    assert len(served.asked) - before <= 2, "asking again is of no use"


def test_a_rejected_port_and_a_bad_certificate_are_named(served: Served, no_waits: None) -> None:
    places = {
        "http://127.0.0.1:1": r"Cannot connect to host 127\.0\.0\.1:1",
        served.url.replace("http", "https"): "SSL|ssl",
    }
    for place, words in places.items():
        for read in (
            version_of,
            read_url,
            lambda url: len(kdp.open_shards(url)),
            lambda url: list(kdp.stream_shards(url)),
        ):
            with pytest.raises(DataError, match=rf"^'{place}/a\.tar' cannot be read: .*({words})"):
                read(f"{place}/a.tar")


def test_storage_that_is_asked_again_is_logged_now_and_then(
    no_waits: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kdpipes.storage.access._warned_at", -math.inf)
    responses = iter([OSError("http://ada:pw@host/a?sig=1 reset"), OSError("again"), OSError("again"), "bytes"] * 3)

    def ask() -> Any:
        response = next(responses)
        if isinstance(response, OSError):
            raise response
        return response

    caplog.set_level(logging.INFO, "kdpipes.storage.access")
    assert [retried(ask) for _ in range(3)] == ["bytes"] * 3
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    first = "Storage does not respond, trying again (2 of 6): http://***@host/a?*** reset"
    assert told[:2] == [("INFO", first), ("WARNING", "Storage does not respond, trying again (3 of 6): again")]
    assert [level for level, _ in told].count("WARNING") == 1


@pytest.mark.parametrize(("asked", "least"), [("7", 7), ("Fri, 01 Jan 2100 00:00:00 GMT", 60), ("soon", 0)])
def test_servers_say_when_to_ask_again(asked: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("kdpipes.storage.access.time.sleep", waits.append)
    with serving() as has:
        has.files["/a.bin"], has.rejected, has.headers["Retry-After"] = b"heron", {"/a.bin": 503}, asked
        has.before = lambda served, _: served.rejected.clear() if len(served.asked) == 2 else None
        assert read_url(f"{has.url}/a.bin") == b"heron"
    failure: Any = {"ResponseMetadata": {"HTTPHeaders": {"retry-after": asked}}}
    retried(Mock(side_effect=[ClientError(failure, "GetObject"), None]))
    assert len(waits) == 2
    assert all(least <= wait < max(least, 1) + 1 for wait in waits)


def test_missing_credentials_are_not_asked_for_again() -> None:
    calls = list[int]()

    def ask() -> None:
        calls.append(1)
        raise NoCredentialsError

    with pytest.raises(NoCredentialsError) as caught:
        retried(ask)
    assert (len(calls), is_rejected(caught.value)) == (1, True)
