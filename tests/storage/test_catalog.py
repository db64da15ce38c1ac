"""Indexes beside shards, in the cache, and of shards that have changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.storage.catalog import make_index, open_catalog
from kdpipes.storage.files import matching_urls, version_of
from kdpipes.storage.index_home import index_url
from kdpipes.storage.readers import Version, stat_in
from kdpipes.storage.shard_index import ShardIndex
from tests.faulty_storage import Fault, faulty_storage

pytestmark = pytest.mark.usefixtures("cache")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TarWriter(str(path)) as writer:
        for row in rows:
            writer.write(row)
    return str(path)


def rows(*numbers: int | str) -> list[dict[str, Any]]:
    return [{"__key__": f"k{n}", "jpg": bytes([int(n)]) * 50, "cls": n} for n in numbers]


def told(catalog: Any) -> list[tuple[str, int]]:
    values = catalog.fields["cls"]
    return [(catalog.key(place), int(values[place])) for place in range(len(catalog))]


def test_an_index_is_kept_beside_the_shard_and_read_from_there(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", rows(1, 2))
    for _ in range(2):
        assert told(open_catalog([url], ["a.tar"])) == [("a.tar/k1", 1), ("a.tar/k2", 2)]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.index"], "and nothing half-written"
    content = Path(index_url(url)).read_bytes()
    index = ShardIndex.from_bytes(content, "")
    assert index.version == version_of(url)
    Path(url).with_suffix(".tar.index").write_bytes(content)
    Path(url).write_bytes(bytes(Path(url).stat().st_size))  # only the index tells
    os.utime(url, ns=(0, int(index.version.tag.partition(":")[2])))
    assert told(open_catalog([url], ["a.tar"])) == [("a.tar/k1", 1), ("a.tar/k2", 2)]


def test_a_shard_that_has_changed_is_indexed_again(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", rows(1, 2))
    open_catalog([url], ["a.tar"])
    write(tmp_path / "a.tar", rows(3, 4))  # of the same size
    os.utime(url, ns=(0, 10**18 + Path(index_url(url)).stat().st_mtime_ns))
    assert told(open_catalog([url], ["a.tar"])) == [("a.tar/k3", 3), ("a.tar/k4", 4)]
    write(tmp_path / "a.tar", rows(5))
    os.utime(url, ns=(0, 0))
    write(tmp_path / "a.tar", rows(*range(40)))  # of another size
    assert len(open_catalog([url], ["a.tar"])) == 40


def test_a_copy_of_shard_and_index_needs_no_other(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", rows(1))
    make_index(url, with_checksums=True)
    for name in ("a.tar", "a.tar.index"):
        (tmp_path / "copy").mkdir(exist_ok=True)
        shutil.copyfile(tmp_path / name, tmp_path / "copy" / name)
    os.utime(tmp_path / "copy" / "a.tar", ns=(0, Path(tmp_path / "copy" / "a.tar.index").stat().st_mtime_ns))
    catalog = open_catalog([str(tmp_path / "copy" / "a.tar")], ["a.tar"])
    assert catalog.fields["jpg"].checksums is not None, "the index of the original"


def test_where_nothing_can_be_written_the_cache_has_the_index(tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    url = write(tmp_path / "data" / "a.tar", rows(1, 2))
    from kdpipes.storage import index_home as module

    rejected = []

    def reject(place: str, content: bytes, **_: Any) -> None:
        rejected.append(place)
        raise PermissionError(place)

    monkeypatch.setattr(module, "write_url", reject)
    for _ in range(2):
        assert len(open_catalog([url], ["a.tar"])) == 2
    assert rejected == [index_url(url)]
    assert len(list((cache / "indexes").iterdir())) == 1
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["a.tar"]


def test_a_damaged_index_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = write(tmp_path / "a.tar", rows(1, 2))
    open_catalog([url], ["a.tar"])
    path = Path(index_url(url))
    good = path.read_bytes()
    for bad in (b"", good[:-1], b"x" + good[1:]):
        path.write_bytes(bad)
        assert len(open_catalog([url], ["a.tar"])) == 2
        assert "It is made anew" in caplog.text
        assert path.read_bytes() == good
        caplog.clear()


def test_shards_with_other_fields_are_joined(tmp_path: Path) -> None:
    urls = [
        write(tmp_path / "a.tar", rows(1)),
        write(tmp_path / "b.tar", [{"__key__": "x", "png": b"p", "cls": 7}]),
        write(tmp_path / "c.tar", []),
    ]
    catalog = open_catalog(urls, ["a", "b", "c"])
    assert told(catalog) == [("a/k1", 1), ("b/x", 7)]
    assert (catalog.fields["png"].offsets >= 0).tolist() == [False, True]
    pipe: Any = kdp.open_shards(urls)
    assert [sorted(sample) for sample in pipe] == [["cls", "jpg"], ["cls", "png"]]


def test_classes_that_are_names_are_no_numbers(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", [{"__key__": "a", "cls": "heron"}, {"__key__": "b", "cls": "7"}])
    assert open_catalog([url], ["a"]).fields["cls"].sizes.tolist() == [5, 1]
    assert kdp.open_shards(url).column("cls").tolist() == ["heron", 7]


def test_remote_shards_are_indexed_by_reading_with_checksums(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/kdpipes-catalog/a.tar", Path(write(tmp_path / "a.tar", rows(1, 2))).read_bytes())
    try:
        for _ in range(2):
            catalog = open_catalog(["memory://kdpipes-catalog/a.tar"], ["a.tar"])
            assert told(catalog) == [("a.tar/k1", 1), ("a.tar/k2", 2)]
            assert catalog.fields["jpg"].checksums is not None
        assert memory.exists("/kdpipes-catalog/a.tar.index")
        assert matching_urls(["memory://kdpipes-catalog/*.tar"]) == ["memory:///kdpipes-catalog/a.tar"]
    finally:
        memory.rm("/kdpipes-catalog", recursive=True)


def test_globs_are_files_in_order(tmp_path: Path) -> None:
    urls = [write(tmp_path / f"{name}.tar", rows(n)) for n, name in enumerate("bac")]
    assert matching_urls([f"{tmp_path}/*.tar"]) == sorted(urls)
    assert kdp.open_shards(f"{tmp_path}/*.tar").column("cls").tolist() == [1, 0, 2]
    with pytest.raises(FileNotFoundError, match="No file matches"):
        len(kdp.open_shards(f"{tmp_path}/*.tgz"))


@pytest.mark.parametrize("is_checksum", [True, False])
def test_a_damaged_shard_is_read_again_if_its_tag_is_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checksum: bool
) -> None:
    content = Path(write(tmp_path / "a.tar", rows(*range(9)))).read_bytes()
    tag = hashlib.md5(content if is_checksum else b"another").hexdigest()
    version = Version(len(content), f'tag:"{tag}"')
    for seed in range(4):
        faults = [Fault("flip_bit", times=1, on=kind) for kind in ("whole", "range")]
        with faulty_storage(str(tmp_path), faults=faults if is_checksum else [], seed=seed) as files:
            index = make_index("faulty://a.tar", version)
            assert not is_checksum or files.stats().faults["flip_bit"] >= 1
        found = index.fields["jpg"].checksums
        assert found is not None
        read = [content[offset : offset + size] for offset, size in zip(*places(index), strict=True)]
        assert found.tolist() == [zlib.crc32(one) for one in read]
        assert len(read) == 9


def places(index: Any) -> tuple[list[int], list[int]]:
    return index.fields["jpg"].offsets.tolist(), index.fields["jpg"].sizes.tolist()


def test_an_older_tar_of_the_same_size_is_indexed_again(tmp_path: Path) -> None:
    url, new = write(tmp_path / "a.tar", rows(1, 2)), write(tmp_path / "new" / "a.tar", rows(3, 4))
    assert told(open_catalog([url], ["a.tar"])) == [("a.tar/k1", 1), ("a.tar/k2", 2)]
    os.utime(new, (1, 1))
    assert Path(new).stat().st_size == Path(url).stat().st_size
    Path(new).replace(url)
    assert told(open_catalog([url], ["a.tar"])) == [("a.tar/k3", 3), ("a.tar/k4", 4)]


def test_an_index_beside_another_remote_tar_is_not_used(tmp_path: Path) -> None:
    for name, numbers in (("then", ("01", "02")), ("now", ("05", "06"))):
        make_index(write(tmp_path / name / "a.tar", rows(*numbers)))
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/kdpipes-other/a.tar", (tmp_path / "now" / "a.tar").read_bytes())
        for name, expected in (("now", [5, 6]), ("then", [5, 6])):
            memory.pipe("/kdpipes-other/a.tar.index", (tmp_path / name / "a.tar.index").read_bytes())
            catalog = open_catalog(["memory://kdpipes-other/a.tar"], ["a.tar"])
            assert [number for _, number in told(catalog)] == expected
    finally:
        memory.rm("/kdpipes-other", recursive=True)


def rewrite(path: Path, index: str, date: int, tmp_path: Path) -> str:
    """Replace a shard by one with another label in the middle, of a date; the index stays. Return its URL."""
    corrected = [{**row, "cls": label} for row, label in zip(MANY, CORRECTED, strict=True)]
    Path(write(tmp_path / "new" / "a.tar", corrected)).replace(path)
    os.utime(path, (date, date))
    assert Path(index).exists()
    return str(path)


def labels(url: str) -> list[int]:
    return list(kdp.open_shards(url).column("cls").tolist())


MANY: list[dict[str, Any]] = [{"__key__": f"k{n:02}", "jpg": bytes([n]) * 300, "cls": 1} for n in range(40)]
CORRECTED = [7 if n == 13 else 1 for n in range(40)]


@pytest.mark.parametrize("with_checksums", [True, False])
def test_one_label_of_an_older_shard_makes_a_new_index(tmp_path: Path, with_checksums: bool) -> None:
    url = write(tmp_path / "a.tar", MANY)
    make_index(url, with_checksums=with_checksums)
    assert labels(url) == [1] * 40
    rewrite(Path(url), index_url(url), 1_000_000, tmp_path)
    assert labels(url) == labels(url) == CORRECTED


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_column_of_an_older_shard_makes_a_new_index(tmp_path: Path, with_checksums: bool) -> None:
    then = [{"__key__": f"k{n}", "json": {"a": n}} for n in range(9)]
    url = write(tmp_path / "a.tar", then)
    make_index(url, with_checksums=with_checksums, columns=["json.a"])
    Path(write(tmp_path / "new" / "a.tar", [*then[:5], {**then[5], "json": {"a": 8}}, *then[6:]])).replace(url)
    os.utime(url, (1_000_000, 1_000_000))
    assert kdp.open_shards(url).column("json.a").tolist() == [0, 1, 2, 3, 4, 8, 6, 7, 8]


def test_the_index_of_a_copy_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write(tmp_path / "a.tar", MANY)
    make_index(url, with_checksums=True)
    os.utime(url, (1_000_000, 1_000_000))
    assert [sample["cls"] for sample in kdp.stream_shards(url)] == [1] * 40
    monkeypatch.setattr("kdpipes.storage.index_home.is_index_of", lambda index, url: pytest.fail("compared again"))
    for _ in range(2):
        assert [sample["cls"] for sample in kdp.stream_shards(url)] == labels(url) == [1] * 40


@pytest.mark.parametrize("is_corrected", [True, False])
def test_an_uploaded_index_is_that_of_a_shard_uploaded_before(tmp_path: Path, is_corrected: bool) -> None:
    url = write(tmp_path / "a.tar", MANY)
    make_index(url)  # with a date as tag, where the storage has ETags
    if is_corrected:
        rewrite(Path(url), index_url(url), 1 << 32, tmp_path)
    before = Path(index_url(url)).read_bytes()
    with faulty_storage(str(tmp_path)) as storage:
        assert labels("faulty://a.tar") == (CORRECTED if is_corrected else [1] * 40)
    assert (Path(index_url(url)).read_bytes() == before) == (not is_corrected)
    read = sum(request.delivered for request in storage.requests() if request.path == "a.tar")
    assert (read >= Path(url).stat().st_size) == is_corrected, "all of it is read only if its date does not fit"


@pytest.mark.parametrize(
    "date",
    [5.0, "1970-01-01T00:00:05Z", "Thu, 01 Jan 1970 00:00:05 GMT", datetime(1970, 1, 1, 0, 0, 5, tzinfo=timezone.utc)],
)
def test_dates_of_every_storage_are_compared(date: Any) -> None:
    for name in ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created"):
        assert stat_in({"size": 1, name: date}).modified == 5.0
    assert stat_in({"size": 1, "mtime": "yesterday"}).modified is None
