"""Shards front to back, from disk, from memory:// and compressed, once for each epoch."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import kdpipes as kdp
from kdpipes.storage import remote
from kdpipes.storage.catalog import make_index, survey_shards
from tests.faulty_storage import Fault, faulty_storage

JPGS = [random.Random(n).randbytes(20_000) for n in range(4)]
ROWS: list[dict[str, Any]] = [
    {"__key__": f"birds/{n}", "jpg": JPGS[n], "cls": str(n % 2).encode(), "json": {"n": n}} for n in range(4)
]


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/shards", recursive=True)


def _read(stream: Any) -> list[tuple[str, int, dict[str, Any]]]:
    return [(sample.key, sample.index, dict(sample)) for sample in stream]


def test_samples_come_in_order_from_wherever_the_shards_lie(write: Callable[..., Path], memory: Any) -> None:
    places = {}
    for suffix in ("tar", "tar.gz"):
        paths = [write(ROWS[:2], f"a-0.{suffix}"), write(ROWS[2:], f"a-1.{suffix}")]
        memory.pipe({f"/shards/{path.name}": path.read_bytes() for path in paths})
        places[f"{paths[0].parent}/a-{{0..1}}.{suffix}"] = places[f"memory://shards/a-{{0..1}}.{suffix}"] = suffix
    for urls, suffix in places.items():
        assert _read(kdp.stream_shards(urls)) == [
            (f"a-{n // 2}.{suffix}/birds/{n}", n, {"jpg": JPGS[n], "cls": n % 2, "json": {"n": n}}) for n in range(4)
        ]


def test_each_epoch_begins_anew_after_an_abandoned_one(write: Callable[..., Path]) -> None:
    stream = kdp.stream_shards(write(ROWS, "a.tar"), class_names=["heron", "stork"])
    first = _read(stream)
    assert [sample.key for sample in itertools.islice(stream, 2)] == ["a.tar/birds/0", "a.tar/birds/1"]
    assert _read(stream) == first
    assert [(sample.draw.epoch, sample.ordinal) for sample in stream] == [(3, n) for n in range(4)]
    assert stream.class_names() == ("heron", "stork")


def test_a_stream_has_neither_length_nor_positions(write: Callable[..., Path]) -> None:
    stream = kdp.stream_shards(write(ROWS, "a.tar"))
    with pytest.raises(TypeError):
        len(stream)
    with pytest.raises(TypeError, match=r"is a stream and cannot be indexed\. .*`kdp\.open_shards` opens shards"):
        stream[0]


def test_urls_that_would_run_a_command_are_rejected_at_once() -> None:
    with pytest.raises(ValueError, match=r"`urls` must be paths or fsspec URLs, but is 'pipe:cat a\.tar' instead"):
        kdp.stream_shards("pipe:cat a.tar")


def test_a_missing_shard_is_reported_first_or_remote_in_turn(
    write: Callable[..., Path], memory: Any, tmp_path: Path
) -> None:
    paths = [write(ROWS[:1], "a.tar"), write([], "empty.tar"), tmp_path / "missing.tar"]
    with pytest.raises(FileNotFoundError, match=rf"^There is no file '{tmp_path}/missing\.tar'\.$"):
        next(iter(kdp.stream_shards(paths)))
    memory.pipe({f"/shards/{path.name}": path.read_bytes() for path in paths[:2]})
    stream = iter(kdp.stream_shards([f"memory://shards/{path.name}" for path in paths]))
    assert next(stream).key == "a.tar/birds/0"
    with pytest.raises(FileNotFoundError, match=r"^There is no file 'memory://shards/missing\.tar'\.$"):
        next(stream)


def test_a_cut_shard_gives_its_whole_samples_and_then_an_error(write: Callable[..., Path]) -> None:
    words = {"a.tar": r"is truncated in member 'birds/2\.jpg' at offset \d+", "a.tar.gz": "file ended before the end"}
    for name in words:
        path = write(ROWS, name)
        content, keys = path.read_bytes(), list[str]()
        path.write_bytes(content[: content.find(JPGS[2]) + 9_000] if name == "a.tar" else content[:50_000])
        with pytest.raises(kdp.DataError, match=rf"^Shard '{path}' .*{words[name]}"):
            list(map(keys.append, (sample.key for sample in kdp.stream_shards(path))))
        assert keys == [f"{name}/birds/{n}" for n in range(len(keys))] != []


def test_members_are_decoded_on_read_and_damage_names_samples(write: Callable[..., Path]) -> None:
    (sample,) = kdp.stream_shards(write([{"__key__": "a", "jpg": b"1", "json": b"{"}], "a.tar"))
    assert sample["jpg"] == b"1"
    with pytest.raises(
        kdp.DataError, match=r"^Member 'json' of sample 'a\.tar/a' in '.*a\.tar' at offset \d+ cannot be de"
    ):
        sample["json"]


def test_a_sample_in_two_places_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.jpg", "1.jpg", "0.cls"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    with pytest.raises(kdp.DataError, match=r"sample '0' in two places: the second is '0\.cls' at offset"):
        list(kdp.stream_shards(tmp_path / "a.tar"))


def test_a_stream_has_no_columns() -> None:
    with pytest.raises(TypeError, match=r"is a stream and has no columns\. `kdp\.open_shards`"):
        kdp.stream_shards("a.tar").column("y")


def test_globs_are_the_files_that_match(write: Callable[..., Path], memory: Any, tmp_path: Path) -> None:
    paths = [write(ROWS[2:], "b-1.tar"), write(ROWS[:2], "b-0.tar")]
    memory.pipe({f"/shards/{path.name}": path.read_bytes() for path in paths})
    for urls in (tmp_path / "b-*.tar", "memory://shards/b-*.tar"):
        stream = kdp.stream_shards(urls)
        assert (stream.num_shards, stream.fingerprint()) == (2, kdp.stream_shards(sorted(paths)).fingerprint())
        assert [sample.key for sample in kdp.stream_shards(urls)] == [f"b-{n // 2}.tar/birds/{n}" for n in range(4)]
        with kdp.Loader(kdp.stream_shards(urls).select("key").deal(batch_size=3), num_workers=2) as loader:
            assert [len(batch) for batch in loader] == [2, 2]
    with pytest.raises(FileNotFoundError, match=r"^No file matches '.*c-\*\.tar'\.$"):
        list(kdp.stream_shards(tmp_path / "c-*.tar"))


KINDS: tuple[Any, ...] = ("reset", "reset_midway", "timeout", "too_many_requests", "truncate")
FAULTS = [Fault(kind, after=2 * place, times=1, on="range") for place, kind in enumerate(KINDS)]  # fewer than tries


@pytest.mark.parametrize("errors", ["builtin", "s3fs"])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_streams_outlast_what_passes(
    write: Callable[..., Path], num_workers: int, suffix: str, errors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(remote, "_FIRST_CHUNK", 1 << 12)
    monkeypatch.setattr(remote, "_LARGEST_CHUNK", 1 << 12)
    paths = [write(ROWS[:2], f"a-0.{suffix}"), write(ROWS[2:], f"a-1.{suffix}")]

    def epochs(urls: Any, split: Any, num_workers: int) -> list[Any]:
        pipe = kdp.stream_shards(urls).shuffle(buffer_size=2).select("key jpg cls").deal(batch_size=2, split=split)
        with kdp.Loader(pipe, num_workers=num_workers) as loader:
            return [sorted(loader) for _ in range(2)]

    for split in ("samples", "auto"):
        with faulty_storage(str(paths[0].parent), faults=FAULTS, seed=1, errors=errors) as storage:
            found = epochs(f"faulty://a-{{0..1}}.{suffix}", split, num_workers)
        assert found == epochs(paths, split, num_workers)
        assert len(storage.stats().faults) >= 3


def test_a_shard_that_cannot_be_reached_names_the_member(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.storage.access._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(remote, "_FIRST_CHUNK", 1 << 14)
    monkeypatch.setattr(remote, "_NUM_AHEAD", 1)
    path = write(ROWS, "a.tar")
    with faulty_storage(str(path.parent), faults=[Fault("reset", after=2)], errors="s3fs"):
        stream = iter(kdp.stream_shards("faulty://a.tar"))
        words = r"cannot be read at offset 16384: .* \(in member 'birds/0\.jpg' at offset \d+\)\."
        with pytest.raises(kdp.DataError, match=r"^Shard 'faulty://a\.tar' " + words):
            next(stream)


def test_a_member_that_one_sample_lacks_is_damage_of_that_sample(write: Callable[..., Path]) -> None:
    rows = [{name: value for name, value in row.items() if (name, n) != ("jpg", 2)} for n, row in enumerate(ROWS)]
    path = write(rows, "a.tar")
    for source in (kdp.stream_shards, kdp.open_shards):
        words = rf"^Sample 'a\.tar/birds/2' in '{path}' at offset \d+ has no member 'jpg', as other samples have"
        samples: Any = list(source(path))
        assert "jpg" not in samples[2]
        assert samples[2].get("jpg", "none") == "none"
        with pytest.raises(kdp.DataError, match=words):
            samples[2]["jpg"]
        with pytest.raises(kdp.FieldError, match="has no field 'png'"):
            samples[2]["png"]
        for bad in (source(path).rename_fields(x="jpg;webp"), source(path).add_field("x", lambda s: s["jpg"])):
            pipe = bad.on_error("skip").select("x key").deal(batch_size=2)
            for num_workers in (0, 1):
                with kdp.Loader(pipe, num_workers=num_workers) as loader:
                    assert [[key[-1] for _, key in batch] for batch in loader] == [["0", "1"], ["3"]]
                    assert [(skip["key"], skip["is_shard"]) for skip in loader.skipped] == [("a.tar/birds/2", False)]
        with pytest.raises(kdp.FieldError, match="has no field 'png'"):
            list(source(path).rename_fields(x="png"))


def flipped(path: Path, place: int) -> None:
    """Flip a bit of a file, and let its date be as it was."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("verify", ["auto", True])
