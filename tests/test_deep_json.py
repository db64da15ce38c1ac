"""JSON that is nested too deeply is damage like any other, wherever kdpipes reads JSON."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

import kdpipes as kdp
from kdpipes.cache.folder import METADATA

DEEP = b"[" * 200_000


@pytest.fixture
def shard(tmp_path: Path) -> str:
    path = str(tmp_path / "a.tar")
    with webdataset.TarWriter(path) as writer:
        for number in range(3):
            writer.write({"__key__": str(number), "cls": str(number), "json": {"n": number}})
    return path


@pytest.mark.parametrize("open_source", [kdp.open_shards, kdp.stream_shards])
def test_a_deep_member_names_its_sample(open_source: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "deep.tar")
    with webdataset.TarWriter(path, encoder=False) as writer:
        writer.write({"__key__": "0", "json": DEEP})
    with pytest.raises(kdp.DataError, match=r"ember 'json' of sample 'deep\.tar/0' .* cannot be decoded: .*too deeply"):
        next(iter(open_source(path)))["json"]


def test_an_index_with_a_deep_header_is_made_anew(shard: str) -> None:
    list(kdp.open_shards(shard))
    sidecar = Path(f"{shard}.index")
    whole = sidecar.read_bytes()
    content = whole[:12] + np.uint32(len(DEEP)).tobytes() + DEEP
    sidecar.write_bytes(content + np.uint32(zlib.crc32(content)).tobytes())
    assert [sample["y"] for sample in kdp.open_shards(shard).rename_fields(y="cls")] == [0, 1, 2]
    assert sidecar.read_bytes() == whole


def test_deep_metadata_of_a_cache_is_reported(tmp_path: Path) -> None:
    def cached() -> Any:
        return (
            kdp.from_dataset([(number, 0) for number in range(3)]).transform("x", int).cache_on_disk(tmp_path / "cache")
        )

    assert [sample["x"] for sample in cached()] == [0, 1, 2]
    (tmp_path / "cache" / METADATA).write_bytes(DEEP)
    with pytest.raises(kdp.DataError, match="METADATA file is damaged"):
        list(cached())


def test_deep_notes_of_writers_are_reported(shard: str, tmp_path: Path) -> None:
    chain = kdp.from_dataset([(number, 0) for number in range(3)])
    kdp.write_records(chain, tmp_path / "records")
    (tmp_path / "records" / "records.json").write_bytes(DEEP)
    with pytest.raises(kdp.DataError, match=r"its records\.json is damaged"):
        len(kdp.open_records(tmp_path / "records"))
    kdp.write_shards(kdp.open_shards(shard), str(tmp_path / "out" / "o-%03d.tar"), max_samples=1)
    (notes,) = (tmp_path / "out").glob("*.json")
    notes.write_bytes(DEEP)
    with pytest.raises(kdp.DataError, match="cannot be read as notes of shards"):
        kdp.write_shards(kdp.open_shards(shard), str(tmp_path / "out" / "o-%03d.tar"), max_samples=1)


def test_a_deep_line_of_a_quarantine_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(DEEP + b"\n")
    chain = kdp.from_dataset([(0, 0)]).on_error("quarantine", path=tmp_path / "bad.jsonl").select("x")
    with pytest.raises(kdp.DataError, match="Line 1 of the quarantine"):
        list(chain.deal(batch_size=1))
