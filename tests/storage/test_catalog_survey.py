"""What is in shards, and the state of their indexes, with nothing written."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from kdpipes.demo import write_photo_shards
from kdpipes.storage.catalog import make_index, survey_shards
from kdpipes.storage.files import cache_folder, version_of
from kdpipes.storage.index_home import find_index, index_url
from kdpipes.storage.urls import expand_urls
from tests.faulty_storage import faulty_storage


@pytest.fixture
def tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shard of 80 samples, without an index."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    return Path(expand_urls(write_photo_shards(tmp_path, num_shards=2))[0])


def states(*urls: Any, **options: Any) -> list[tuple[str, int | None]]:
    seen = survey_shards([str(url) for url in urls], **options)
    return [(shard.state, None if shard.index is None else len(shard.index.keys)) for shard in seen]


def files_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_an_index_is_missing_fresh_stale_or_damaged(tar: Path) -> None:
    assert states(tar) == [("missing", 80)]
    make_index(str(tar))
    assert states(tar) == [("fresh", 80)]
    content = Path(index_url(str(tar))).read_bytes()
    Path(index_url(str(tar))).write_bytes(content[:-1])
    assert states(tar) == [("damaged", 80)]
    Path(index_url(str(tar))).write_bytes(content)
    write_photo_shards(tar.parent, num_shards=3)
    assert states(tar) == [("stale", 54)]


def test_a_copy_of_shard_and_index_is_fresh(tar: Path, tmp_path: Path) -> None:
    make_index(str(tar))
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in (tar, Path(index_url(str(tar)))):
        shutil.copyfile(path, folder / path.name)
    beside = Path(index_url(str(folder / tar.name)))
    os.utime(folder / tar.name, ns=(0, beside.stat().st_mtime_ns))
    assert states(folder / tar.name) == [("fresh", 80)]
    found = find_index(str(folder / tar.name), version_of(str(folder / tar.name)))
    assert found.index is not None
    assert found.index.version == version_of(str(tar)), "that of the original"
    assert not cache_folder("indexes").exists(), "nothing is written"


def test_nothing_is_written_or_read_through_unless_wanted(tar: Path, tmp_path: Path) -> None:
    other = tar.with_name("photos-001.tar")
    make_index(str(other))
    before = files_in(tmp_path)
    assert states(tar, other, scan=False) == [("missing", None), ("fresh", 80)]
    assert states(tar, other) == [("missing", 80), ("fresh", 80)]
    assert files_in(tmp_path) == before
    with faulty_storage(str(tmp_path)) as storage:
        found = states("faulty://photos-000.tar", "faulty://photos-001.tar", scan=False)
        assert found == [("missing", None), ("fresh", 80)]
        assert storage.stats().bytes_delivered < other.stat().st_size // 10, "the index, and a few headers"
    assert files_in(tmp_path) == before


def test_a_shard_elsewhere_is_read_through(tar: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/kdpipes-survey/a.tar", tar.read_bytes())
    try:
        assert states("memory://kdpipes-survey/a.tar") == [("missing", 80)]
        assert memory.ls("/kdpipes-survey", detail=False) == ["/kdpipes-survey/a.tar"]
        make_index("memory://kdpipes-survey/a.tar")
        assert states("memory://kdpipes-survey/a.tar", scan=False) == [("fresh", 80)]
    finally:
        memory.rm("/kdpipes-survey", recursive=True)


def test_a_compressed_tar_has_no_index_but_can_be_read(tar: Path) -> None:
    packed = tar.with_suffix(".tar.gz")
    packed.write_bytes(gzip.compress(tar.read_bytes()))
    assert states(packed) == [("impossible", 80)]
    assert states(packed, scan=False) == [("impossible", None)]
    plain, unpacked = (next(survey_shards([str(path)])).index for path in (tar, packed))
    assert plain is not None
    assert unpacked is not None
    assert plain.fields["jpg"].sizes.tolist() == unpacked.fields["jpg"].sizes.tolist()
    assert list(plain.keys) == list(unpacked.keys)


def test_a_shard_that_is_missing_is_an_error(tar: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no file '.*none\.tar'"):
        states(tar, tar.with_name("none.tar"))
