"""Paths and URLs: what they expand to, what they are called, and what is said when they cannot be read."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import known_implementations
from hypothesis import given, settings
from hypothesis import strategies as st

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage.files import list_files, read_url
from kdpipes.storage.filesystems import filesystem_of
from kdpipes.storage.index_home import index_url
from kdpipes.storage.urls import expand_urls, is_local, join_url, relative_names, split_chain
from tests.faulty_storage import Fault, faulty_storage

CONTENTS = {"heron/2.JPG": b"two", "heron/1.jpg": b"one", "stork/old/3.png": b"three", "notes.txt": b"text"}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The same files in a folder of this machine and in one of fsspec's."""
    root = str(tmp_path / "birds") if request.param == "local" else "memory://test_files/birds"
    filesystem, path = fsspec.core.url_to_fs(root)
    for name, content in CONTENTS.items():
        filesystem.makedirs(f"{path}/{name}".rsplit("/", 1)[0], exist_ok=True)
        filesystem.pipe(f"{path}/{name}", content)
    yield root
    filesystem.rm(path, recursive=True)


def test_ranges_and_sequences_of_urls_are_written_out_in_order() -> None:
    assert expand_urls("s3://b/{a,b}-{08..10}.tar")[:4] == [f"s3://b/a-{n}.tar" for n in ("08", "09", "10")] + [
        "s3://b/b-08.tar"
    ]
    assert expand_urls([Path("x/1.tar"), "{2..3}.tar"]) == ["x/1.tar", "2.tar", "3.tar"]
    assert expand_urls(Path("x.tar")) == ["x.tar"]


def test_what_is_no_url_is_rejected() -> None:
    rejected: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "`urls` must be a path or URL, or a sequence of them, but is 3 instead"),
        ([b"a.tar"], TypeError, "`urls` must be a path or URL, or a sequence of them"),
        ([], ValueError, "`urls` must be at least one path or URL, but is"),
        (["a.tar", "pipe:curl x"], ValueError, "`urls` must be paths or fsspec URLs, but is 'pipe:curl x' instead"),
    ]
    for urls, kind, words in rejected:
        with pytest.raises(kind, match=words):
            expand_urls(urls)


@settings(max_examples=60, deadline=None, database=None)
@given(st.sets(st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=4).map(tuple), min_size=1))
def test_names_are_the_shortest_tails_that_tell_folders_apart(paths: set[tuple[str, ...]]) -> None:
    urls = ["s3://bucket/" + "/".join(path) for path in sorted(paths)]
    names = relative_names(urls)
    assert len(set(names)) == len(urls)
    tails = [[path[-1]] for path in sorted(paths)]
    if len({path[-1] for path in paths}) < len(paths):
        tails = [url.split("/") for url in urls]
        while all(len(tail) > 1 for tail in tails) and len({tail[0] for tail in tails}) == 1:
            tails = [tail[1:] for tail in tails]
    assert names == ["/".join(tail) for tail in tails]


def test_a_folder_is_listed_sorted_and_by_suffix(folder: str) -> None:
    assert list_files(folder, (".jpg", ".png")) == ["heron/1.jpg", "heron/2.JPG", "stork/old/3.png"]
    assert list_files(folder, (".gif",)) == []


def test_a_file_is_read_whole(folder: str) -> None:
    assert read_url(f"{folder}/heron/1.jpg") == b"one"
    assert is_local(folder) == (not folder.startswith("memory://"))


def test_what_is_missing_is_named(folder: str) -> None:
    missing = f"{folder}/heron/9.jpg"
    with pytest.raises(FileNotFoundError, match=rf"^There is no file '{missing}'\.$"):
        read_url(missing)
    with pytest.raises(FileNotFoundError, match=rf"^There is no folder '{folder}/gulls'\.$"):
        list_files(f"{folder}/gulls", (".jpg",))


