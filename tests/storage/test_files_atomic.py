"""Files that are there whole or not at all: after errors, beside other processes, and after a process was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kdpipes.storage.files import create_file, draft_of, locked, replace_file
from tests.processes import in_child

both = pytest.mark.parametrize("write", [replace_file, create_file])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("write", [replace_file, partial(replace_file, is_synced=True), create_file])
def test_a_file_is_written_and_no_draft_is_left(write: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path / "größe ☃.json", b"heron")
    assert (tmp_path / "größe ☃.json").read_bytes() == b"heron"
    assert names_in(tmp_path) == ["größe ☃.json"]


def test_what_was_there_is_replaced_or_stays(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", b"first")
    create_file(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    replace_file(tmp_path / "a", b"third")
    assert (tmp_path / "a").read_bytes() == b"third"
    assert names_in(tmp_path) == ["a"]


def test_an_error_leaves_what_was_there_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("the disk is gone")

    (tmp_path / "a").write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        replace_file(tmp_path / "a", b"after", is_synced=True)
    assert (tmp_path / "a").read_bytes() == b"before"
    assert names_in(tmp_path) == ["a"]


@both
def test_a_folder_that_is_missing_is_an_error(write: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        write(tmp_path / "none" / "a", b"heron")


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, sync, move = list[Any](), os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (told.append(os.fstat(file).st_size), sync(file)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (told.append("name"), move(*paths)))
    replace_file(tmp_path / "a", b"heron", is_synced=True)
    assert told == [5, "name"]


def test_without_hard_links_files_are_created_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*paths: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", reject)
    create_file(tmp_path / "a", b"heron")
    assert (tmp_path / "a").read_bytes() == b"heron"
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_draft_removed_by_another_process_is_an_error(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late(draft: Path, path: Path) -> None:
        if is_there:
            path.write_bytes(b"theirs")
        draft.unlink()
        link(draft, path)

    monkeypatch.setattr(os, "link", late)
    if is_there:
        create_file(tmp_path / "a", b"ours")
        assert (tmp_path / "a").read_bytes() == b"theirs"
    else:
        with pytest.raises(FileNotFoundError):
            create_file(tmp_path / "a", b"ours")


@pytest.mark.parametrize(("write", "place"), [(replace_file, (Path, "replace")), (create_file, (os, "link"))])
def test_a_killed_process_leaves_a_draft_with_its_name(
    write: Callable[..., None], place: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with monkeypatch.context() as patch:
        patch.setattr(*place, lambda *paths: os.kill(os.getpid(), signal.SIGKILL))
        assert in_child(lambda: write(tmp_path / "a", b"after")) == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"before"
    (left,) = tmp_path.glob(".a.*.part")
    assert left.read_bytes() == b"after"


def test_a_draft_lies_where_asked_and_goes_unless_moved(tmp_path: Path) -> None:
    with draft_of(tmp_path / "a", tmp_path / "elsewhere") as draft:
        assert draft == tmp_path / "elsewhere"
        draft.write_bytes(b"heron")
    assert names_in(tmp_path) == []
    with draft_of(tmp_path / "a") as one, draft_of(tmp_path / "a") as other:
        assert one != other, "two who write at a time do not meet"


def test_a_lock_keeps_out_others_until_its_process_ends(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as is_held, locked(tmp_path / "lock", timeout_s=0) as is_held_twice:
        assert (is_held, is_held_twice) == (True, False)

    def die() -> None:
        with locked(tmp_path / "lock", timeout_s=0) as is_held:
            os.kill(os.getpid(), signal.SIGKILL if is_held else signal.SIGTERM)

    assert in_child(die) == -signal.SIGKILL
    with locked(tmp_path / "lock", timeout_s=0) as is_held:
        assert is_held
