"""Tars, front to back and by index: the same samples, and an error that names the place wherever one is cut."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.compression import compr
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.storage.files import version_of
from kdpipes.storage.tar import _split, index_shard, read_members

Members = list[tuple[str, bytes]]
Groups = list[tuple[str, dict[str, bytes]]]

# Two members of 512 + 1,024 and 512 + 512 bytes each: a sample is 2,560 bytes long.
PHOTOS: Members = [
    entry for n in range(3) for entry in ((f"birds/{n}.jpg", bytes([n]) * 700), (f"birds/{n}.cls", b"%d" % n))
]


def read_groups(url: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and fields of each sample of a tar."""
    for group in read_members(url):
        yield group[0][0].key, {member.field: content for member, content in group}


def _tar(members: Members) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(content: bytes, name: str = "a.tar") -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


def _indexed(url: str) -> Groups:
    index, content = index_shard(url, version_of(url), with_checksums=True), Path(url).read_bytes()
    groups: Groups = []
    for number, key in enumerate(index.keys):
        places = {field: (int(at.offsets[number]), int(at.sizes[number])) for field, at in index.fields.items()}
        found = {field: content[start : start + size] for field, (start, size) in places.items() if start >= 0}
        for field, value in found.items():
            checksums = index.fields[field].checksums
            assert checksums is not None
            assert zlib.crc32(value) == checksums[number]
        groups.append((key, found))
    return groups


def _streamed(url: str) -> Groups:
    return list(read_groups(url))


READERS = (_indexed, _streamed)


def test_members_with_the_same_key_are_a_sample(write: Callable[..., str]) -> None:
    long = "birds/" + "long" * 60
    members = [("README", b"no extension"), ("0.JPG", b"a"), ("0.seg.png", b"b"), (".hidden", b"c")]
    expected = [("0", {"jpg": b"a", "seg.png": b"b"}), (long, {"txt": b""}), ("2.d/x", {"cls": b"7"})]
    photos = [(f"birds/{n}", {"jpg": bytes([n]) * 700, "cls": b"%d" % n}) for n in range(3)]
    for read in READERS:
        assert read(write(_tar([*members, (f"{long}.txt", b""), ("2.d/x.cls", b"7")]))) == expected
        assert read(write(_tar(PHOTOS))) == photos
        assert read(write(_tar([]))) == []


def test_a_cut_tar_is_an_error_that_names_it(write: Callable[..., str]) -> None:
    cuts = {
        2_560 + 100: "is truncated: no end mark stands at offset 2560",  # in a header
        2_560 + 512 + 300: "truncated",  # in a content
        2_560 + 512 + 700: "offset 4096 on: unexpected end of data",  # in the padding behind it
        3 * 2_560: "is truncated: no end mark stands at offset 7680",  # at the end mark
        600: "truncated",  # in the first content
        100: "cannot be read as a (plain )?tar: truncated header",
        0: "cannot be read as a (plain )?tar: empty file",
    }
    for stop, words in cuts.items():
        url = write(_tar(PHOTOS)[:stop])
        for read in READERS:
            with pytest.raises(DataError, match=f"'{url}' .*{words}"):
                read(url)


def test_a_cut_remote_tar_may_be_whole_in_its_storage(write: Callable[..., str]) -> None:
    content, memory = _tar(PHOTOS)[:3_000], fsspec.filesystem("memory")
    memory.pipe("/kdpipes-cut/a.tar", content)
    try:
        with pytest.raises(DataError, match=r"a\.tar' is truncated.*\. Its storage may have cut it: .* again\."):
            list(read_groups("memory://kdpipes-cut/a.tar"))
    finally:
        memory.rm("/kdpipes-cut", recursive=True)
    with pytest.raises(DataError, match="is truncated") as caught:
        list(read_groups(write(content)))
    assert "Its storage" not in str(caught.value)


