"""Samples that shards leave out: named, counted, listed once, and left out again when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core.errors import DataError
from tests.write.shards import QUIET, names_in, tars_in, write

pytestmark = QUIET


def test_damaged_samples_are_errors_or_left_out(tmp_path: Path) -> None:
    def load(x: int) -> str:
        if x in (3, 4):
            raise ValueError("torn")
        return str(x)

    chain = kdp.from_dataset([(x, x) for x in range(10)]).transform("x", load)
    with pytest.raises(ValueError, match="torn") as caught:
        write(chain, tmp_path / "raise", max_samples=4)
    notes = "\n".join(caught.value.__notes__)
    assert "of sample '3'" in notes
    assert "shard " in notes
    for number, limits in enumerate([{"max_samples": 4}, {"max_samples": None, "max_bytes": 9000}]):
        for num_workers in (0, 2):
            folder = tmp_path / f"skip-{number}-{num_workers}"
            result = write(chain.on_error("skip"), folder, **limits, num_workers=num_workers)
            assert (result.num_samples, result.num_left_out) == (8, 2)
            keys = [key.rpartition("/")[2] for key in kdp.open_shards(result.urls).column("key")]
            assert keys == [str(x) for x in range(10) if x not in (3, 4)]
        assert tars_in(tmp_path / f"skip-{number}-0") == tars_in(tmp_path / f"skip-{number}-2")


def test_what_a_stream_leaves_out_is_left_out_when_it_goes_on(photo_shards: str, tmp_path: Path) -> None:
    def load(y: int, rng: Any = None) -> int:
        if y == 3:
            raise ValueError("torn")
        return y

    chain = kdp.stream_shards(photo_shards).transform("cls", load).on_error("skip")
    assert write(chain, tmp_path).num_left_out == 12
    before = tars_in(tmp_path)
    for name in ("train-000002.tar", "train-000003.tar.index"):
        (tmp_path / name).unlink()
    assert write(chain, tmp_path).num_found == 2
    assert tars_in(tmp_path) == before


def test_a_sample_without_a_key_does_not_block_a_resumed_run(tmp_path: Path) -> None:
    def key(sample: kdp.Sample) -> str:
        if sample["y"] == 1:
            raise DataError("no name")
        return sample.key

    chain = kdp.from_dataset([(str(y), y) for y in range(6)]).on_error("skip")
    options = {"max_samples": None, "max_bytes": 4096, "key": key}
    write(chain, tmp_path, **options)
    before = tars_in(tmp_path)
    (tmp_path / sorted(names_in(tmp_path))[-2]).unlink()  # the last index
    assert write(chain, tmp_path, **options).num_found == len(before) - 1 >= 2
    assert tars_in(tmp_path) == before


class Torn(kdp.MapPipe):
    """Samples of which some cannot be read."""

    def __len__(self) -> int:
        return 6

    def fetch(self, index: int) -> kdp.Sample:
        if index in (0, 3):
            raise OSError("torn")
        return kdp.Sample({"x": str(index), "y": index}, key=str(index), index=index)


@pytest.mark.parametrize("options", [{"max_samples": 2}, {"max_samples": None, "max_bytes": 6000}], ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_cannot_be_read_are_left_out_and_counted(
    tmp_path: Path, options: dict[str, Any], num_workers: int
) -> None:
    listed = tmp_path / "bad.jsonl"
    chain = Torn().on_error("quarantine", path=listed)
    result = write(chain, tmp_path / "shards", **options, num_workers=num_workers)
    assert (result.num_samples, result.num_left_out) == (4, 2)
    noted = [json.loads(line) for line in listed.read_text().splitlines()]
    assert sorted(entry["key"] for entry in noted) == ["position 0", "position 3"]
    assert {entry["error"] for entry in noted} == {"OSError: torn"}
    with pytest.raises(OSError, match="torn"):
        write(Torn(), tmp_path / "raise", **options, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_counted_where_all_are_left_out(tmp_path: Path, num_workers: int) -> None:
    chain = kdp.from_dataset([(0, 0), (0, 0)]).transform("x", lambda x: 1 / x).on_error("skip")
    result = write(chain, tmp_path, max_samples=None, max_bytes=6000, num_workers=num_workers)
    assert (result.urls, result.num_left_out) == ([], 2)


@pytest.mark.parametrize("write_all", [write, lambda chain, folder: kdp.write_records(chain, folder)])
def test_quarantine_tells_samples_of_one_key_apart(tmp_path: Path, write_all: Any) -> None:
    one, other = (kdp.from_dataset([(x, 0)]).transform("x", lambda x: 1 / x) for x in (2, 0))
    chain = kdp.concat(one, other).on_error("quarantine", path=tmp_path / "bad.jsonl")
    assert write_all(chain, tmp_path / "written").num_samples == 1
    with kdp.Loader(chain.select("x", bare=True).deal(batch_size=2)) as loader:
        assert list(loader) == [[0.5]]


def test_quarantine_lists_what_was_left_out_once(tmp_path: Path) -> None:
    chain = kdp.from_dataset([(1, 0), (0, 0), (4, 0)]).transform("x", lambda x: 1 / x)
    chain = chain.on_error("quarantine", path=tmp_path / "bad.jsonl")
    result = write(chain, tmp_path, max_samples=None, max_bytes=10**6, num_workers=2)
    assert result.num_samples == 2
    assert [json.loads(line)["key"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()] == ["1"]
