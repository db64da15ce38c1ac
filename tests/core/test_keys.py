"""Keys are unique where names repeat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.core.keys import repetitions, unique_key, without_repetition


@given(st.lists(st.sampled_from(["a", "b", "a #2", "a #3", "b #2", "c"])))
def test_keys_of_any_names_are_unique(names: list[str]) -> None:
    numbers = repetitions(names)
    if numbers is None:
        assert len(set(names)) == len(names)
        return
    keys = [unique_key(name, number) for name, number in zip(names, numbers.tolist(), strict=True)]
    assert len(set(keys)) == len(keys)
    assert [keys[names.index(name)] for name in names] == names, "the first of equal names stays"
    made = [(name, key) for name, key in zip(names, keys, strict=True) if " #" not in name]
    assert all(without_repetition(key) == name for name, key in made)


def of_ids(names: Sequence[str], folder: Path) -> Any:
    return kdp.from_ids(list(names), list(range(len(names))), load=str.upper)


def of_paths(names: Sequence[str], folder: Path) -> Any:
    for name in names:
        (folder / name).write_bytes(name.encode())
    return kdp.from_table({"file": list(names), "y": list(range(len(names)))}, path="file", root=folder)


@pytest.mark.parametrize("make", [of_ids, of_paths])
def test_a_name_that_repeats_makes_several_keys(make: Any, tmp_path: Path) -> None:
    pipe = make(["a", "b", "a", "a"], tmp_path)
    keys = ["a", "b", "a #2", "a #3"]
    assert [sample.key for sample in pipe] == pipe.column("key").tolist() == keys
    batches = pipe.select("key y").deal(batch_size=64)
    assert [key for batch in kdp.Loader(batches) for key, _ in batch] == keys
    assert [key for batch in kdp.Loader(pipe.select("key y").deal(batch_size=1)) for key, _ in batch] == keys


@pytest.mark.parametrize("make", [of_ids, of_paths])
def test_replay_finds_each_of_several_rows(make: Any, tmp_path: Path) -> None:
    pipe = make(["a", "b", "a"], tmp_path)
    chain = pipe.record_ctx().select("y", return_ctx=True)
    assert [kdp.replay(sample.key, {}, chain)[0] for sample in pipe] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("make", [of_ids, of_paths])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_quarantined_row_drops_no_other(make: Any, num_workers: int, tmp_path: Path) -> None:
    def checked(sample: Any) -> int:
        if sample["y"] == 0:
            raise kdp.DataError("bad")
        return int(sample["y"])

    pipe = make(["a", "b", "a"], tmp_path).add_field("v", checked)
    path = tmp_path / "quarantine.jsonl"
    chain = pipe.on_error("quarantine", path=path, max_share=1.0).select("v").deal(batch_size=1)
    with kdp.Loader(chain, num_workers=num_workers) as loader:
        assert [[v for batch in loader for (v,) in batch] for _ in range(2)] == [[1, 2], [1, 2]]


def test_rows_of_one_image_join_what_belongs_to_it(tmp_path: Path) -> None:
    captions = of_paths(["a.jpg", "a.jpg", "b.jpg"], tmp_path)
    sizes = kdp.from_table({"image": ["a", "b"], "size": [1, 2]}, key="image", columns=["size"])
    assert captions.join(sizes).select("y size")[1] == (1, 1)
    with pytest.raises(kdp.DataError, match="unique keys in the other source"):
        kdp.from_ids(["a", "b"], load=str).join(captions.rename_fields(z="x")).column("y")


def test_a_row_without_a_path_is_the_only_one_that_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    pipe = kdp.from_table({"file": ["a", None, "a", None]}, path="file", root=tmp_path)
    assert [pipe[0].key, pipe[2].key] == ["a", "a #2"]
    with pytest.raises(kdp.DataError, match="Row 1 of the table has no key or path"):
        pipe[1].key  # noqa: B018


class Named(kdp.SampleSource):
    """A source whose keys are not unique."""

    def __len__(self) -> int:
        return 3

    def key_of(self, index: int) -> str:
        return "ab"[index % 2]

    def getitem_y(self, index: int) -> int:
        return index


def two_tables() -> Any:
    return kdp.concat(kdp.from_table({"y": [0]}), kdp.from_table({"y": [1, 2]}))


DOUBLES = {
    "a source": Named,
    "tables with numbered rows": two_tables,
    "items": lambda: SequenceWrapper([0, 1, 2]).to_samples(fields="y", key=lambda item: "a"),
}


@pytest.mark.parametrize("source", DOUBLES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_quarantine_tells_equal_keys_apart(source: str, num_workers: int, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"

    def chain(bad: int) -> Any:
        pipe = DOUBLES[source]().add_field("v", lambda sample: 1 // (sample["y"] - bad) and sample["y"])
        return pipe.on_error("quarantine", path=path, max_share=1.0).select("y v").deal(batch_size=1)

    with kdp.Loader(chain(0), num_workers=num_workers) as loader:
        assert [[batch[0][0] for batch in loader] for _ in range(2)] == [[1, 2], [1, 2]]
    assert [batch[0][0] for batch in kdp.Loader(chain(7))] == [1, 2], "the entry stays"
    path.write_text(json.dumps({"key": two_tables()[1].key, "error": "by hand"}) + "\n")
    assert [batch[0][0] for batch in kdp.Loader(chain(7))] == {"tables with numbered rows": [2]}.get(source, [0, 1, 2])


@pytest.mark.parametrize("source", DOUBLES)
def test_caches_tell_equal_keys_apart(source: str) -> None:
    cached = DOUBLES[source]().transform("y", lambda y: y + 10).add_field("z", lambda s: s["y"]).cache_in_memory()
    for _ in range(2):
        assert [(sample["y"], sample["z"]) for sample in cached] == [(10, 10), (11, 11), (12, 12)]


@pytest.mark.parametrize("source", DOUBLES)
def test_replay_rejects_a_key_of_several_samples(source: str) -> None:
    pipe = DOUBLES[source]().record_ctx()
    with pytest.raises(kdp.ChainError, match=r"Several samples .* have the key"):
        kdp.replay(pipe[0].key, {}, pipe.select("y", return_ctx=True))
    repeated = kdp.from_ids(["a", "b"], [0, 1], load=str).repeat_until(repetitions=2).select("y")
    assert kdp.replay("b", {}, repeated) == (1,)
