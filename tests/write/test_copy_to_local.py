"""A data set on a local disk: KappaData's rules, whole files only, one copy for all, no leftovers."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core import messages
from kdpipes.storage.jobs import in_parallel
from kdpipes.write.copy import copy_to_local
from tests.faulty_storage import Fault, faulty_storage
from tests.processes import exit_status, fork
from tests.write.copies import CONTENTS, MARKERS, TRAIN, interrupted, is_complete, read, write

pytestmark = pytest.mark.usefixtures("no_waits")


def test_what_is_missing_is_copied_and_what_is_complete_is_used(origin: Path, local: Path) -> None:
    (origin / "empty/below").mkdir(parents=True)
    result = copy_to_local(origin, local)
    assert result == (local, True, False, False, len(CONTENTS), sum(map(len, CONTENTS.values())))
    assert read(local) == CONTENTS
    assert (local / "empty/below").is_dir()
    assert {path.name for path in local.iterdir()} == {"train", "val", "empty", "labels.csv"} | MARKERS
    assert copy_to_local(str(origin), str(local)) == (local, False, False, False, 0, 0)


def test_only_a_part_is_copied(origin: Path, local: Path) -> None:
    assert copy_to_local(origin, local, relative_path="train").path == local / "train"
    assert read(local / "train") == TRAIN
    assert {path.name for path in local.iterdir()} == {"train"}
    copy_to_local(origin, local, relative_path=Path("val", "heron"))
    assert read(local / "val/heron") == {"3.jpg": b""}


def test_changes_after_copying_are_not_looked_at(origin: Path, local: Path) -> None:
    copy_to_local(origin, local)
    write(origin, {"labels.csv": b"changed", "new": b""})
    assert not copy_to_local(origin, local).was_copied
    assert not copy_to_local("s3://no-such-bucket/nothing", local).was_copied
    assert read(local) == CONTENTS


def test_what_a_user_put_there_is_used_as_it_is(origin: Path, local: Path) -> None:
    write(local, {"mine.txt": b"mine"})
    assert not copy_to_local(origin, local).was_copied
    assert read(local) == {"mine.txt": b"mine"}
    (local / "train").mkdir()
    assert copy_to_local(origin, local, relative_path="train").was_copied, "an empty folder is nobody's"


def test_what_is_broken_off_is_completed(origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, 2, origin, local)
    first = read(local)
    whole = {name for name in first if not name.startswith(".autocopy")}
    assert len(whole) == 2
    assert not is_complete(local)
    before = {name: (local / name).stat().st_ino for name in whole}
    result = copy_to_local(origin, local)
    assert (result.was_copied, result.was_deleted, result.num_files) == (True, False, len(CONTENTS) - 2)
    assert read(local) == CONTENTS
    assert {name: (local / name).stat().st_ino for name in whole} == before
    assert not (local / ".autocopy").exists()


def test_a_broken_copy_of_an_older_state_is_removed(origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, 3, origin, local)
    (origin / "labels.csv").write_bytes(b"2,1")  # of the same size
    (origin / "train/heron/1.jpg").unlink()
    result = copy_to_local(origin, local)
    assert result.was_deleted
    assert read(local) == read(origin)


def test_kappadatas_broken_copy_is_removed_complete_one_used(origin: Path, local: Path) -> None:
    write(local, {"autocopy_start.txt": b"this file indicates that an attempt was started", "labels.csv": b"4,5"})
    assert copy_to_local(origin, local).was_deleted
    assert read(local) == CONTENTS
    other = write(local.parent / "other", dict.fromkeys(MARKERS, b"") | {"a": b""})
    assert not copy_to_local(origin, other).was_copied


def test_a_part_of_a_broken_whole_copy_completes_the_whole(
    origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 3, origin, local)
    assert (local / "train").is_dir()
    result = copy_to_local(origin, local, relative_path="train")
    assert (result.was_copied, result.path) == (True, local / "train")
    assert read(local) == CONTENTS
    assert not copy_to_local(origin, local, relative_path="train/heron").was_copied


def test_a_whole_completes_parts_that_were_copied_before(
    origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_to_local(origin, local, relative_path="train/heron")
    interrupted(monkeypatch, 0, origin, local, relative_path="val")
    (origin / "train/heron/1.jpg").write_bytes(b"changed")
    copy_to_local(origin, local)
    expected = CONTENTS | {f"{part}/{name}": b"" for part in ("train/heron", "val") for name in MARKERS}
    assert {name: b"" if Path(name).name in MARKERS else content for name, content in read(local).items()} == expected
    assert is_complete(local)


def test_markers_of_the_source_are_not_copied(origin: Path, local: Path) -> None:
    write(origin, dict.fromkeys(MARKERS, b"theirs") | {"val/autocopy_end.txt": b"theirs"})
    copy_to_local(origin, local)
    assert read(local) == CONTENTS
    assert (local / "autocopy_end.txt").read_bytes() != b"theirs"


def test_one_of_several_processes_copies_and_the_others_wait(origin: Path, local: Path, tmp_path: Path) -> None:
    def work() -> None:
        result = copy_to_local("faulty://", local, num_workers=1)
        assert read(local) == CONTENTS
        (tmp_path / f"done-{result.was_copied}-{os.getpid()}").touch()

    with faulty_storage(str(origin), faults=[Fault("latency", seconds=0.02, on="whole")]) as storage:
        assert [exit_status(child) for child in [fork(work) for _ in range(3)]] == [0, 0, 0]
        assert sum(request.kind == "whole" for request in storage.requests()) == sum(map(bool, CONTENTS.values()))
    assert len(list(tmp_path.glob("done-True-*"))) == 1
    assert len(list(tmp_path.glob("done-False-*"))) == 2


def test_the_next_copy_continues_where_a_waiting_one_was_killed(origin: Path, local: Path) -> None:
    began, begin = os.pipe()

    def stopped(seconds: float) -> None:
        os.write(begin, b"!")
        signal.pause()

    with faulty_storage(str(origin), faults=[Fault("latency", seconds=1, on="whole", times=1)], sleep=stopped):
        first = fork(lambda: copy_to_local("faulty://", local, num_workers=1))
        os.read(began, 1)
        assert (local / "autocopy_start.txt").exists()
        with faulty_storage(str(origin)):
            second = fork(lambda: copy_to_local("faulty://", local))
            os.kill(first, signal.SIGKILL)
            assert (exit_status(first), exit_status(second)) == (-signal.SIGKILL, 0)
    os.close(began)
    os.close(begin)
    assert read(local) == CONTENTS
    assert is_complete(local)


def test_files_are_copied_at_a_time_and_an_error_ends_all(origin: Path, local: Path) -> None:
    write(origin, {f"many/{number}": b"x" for number in range(100)})
    copy_to_local(origin, local / "a", relative_path="many", num_workers=3)
    assert len(read(local / "a/many")) == 100
    with faulty_storage(str(origin), faults=[Fault("missing", paths="many/50", on="whole")]) as storage:
        with pytest.raises(FileNotFoundError, match="many/50"):
            copy_to_local("faulty://", local / "b", relative_path="many", num_workers=2)
        assert sum(request.kind == "whole" for request in storage.requests()) < 70


def test_who_is_at_work_is_told_of_an_error_and_waited_for() -> None:
    began, stopped, ended = threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        if not number:
            assert began.wait(20)
            raise OSError("the first one")
        began.set()
        ended.append(stopped.wait(20))

    with pytest.raises(OSError, match="the first one"):
        list(in_parallel(work, range(50), 2, stopped.set))
    assert ended
    assert all(ended)


def test_progress_is_shown_in_bytes_where_it_takes_long(
    origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    copy_to_local(origin, local / "a")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(messages, "DELAY_S", 0.0)
    monkeypatch.setattr(messages._Bar, "__init__", _often(messages._Bar.__init__))
    copy_to_local(origin, local / "b")
    assert f"copying '{origin}': 100%" in capfd.readouterr().err
    monkeypatch.setenv("RANK", "1")
    copy_to_local(origin, local / "c")
    assert capfd.readouterr().err == ""


def _often(init: Any) -> Any:
    return lambda *args, **options: init(*args, **{**options, "mininterval": 0})


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((1, "l"), {}, TypeError, "`global_root` must be a path or an fsspec URL"),
        (("g", "s3://l"), {}, TypeError, "`local_root` must be a local folder"),
        (("g", "l"), {"relative_path": "../a"}, ValueError, "`relative_path` must be a path below both folders"),
        (("g", "l"), {"relative_path": "/a"}, ValueError, "`relative_path`"),
        (("g", "l"), {"relative_path": 3}, ValueError, "`relative_path`"),
        (("g", "l"), {"num_workers": 0}, ValueError, "`num_workers` must be an integer of at least 1"),
    ],
)
def test_mistakes_are_rejected(arguments: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        copy_to_local(*arguments, **options)


def test_a_folder_is_not_copied_into_itself(origin: Path) -> None:
    for local in (origin, origin / "train" / "local"):
        with pytest.raises(ValueError, match="`local_root` must be a folder outside of `global_root`"):
            copy_to_local(origin, local)
    assert read(origin) == CONTENTS


def test_the_copy_is_a_source_of_pipes(photo_folder: Path, local: Path) -> None:
    copy_to_local(photo_folder, local)
    ours, theirs = kdp.image_folder(local), kdp.image_folder(photo_folder)
    assert ours.class_names() == theirs.class_names()
    assert list(ours.column("key")) == list(theirs.column("key"))