def test_a_flipped_bit_is_an_error_of_its_sample(write: Callable[..., Path], verify: Any) -> None:
    path = write(ROWS, "a.tar")
    make_index(str(path), with_checksums=True)
    flipped(path, path.read_bytes().index(JPGS[2]) + 5)
    samples = list(kdp.stream_shards(path, verify=verify))
    assert (samples[1]["jpg"], samples[2]["cls"]) == (JPGS[1], 0)
    words = rf"^Member 'jpg' of sample 'a\.tar/birds/2' in '{path}' at offset \d+ is damaged, or has been replaced"
    with pytest.raises(kdp.DataError, match=words):
        samples[2]["jpg"]
    chain = kdp.stream_shards(path, verify=verify).on_error("skip").select("key jpg").deal(batch_size=9)
    assert [key[-1] for key, _ in next(iter(chain))] == ["0", "1", "3"]
    assert [sample["jpg"] for sample in kdp.stream_shards(path, verify=False)][2] != JPGS[2]


def test_shards_without_checksums_are_read_unless_verify_is_true(write: Callable[..., Path]) -> None:
    path, packed = write(ROWS, "a.tar"), write(ROWS, "a.tar.gz")
    for _ in range(2):
        assert len(list(kdp.stream_shards(path))) == len(list(kdp.stream_shards(packed, verify=True))) == 4
        with pytest.raises(kdp.DataError, match=r"a\.tar' cannot be verified: it has no index with checksums"):
            list(kdp.stream_shards(path, verify=True))
        make_index(str(path))  # of headers alone
    make_index(str(path), with_checksums=True)
    assert len(list(kdp.stream_shards(path, verify=True))) == 4
    with pytest.raises(ValueError, match="`verify` must be one of True, False, 'auto'"):
        kdp.stream_shards(path, verify="yes")  # type: ignore[arg-type]