def test_samples_before_a_cut_come_through_with_its_member(write: Callable[..., str]) -> None:
    groups = read_groups(write(_tar(PHOTOS)[: 2 * 2_560 + 512 + 300]))
    assert next(groups) == ("birds/0", {"jpg": bytes(700), "cls": b"0"})
    with pytest.raises(DataError, match=r"is truncated in member 'birds/2\.jpg' at offset 5632"):
        list(groups)


@pytest.mark.parametrize("sample", range(3))
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_zeros_in_place_of_members_are_an_error(write: Callable[..., str], sample: int, suffix: str) -> None:
    content = bytearray(_tar(PHOTOS))
    content[sample * 2_560 : sample * 2_560 + 2_048] = bytes(2_048)
    is_packed = suffix == "tar.gz"
    url = write(gzip.compress(content) if is_packed else bytes(content), f"a.{suffix}")
    words = rf"is damaged: zeros at offset {sample * 2_560} .* data follow at offset {sample * 2_560 + 2_048};"
    for read in [_streamed] if is_packed else READERS:
        with pytest.raises(DataError, match=f"'{url}' {words}"):
            read(url)


def test_samples_before_zeros_come_through(write: Callable[..., str]) -> None:
    groups = read_groups(write(_tar(PHOTOS[:4]) + _tar(PHOTOS[4:])))  # two tars in one file
    assert next(groups) == ("birds/0", {"jpg": bytes(700), "cls": b"0"})
    with pytest.raises(DataError, match="is damaged: zeros at offset 5120"):
        list(groups)


@pytest.mark.parametrize("num_zeros", [512, 1_024, 10_240, 11_264])
def test_zeros_up_to_the_end_of_a_record_end_a_tar(write: Callable[..., str], num_zeros: int) -> None:
    url = write(_tar(PHOTOS)[: 3 * 2_560] + bytes(num_zeros))
    for read in READERS:
        assert [key for key, _ in read(url)] == ["birds/0", "birds/1", "birds/2"]
        assert read(write(bytes(num_zeros), "empty.tar")) == []


@pytest.mark.parametrize("num_zeros", [11_265, 3_000_001])
@pytest.mark.parametrize("num_bytes", [0, 2_560])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_more_zeros_than_end_a_tar_are_an_error(
    write: Callable[..., str], num_bytes: int, num_zeros: int, suffix: str
) -> None:
    content = _tar(PHOTOS)[:num_bytes] + bytes(num_zeros)
    is_packed = suffix == "tar.gz"
    url = write(gzip.compress(content) if is_packed else content, f"a.{suffix}")
    words = rf"^Shard '{url}' is damaged: more than 11,264 zeros follow at offset {num_bytes}, "
    for read in [_streamed] if is_packed else READERS:
        with pytest.raises(DataError, match=words):
            read(url)


def test_a_repeated_field_is_rejected(write: Callable[..., str]) -> None:
    url = write(_tar([("0.jpg", b"a"), ("0.cls", b"1"), ("0.JPG", b"b")]))
    for read in READERS:
        with pytest.raises(
            DataError, match=r"two members for field 'jpg' of sample '0': the second is at offset 2560\."
        ):
            read(url)


UNSORTED: Members = [
    ("0.jpg", b"a"),
    ("1.cls", b"11"),
    ("1.jpg", b"b"),
    ("2.cls", b"12"),
    ("0.cls", b"10"),
    ("2.jpg", b"c"),
]


def test_an_index_joins_members_in_several_places(write: Callable[..., str]) -> None:
    url = write(_tar(UNSORTED))
    assert _indexed(url) == [(f"{n}", {"jpg": b"abc"[n : n + 1], "cls": b"1%d" % n}) for n in range(3)]
    for with_checksums in (False, True):
        values = index_shard(url, version_of(url), with_checksums=with_checksums).fields["cls"].values
        assert values is not None
        assert values.tolist() == [10, 11, 12]


def test_a_stream_rejects_members_in_several_places(write: Callable[..., str]) -> None:
    url = write(_tar(UNSORTED))
    words = r"a\.tar' has members of sample '0' in two places: .*'0\.cls' at offset 4608.*--sort=name.*kdp\.open_shards"
    with pytest.raises(DataError, match=words):
        _streamed(url)


