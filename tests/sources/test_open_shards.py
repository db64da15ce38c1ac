"""Shards by position: the index is read late and once, members alone, and damage is named."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.core.errors import DataError
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.files import version_of
from kdpipes.storage.shard_index import Places, ShardIndex
from kdpipes.storage.tar import index_shard

ROWS: list[dict[str, Any]] = [
    {"__key__": f"birds/{n}", "jpg": bytes([n]) * 2_000, "cls": str(n % 2).encode(), "json": {"n": n}} for n in range(4)
]


def test_members_are_fields_and_keys_name_shard_and_sample(write: Callable[..., Path], tmp_path: Path) -> None:
    write(ROWS[:2], "a-0.tar"), write(ROWS[2:], "a-1.tar")
    pipe = kdp.open_shards(tmp_path / "a-{0..1}.tar", class_names=["heron", "stork"])
    assert [sample.key for sample in pipe] == [f"a-{n // 2}.tar/birds/{n}" for n in range(4)]
    assert [dict(sample) for sample in pipe] == [
        {"jpg": bytes([n]) * 2_000, "cls": n % 2, "json": {"n": n}} for n in range(4)
    ]
    assert (pipe.column("cls").tolist(), pipe.class_names()) == ([0, 1, 0, 1], ("heron", "stork"))


def test_positions_and_streams_give_the_same_photos(photo_shards: str) -> None:
    indexed, streamed = kdp.open_shards(photo_shards), list(kdp.stream_shards(photo_shards))
    assert len({sample.key for sample in indexed}) == len(streamed) == 160
    order = random.Random(0).sample(range(160), 160)
    found = {index: (indexed[index].key, dict(indexed[index])) for index in order}
    assert [found[index] for index in range(160)] == [(sample.key, dict(sample)) for sample in streamed]


def test_headers_are_read_when_needed_and_then_never_again(write: Callable[..., Path], tmp_path: Path) -> None:
    missing = kdp.open_shards(tmp_path / "a.tar")
    with pytest.raises(FileNotFoundError, match=rf"^There is no file '{tmp_path}/a\.tar'\.$"):
        len(missing)
    path = write(ROWS)
    assert len(missing) == 4
    twin = pickle.loads(pickle.dumps(missing))
    path.unlink()
    assert [sample.key for sample in twin] == [f"a.tar/birds/{n}" for n in range(4)]


@pytest.mark.parametrize("name", ["open_shards", "stream_shards"])
def test_a_folder_is_told_how_to_name_its_shards(name: str, tmp_path: Path) -> None:
    (tmp_path / "0.tar").touch()
    way_out = rf"Write '{tmp_path}/\*\.tar' for the shards in it\.$"
    with pytest.raises(DataError, match=rf"^'{tmp_path}/?' is a folder; a file is needed\. {way_out}"):
        next(iter(getattr(kdp, name)(f"{tmp_path}/")))


def test_a_field_is_read_alone_and_damage_after_it_is_named(write: Callable[..., Path]) -> None:
    path = write(ROWS)
    pipe = kdp.open_shards(path)
    content = path.read_bytes()
    assert len(pipe) == 4
    last = pipe[3]
    path.write_bytes(content[: content.rindex(b"\3" * 2_000) + 100])
    assert (last["cls"], pipe.column("cls").tolist()) == (1, [0, 1, 0, 1])
    with pytest.raises(kdp.DataError, match=r"truncated: expected 2000 bytes at offset .*, but found 100") as caught:
        last["jpg"]
    assert caught.value.__notes__ == ["kdpipes: while reading member 'jpg' of sample 'a.tar/birds/3' (ordinal 3)"]


def test_cut_and_compressed_shards_are_rejected(write: Callable[..., Path], tmp_path: Path) -> None:
    whole, packed = write(ROWS), write(ROWS, "b.tar.gz")
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole.read_bytes()[:9_000])
    with pytest.raises(kdp.DataError, match=r"cut\.tar'.*truncated"):
        len(kdp.open_shards([whole, cut]))
    with pytest.raises(
        kdp.DataError, match=r"b\.tar\.gz' cannot be read as a plain tar.* read them with `kdp\.stream_shards`"
    ):
        len(kdp.open_shards(packed))


def test_bad_urls_are_rejected_at_once() -> None:
    with pytest.raises(ValueError, match=r"`urls` must be paths or fsspec URLs, but is 'pipe:cat a\.tar' instead"):
        kdp.open_shards("pipe:cat a.tar")
    with pytest.raises(TypeError, match="`urls` must be a path or URL, or a sequence of them, but is 3 instead"):
        kdp.open_shards(3)  # type: ignore[arg-type]


def test_a_sample_may_lack_a_field_that_is_then_no_column(write: Callable[..., Path]) -> None:
    pipe = kdp.open_shards(write([ROWS[0], {"__key__": "b", "png": b"1"}, {"__key__": "c", "cls": b"heron"}]))
    assert [list(sample) for sample in pipe] == [["cls", "jpg", "json"], ["png"], ["cls"]]
    with pytest.raises(kdp.DataError, match=r"^Sample 'a\.tar/b' has no member 'cls'; 1 have none\. Drop them"):
        pipe.column("cls")
    with pytest.raises(kdp.FieldError, match=r"^`open_shards` has no field 'clas'; .* Did you mean 'cls'"):
        pipe.column("clas")


def test_a_member_that_does_not_decode_is_named_when_read(write: Callable[..., Path]) -> None:
    sample = kdp.open_shards(write([{"__key__": "a", "jpg": b"1", "json": b"{"}]))[0]
    assert sample["jpg"] == b"1"
    with pytest.raises(
        kdp.DataError, match=r"^member 'json' of sample 'a\.tar/a' in '.*a\.tar' at offset \d+ cannot be"
    ):
        sample["json"]


def test_an_empty_shard_has_no_samples(write: Callable[..., Path]) -> None:
    pipe = kdp.open_shards([write([]), write(ROWS, "b.tar")])
    assert [sample.key for sample in pipe] == [f"b.tar/birds/{n}" for n in range(4)]
    assert list(kdp.open_shards(write([]))) == []


@pytest.mark.parametrize("is_renamed", [True, False], ids=["another file", "the same file"])
@pytest.mark.parametrize("grows", [True, False])
def test_a_shard_replaced_while_open_is_an_error_until_reopened(
    write: Callable[..., Path], is_renamed: bool, grows: bool
) -> None:
    path = write(ROWS)
    pipe = kdp.open_shards(path).select("jpg").deal(batch_size=4)
    photos = [(row["jpg"],) for row in ROWS]
    assert list(pipe) == [photos]
    other = write(ROWS[::-1], "b.tar").read_bytes()
    place = path.with_name("c.tar") if is_renamed else path
    place.write_bytes(other + bytes(512) * grows)
    os.utime(place, ns=(0, 1))
    place.replace(path)
    with pytest.raises(kdp.DataError, match=r"Shard '.*a\.tar' has been replaced, .* Open it again, `kdp\.open_shards"):
        list(pipe)
    assert list(kdp.open_shards(path).select("jpg").deal(batch_size=4)) == [photos[::-1]]


def damaged(path: Path, num_samples: int = 40) -> tuple[str, ShardIndex]:
    """Write a tar with 4 KiB of zeros in its middle; return it, and the index that ends there."""
    with TarWriter(str(path), mtime=0) as writer:
        for n in range(num_samples):
            writer.write({"__key__": f"{n:02}", "txt": "heron" * 200})
    content = path.read_bytes()
    middle = content.index(b"20.txt")
    whole = index_shard(str(path), version_of(str(path)))
    places = whole.fields["txt"]
    cut = ShardIndex(
        whole.version, PackedStrings(list(whole.keys)[:20]), {"txt": Places(places.offsets[:20], places.sizes[:20])}
    )
    status = path.stat()
    path.write_bytes(content[:middle] + bytes(4_096) + content[middle + 4_096 :])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return str(path), cut


def test_zeros_inside_a_shard_are_damage_and_lose_no_sample(tmp_path: Path) -> None:
    url, cut = damaged(tmp_path / "0.tar")
    whole = str(shutil.copy(url, tmp_path / "1.tar"))
    with pytest.raises(DataError, match=rf"^Shard '{url}' is damaged: zeros at offset \d+ .* data follow at offset"):
        len(kdp.open_shards(url))
    with pytest.raises(DataError, match=rf"^Shard '{url}' is damaged: zeros"):
        list(kdp.stream_shards(url))
    Path(f"{url}.index").write_bytes(cut.to_bytes())
    with pytest.raises(DataError, match=rf"^Shard '{url}' is damaged: zeros"):
        len(kdp.open_shards(url))
    Path(whole).write_bytes(Path(whole).read_bytes()[: 20 * 1_536] + bytes(11_000))  # the end of a tar
    assert len(kdp.open_shards(whole)) == len(kdp.open_shards(whole)) == len(list(kdp.stream_shards(whole))) == 20
    Path(whole).write_bytes(Path(whole).read_bytes()[: 20 * 1_536] + bytes(40_000))  # as a download left it
    for read in (kdp.open_shards, kdp.stream_shards):
        with pytest.raises(DataError, match=rf"^Shard '{whole}' is damaged: more than 11,264 zeros follow"):
            list(read(whole))  # type: ignore[call-overload]


def test_a_tolerant_stream_continues_with_the_next_shard(tmp_path: Path) -> None:
    damaged(tmp_path / "0.tar")
    with TarWriter(str(tmp_path / "1.tar")) as writer:
        writer.write({"__key__": "0", "txt": "stork"})
    chain = kdp.stream_shards(tmp_path / "{0..1}.tar").on_error("skip").select("key").deal(batch_size=50)
    with kdp.Loader(chain) as loader:
        keys = [key for batch in loader for (key,) in batch]
        assert keys == [*(f"0.tar/{n:02}" for n in range(19)), "1.tar/0"]
        assert loader.stats()["skipped_shards"] == 1


def _tar(members: list[tuple[str, bytes]]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


def _unsorted(number: int) -> bytes:
    """Return a shard whose labels, texts and JSON members are in different orders."""
    members = [(f"{n}.cls", b"%d" % (n + number)) for n in (2, 0, 1)]
    members += [(f"{n}.json", b'{"n": %d}' % n) for n in (1, 2, 0)]
    return _tar([*members, *((f"{n}.txt", b"text %d" % n) for n in (0, 1))])


@pytest.mark.parametrize("root", ["local", "memory://test_unsorted"])
def test_shards_in_any_order_are_read_by_position(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    root = str(tmp_path) if root == "local" else root
    for number in range(2):
        with fsspec.open(f"{root}/a-{number}.tar", "wb") as file:
            file.write(_unsorted(number))
    urls = f"{root}/a-{{0..1}}.tar"
    expected = [(f"a-{shard}.tar/{n}", n + shard, {"n": n}) for shard in range(2) for n in (2, 0, 1)]
    for is_indexed in (False, True):
        if is_indexed:
            kdp.index_shards(urls, columns="json.n")
        pipe = kdp.open_shards(urls)
        assert [(sample.key, sample["cls"], sample["json"]) for sample in pipe] == expected
        assert pipe.column("cls").tolist() == [y for _, y, _ in expected]
        assert pipe.column("json.n").tolist() == [2, 0, 1] * 2
        assert pipe[1]["txt"] == "text 0"
        with pytest.raises(DataError, match=r"'a-0\.tar/2' .*'txt'"):
            pipe[0]["txt"]
        for batch_size in (1, 64):
            batches = pipe.select("key cls").deal(batch_size=batch_size, shuffle=True, seed=0).collate_samples()
            pairs = [pair for keys, labels in batches for pair in zip(keys, labels.tolist(), strict=True)]
            assert sorted(pairs) == sorted((key, y) for key, y, _ in expected)
