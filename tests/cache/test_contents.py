"""A complete cache says which samples it holds, wherever it is opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.cache import folder, open_cache
from kdpipes.cache.file_store import path_of
from kdpipes.cache.open_cache import check_cache, read_list, write_list
from kdpipes.storage.codec import DamagedError, encode
from tests.cache.entries import open_files, open_lmdb


@pytest.mark.parametrize("kind", [open_files, open_lmdb])
def test_a_cache_is_complete_when_it_was_said_to_be(tmp_path: Path, kind: Any) -> None:
    store = kind(tmp_path / "cache")
    store.put(b"a", [b"heron"])
    assert read_list(store) is None
    assert write_list(store, ["birds/2.jpg", "birds/1.jpg", ""], {"fields": ["x"], "y": np.arange(3)})
    store.close()
    found = read_list(kind(tmp_path / "cache"))
    assert found is not None
    assert list(found.keys) == ["birds/2.jpg", "birds/1.jpg", ""]
    assert (found.notes["fields"], found.notes["y"].tolist()) == (["x"], [0, 1, 2])
    assert write_list(store, [], {})
    assert [len(part) for part in read_list(store) or ()] == [0, 0]


def test_a_packed_cache_says_what_it_holds(tmp_path: Path) -> None:
    write_list(open_files(tmp_path / "cache"), ["heron", "gull"], {})
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "cache")
    found = read_list(open_files(f"zip://::{tmp_path}/packed.zip"))
    assert found is not None
    assert list(found.keys) == ["heron", "gull"]


def lists_in(folder: Path) -> list[Path]:
    """Return the list of samples, and its copy."""
    return [folder / path_of(key) for key in open_cache._KEYS]


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:90] + b"?" + content[91:]])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_list_is_read_from_its_copy_and_healed(tmp_path: Path, damage: Any, number: int) -> None:
    write_list(open_files(tmp_path / "cache"), ["heron", "gull"], {"y": 3})
    paths = lists_in(tmp_path / "cache")
    whole = paths[number].read_bytes()
    assert damage(whole) != whole
    paths[number].write_bytes(damage(whole))
    assert read_list(open_files(tmp_path / "cache"))[1] == {"y": 3}  # type: ignore[index]
    assert check_cache(str(tmp_path / "cache")) == (2, 1, 1)
    assert paths[number].read_bytes() == whole
    assert check_cache(str(tmp_path / "cache")) == (2, 0, 0)


def test_a_list_damaged_with_its_copy_is_an_error_with_place(tmp_path: Path) -> None:
    write_list(open_files(tmp_path / "cache"), ["heron"], {})
    paths = lists_in(tmp_path / "cache")
    for path in paths:
        path.write_bytes(b"".join(encode(1))[:-1])
    assert check_cache(str(tmp_path / "cache")) == (2, 2, 0)
    with pytest.raises(DamagedError, match=rf"samples of the cache in '{tmp_path}/cache'.*`.warm_up\(\)`"):
        len(kdp.open_cache(tmp_path / "cache"))
    assert write_list(open_files(tmp_path / "cache"), ["heron"], {})
    assert check_cache(str(tmp_path / "cache")) == (2, 0, 0)


def test_a_list_without_a_copy_gets_one(tmp_path: Path) -> None:
    write_list(open_files(tmp_path / "cache"), ["heron"], {})
    first, copy = lists_in(tmp_path / "cache")
    copy.unlink()
    assert check_cache(str(tmp_path / "cache")) == (1, 0, 0)
    first.unlink()
    found = read_list(open_files(tmp_path / "cache"))
    assert found is not None
    assert list(found.keys) == ["heron"]


def test_writing_the_same_list_again_adds_nothing(tmp_path: Path) -> None:
    store = open_lmdb(tmp_path / "cache")
    for keys in (["heron"], ["heron"], ["gull"], ["gull"]):
        assert write_list(store, keys, {})
    assert store.stats().entries == 2


@pytest.mark.parametrize("kind", [open_files, open_lmdb])
def test_damaged_metadata_is_an_error_that_says_what_to_do(tmp_path: Path, kind: Any) -> None:
    store = kind(tmp_path / "cache")
    store.put(b"a", encode("heron"))
    store.close()
    path = tmp_path / "cache" / "METADATA"
    whole = path.read_bytes()
    for damaged in (whole[:20], b"", whole.replace(b'"format": ', b'"format": 9'), whole.replace(b"lay", b"LAY")):
        path.write_bytes(damaged)
        for use in (lambda: kind(tmp_path / "cache").get(b"a"), lambda: check_cache(str(tmp_path / "cache"))):
            with pytest.raises(kdp.DataError, match=r"METADATA file is damaged\. Give another folder, or delete"):
                use()
    path.write_bytes(whole)
    assert kind(tmp_path / "cache").contains(b"a")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"max_bytes": None}, "`max_bytes` must be an integer from 1 to"),
        ({"max_bytes": "a"}, "`max_bytes` must be an integer from 1 to"),
        ({"max_bytes": True}, "`max_bytes` must be an integer from 1 to"),
        ({"max_bytes": 2**70}, "`max_bytes` must be an integer from 1 to"),
    ],
)
def test_wrong_entries_of_metadata_are_an_error(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    open_lmdb(tmp_path / "cache").put(b"a", encode("heron"))
    path = tmp_path / "cache" / "METADATA"
    content = {**json.loads(path.read_text()), **changes}
    del content["checksum"]
    path.write_text(json.dumps({**content, "checksum": folder._checksum(content)}))
    for use in (lambda: open_lmdb(tmp_path / "cache").get(b"b"), lambda: kdp.open_cache(tmp_path / "cache")[0]):
        with pytest.raises(kdp.DataError, match=f"METADATA file is damaged: {rule}.*Give another folder, or delete"):
            use()


def test_what_cannot_be_written_stays_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_list(open_files(tmp_path / "cache"), ["heron"], {})
    lists_in(tmp_path / "cache")[0].write_bytes(b"")

    def reject(*_: Any, **__: Any) -> None:
        raise PermissionError("of somebody else")

    monkeypatch.setattr(folder.LocalFolder, "write", reject)
    with pytest.warns(UserWarning, match="takes no more .of somebody else"):
        assert check_cache(str(tmp_path / "cache")) == (2, 1, 0)
