"""What `write_shards` has written comes back as it was: in both flavours, from caches, and from other storage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kdpipes as kdp
from kdpipes.core.sample import Sample
from kdpipes.storage.decoding import decode_member
from kdpipes.write.members import MemberEncoder
from tests.write.shards import QUIET, write

pytestmark = QUIET
ROW: dict[str, Any] = {
    "depth": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "name": "größe\n",
    "boxes": [[1, 2.5], []],
    "meta": {"a": None, "b": [True]},
    "score": 0.1,
    "y": 3,
    "count.npy": np.array(5, np.int16),
    "page.html": "<p>ß",
    "weights.pth": {"w": torch.arange(3, dtype=torch.bfloat16)},
    "jpg": b"\xff\xd8\xff-",
}
FIELDS = {"depth": "depth.npy", "name": "name.txt", "boxes": "boxes.json", "meta": "meta.json", "score": "score.json"}


def shards(folder: Path, rows: int = 3) -> list[str]:
    return write(kdp.from_dataset([ROW] * rows, " ".join(ROW)), folder, max_samples=2).urls


def check(sample: Any) -> None:
    for name, value in ROW.items():
        back = sample[{"y": "cls"}.get(name, FIELDS.get(name, name))]
        if isinstance(value, np.ndarray):
            assert back.dtype == value.dtype
            assert np.array_equal(back, value)
        elif name == "weights.pth":
            assert torch.equal(back["w"], value["w"])
        else:
            assert (type(back), back) == (type(value), value)


READERS = [kdp.open_shards, kdp.stream_shards]


@pytest.mark.parametrize("read", READERS)
def test_values_come_back_in_both_flavours(read: Any, tmp_path: Path) -> None:
    samples = list(read(shards(tmp_path)))
    assert len(samples) == 3
    for sample in samples:
        check(sample)
    assert not np.shares_memory(samples[0]["depth.npy"], samples[1]["depth.npy"])


@pytest.mark.parametrize("read", READERS)
def test_values_come_back_from_other_storage(read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    fsspec.filesystem("memory").put(sorted(map(str, Path(shards(tmp_path / "a")[0]).parent.glob("*"))), "/round/")
    chain = read("memory://round/train-00000{0..1}.tar").select("depth.npy").deal(batch_size=3).collate_samples()
    depths = torch.cat([batch for (batch,) in chain])
    assert torch.equal(depths, torch.from_numpy(np.stack([ROW["depth"]] * 3)))
    for sample in read("memory://round/train-00000{0..1}.tar"):
        check(sample)


@pytest.mark.parametrize("read", READERS)
def test_fields_can_stay_bytes(read: Any, tmp_path: Path) -> None:
    sample = next(iter(read(shards(tmp_path), decode=False)))
    assert sample["name.txt"] == ROW["name"].encode()
    assert np.array_equal(np.load(io.BytesIO(sample["depth.npy"])), ROW["depth"])
    assert sample["cls"] == 3
    with pytest.raises(TypeError, match="`decode` must be True or False, but is 1 instead"):
        read(shards(tmp_path), decode=1)


@pytest.mark.parametrize("read", READERS)
def test_caches_know_bytes_from_values(read: Any, tmp_path: Path) -> None:
    urls = shards(tmp_path / "shards")

    def first(**options: Any) -> Any:
        chain = read(urls, **options).cache_on_disk(tmp_path / "cache")
        for _ in range(2):  # made, and from the cache
            samples = list(chain.select("depth.npy name.txt"))
        return samples[0]

    array, text = first()
    assert np.array_equal(array, ROW["depth"])
    assert text == ROW["name"]
    raw, text = first(decode=False)
    assert type(raw) is type(text) is bytes
    assert first()[1] == ROW["name"]


@pytest.mark.parametrize("read", READERS)
def test_a_hostile_array_is_an_error_that_names_the_sample(read: Any, tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.zeros(3))
    huge = content.getvalue().replace(b"(3,), }" + b" " * 20, b"(3" + b"0" * 15 + b",), }" + b" " * 5)
    pipe = kdp.from_dataset([(huge, 0)]).rename_fields(npy="x")
    sample = next(iter(read(write(pipe, tmp_path).urls)))
    with pytest.raises(
        kdp.DataError, match=r"ember 'npy' of sample '.*000000.*/0' in .* cannot be decoded: .*declares"
    ):
        sample["npy"]


def test_fields_are_decoded_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdpipes.storage.decoding.decode_array", lambda *_: pytest.fail("decoded"))
    for read in READERS:
        assert [sample["cls"] for sample in read(shards(tmp_path))] == [3, 3, 3]


def test_shards_that_are_read_and_written_again_are_the_same(tmp_path: Path) -> None:
    first = shards(tmp_path / "a")
    again = write(kdp.open_shards(first), tmp_path / "b", max_samples=2, key=lambda sample: sample.key.split("/")[1])
    assert [Path(url).read_bytes() for url in again.urls] == [Path(url).read_bytes() for url in first]


TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(st.none() | inner) | st.dictionaries(TEXT, st.none() | inner),
    max_leaves=8,
)


@given(value=JSON)
def test_plain_values_come_back(value: Any) -> None:
    ((extension, content),) = MemberEncoder(None, None, None)(Sample({"a": value}, key="k"))
    back = decode_member(extension, content)
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize("value", [torch.tensor([1, 2]), torch.zeros(2, 0), np.array(2.5), np.float16(0.1), (1, 2)])
def test_tensors_and_tuples_come_back_as_arrays_and_lists(value: Any) -> None:
    ((extension, content),) = MemberEncoder(None, None, None)(Sample({"a": value}, key="k"))
    back = decode_member(extension, content)
    assert isinstance(back, np.ndarray | float | list)
    assert np.array_equal(np.asarray(back), np.asarray(value))


def test_what_only_pickle_could_load_is_not_written_as_pth() -> None:
    with pytest.raises(kdp.ChainError, match=r"Field 'a' cannot be written as 'pth': UnpicklingError: Weights only"):
        MemberEncoder(None, {"a": "pth"}, None)(Sample({"a": {Path("b"): 1}}, key="k"))
