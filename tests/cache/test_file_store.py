"""Files: folders that stay small, caches that travel, and disks that are full, read-only or damaged."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from kdpipes.cache import folder
from kdpipes.cache.file_store import path_of
from kdpipes.cache.store import Entries
from kdpipes.core.errors import DataError
from kdpipes.storage.codec import DamagedError, decode, encode
from tests.cache.entries import metadata, open_files

OnDisk = Callable[..., Any]


def fill(store: Entries, most: int) -> int:
    """Put entries until one is rejected; return how many were taken."""
    return next((number for number in range(most) if not store.put(b"%d" % number, encode([number, "x" * 9000]))), most)


def all_whole(store: Entries, number: int) -> bool:
    return all(decode(store.get(b"%d" % place)) == [place, "x" * 9000] for place in range(number))


def in_folders(root: Path) -> Counter[Path]:
    """Return how many files and folders lie in each folder, of those that are not hidden."""
    return Counter(path.parent for path in root.rglob("*") if "/." not in str(path))


def test_folders_stay_small_on_disk(tmp_path: Path) -> None:
    store = open_files(tmp_path / "cache")
    for number in range(2000):
        store.put(b"%d" % number, [b"x"])
    assert 256 <= max(in_folders(tmp_path / "cache").values()) <= 256 + 8
    assert store.stats()[2:4] == (2000, 2000)


def test_metadata_marks_the_folder_as_a_cache(tmp_path: Path) -> None:
    open_files(tmp_path / "cache").put(b"a", [b"heron"])
    assert bytes(open_files(tmp_path / "cache").get(b"a") or b"") == b"heron"
    noted = json.loads((tmp_path / "cache" / "METADATA").read_text())
    assert type(noted.pop("checksum")) is int
    assert noted == {"format": 3, "layout": "files"}


def test_a_moved_and_packed_cache_opens_on_a_read_only_disk(tmp_path: Path, warned_once: Callable[[str], Any]) -> None:
    store = open_files(tmp_path / "cache")
    fill(store, 5)
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    assert all_whole(open_files(tmp_path / "moved"), 5)
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "moved")
    packed = open_files(f"zip://::{tmp_path}/packed.zip")
    assert all_whole(packed, 5)
    assert packed.get(b"none") is None
    assert packed.stats().entries == 5
    with warned_once("takes no more.*keeps what it has"):
        assert not packed.put(b"new", [b"x"])
        assert not packed.put(b"newer", [b"x"])


def test_a_cache_below_a_folder_of_an_archive_is_opened(tmp_path: Path) -> None:
    fill(open_files(tmp_path / "all" / "cache"), 3)
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "all")
    assert all_whole(open_files(f"zip://cache::file://{tmp_path}/packed.zip"), 3)


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    store = open_files(tmp_path / "cache")
    assert (store.get(b"a"), store.contains(b"a")) == (None, False)
    assert store.stats().entries == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"\0" * len(data), lambda data: b""])
def test_a_damaged_file_is_found_and_heals(tmp_path: Path, damage: Any) -> None:
    store = open_files(tmp_path / "cache")
    store.put(b"a", encode(["heron"] * 100))
    store.put(b"b", encode("gull"))
    path = tmp_path / "cache" / path_of(b"a")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedError):
        decode(store.get(b"a"))
    assert decode(store.get(b"b")) == "gull"
    assert store.put(b"a", encode(["heron"] * 100), replace=True)
    assert decode(store.get(b"a")) == ["heron"] * 100
    assert store.stats().entries == 2


def test_a_folder_of_another_version_is_rejected(tmp_path: Path) -> None:
    open_files(tmp_path / "cache").put(b"a", [b"heron"])
    (tmp_path / "cache" / "METADATA").write_text(metadata(format=0, layout="files"))
    rejected = "cache of format 0 and layout 'files'. This version of kdpipes reads format 3.*another folder, or delete"
    for call in (lambda s: s.get(b"a"), lambda s: s.put(b"a", [b""]), lambda s: s.contains(b"a"), lambda s: s.stats()):
        with pytest.raises(DataError, match=rejected):
            call(open_files(tmp_path / "cache"))
    (tmp_path / "cache" / "METADATA").write_bytes(b"\xff")
    with pytest.raises(DataError, match="METADATA file is damaged"):
        open_files(tmp_path / "cache").get(b"a")


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_folder_that_holds_something_else_is_rejected(tmp_path: Path, place: str) -> None:
    url = str(tmp_path) if place == "local" else f"memory://{tmp_path.name}"
    with fsspec.open(f"{url}/heron.jpg", "wb") as file:
        file.write(b"photo")
    store = open_files(url)
    assert store.get(b"a") is None
    with pytest.raises(DataError, match=r"is not a cache, but holds 'heron.jpg'\. Give an empty folder"):
        store.put(b"a", [b""])
    assert list(tmp_path.iterdir()) == ([tmp_path / "heron.jpg"] if place == "local" else [])


def test_a_full_disk_is_survived(on_small_disk: OnDisk) -> None:
    def work(folder: Path, remount: Any) -> Any:
        store = open_files(folder / "cache")
        number = fill(store, 1000)
        drafts = list((folder / "cache" / ".partial").iterdir())
        return number, all_whole(store, number), store.put(b"new", [b"x"]), store.stats().entries - number, drafts

    answer, warned = on_small_disk(work, 1 << 20)
    assert answer[0] >= 50
    assert answer[1:] == (True, False, 0, [])
    assert len(warned) == 1
    assert "No space left on device" in warned[0]


def test_a_file_that_may_not_grow_is_left_out(tmp_path: Path) -> None:
    store = open_files(tmp_path / "cache")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store.put(b"a", [b"heron"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.warns(UserWarning, match="takes no more.*File too large"):
            assert not store.put(b"b", [bytes(100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert bytes(store.get(b"a") or b"") == b"heron"
    assert store.get(b"b") is None
    assert not list((tmp_path / "cache" / ".partial").iterdir())
    store.close()
    assert store.put(b"b", [bytes(100_000)])


def test_a_read_only_folder_is_read(on_small_disk: OnDisk) -> None:
    def work(folder: Path, remount: Callable[[], int]) -> Any:
        fill(open_files(folder / "cache"), 3)
        assert remount() == 0
        store, new = open_files(folder / "cache"), open_files(folder / "new")
        return all_whole(store, 3), store.put(b"new", [b"x"]), store.put(b"new", [b"x"]), new.put(b"a", [b"x"])

    answer, warned = on_small_disk(work, 1 << 20)
    assert answer == (True, False, False, False)
    assert ["Read-only file system" in text for text in warned] == [True, True]


def test_what_was_half_written_is_removed_by_the_next_who_writes(tmp_path: Path) -> None:
    store = open_files(tmp_path / "cache")
    store.put(b"a", [b"heron"])
    drafts = tmp_path / "cache" / ".partial"
    host = os.uname().nodename
    names = [f"{host}~{2**22 + 1}~0", f"{host}~{os.getpid()}~0", "elsewhere~1~0", "elsewhere~1~1"]
    for name in names:
        (drafts / name).touch()
    os.utime(drafts / names[3], (0, 0))
    store.close()
    store.put(b"b", [b"gull"])
    assert sorted(path.name for path in drafts.iterdir()) == sorted(names[1:3])
    assert store.stats().entries == 2


def test_storage_that_is_out_of_reach_is_gone_without(
    monkeypatch: pytest.MonkeyPatch, namespace: str, warned_once: Callable[[str], Any]
) -> None:
    store = open_files(f"memory://{namespace}")
    store.put(b"a", [b"heron"])
    monkeypatch.setattr(folder, "_NUM_TRIES", 1)

    def away(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection reset")

    for name in ("cat_file", "pipe_file"):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, away)
    with warned_once(r"cannot be read \(Connection reset\).*as if there were no cache"):
        assert store.get(b"a") is None
        assert not store.put(b"b", [b"x"])


def test_an_unknown_kind_of_url_is_an_error(tmp_path: Path) -> None:
    for call in (lambda s: s.get(b"a"), lambda s: s.put(b"a", [b""])):
        with pytest.raises(ValueError, match=r"`url` must be .* a protocol that fsspec knows"):
            call(open_files("nowhere://bucket"))


def test_entries_deleted_by_hand_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_files(tmp_path / "cache")
    fill(store, 50)
    size = store.stats().bytes
    monkeypatch.setattr(folder, "_SETTLED_NS", 0)  # else folders that have just changed are listed each time
    assert open_files(tmp_path / "cache").stats()[2:4] == (size, 50)
    paths = [path for path in (tmp_path / "cache").rglob("*") if len(path.name) == 40]
    gone = paths[0].stat().st_size
    paths[0].unlink()
    assert store.stats()[2:4] == (size - gone, 49)
    shutil.rmtree(paths[1].parent)
    assert store.stats().entries == len([path for path in paths if path.exists()])
    store.put(b"new", [b"x"])
    assert store.stats().entries == len([path for path in paths if path.exists()]) + 1


def test_counting_again_lists_no_folder_that_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(open_files(tmp_path / "cache"), 50)
    monkeypatch.setattr(folder, "_SETTLED_NS", 0)
    counted = open_files(tmp_path / "cache").stats()
    listed: list[Any] = []
    listing = os.scandir

    def note(path: Any) -> Any:
        listed.append(path)
        return listing(path)

    open_files(tmp_path / "cache").stats()  # the first count has written its file into the first folder
    monkeypatch.setattr(folder.os, "scandir", note)
    assert open_files(tmp_path / "cache").stats() == counted
    assert listed == []


def test_entries_that_are_deleted_meanwhile_are_left_out(tmp_path: Path) -> None:
    store = open_files(tmp_path / "cache")
    for key in (b"a", b"b", b"c"):
        store.put(key, [key])
    entries = store.store.each_entry()
    seen = [next(entries)]
    for path in (tmp_path / "cache").rglob("*"):
        if len(path.name) == 40 and bytes.fromhex(path.name) != seen[0][0]:
            path.unlink()
    assert list(entries) == []
