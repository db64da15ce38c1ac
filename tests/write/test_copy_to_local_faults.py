"""Copies of data sets from anywhere, and faults: of the storage, of the source, and of the local disk."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import kdpipes as kdp
from kdpipes.write import copy
from kdpipes.write.copy import copy_to_local
from tests.faulty_storage import Fault, faulty_storage
from tests.write.copies import CONTENTS, TRAIN, is_complete, read, write, zipped

pytestmark = pytest.mark.usefixtures("no_waits")


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
    monkeypatch.setattr(copy, "_ZIP_BLOCK", 1000)
    monkeypatch.setattr(copy, "_STEP", 1000)
    content = os.urandom(5000)
    write(origin, {"zips/a.zip": zipped({"1": content, "2": b"2"})})
    with faulty_storage(str(origin), faults=FAULTS[name]) as storage:
        copy_to_local("faulty://", local)
        assert storage.stats().faults
    assert read(local) == CONTENTS | {"zips/a/1": content, "zips/a/2": b"2"}


def test_a_fault_that_stays_is_an_error_that_names_the_file(origin: Path, local: Path) -> None:
    text = r"'faulty://train/heron/2\.jpg' cannot be read: expected 3000 bytes"
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


def test_a_full_disk_is_reported_in_numbers_before_copying(
    origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(copy.shutil, "disk_usage", lambda path: type("", (), {"free": 100})())
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
    with pytest.raises(NotADirectoryError, match=r"local' is a file\. Pass a folder"):
        copy_to_local(origin, local)