def test_members_that_come_damaged_are_read_again(
    write: Callable[..., Path], tmp_path: Path, no_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    write(ROWS, "a.tar")
    flip = Fault("flip_bit", every=1, on="range")
    with faulty_storage(str(tmp_path)):
        make_index("faulty://a.tar")
    with faulty_storage(str(tmp_path), faults=[Fault("flip_bit", times=1, on="range", paths="*.tar")]) as files:
        found = [list(sample.items()) for sample in kdp.stream_shards("faulty://a.tar", verify=True)]
        assert found == [list(sample.items()) for sample in kdp.stream_shards(tmp_path / "a.tar")]
        ranges = [one for one in files.requests() if one.path == "a.tar" and one.kind == "range"]
        assert [one.start > 0 for one in ranges] == [False, True], "the damaged member is read again, alone"
        before = len(files.requests())
        list(kdp.stream_shards("faulty://a.tar"))
        assert not [one for one in files.requests()[before:] if one.path != "a.tar"], "no index is asked for"
    with faulty_storage(str(tmp_path), faults=[flip]), pytest.raises(kdp.DataError, match="is damaged"):
        list(map(dict, kdp.stream_shards("faulty://a.tar", verify=True)))


def test_a_member_that_is_too_large_is_an_error_that_names_it(write: Callable[..., Path]) -> None:
    rows = [*ROWS, {"__key__": "bomb", "jpg": bytes(1 << 24)}, {"__key__": "last", "jpg": b"a"}]
    path = write(rows, "a.tar.gz")
    assert path.stat().st_size < 1 << 17
    words = rf"^Member 'bomb\.jpg' of shard '{path}' at offset \d+ has 16,777,216 bytes; `.*\)` allows 1,000,000\.$"
    stream = kdp.stream_shards(path, max_member_bytes=1_000_000)
    with pytest.raises(kdp.DataError, match=words):
        list(stream)
    assert len(list(kdp.stream_shards(path))) == 6
    assert len(next(iter(stream.on_error("skip").select("key").deal(batch_size=9)))) == 3


@pytest.mark.parametrize("name", ["a.tar", "a.TAR.GZ", "a.taz", "shard"])
def test_compressed_shards_are_streamed_whatever_their_name(
    name: str, write: Callable[..., Path], memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    content = gzip.compress(write(ROWS, "plain.tar").read_bytes())
    (tmp_path / name).write_bytes(content)
    memory.pipe(f"/shards/{name}", content)
    for url in (str(tmp_path / name), f"memory://shards/{name}"):
        for verify in ("auto", True):
            stream = kdp.stream_shards(url, verify=verify)
            for _ in range(2):
                assert [(sample.key, sample["cls"]) for sample in stream] == [
                    (f"{name}/birds/{n}", n % 2) for n in range(4)
                ]
        assert [shard.state for shard in survey_shards([url])] == ["impossible"]
        with pytest.raises(kdp.DataError, match=r"is compressed\. .*`kdp\.stream_shards`"):
            len(kdp.open_shards(url))
    assert not list((tmp_path / "cache").rglob("*.index"))
