"""Shards front to back, from disk, from memory:// and compressed, once for each epoch."""

from __future__ import annotations

import io
import itertools
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp

JPGS = [random.Random(n).randbytes(20_000) for n in range(4)]
ROWS: list[dict[str, Any]] = [
    {"__key__": f"birds/{n}", "jpg": JPGS[n], "cls": str(n % 2).encode(), "json": {"n": n}} for n in range(4)
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[dict[str, Any]], name: str) -> Path:
        with TarWriter(str(tmp_path / name)) as writer:
            for row in rows:
                writer.write(row)
        return tmp_path / name

    return write


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


def test_each_epoch_begins_anew_also_after_one_that_was_abandoned(write: Callable[..., Path]) -> None:
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
    with pytest.raises(TypeError, match=r"is a stream: it has no positions\. `kdp\.open_shards` gives an indexed"):
        stream[0]


def test_urls_that_would_run_a_command_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"`urls` must be paths or fsspec URLs, but is 'pipe:cat a\.tar' instead"):
        kdp.stream_shards("pipe:cat a.tar")


def test_shards_are_opened_when_their_turn_comes(write: Callable[..., Path], tmp_path: Path) -> None:
    stream = iter(kdp.stream_shards([write(ROWS[:1], "a.tar"), write([], "empty.tar"), tmp_path / "missing.tar"]))
    assert next(stream).key == "a.tar/birds/0"
    with pytest.raises(FileNotFoundError, match=rf"^There is no file '{tmp_path}/missing\.tar'\.$"):
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


def test_members_are_decoded_when_read_and_damage_names_the_sample(write: Callable[..., Path]) -> None:
    (sample,) = kdp.stream_shards(write([{"__key__": "a", "jpg": b"1", "json": b"{"}], "a.tar"))
    assert sample["jpg"] == b"1"
    with pytest.raises(kdp.DataError, match=r"^Member 'json' of sample 'a\.tar/a' in '.*a\.tar' cannot be decoded: "):
        sample["json"]


def test_a_sample_in_two_places_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.jpg", "1.jpg", "0.cls"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    with pytest.raises(kdp.DataError, match=r"sample '0' in two places; .* The second is '0\.cls' at offset"):
        list(kdp.stream_shards(tmp_path / "a.tar"))


def test_a_stream_has_no_columns() -> None:
    with pytest.raises(TypeError, match=r"is a stream: it has no columns\. `kdp\.open_shards`"):
        kdp.stream_shards("a.tar").column("y")