@pytest.mark.parametrize("read", READERS)
def test_a_repeated_field_in_another_place_is_rejected(
    read: Callable[[str], Groups], write: Callable[..., str]
) -> None:
    url = write(_tar([("0.jpg", b"a"), ("1.jpg", b"b"), ("0.jpg", b"c")]))
    with pytest.raises(DataError, match=r"two members for field 'jpg' of sample '0'|sample '0' in two places"):
        read(url)


HIDDEN = (
    "._0.jpg",
    "d/._0.jpg",
    "d/.DS_Store",
    ".DS_Store",
    "__MACOSX/d/0.jpg",
    "__meta__/0.json",
    "__meta__/a.b/c.txt",
)


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("read", READERS)
def test_members_that_belong_to_no_sample_are_ignored(
    name: str, read: Callable[[str], Groups], write: Callable[..., str]
) -> None:
    members = [("d/0.jpg", b"a"), (name, b"x"), ("d/0.cls", b"1"), ("__bg__/1.cls", b"2"), ("./d.x/2.cls", b"3")]
    expected = [("d/0", {"jpg": b"a", "cls": b"1"}), ("__bg__/1", {"cls": b"2"}), ("./d.x/2", {"cls": b"3"})]
    assert read(write(_tar(members))) == expected
    assert read(write(_tar([(name, b"x"), *members[:1], *members[2:]]))) == expected


@pytest.mark.parametrize("read", READERS)
def test_joined_tars_are_an_error_with_commands(read: Callable[[str], Groups], write: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"offset 10240; if tars were joined with `cat`, extract .* --ignore-zeros"):
        read(write(_tar([("0.txt", b"a")]) + _tar([("1.txt", b"b")])))


def test_what_is_no_tar_is_rejected(write: Callable[..., str]) -> None:
    url = write(b"heron " * 1000)
    with pytest.raises(DataError, match=rf"^'{url}' cannot be read as a tar: invalid header"):
        _streamed(url)
    with pytest.raises(DataError, match=rf"^'{url}' cannot be read as a plain tar: invalid header\.$"):
        _indexed(url)


