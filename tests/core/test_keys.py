"""Keys are unique where names repeat."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.core.keys import repetitions, unique_key, without_repetition


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    assert [kdp.replay(key, {}, pipe.record_ctx().select("y")) for key in keys] == [(0,), (1,), (2,), (3,)]


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


def shards(keys: str, read: Any = kdp.stream_shards, size: int = 1) -> Any:
    """Return samples with these keys, `size` of them in each shard."""
    for first in range(0, len(keys), size):
        with wds.TarWriter(f"{first}.tar") as writer:
            for number, key in list(enumerate(keys))[first : first + size]:
                writer.write({"__key__": str(number), "txt": key, "cls": number})
    urls = [f"{first}.tar" for first in range(0, len(keys), size)]
    return read(urls).to_samples(key=lambda sample: sample["txt"]).rename_fields(y="cls", z="txt")


DOUBLES = {
    "a source": Named,
    "shards": lambda: shards("aba", kdp.open_shards, 3),
    "tables with numbered rows": two_tables,
    "items": lambda: SequenceWrapper([0, 1, 2]).to_samples(fields="y", key=lambda item: "a"),
}


def without(bad: int, pipe: Any, path: Path, **options: Any) -> Any:
    """Return a loader of numbers whose sample `bad` cannot be made."""
    pipe = pipe.add_field("v", lambda sample: sample["y"] + 0 // (sample["y"] - bad))
    pipe = pipe.on_error("quarantine", path=path, max_share=1.0)
    return kdp.Loader(pipe.select("v", bare=True).deal(batch_size=1), **options)


@pytest.mark.parametrize("source", [*DOUBLES, of_ids, of_paths])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_quarantine_tells_equal_keys_apart(source: Any, num_workers: int, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    pipe = DOUBLES[source]() if isinstance(source, str) else source(["a", "b", "a"], tmp_path)
    with without(0, pipe, path, num_workers=num_workers) as loader:
        assert [[v for (v,) in loader] for _ in range(2)] == [[1, 2], [1, 2]]
    assert [v for (v,) in without(7, pipe, path)] == [1, 2], "the entry stays"
    path.write_text(json.dumps({"key": two_tables()[1].key, "error": "by hand"}) + "\n")
    assert [v for (v,) in without(7, pipe, path)] == {"tables with numbered rows": [2]}.get(source, [0, 1, 2])


def die_at_zero(sample: Any) -> int:
    if sample["y"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(sample["y"])


@pytest.mark.parametrize("source", DOUBLES)
def test_the_twin_of_a_deadly_sample_is_delivered(source: str, tmp_path: Path) -> None:
    pipe = DOUBLES[source]().add_field("v", die_at_zero).on_error("quarantine", path=tmp_path / "q", max_share=1.0)
    service = kdp.ProcessReadingService(1, num_deaths=1)
    for _ in range(2):
        with kdp.Loader(pipe.select("v", bare=True).deal(batch_size=1), reading_service=service) as loader:
            assert [v for (v,) in loader] == [1, 2]


@pytest.mark.parametrize("source", [*DOUBLES.values(), lambda: shards("aba", size=3)])
def test_caches_tell_equal_keys_apart(source: Any) -> None:
    cached = source().transform("y", lambda y: y + 10).add_field("z", lambda s: s["y"]).cache_in_memory()
    for _ in range(2):
        assert [(sample["y"], sample["z"]) for sample in cached] == [(10, 10), (11, 11), (12, 12)]


@pytest.mark.parametrize("source", DOUBLES)
def test_replay_rejects_a_key_of_several_samples(source: str) -> None:
    pipe = DOUBLES[source]().record_ctx()
    with pytest.raises(kdp.ChainError, match=r"Several samples .* have the key"):
        kdp.replay(pipe[0].key, {}, pipe.select("y", return_ctx=True))
    repeated = kdp.from_ids(["a", "b"], [0, 1], load=str).repeat_until(repetitions=2).select("y")
    assert kdp.replay("b", {}, repeated) == (1,)


def stream_of_items(keys: str) -> Any:
    return IterableWrapper(list(enumerate(keys))).to_samples(fields="y z", key=lambda item: item[1])


def stream_of_webdataset(keys: str, repetitions: int = 1) -> Any:
    rows = IterableWrapper([{"__key__": key, "y": number} for number, key in enumerate(keys)])
    return kdp.from_webdataset(wds.DataPipeline(rows).repeat(repetitions))


STREAMS = pytest.mark.parametrize("source", [stream_of_items, stream_of_webdataset])


@pytest.mark.parametrize("source", [stream_of_items, stream_of_webdataset, shards])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_quarantine_rejects_equal_keys_of_a_stream(source: Any, num_workers: int, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    loader = without(2, source("abac"), path, num_workers=num_workers)
    with loader, pytest.raises(kdp.ChainError) as caught:
        list(itertools.chain(loader, loader))  # a worker that begins late may know the quarantine at once
    assert "Samples 0 and 2 of the stream both have the key 'a'" in str(caught.value)
    for keys in ("abcd", "abcc"):
        assert [v for (v,) in without(7, source(keys), path)] == [1, 2, 3], "only keys that are listed must be unique"


@STREAMS
def test_replay_finds_the_sample_of_a_stream_that_made_the_ctx(source: Any) -> None:
    pipe = source("abca").shuffle(buffer_size=3).record_ctx().add_field("w", lambda sample, rng: rng.random())
    chain = pipe.select("y w", return_ctx=True)
    (batch,) = kdp.Loader(chain.deal(batch_size=4, seed=3))
    assert sorted(y for (y, _), _ in batch) == [0, 1, 2, 3]
    for item, ctx in batch:
        assert kdp.replay("abca"[item[0]], ctx, chain)[0] == item


def test_replay_rejects_a_key_of_several_samples_in_lanes() -> None:
    pipe = shards("abca").record_ctx().select("y", return_ctx=True)
    items = [item for batch in pipe.deal(batch_size=1) for item in batch]
    assert [kdp.replay("abca"[y], ctx, pipe)[0] for (y,), ctx in items[1:3]] == [(1,), (2,)]
    with pytest.raises(kdp.ChainError, match="Samples 0 and 3 of the stream have the key 'a'"):
        kdp.replay("a", items[3][1], pipe)


def test_a_stream_that_repeats_itself_may_be_in_quarantine(tmp_path: Path) -> None:
    stream = stream_of_webdataset("ab", repetitions=2)
    for _ in range(2):
        assert [v for (v,) in without(0, stream, tmp_path / "quarantine.jsonl")] == [1, 1]
