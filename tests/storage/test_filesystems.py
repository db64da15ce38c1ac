"""The file system of a URL: found once, by each thread if need be, and anew where fsspec's is another."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
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

    def note(url: str) -> Any:
        asked.append(url)
        return url_to_fs(url)

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
    for number in range(10):
        filesystem_of(f"http://127.0.0.1/{number}")
    assert len(filesystems._shared) <= 3