def test_a_file_in_place_of_a_folder_and_reverse_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=r"a\.jpg' is a file\. Pass a folder\.$"):
        list_files(str(path), (".jpg",))
    with pytest.raises(DataError, match=rf"^'{tmp_path}' is a folder; a file is needed\. Name a file in it\.$"):
        read_url(str(tmp_path))


def test_the_hint_for_a_glob_fits_lists_of_files(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/*.jpg"
    for pipe in (kdp.from_ids([pattern]), kdp.from_table({"file": [pattern]}, path="file")):
        with pytest.raises(FileNotFoundError, match=r"\*\.jpg'\. Globs are not expanded here: name each file\."):
            pipe[0]["x"]


def test_a_file_system_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_implementations, "absent", {"class": "absent_fs.Fs", "err": "Get absent"})
    for read in (read_url, lambda url: list_files(url, (".jpg",))):
        with pytest.raises(ImportError, match="'absent://b/x' needs a file system that is not installed: Get absent"):
            read("absent://b/x")


def test_errors_of_any_class_name_what_was_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    with faulty_storage(folder, faults=[Fault("reset")], errors="s3fs"):
        for read in (read_url, lambda url: list_files(url, (".jpg",))):
            with pytest.raises(DataError, match=r"^'faulty://heron' cannot be read: Could not connect"):
                read("faulty://heron")


def test_a_whole_file_system_is_a_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "birds.zip", "w") as archive:
        for name, content in CONTENTS.items():
            archive.writestr(name, content)
    root = f"zip://::{tmp_path}/birds.zip"
    assert list_files(root, (".jpg",)) == ["heron/1.jpg", "heron/2.JPG"]
    assert read_url(join_url(root, "heron/1.jpg")) == b"one"


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in (".hidden.jpg", "1.jpg"):
        (tmp_path / name).write_bytes(b"")
    assert list_files(str(tmp_path), (".jpg",)) == ["1.jpg"]


def test_hidden_files_of_remote_folders_are_left_out() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/test_hidden/.hidden.jpg": b"", "/test_hidden/1.jpg": b""})
    try:
        assert list_files("memory://test_hidden", (".jpg",)) == ["1.jpg"]
    finally:
        memory.rm("/test_hidden", recursive=True)


def test_an_unknown_protocol_is_an_error_that_names_the_url() -> None:
    with pytest.raises(ValueError, match="nope://b/x"):
        read_url("nope://b/x")


def test_local_names_may_hold_double_colons(tmp_path: Path) -> None:
    root = tmp_path / "std::vector"
    root.mkdir()
    (root / "12::30.jpg").write_bytes(b"one")
    url = f"{root}/12::30.jpg"
    assert is_local(url)
    assert list_files(str(root), (".jpg",)) == ["12::30.jpg"]
    assert read_url(join_url(str(root), "12::30.jpg")) == b"one"
    filesystem, path = filesystem_of(url)
    assert (filesystem.cat_file(path), split_chain(url)) == (b"one", (url, "", ""))
    assert index_url(f"{root}/a::b.tar") == f"{root}/a::b.tar.index"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run::1.tar", ["run::1.tar"]),
        ("a.tar::b.tar", ["a.tar", "b.tar"]),
        ("a-{0..1}.tar::b.tgz", ["a-0.tar", "a-1.tar", "b.tgz"]),
        ("run::{0..1}.tar", ["run::0.tar", "run::1.tar"]),
        ("zip://a.tar::file:///b.tar", ["zip://a.tar::file:///b.tar"]),
        ("std::vector/a.tar", ["std::vector/a.tar"]),
    ],
)
def test_double_colons_join_tars_only(text: str, expected: list[str]) -> None:
    assert expand_urls(text) == expected


def test_a_tar_that_exists_is_not_split(tmp_path: Path) -> None:
    (tmp_path / "a.tar::b.tar").write_bytes(b"")
    assert expand_urls(str(tmp_path / "a.tar::b.tar")) == [f"{tmp_path}/a.tar::b.tar"]
