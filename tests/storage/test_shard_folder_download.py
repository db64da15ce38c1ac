"""Downloads of shards: breaks resumed, replaced shards rejected, damage noticed by the tag."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.storage import remote, shard_cache
from kdpipes.storage.files import HeldFile, ReplacedError, read_url, version_of, write_url
from kdpipes.storage.index_home import index_url
from kdpipes.storage.shard_cache import Shard
from kdpipes.storage.shard_index import ShardIndex
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage
from tests.processes import in_child
from tests.storage.kept_shards import CONTENTS, NUMBER, RANGE, SIZE, has_read, kept, made, moved, shard, shards

pytestmark = pytest.mark.usefixtures("no_waits", "forgets_tags", "small_ranges")


@pytest.mark.parametrize("kind", ["reset", "reset_midway", "timeout", "unavailable", "too_many_requests", "truncate"])
def test_what_passes_is_outlasted(origin: str, place: Path, kind: Any) -> None:
    with faulty_storage(origin, faults=[Fault(kind, every=3, on="range")], sleep=lambda _: None) as files:
        assert all(has_read(made(place), one) for one in shards())
        assert files.stats().faults[kind] > NUMBER
        wasted = sum(one.delivered for one in files.requests() if one.faults)
        assert moved(files) == NUMBER * SIZE + wasted, "a range alone is asked for again"


def test_a_file_system_that_cannot_be_made_is_a_failed_download(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str) -> Any:
        raise TypeError("no such option")

    cache, one = made(place), shard(0)
    monkeypatch.setattr(remote, "filesystem_of", fail)
    cache.expect([one])
    assert not has_read(cache, one)
    monkeypatch.undo()
    cache.expect([one])
    assert has_read(cache, one)


def test_a_download_that_fails_goes_on_later(origin: str, place: Path, one_range: None) -> None:
    with faulty_storage(origin, faults=[Fault("unavailable", after=9, times=6, on="range")]) as files:
        cache, one = made(place), shard(0)
        assert not has_read(cache, one)
        assert not has_read(cache, one), "not tried again in this epoch"
        assert len([request for request in files.requests() if request.kind == "range"]) == 9 + 6
        assert kept(place, ".part") == [one.name]
        cache.expect([one])
        assert has_read(cache, one)
        assert files.stats().bytes_repeated == 0
        assert moved(files) == SIZE


@pytest.mark.parametrize("num_ranges", [1, 4])
def test_a_killed_download_is_resumed(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch, num_ranges: int
) -> None:
    monkeypatch.setattr(remote, "_NUM_WHOLE", num_ranges)
    one, write, num_written = shard(0), shard_cache.write_all, 0

    def die(file: int, content: bytes) -> None:
        nonlocal num_written
        num_written += 1
        write(file, content[: len(content) // 2] if num_written == 8 else content)
        if num_written == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(shard_cache, "write_all", die)
        assert in_child(lambda: made(place).read(one, 0, 9)) == -signal.SIGKILL
    assert (place / f"{one.name}.part").stat().st_size == 7 * RANGE + RANGE // 2
    assert has_read(made(place), one)
    assert 0 < storage.stats().bytes_repeated <= (num_ranges + 1) * RANGE
    assert kept(place, ".tar", ".part") == [one.name]


def test_a_shard_that_is_replaced_meanwhile_is_rejected(origin: str, place: Path) -> None:
    for kind in ("new_etag", "new_size"):
        with faulty_storage(origin, faults=[Fault(kind, after=1, on="info")]):  # type: ignore[arg-type]
            with pytest.raises(ReplacedError, match=r"Shard 'faulty://0\.tar' has been replaced since its index was"):
                made(place).read(shard(0), 0, 9)
            assert kept(place, ".tar", ".part") == []


def test_a_shard_that_is_removed_meanwhile_is_rejected(storage: FaultyFileSystem, origin: str, place: Path) -> None:
    one = shard(0)
    place.mkdir()
    (place / f"{one.name}.part").write_bytes(CONTENTS[0])
    Path(origin, "0.tar").unlink()
    with pytest.raises(ReplacedError, match=r"Shard 'faulty://0\.tar' has been removed"):
        made(place).read(one, 0, 9)


def test_a_part_of_another_version_is_not_resumed(storage: FaultyFileSystem, origin: str, place: Path) -> None:
    before = shard(0)
    place.mkdir()
    (place / f"{before.name}.part").write_bytes(CONTENTS[1][: SIZE // 2])
    Path(origin, "0.tar").write_bytes(CONTENTS[0])
    assert shard(0).name != before.name
    assert has_read(made(place), shard(0))


@pytest.mark.parametrize("length", [0, SIZE - 10, SIZE + 10])
def test_a_copy_of_another_length_is_made_anew(storage: FaultyFileSystem, place: Path, length: int) -> None:
    one = shard(0)
    for name in (f"{one.name}.tar", f"{one.name}.part"):
        place.mkdir(exist_ok=True)
        (place / name).write_bytes((CONTENTS[0] + bytes(10))[:length] if name.endswith("tar") else bytes(SIZE + 10))
        assert has_read(made(place), one)
        (place / f"{one.name}.tar").unlink()


def tag_by(monkeypatch: pytest.MonkeyPatch, tag_of: Callable[[bytes], str]) -> None:
    """Let the storage say tags that are computed from the contents."""
    honest = FaultyFileSystem.info

    def info(self: FaultyFileSystem, path: str, **kwargs: Any) -> dict[str, Any]:
        number = int(path.rsplit("/", 1)[-1].removesuffix(".tar"))
        return {**honest(self, path, **kwargs), "ETag": f'"{tag_of(CONTENTS[number])}"'}

    monkeypatch.setattr(FaultyFileSystem, "info", info)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def test_damage_on_the_way_is_seen_by_the_tag(origin: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tag_by(monkeypatch, md5)
    with faulty_storage(origin, faults=[Fault("flip_bit", after=3, times=1)]) as files:
        assert has_read(made(place), shard(0))
        assert moved(files) == 2 * SIZE
    with faulty_storage(origin, faults=[Fault("flip_bit", probability=0.5)]):
        assert not has_read(made(place), shard(1))
    assert len(kept(place)) == 1


def test_a_tag_that_resembles_a_checksum_costs_one_download(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag_by(monkeypatch, lambda content: md5(content[::-1]))
    assert all(has_read(made(place), one) for one in shards())
    assert moved(storage) == (NUMBER + 1) * SIZE


def test_checksums_of_s3_are_those_of_the_content(s3: str, place: Path) -> None:
    import fsspec

    fsspec.filesystem("s3").pipe(f"{s3}/a.tar", CONTENTS[0])
    one = Shard(f"{s3}/a.tar", version_of(f"{s3}/a.tar"))
    assert md5(CONTENTS[0]) in one.version.tag
    assert made(place).read(one, 0, SIZE) == CONTENTS[0]
    assert shard_cache._without_md5 == set()


def test_a_shard_whose_members_have_checksums_is_downloaded_once(
    storage: FaultyFileSystem, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag_by(monkeypatch, lambda content: md5(content[::-1]))
    assert all(has_read(made(place), one._replace(is_checked=True)) for one in shards())
    assert moved(storage) == NUMBER * SIZE


@pytest.mark.parametrize("has_checksums", [True, False])
def test_the_index_decides_whether_a_shard_is_hashed(
    s3: str, place: Path, monkeypatch: pytest.MonkeyPatch, has_checksums: bool
) -> None:
    url, hashed, real = f"{s3}/letters-0.tar", list[Path](), shard_cache._md5
    kdp.write_shards(kdp.from_dataset([b"a", b"b"], "bin"), f"{s3}/letters-%d.tar", max_samples=2)
    if not has_checksums:
        index = ShardIndex.from_bytes(read_url(index_url(url)), url)
        plain = {name: replace(places, checksums=None) for name, places in index.fields.items()}
        write_url(index_url(url), replace(index, fields=plain).to_bytes())

    def note(file: HeldFile) -> str:
        hashed.append(file.path)
        return real(file)

    monkeypatch.setattr(shard_cache, "_md5", note)
    shards = kdp.open_shards(url, fetch="shards", cache_dir=str(place))
    assert [bytes(sample["bin"]) for sample in shards] == [b"a", b"b"]
    assert len(hashed) == (0 if has_checksums else 1)
