"""Headers of tars: read as Python's tarfile reads them, and never silently where they are cut, damaged or hostile."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset import TarWriter
from webdataset.tariterators import group_by_keys, tar_file_expander

from kdpipes.storage.tar import read_members
from kdpipes.storage.tar_headers import (
    FileBytes,
    ForwardBytes,
    NoTarError,
    StreamBytes,
    UnreadableTarError,
    read_entries,
)

Found = list[tuple[str, bytes]]
ERRORS = (NoTarError, UnreadableTarError)
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
KINDS = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]

letters = st.characters(exclude_categories=("Cs",), exclude_characters="\0/") | st.sampled_from("a. \udc80\udcff")
names = st.lists(st.text(letters, min_size=1, max_size=70), min_size=1, max_size=6).map("/".join)


@st.composite
def members(draw: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(draw(names))
    info.type = draw(st.sampled_from([*KINDS, tarfile.FIFOTYPE, *[tarfile.REGTYPE] * 8]))
    content = bytes(draw(st.sampled_from([0, 1, 511, 512, 513, 1_500]))) if info.isreg() else b""
    info.size = len(content)
    info.mtime = draw(st.sampled_from([0, 1_700_000_000, 1_700_000_000.25]))
    info.linkname = draw(names) if info.issym() or info.islnk() else ""
    info.uname = draw(st.sampled_from(["", "heron", "h\u00e9ron" * 12]))
    return info, content


def write(entries: list[tuple[tarfile.TarInfo, bytes]], kind: int, **options: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind, encoding="utf-8", **options) as tar:
        for info, content in entries:
            try:
                tar.addfile(info, io.BytesIO(content))
            except ValueError:  # a name that is too long for ustar
                assert kind == tarfile.USTAR_FORMAT
    return file.getvalue()


def file(name: str, content: bytes = b"", **attributes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def by_tarfile(content: bytes) -> Found:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:", encoding="utf-8") as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar if info.isreg()]  # type: ignore[union-attr]


def read(source: ForwardBytes) -> Iterator[tuple[str, bytes]]:
    for entry in read_entries(source):
        if entry.kind == "file":
            content = source.take(entry.offset, entry.size)
            if len(content) < entry.size:
                raise UnreadableTarError("is cut")
            yield entry.name, content


@contextmanager
def opened(content: bytes) -> Iterator[list[ForwardBytes]]:
    descriptor = os.memfd_create("tar")
    try:
        os.write(descriptor, content)
        yield [FileBytes(descriptor), StreamBytes(io.BytesIO(content))]
    finally:
        os.close(descriptor)


def ours(content: bytes) -> list[tuple[Found, Exception | None]]:
    """Return what comes before the end, or the error, by each way of reading."""
    results: list[tuple[Found, Exception | None]] = []
    with opened(content) as sources:
        for source in sources:
            found: Found = []
            try:
                for item in read(source):
                    found.append(item)
            except ERRORS as error:
                results.append((found, error))
            else:
                results.append((found, None))
    return results


def patched(block: bytes, *, is_signed: bool = False, **fields: bytes) -> bytes:
    """Return a header with other fields and the sum that belongs to it."""
    places = {"name": 0, "size": 124, "type": 156, "magic": 257, "prefix": 345}
    changed = bytearray(block)
    for field, value in fields.items():
        changed[places[field] : places[field] + len(value)] = value
    changed[148:156] = b" " * 8
    total = sum(byte - 256 if is_signed and byte > 127 else byte for byte in changed)
    changed[148:156] = b"%06o\0 " % total
    return bytes(changed)


def header(name: str = "0.jpg", **fields: bytes) -> bytes:
    return patched(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT), **fields)


def pax(payload: bytes, kind: bytes = b"x") -> bytes:
    return header("x", type=kind, size=b"%011o\0" % len(payload)) + payload + bytes(-len(payload) % 512)


END = bytes(1024)


@settings(max_examples=150)
@given(entries=st.lists(members(), min_size=1, max_size=6), kind=st.sampled_from(FORMATS), has_global=st.booleans())
def test_members_are_those_of_tarfile(
    entries: list[tuple[tarfile.TarInfo, bytes]], kind: int, has_global: bool
) -> None:
    is_global = has_global and kind == tarfile.PAX_FORMAT
    content = write(entries, kind, pax_headers={"comment": "h\u00e9ron"} if is_global else None)
    assert ours(content) == [(by_tarfile(content), None)] * 2
    with tarfile.open(fileobj=io.BytesIO(content), encoding="utf-8") as tar, opened(content) as sources:
        expected = [
            (info.name, info.offset_data, info.size if info.isreg() else 0)
            for info in tar
            if info.isreg() or info.islnk() or info.issym()
        ]
        for source in sources:
            found = [(entry.name, entry.offset, entry.size) for entry in read_entries(source) if entry.kind != "other"]
            assert found == expected


@pytest.mark.parametrize("mtime", [0.5, 0])
def test_webdatasets_own_tars_give_its_samples(tmp_path: Path, mtime: float) -> None:
    path = tmp_path / "a.tar"
    rows = [(f"birds/{'long' * (n % 2) * 40}{n}", {"jpg": bytes(n), "seg.png": b"p"}) for n in range(0, 2_000, 99)]
    with TarWriter(str(path), mtime=mtime) as writer:
        for key, fields in rows:
            writer.write({"__key__": key, **fields})
    with path.open("rb") as stream:
        theirs = list(group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])))
    ours = [(group[0][0].key, {member.field: data for member, data in group}) for group in read_members(str(path))]
    assert ours == rows
    assert [(row["__key__"], {"jpg": row["jpg"], "seg.png": row["seg.png"]}) for row in theirs] == rows


@cache
def small(kind: int) -> bytes:
    is_short = kind == tarfile.USTAR_FORMAT
    last = ("h\u00e9ron/1.jpg", "birds/0.cls") if is_short else ("long" * 40 + ".jpg", "h\u00e9.cls")
    files = [file(name, bytes([n + 1]) * 700 * n) for n, name in enumerate(("0.jpg", *last))]
    entries = [file("folder", type=tarfile.DIRTYPE), *files]
    return write(entries, kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cut_tar_gives_its_first_members_then_an_error(kind: int) -> None:
    content = small(kind)
    whole, end = by_tarfile(content), len(content.rstrip(b"\0"))
    end = (-(-end // 512) + 1) * 512  # of the first block of zeros
    for stop in {*range(0, end + 1, 512), *range(1, end, 97), end - 1}:
        for found, error in ours(content[:stop]):
            assert found == whole[: len(found)]
            assert (error is None) == (stop == end)
    assert ours(content[:end])[0][0] == whole


@given(content=st.sampled_from(FORMATS).map(small), data=st.data())
def test_a_tar_that_is_cut_anywhere_is_an_error(content: bytes, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(content.rstrip(b"\0"))))
    for found, error in ours(content[:stop]):
        assert found == by_tarfile(content)[: len(found)]
        assert error is not None


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_changed_byte_is_an_error_or_reads_as_with_tarfile(kind: int, mask: int) -> None:
    content = small(kind)
    whole = by_tarfile(content)
    for place in range(len(content.rstrip(b"\0"))):
        damaged = bytearray(content)
        damaged[place] ^= mask
        for found, error in ours(bytes(damaged)):
            if found != whole[: len(found)] or (error is None and found != whole):
                theirs = by_tarfile(bytes(damaged))
                assert found == (theirs if error is None else theirs[: len(found)]), (place, error)


@given(content=st.sampled_from(FORMATS).map(small), changes=st.dictionaries(st.integers(0, 4_000), st.integers(0, 255)))
def test_damage_raises_no_other_error(content: bytes, changes: dict[int, int]) -> None:
    damaged = bytearray(content)
    for place, value in changes.items():
        damaged[place] = value
    ours(bytes(damaged))


@given(content=st.binary(max_size=2_000), is_extended=st.booleans())
def test_what_is_no_tar_is_an_error(content: bytes, is_extended: bool) -> None:
    for _, error in ours((pax(content) if is_extended else b"") + content):
        assert error is not None or not any(content[:512])


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"777777777777", b"\x80" + (1 << 60).to_bytes(11, "big"), b"\x80" + b"\xff" * 11]
)
def test_a_size_that_nothing_holds_is_an_error(size: bytes) -> None:
    content = header(size=size) + b"heron" + END
    (_, of_file), (_, of_stream) = ours(content)
    assert "is truncated in member '0.jpg' at offset 512" in str(of_file)
    assert str(of_stream) == "is cut"
    for kind in b"xgL":
        for _, error in ours(header(size=size, type=bytes([kind])) + END):
            assert "the extended header at offset 512 claims" in str(error)
    with pytest.raises(UnreadableTarError, match="unexpected end of data"):
        list(read_entries(StreamBytes(io.BytesIO(content))))


def test_a_negative_size_is_an_error() -> None:
    for size in (b"\xff" * 12, b"\xff" + bytes(11), b"-0000000001\0"):
        for _, error in ours(header(size=size) + END):
            assert str(error) == "negative size"
    for _, error in ours(pax(b"11 size=-1\n") + header() + END):
        assert str(error) == "is damaged: the extended header at offset 0 gives b'-1' as a size"


@pytest.mark.parametrize(
    "payload",
    [
        b"14 path=1.jpg",  # no end of line
        b"99 path=1.jpg\n",  # a length that goes too far
        b"13 path=1.jpg\n",  # one that stops short
        b"4 path=1.jpg\n",
        b"0 path=1.jpg\n",
        b"-14 path=1.jpg\n",
        b"path=1.jpg\n",
        b"9 path1.\n",
        b"9" * 5_000 + b" path=1.jpg\n",
        b"14 path=1.jpg\nheron",
        b" " * 600,
    ],
)
def test_pax_records_that_lie_are_an_error(payload: bytes) -> None:
    for found, error in ours(pax(payload) + header() + END):
        assert (found, "the extended header at offset 512 has no record at byte" in str(error)) == ([], True)


def test_extended_headers_override_names_and_sizes() -> None:
    five = b"heron" + bytes(507)
    cases = {
        pax(b"14 path=1.jpg\n10 size=5\n") + header() + five: ("1.jpg", b"heron"),
        pax(b"14 path=1.jpg\n14 path=2.jpg\n\0\0") + header(): ("2.jpg", b""),
        pax(b"15 path=1.jpg/\n17 comment=a\nb=c\n") + header(): ("1.jpg", b""),
        pax(b"14 path=1.jpg\n") + pax(b"14 path=2.jpg\n") + header(): ("1.jpg", b""),
        pax(b"1.jpg\0", b"L") + pax(b"2.jpg\0", b"K") + header(): ("1.jpg", b""),
        pax(b"14 path=1.jpg\n", b"X") + pax(b"14 comment=ab\n", b"g") + header(): ("1.jpg", b""),
    }
    for content, expected in cases.items():
        assert ours(content + END) == [([expected], None)] * 2
        assert by_tarfile(content + END) == [expected]


def test_many_extended_headers_are_read_one_after_the_other() -> None:
    content = pax(b"14 path=1.jpg\n") * 5_000 + header() + END
    assert ours(content) == [([("1.jpg", b"")], None)] * 2


def test_extended_headers_without_a_member_are_an_error() -> None:
    for tail, words in {END: "no member follows the extended header at offset 0", b"": "no end mark stands at"}.items():
        for _, error in ours(pax(b"14 path=1.jpg\n") + tail):
            assert words in str(error)
    for record in (b"14 path=1.jpg\n", b"10 size=5\n", b"20 GNU.sparse.map=0\n"):
        for _, error in ours(pax(record, b"g") + header() + END):
            assert "gives all members one path or size" in str(error)


def _kinds(content: bytes) -> list[list[tuple[str, str]]]:
    with opened(content + END) as sources:
        return [[(entry.name, entry.kind) for entry in read_entries(source)] for source in sources]


def test_sparse_members_are_told_apart_with_their_maps() -> None:
    hole = bytearray(header(type=b"S", size=b"00000000005\0"))
    hole[482] = 1
    more = bytes(504) + b"\1" + bytes(7)
    gnu = patched(bytes(hole)) + more + bytes(512) + b"heron" + bytes(507)
    assert _kinds(gnu + header("1.jpg")) == [[("0.jpg", "sparse"), ("1.jpg", "file")]] * 2
    for _, error in ours(gnu[:1024]):
        assert str(error) == "is truncated: the map of a sparse member ends at offset 1024"
    records = b"22 GNU.sparse.major=1\n27 GNU.sparse.name=2.jpg.x\n"
    assert _kinds(pax(records) + header("GNUSparseFile.1/2.jpg")) == [[("2.jpg.x", "sparse")]] * 2


def test_old_tars_signed_sums_and_odd_numbers_are_read() -> None:
    blank = {"magic": bytes(8), "type": b"\0"}
    old = header("a/", **blank) + header("a/0.jpg", size=b"     5 \0    ", **blank) + b"heron" + bytes(507)
    assert ours(old + END) == [([("a/0.jpg", b"heron")], None)] * 2
    signed = patched(header(), is_signed=True, name="h\u00e9ron.jpg".encode())
    assert ours(signed + END) == [([("h\u00e9ron.jpg", b"")], None)] * 2
    for size in (b"\0" * 12, b" " * 12, b"\x80" + bytes(11), b"0\0 heron\0\0\0\0"):
        content = header(size=size) + END
        assert ours(content) == [([("0.jpg", b"")], None), (by_tarfile(content), None)]


def test_a_time_in_the_place_of_a_prefix_is_none() -> None:
    times = header(magic=b"ustar  \0", prefix=b"14000000000 14000000000 ")
    assert ours(times + END) == [([("0.jpg", b"")], None)] * 2
    assert ours(header(prefix=b"birds") + END) == [([("birds/0.jpg", b"")], None)] * 2


class Counted(FileBytes):
    """Counts how often all headers of a member are taken at once."""

    num_at_once = 0

    def take(self, offset: int, size: int, /) -> bytes:
        Counted.num_at_once += size == 3 * 512
        return super().take(offset, size)


def told(path: Path, *, goes_back: bool) -> list[object]:
    """The entries, and the error at their end."""
    entries: list[object] = []
    with path.open("rb") as file:
        source = Counted(file.fileno())
        source.goes_back = goes_back
        try:
            for entry in read_entries(source):
                entries.append(entry)
        except ERRORS as error:
            entries.append((type(error), str(error)))
    return entries


def test_headers_read_together_equal_headers_read_one_by_one(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "damaged.tar"
    with TarWriter(str(path)) as writer:
        for index in range(12):
            writer.write({"__key__": f"b/{index}", "jpg": bytes(draw.choice([0, 5, 511, 512, 700])), "cls": index})
    whole, Counted.num_at_once = path.read_bytes(), 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.randint(0, 2)):
            content[draw.randrange(len(content))] = draw.choice([0, 255, draw.randrange(256)])
        path.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])
        assert told(path, goes_back=True) == told(path, goes_back=False)
    assert Counted.num_at_once > 1000, "most members of webdataset's writer have such headers"
