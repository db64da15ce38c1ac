"""Zips that become folders of a local disk: the same files, or an error that names what is wrong with them."""

from __future__ import annotations

import errno
import io
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.write import copy
from kdpipes.write.copy import copy_to_local
from tests.write.copies import TRAIN, interrupted, is_complete, read, write, zipped

pytestmark = pytest.mark.usefixtures("no_waits")


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
def test_a_zip_that_reaches_out_of_the_folder_is_rejected(origin: Path, local: Path, case: str) -> None:
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
    "no zip": (b"no zip at all", "is not a readable zip file"),
    "empty": (b"", "is not a readable zip file"),
    "cut": (ONE[:-30], "is not a readable zip file"),
    "damaged": (ONE[:60] + b"\xff" + ONE[61:], "'member.bin' of .* cannot be unpacked"),
    "larger than stated": (bomb(ONE, 100), "'member.bin' of .* cannot be unpacked"),
    "smaller than stated": (bomb(ONE, 100_000), "12800 were received"),
    "encrypted": (encrypted(ONE), "'member.bin' of .* is rejected: it is encrypted"),
    "file and folder": (zipped({"a": b"", "a/b": b""}), "'a' of .* is rejected"),
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


def test_a_zip_that_would_fill_the_disk_is_rejected(origin: Path, local: Path) -> None:
    write(origin, {"bad.zip": bomb(zipped({str(number): b"" for number in range(9)}), 1 << 31)})
    huge = bytearray((origin / "bad.zip").read_bytes())
    with zipfile.ZipFile(io.BytesIO(huge)) as archive:
        assert archive.infolist()[0].file_size == 1 << 31
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy.shutil, "disk_usage", lambda path: type("", (), {"free": 1 << 20})())
        with pytest.raises(
            OSError, match=r"unpacking '.*bad.zip' needs 2147483648 bytes, and 1048576 are free"
        ) as raised:
            copy_to_local(origin, local, relative_path="bad")
    assert raised.value.errno == errno.ENOSPC
    assert not is_complete(local / "bad")
