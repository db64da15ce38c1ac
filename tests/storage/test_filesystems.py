"""The file system of a URL: found once, by each thread if need be, and anew where fsspec's is another."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kdpipes.storage import filesystems
from kdpipes.storage.filesystems import filesystem_of


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which URLs fsspec was asked for."""
    asked: list[str] = []
    url_to_fs = fsspec.core.url_to_fs

    def note(url: str, **options: Any) -> Any:
        asked.append(url)
        return url_to_fs(url, **options)

    monkeypatch.setattr("fsspec.core.url_to_fs", note)
    monkeypatch.setattr(filesystems, "_shared", {})
    filesystems._own.__dict__.clear()
    return asked


@pytest.mark.parametrize("url", ["memory://a/b.tar", "http://127.0.0.1/b.tar?c=1", "zip://b.tar::memory://c.zip"])
def test_it_is_what_fsspec_says(url: str, found: list[str]) -> None:
    fsspec.filesystem("memory").pipe("/c.zip", b"PK\5\6" + bytes(18))
    for _ in range(2):
        filesystem, path = filesystem_of(url)
        theirs, their_path = fsspec.url_to_fs(url)
        assert (type(filesystem), path) == (type(theirs), their_path)
    assert found == [url] * (2 if "::" in url else 1)


class FromUrl(MemoryFileSystem):
    """A file system that a URL says more about, as sftp's do."""

    protocol = "fromurl"

    def __init__(self, host: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.host = host

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"host": path.split("/")[2]}


def test_it_is_one_for_all_urls_unless_they_say_more(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "fromurl", FromUrl)
    one, other = (filesystem_of(f"memory://{name}.tar") for name in "ab")
    assert one[0] is other[0]
    assert (one[1], other[1]) == ("/a.tar", "/b.tar")
    for name in "abab":
        assert filesystem_of(f"fromurl://{name}/c.tar")[0].host == name
    assert found == ["memory://a.tar", "fromurl://a/c.tar", "fromurl://b/c.tar"]


def test_paths_are_not_taken_for_protocols(found: list[str]) -> None:
    assert filesystem_of("data:,heron")[0].cat("data:,heron") == b"heron"
    for path in ("data", "http", "/tmp/a.tar"):
        assert type(filesystem_of(path)[0]).__name__ == "LocalFileSystem"
    assert type(filesystem_of("http://127.0.0.1/a")[0]).__name__ == "HTTPFileSystem"
    assert type(filesystem_of("http")[0]).__name__ == "LocalFileSystem"


@pytest.mark.parametrize("path", ["a b.tar", "./a.tar", "/tmp/a.tar", "file:///tmp/a.tar", "local://a.tar"])
def test_paths_are_what_fsspec_makes_of_them(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert filesystem_of(path)[1] == fsspec.url_to_fs(path)[1]


def test_threads_share_only_what_is_made_for_that(found: list[str]) -> None:
    with ThreadPoolExecutor(1) as other:
        for url, is_shared in (("http://127.0.0.1/a", True), ("memory://a", False)):
            mine = filesystem_of(url)[0]
            assert (other.submit(filesystem_of, url).result()[0] is mine) == is_shared
    assert found == ["http://127.0.0.1/a", "memory://a", "memory://a"]


def test_settings_and_cleared_instances_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    first = filesystem_of("memory://a")[0]
    monkeypatch.setitem(fsspec.config.conf, "memory", {"use_listings_cache": False})
    second = filesystem_of("memory://a")[0]
    fsspec.config.conf["memory"]["use_listings_cache"] = True
    third = filesystem_of("memory://a")[0]
    MemoryFileSystem.clear_instance_cache()
    assert len({id(one) for one in (first, second, third, filesystem_of("memory://a")[0])}) == 4


def test_a_forked_process_finds_its_own(found: list[str]) -> None:
    filesystem_of("http://127.0.0.1/a")
    child = os.fork()
    if not child:
        filesystem_of("http://127.0.0.1/a")
        os._exit(len(found))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "_MANY", 3)
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "fromurl", FromUrl)
    for number in range(10):
        filesystem_of(f"fromurl://{number}/a")
    assert len(filesystems._own.__dict__) <= 3
