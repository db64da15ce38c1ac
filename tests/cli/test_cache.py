"""`kdpipes cache`: `ls`, `verify` and `clear`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kdpipes as kdp
from kdpipes.cache.file_store import path_of
from kdpipes.cache.open_cache import check_cache, clear_cache, look_at_cache, named_caches
from kdpipes.core import messages
from tests.faulty_storage import faulty_storage


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[str]]:
    """A cache in memory with one entry, one of files with all, and one of LMDB."""
    source = kdp.from_ids(["a", "b"], [0, 1], load=lambda name: name.encode() * 5000)
    name = f"test-cli-{os.getpid()}"
    files, lmdb = str(tmp_path / "files"), str(tmp_path / "lmdb")
    named = source.cache_in_memory(name=name)
    source.cache_on_disk(files, layout="files").warm_up(progress=False)
    source.cache_on_disk(lmdb)[1]["x"]
    named[0]["x"]
    yield [f"name={name}", files, lmdb]
    if f"name={name}" in named_caches():
        clear_cache(f"name={name}")


def damage(files: str) -> None:
    path = next(path for path in Path(files).rglob("*") if path.is_file() and b"bbbb" in path.read_bytes())
    path.write_bytes(path.read_bytes()[:-1])


def test_caches_are_listed(places: list[str], run: Any) -> None:
    listed = run("cache", "ls", *places).out.splitlines()
    assert listed[0].startswith(f"{places[0]}: 1 entry, ")
    assert listed[1].startswith(f"{places[1]}: 4 entries, ")
    assert listed[1].endswith("bytes, files, complete for 2 samples")
    assert listed[2].endswith("bytes, lmdb, not complete")
    assert listed[0] in run("cache", "ls").out.splitlines(), "all that have names"


def test_json_tells_what_the_functions_return(places: list[str], run: Any) -> None:
    assert run("cache", "ls", *places, "--json").json() == [look_at_cache(place)._asdict() for place in places]
    verified = [check_cache(place)._asdict() for place in places]
    told = run("cache", "verify", "--json", *places).json()
    assert told == [{"place": place, **each} for place, each in zip(places, verified, strict=True)]


def test_damaged_entries_are_counted_and_end_with_status_1(places: list[str], run: Any) -> None:
    files = places[1]
    assert run("cache", "verify", *places).out.splitlines()[1] == f"{files}: 4 entries, 0 damaged"
    damage(files)
    said = run("cache", "verify", files)
    assert (said.status, said.out) == (1, f"{files}: 4 entries, 1 damaged\n")
    assert said.err.startswith("kdpipes cache: 1 damaged entry")
    assert said.err.count("\n") == 1
    as_json = run("cache", "verify", files, "--json")
    assert (as_json.status, as_json.err) == (1, said.err)
    assert '"damaged": 1' in as_json.out


def test_what_needs_no_source_is_healed(places: list[str], run: Any) -> None:
    files = places[1]
    path = Path(files, path_of(b"\0contents"))
    path.write_bytes(path.read_bytes()[:-5])
    assert run("cache", "verify", files) == (0, f"{files}: 4 entries, 1 damaged, 1 of them healed\n", "")
    assert run("cache", "verify", files, "--json").json() == [{"place": files, **check_cache(files)._asdict()}]
    assert run("cache", "verify", files).out == f"{files}: 4 entries, 0 damaged\n"


def test_a_bar_on_stderr_shows_what_takes_long(places: list[str], run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "DELAY_S", 0.0)
    said = run("cache", "verify", places[1])
    assert "verifying" in said.err
    assert said.out == f"{places[1]}: 4 entries, 0 damaged\n"


def test_caches_are_cleared_and_nothing_else(places: list[str], tmp_path: Path, run: Any) -> None:
    assert run("cache", "clear", *places) == (0, "".join(f"{place}: removed\n" for place in places), "")
    assert [path.name for path in tmp_path.iterdir()] == []
    for place in (*places, str(tmp_path)):
        assert run("cache", "clear", place).mistake().startswith("kdpipes cache: ")
    assert tmp_path.exists()


def test_places_without_a_cache_are_told_in_one_line(tmp_path: Path, run: Any) -> None:
    for action in ("ls", "verify"):
        mistake = run("cache", action, tmp_path, "--json").mistake()
        assert mistake.startswith(f"kdpipes cache: There is no cache in {str(tmp_path)!r}")
        assert "There is no cache named 'none'" in run("cache", action, "name=none").mistake()


def test_a_name_without_its_prefix_is_told(places: list[str], run: Any) -> None:
    name = places[0].removeprefix("name=")
    for command in ("clear", "ls", "verify"):
        said = run("cache", command, name)
        assert said.status == 1
        assert f"The cache of that name in memory is 'name={name}'" in said.err


def test_where_there_is_no_cache_that_is_said(monkeypatch: pytest.MonkeyPatch, run: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("kdpipes.cache.open_cache.named_folders", dict)
    with mock.patch.dict(os.environ, KDPIPES_CACHE_DIR=str(tmp_path)):
        assert run("cache", "ls").out.startswith("There are no named caches in memory.")
        assert run("cache", "ls", "--json").json() == []


@pytest.fixture
def indexes(tmp_path: Path, photo_shards: str) -> Iterator[Path]:
    """A local cache with the indexes of remote shards, and what killed processes have left there."""
    folder = tmp_path / "cached" / "indexes"
    with mock.patch.dict(os.environ, KDPIPES_CACHE_DIR=str(folder.parent)):
        with faulty_storage(str(Path(photo_shards).parent)):
            len(kdp.open_shards("faulty://photos-{000..003}.tar"))
        for age, name in enumerate((".new.index.0f.part", ".old.joined.0f.part")):
            (folder / name).write_bytes(bytes(100))
            os.utime(folder / name, (time.time() - age * 1e6,) * 2)
        yield folder


def test_the_local_cache_of_indexes_is_listed_without_old_drafts(indexes: Path, run: Any) -> None:
    listed = run("cache", "ls").out.splitlines()[-1]
    sizes = [path.stat().st_size for path in indexes.iterdir()]
    assert listed == f"{indexes}: {len(sizes)} entries, {sum(sizes):,} bytes, indexes"
    assert [path.name for path in indexes.glob(".*")] == [".new.index.0f.part"], "a process may be writing it"


def test_the_local_cache_of_indexes_is_cleared_and_no_other(indexes: Path, run: Any, tmp_path: Path) -> None:
    other = tmp_path / "indexes"
    shutil.copytree(indexes, other)
    assert "There is no cache" in run("cache", "clear", str(other)).err
    assert run("cache", "clear", str(indexes)).out == f"{indexes}: removed\n"
    assert (other.exists(), indexes.exists(), str(indexes) in named_caches()) == (True, False, False)
    assert run("cache", "ls", str(indexes)).status == 1
