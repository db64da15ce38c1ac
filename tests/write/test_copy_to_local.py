"""A data set on a local disk: KappaData's rules, any source, whole files only, one copy for all, no leftovers."""

from __future__ import annotations

import errno
import io
import os
import signal
import stat
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import kdpipes as kdp
from kdpipes import _progress
from kdpipes.testing import Fault, faulty_storage
from kdpipes.write import _files, _unzip
from kdpipes.write.copy_to_local import copy_to_local

MARKERS = {"autocopy_start.txt", "autocopy_end.txt"}
CONTENTS = {
    "train/heron/1.jpg": b"h1",
    "train/heron/2.jpg": b"h22" * 1000,
    "train/stork/größe ☃.jpg": b"s1",
    "val/heron/3.jpg": b"",
    "val/.hidden": b".",
    "labels.csv": b"1,2",
}
TRAIN = {name.removeprefix("train/"): content for name, content in CONTENTS.items() if name.startswith("train/")}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waits."""
    monkeypatch.setattr("kdpipes.storage.retries._FIRST_WAIT_S", 0.0)


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """The folder to copy."""
    return write(tmp_path / "origin", CONTENTS)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Where to; it is not there."""
    return tmp_path / "deep" / "local"


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def zipped(contents: dict[str | zipfile.ZipInfo, bytes] | dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def read(folder: Path) -> dict[str, bytes]:
    """Return what lies in a folder, the markers of its own aside."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in MARKERS}


def is_complete(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} >= MARKERS


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            work()
        except BaseException:  # nothing of the test may run on in the child
            os._exit(1)
        os._exit(0)
    return child


def exit_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_after(number: int) -> Callable[..., Any]:
    """Return `Path.replace`, by which the process is killed once `number` files have been moved to their places."""
    moved, original = [0], Path.replace

    def replace(self: Path, target: Any) -> Any:
        if moved[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        moved[0] += 1
        return original(self, target)

    return replace


def interrupted(monkeypatch: pytest.MonkeyPatch, number: int, *arguments: Any, **options: Any) -> None:
    """Copy in a process that is killed in the middle."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed_after(number))
        assert exit_status(fork(lambda: copy_to_local(*arguments, num_workers=1, **options))) == -signal.SIGKILL


# The rules


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


def test_what_has_changed_or_gone_since_it_was_copied_is_not_looked_at(origin: Path, local: Path) -> None:
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


def test_a_broken_copy_of_kappadata_is_removed_and_a_complete_one_is_used(origin: Path, local: Path) -> None:
    write(local, {"autocopy_start.txt": b"this file indicates that an attempt was started", "labels.csv": b"4,5"})
    assert copy_to_local(origin, local).was_deleted
    assert read(local) == CONTENTS
    other = write(local.parent / "other", dict.fromkeys(MARKERS, b"") | {"a": b""})
    assert not copy_to_local(origin, other).was_copied


def test_what_is_asked_for_in_a_broken_copy_of_the_whole_is_completed_with_it(
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


# Zips


def test_a_zip_stands_for_a_folder(origin: Path, local: Path) -> None:
    zips = write(origin.parent / "zips", {"train.zip": zipped(TRAIN | {"empty/": b"", "autocopy_end.txt": b""})})
    for number, relative_path in enumerate(("train", "train.zip")):
        result = copy_to_local(zips, local / str(number), relative_path=relative_path)
        assert result == (local / str(number) / "train", True, False, True, 3, sum(map(len, TRAIN.values())))
        assert read(result.path) == TRAIN
        assert (result.path / "empty").is_dir()
    for number, url in enumerate((zips / "train", zips / "train.zip", f"file://{zips}/train.zip")):
        copy_to_local(url, local / f"whole{number}")
        assert read(local / f"whole{number}") == TRAIN


def test_a_folder_of_zips_is_a_folder_of_folders(origin: Path, local: Path) -> None:
    by_class = {
        name: {key: value for key, value in TRAIN.items() if key.startswith(name)} for name in ("heron", "stork")
    }
    flat = {
        f"train/{name}.zip": zipped({Path(key).name: value for key, value in by_class[name].items()})
        for name in by_class
    }
    whole = write(
        origin.parent / "zips",
        {**flat, "val/.DS_Store": b"", "val/a.ZIP": zipped({"b": b"c"}), "mixed/a.zip": b"a", "mixed/b": b"b"},
    )
    result = copy_to_local(whole, local)
    assert (result.was_zip, result.num_files) == (True, 7)
    expected = {f"train/{name}": content for name, content in TRAIN.items()}
    assert read(local) == expected | {"val/.DS_Store": b"", "val/a/b": b"c", "mixed/a.zip": b"a", "mixed/b": b"b"}


def test_a_folder_goes_before_the_zip_beside_it(origin: Path, local: Path) -> None:
    both = write(origin.parent / "both", {"train/1": b"new", "train.zip": zipped({"1": b"old"})})
    copy_to_local(both, local, relative_path="train")
    assert read(local / "train") == {"1": b"new"}
    copy_to_local(both, local / "whole")
    assert read(local / "whole") == {"train/1": b"new", "train.zip": (both / "train.zip").read_bytes()}


def test_a_broken_unpacking_is_completed(origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zips = write(origin.parent / "zips", {"train.zip": zipped(TRAIN)})
    interrupted(monkeypatch, 1, zips, local, relative_path="train")
    result = copy_to_local(zips, local, relative_path="train")
    assert (result.was_deleted, result.num_files) == (False, 2)
    assert read(local / "train") == TRAIN


def link(name: str, kind: int = stat.S_IFLNK) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (kind | 0o777) << 16
    return info


HARMFUL: dict[str, tuple[Any, bytes, str]] = {
    "up": ("../evil", b"x", "outside"),
    "up within": ("a/../../evil", b"x", "outside"),
    "up at the end": ("a/..", b"x", "outside"),
    "up by Windows": ("a\\..\\..\\evil", b"x", "outside"),
    "absolute": ("/tmp/kdpipes-evil", b"x", "outside"),
    "absolute by Windows": ("\\evil", b"x", "outside"),
    "drive": ("C:evil", b"x", "outside"),
    "drive and path": ("c:/evil", b"x", "outside"),
    "link": (link("evil"), b"/etc", "symbolic link"),
    "device": (link("evil", stat.S_IFCHR), b"", "neither a file nor a folder"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_zip_that_reaches_out_of_the_folder_is_refused(origin: Path, local: Path, case: str) -> None:
    member, content, reason = HARMFUL[case]
    name = member if isinstance(member, str) else member.filename
    write(origin, {"bad.zip": zipped({"good": b"g", member: content, "evil/below": b"x"})})
    with pytest.raises(kdp.DataError, match=reason) as raised:
        copy_to_local(origin, local, relative_path="bad")
    assert repr(name) in str(raised.value)
    assert "bad.zip" in str(raised.value)
    assert read(local) == {"bad/autocopy_start.txt": (local / "bad/autocopy_start.txt").read_bytes()}
    assert not is_complete(local / "bad")


def encrypted(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[changed.index(b"PK\x01\x02") + 8] |= 1
    return bytes(changed)


def bomb(content: bytes, size: int) -> bytes:
    """Return a zip that states that its member has another size."""
    changed = bytearray(content)
    place = changed.index(b"PK\x01\x02") + 24
    changed[place : place + 4] = size.to_bytes(4, "little")
    return bytes(changed)


ONE = zipped({"member.bin": bytes(range(256)) * 50})
DAMAGED = {
    "no zip": (b"no zip at all", "no zip that can be read"),
    "empty": (b"", "no zip that can be read"),
    "cut": (ONE[:-30], "no zip that can be read"),
    "damaged": (ONE[:60] + b"\xff" + ONE[61:], "'member.bin' of .* cannot be unpacked"),
    "larger than stated": (bomb(ONE, 100), "'member.bin' of .* cannot be unpacked"),
    "smaller than stated": (bomb(ONE, 100_000), "12800 came"),
    "encrypted": (encrypted(ONE), "'member.bin' of .* is refused: it is encrypted"),
    "file and folder": (zipped({"a": b"", "a/b": b""}), "'a' of .* is refused"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_zip_that_cannot_be_read_is_named(origin: Path, local: Path, case: str) -> None:
    content, reason = DAMAGED[case]
    write(origin, {"bad.zip": content})
    with pytest.raises(kdp.DataError, match=reason):
        copy_to_local(origin, local, relative_path="bad")
    assert {path.name for path in (local / "bad").iterdir()} == {"autocopy_start.txt"}
    write(origin, {"bad.zip": ONE})
    copy_to_local(origin, local, relative_path="bad")
    assert read(local / "bad") == {"member.bin": bytes(range(256)) * 50}


def test_a_zip_that_would_fill_the_disk_is_refused(origin: Path, local: Path) -> None:
    write(origin, {"bad.zip": bomb(zipped({str(number): b"" for number in range(9)}), 1 << 31)})
    huge = bytearray((origin / "bad.zip").read_bytes())
    with zipfile.ZipFile(io.BytesIO(huge)) as archive:
        assert archive.infolist()[0].file_size == 1 << 31
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files.shutil, "disk_usage", lambda path: type("", (), {"free": 1 << 20})())
        with pytest.raises(
            OSError, match=r"unpacking '.*bad.zip' needs 2147483648 bytes, and 1048576 are free"
        ) as raised:
            copy_to_local(origin, local, relative_path="bad")
    assert raised.value.errno == errno.ENOSPC
    assert not is_complete(local / "bad")


# Sources elsewhere, and faults


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty folder in memory."""
    yield "memory://copies"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/copies"):
        filesystem.rm("/copies", recursive=True)


def test_any_url_is_a_source(memory: str, local: Path) -> None:
    files = fsspec.filesystem("memory")
    files.pipe({f"/copies/{name}": content for name, content in CONTENTS.items()})
    files.pipe("/copies/zips/train.zip", zipped(TRAIN))
    copy_to_local(memory, local)
    assert read(local) == CONTENTS | {f"zips/train/{name}": content for name, content in TRAIN.items()}
    copy_to_local(f"{memory}/zips", local / "other", relative_path="train")
    assert read(local / "other/train") == TRAIN
    files.pipe("/copies/a.zip", zipped(CONTENTS))
    copy_to_local("zip://::memory://copies/a.zip", local / "chained", relative_path="train")
    assert read(local / "chained/train") == TRAIN


def test_a_bucket_is_a_source(s3: str, local: Path) -> None:
    filesystem, path = fsspec.core.url_to_fs(s3)
    filesystem.pipe({f"{path}/{name}": content for name, content in CONTENTS.items()})
    filesystem.pipe(f"{path}/zips/train.zip", zipped(TRAIN))
    copy_to_local(s3, local)
    assert read(local) == CONTENTS | {f"zips/train/{name}": content for name, content in TRAIN.items()}
    copy_to_local(f"{s3}/zips", local / "other", relative_path="train")
    assert read(local / "other/train") == TRAIN


FAULTS = {
    "resets": [Fault("reset", every=2)],
    "resets midway": [Fault("reset_midway", every=2)],
    "cut bodies": [Fault("truncate", every=2)],
    "busy": [Fault("too_many_requests", times=3)],
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_storage_that_pass_are_not_noticed(
    origin: Path, local: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_unzip, "_BLOCK", 1000)
    monkeypatch.setattr(_files, "_STEP", 1000)
    content = os.urandom(5000)
    write(origin, {"zips/a.zip": zipped({"1": content, "2": b"2"})})
    with faulty_storage(str(origin), faults=FAULTS[name]) as storage:
        copy_to_local("faulty://", local)
        assert storage.stats().faults
    assert read(local) == CONTENTS | {"zips/a/1": content, "zips/a/2": b"2"}


def test_a_fault_that_stays_is_an_error_that_names_the_file(origin: Path, local: Path) -> None:
    text = r"'faulty://train/heron/2\.jpg' cannot be read: 3000 bytes are due"
    with (
        faulty_storage(str(origin), faults=[Fault("truncate", paths="*2.jpg")]),
        pytest.raises(kdp.DataError, match=text),
    ):
        copy_to_local("faulty://", local)
    assert not is_complete(local)
    assert not (local / ".autocopy").exists()
    assert "train/heron/2.jpg" not in read(local)
    with faulty_storage(str(origin)):
        copy_to_local("faulty://", local)
    assert read(local) == CONTENTS


def test_a_source_that_is_missing_leaves_nothing(origin: Path, local: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither a folder '.*/none' nor a file '.*/none\.zip'"):
        copy_to_local(origin, local, relative_path="none")
    with pytest.raises(NotADirectoryError, match=r"labels\.csv"):
        copy_to_local(origin, local, relative_path="labels.csv")
    with (
        faulty_storage(str(origin), faults=[Fault("unavailable")]),
        pytest.raises(kdp.DataError, match=r"'faulty://train' cannot be listed: .*Service Unavailable"),
    ):
        copy_to_local("faulty://", local, relative_path="train")
    assert not local.exists()


def test_links_are_followed_but_not_in_circles(origin: Path, local: Path) -> None:
    (origin / "val/link.jpg").symlink_to(origin / "labels.csv")
    (origin / "val/folder").symlink_to(origin / "train/heron")
    (origin / "val/loop").symlink_to(origin)
    copy_to_local(origin, local, relative_path="val")
    assert read(local / "val").keys() == {"heron/3.jpg", ".hidden", "link.jpg", "folder/1.jpg", "folder/2.jpg"} | {
        f"loop/{name}" for name in CONTENTS if not name.startswith("val/")
    }
    os.mkfifo(origin / "train/pipe")
    with pytest.raises(kdp.DataError, match="train/pipe' is neither a file nor a folder"):
        copy_to_local(origin, local, relative_path="train")


# The local side


def test_a_full_disk_is_told_in_numbers_before_anything_is_copied(
    origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_files.shutil, "disk_usage", lambda path: type("", (), {"free": 100})())
        with pytest.raises(OSError, match="needs 3008 bytes, and 100 are free") as raised:
            copy_to_local(origin, local)
    assert raised.value.errno == errno.ENOSPC
    assert {path.name for path in local.iterdir()} == {"autocopy_start.txt"}


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_disk_that_gets_full_leaves_nothing_half_finished(
    origin: Path, local: Path, is_zip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_zip:
        origin = write(origin.parent / "zips", {"train.zip": zipped(TRAIN)})

    class Full(io.FileIO):
        def write(self, content: Any, /) -> int:
            if len(content) >= 3000:
                super().write(content[:1000])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    original = Path.open

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        return Full(path, "w") if mode == "wb" else original(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(OSError, match=r"'2\.jpg' needs 3000 bytes, and \d+ are free") as raised:
            copy_to_local(origin, local, relative_path="train")
    assert raised.value.errno == errno.ENOSPC
    assert not is_complete(local / "train")
    assert not (local / "train/heron/2.jpg").exists()
    assert not (local / "train/.autocopy").exists()
    copy_to_local(origin, local, relative_path="train")
    assert read(local / "train") == TRAIN


def test_a_target_that_cannot_be_written_is_an_error(origin: Path, local: Path) -> None:
    with pytest.raises(OSError, match="/proc/kdpipes"):
        copy_to_local(origin, "/proc/kdpipes")
    write(local.parent, {"local": b"a file"})
    with pytest.raises(NotADirectoryError, match=r"local' is a file; a folder is needed"):
        copy_to_local(origin, local)


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


def test_the_next_one_goes_on_where_one_was_killed_while_it_waited(origin: Path, local: Path) -> None:
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
        list(_files.in_parallel(work, range(50), 2, stopped.set))
    assert ended
    assert all(ended)


def test_progress_is_shown_in_bytes_where_it_takes_long(
    origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    copy_to_local(origin, local / "a")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(_progress, "DELAY_S", 0.0)
    monkeypatch.setattr(_progress._Bar, "__init__", _often(_progress._Bar.__init__))
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
        (("g", "s3://l"), {}, TypeError, "`local_root` must be a folder of this machine"),
        (("g", "l"), {"relative_path": "../a"}, ValueError, "`relative_path` must be a path below both folders"),
        (("g", "l"), {"relative_path": "/a"}, ValueError, "`relative_path`"),
        (("g", "l"), {"relative_path": 3}, ValueError, "`relative_path`"),
        (("g", "l"), {"num_workers": 0}, ValueError, "`num_workers` must be an integer of at least 1"),
    ],
)
def test_mistakes_are_refused(arguments: Any, options: Any, error: Any, text: str) -> None:
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