def test_compressed_tars_are_streamed_and_rejected_by_the_index(tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(b"a")
    names = {
        "a.tar.gz": "gz",
        "a.TAZ": "gz",
        "gzip.tar": "gz",
        "a.tbz2": "bz2",
        "bz2": "bz2",
        "a.txz": "xz",
        "b.gz": "xz",
    }
    for name, kind in names.items():
        url = str(tmp_path / name)
        with tarfile.open(url, f"w:{kind}") as tar:  # type: ignore[call-overload]
            tar.add(tmp_path / "0.jpg", "0.jpg")
        assert _streamed(url) == [("0", {"jpg": b"a"})]
        with pytest.raises(DataError, match=r"cannot be read as a plain tar: .* read them with `kdp\.stream_shards`\."):
            _indexed(url)


def test_a_cut_compressed_tar_is_an_error_that_names_it(write: Callable[..., str]) -> None:
    url = write(gzip.compress(_tar(PHOTOS))[:-20], "a.tar.gz")
    with pytest.raises(DataError, match=rf"'{url}' .*Compressed file ended before the end-of-stream"):
        _streamed(url)


@pytest.mark.parametrize("read", READERS)
def test_a_damaged_header_is_an_error(read: Callable[[str], Groups], write: Callable[..., str]) -> None:
    content = bytearray(_tar(PHOTOS))
    content[2_560:2_600] = b"\xff" * 40
    with pytest.raises(DataError, match="offset 2560"):
        read(write(bytes(content)))


def test_the_index_names_the_cut_member(write: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"is truncated in member 'birds/1\.jpg' at offset 3072"):
        _indexed(write(_tar(PHOTOS)[: 2_560 + 512 + 300]))


@pytest.mark.parametrize("name", ["BZh91.jpg", "BZh9/1.jpg", "BZh.jpg", "PK.jpg"])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_plain_tars_are_recognized_whatever_their_name(name: str, suffix: str, write: Callable[..., str]) -> None:
    for read in READERS:
        assert read(write(_tar([(name, b"a")]), f"a.{suffix}")) == [(name.removesuffix(".jpg"), {"jpg": b"a"})]


@pytest.mark.parametrize("content", [b"", b"\x1f", b"BZh9", b"\x1f\x8b\x08"])
@pytest.mark.parametrize("read", READERS)
def test_short_files_are_an_error(content: bytes, read: Callable[[str], Groups], write: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"a\.tar' cannot be read as a (plain )?tar: "):
        read(write(content))


@pytest.mark.parametrize("head", [b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"])
def test_a_missing_decompressor_is_named(
    head: bytes, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(compr, "zstd", raising=False)
    with pytest.raises(DataError, match=r"is compressed by zstd, .*: `pip install zstandard`\."):
        _streamed(write(head + bytes(100)))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_is_rejected(write: Callable[..., str], kind: bytes) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        info = tarfile.TarInfo("0.jpg")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"a"))
        link = tarfile.TarInfo("1.jpg")
        link.type, link.linkname = kind, "0.jpg"
        tar.addfile(link)
    url = write(content.getvalue())
    for read in READERS:
        with pytest.raises(DataError, match=r"Member '1\.jpg' of shard .* is a link, .*--hard-dereference"):
            read(url)


@given(name=st.text("ab./\u00e9", max_size=12).filter(lambda name: not name.rpartition("/")[2].startswith(".")))
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    key, field = _split(name)
    theirs = base_plus_ext(name)
    assert (key, field) == theirs if field else not theirs[1]


MERGED = {
    "numbers": [["0.jpg", "0.cls", "1.jpg", "1.cls"], ["2.jpg", "2.cls", "3.jpg", "3.cls"]],
    "versions": [["v1.0.jpg", "v1.1.jpg"], ["v2.0.jpg", "v2.1.jpg"]],
    "one sample": [["7.jpg", "7.cls", "8.jpg", "8.cls"]],
    "behind others": [["jpg", "cls"], ["7.jpg", "7.cls", "8.jpg", "8.cls"], ["jpg", "cls"]],
}
MEANT = {
    "plain": [["jpg", "cls"], ["jpg", "cls"]],
    "sides": [["left.png", "right.png"], ["left.png", "right.png"]],
    "cameras": [["cam0.png", "cam0.json", "cam1.png", "cam1.json"]] * 2,
    "frames": [["000.jpg", "001.jpg", "002.jpg"], ["000.jpg", "001.jpg"]],
    "one clip": [["000.jpg", "001.jpg", "002.jpg"]],
    "labeled frames": [["000.jpg", "001.jpg", "cls"], ["002.jpg", "003.jpg", "cls"]],
    "masks": [["jpg", "seg.0.png", "seg.1.png"], ["jpg", "seg.0.png"]],
    "one part": [["final2.jpg"], ["draft1.jpg"]],
    "uneven": [["1.jpg", "1.txt", "2.jpg"], ["3.jpg", "4.jpg", "4.txt"]],
}


@pytest.mark.parametrize("name", [*MERGED, *MEANT])
@pytest.mark.parametrize("read", [kdp.open_shards, kdp.stream_shards])
def test_samples_merged_by_dots_in_keys_are_warned_of(name: str, read: Any, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, fields in enumerate({**MERGED, **MEANT}[name]):
            for field in fields:
                tar.addfile(tarfile.TarInfo(f"sub/img{number}.{field}"))
    source = read(tmp_path / "a.tar")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(source)
    told = [str(warning.message) for warning in caught]
    assert len(told) == (name in MERGED)
    number = int(name == "behind others")
    assert all(re.match(rf"Sample 'a.tar/sub/img{number}' looks like 2 samples that were merged", one) for one in told)
