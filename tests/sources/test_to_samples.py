"""Samples of what stock pipes give: paths, dictionaries, open files and tuples."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.utils.data.datapipes.iter import FileLister, FileOpener, IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from webdataset import TarWriter

import kdpipes as kdp
from tests.torchdata_parts import FSSpecFileLister, needs_torchdata


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    for name in ("heron/1.jpg", "heron/2.jpg", "stork/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_paths_are_keys_and_their_files_are_read_late(birds: Path) -> None:
    paths = [f"{birds}/{name}" for name in ("heron/1.jpg", "heron/2.jpg", "stork/1.jpg")]
    sources: list[Any] = [
        FileLister(str(birds), "*.jpg", recursive=True),
        IterableWrapper(paths),
        SequenceWrapper(paths),
    ]
    samples = [sorted(source.to_samples(), key=lambda sample: sample.key) for source in sources]
    assert [[sample.key for sample in found] for found in samples] == [paths] * 3
    assert [sample["x"] for sample in samples[0]] == [b"heron/1.jpg", b"heron/2.jpg", b"stork/1.jpg"]
    Path(paths[2]).unlink()
    assert samples[1][2].key == paths[2]
    with pytest.raises(FileNotFoundError, match=rf"There is no file '{paths[2]}'") as caught:
        samples[2][2]["x"]
    assert caught.value.__notes__ == [f"kdpipes: while reading the file of sample {paths[2]!r} (ordinal 2)"]


def test_urls_of_fsspec_are_listed_and_read() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/listed/1.jpg": b"one", "/listed/2.jpg": b"two"})
    try:
        found = {
            sample.key.rsplit("/", 1)[1]: sample["x"] for sample in FSSpecFileLister("memory://listed").to_samples()
        }
    finally:
        memory.rm("/listed", recursive=True)
    assert found == {"1.jpg": b"one", "2.jpg": b"two"}


@needs_torchdata
def test_torchdatas_webdataset_samples_keep_their_contents(tmp_path: Path) -> None:
    path = str(tmp_path / "a.tar")
    with TarWriter(path) as writer:
        for n in range(3):
            writer.write({"__key__": f"birds/{n}", "jpg": bytes([n]) * 9, "cls": str(n).encode()})
    stream = FileOpener([path], "b").load_from_tar().webdataset().to_samples()
    for _ in range(2):
        samples = list(stream)
        assert [(sample.key.removeprefix(path + "/"), dict(sample)) for sample in samples] == [
            (f"birds/{n}", {"cls": str(n).encode(), "jpg": bytes([n]) * 9}) for n in range(3)
        ]


def test_a_pair_of_path_and_open_file_is_read_and_closed() -> None:
    files = [("heron/1.jpg", io.BytesIO(b"one")), ("heron/2.jpg", io.BytesIO(b"two"))]
    stream = iter(IterableWrapper(files, deepcopy=False).to_samples())
    first = next(stream)
    assert (first.key, dict(first)) == ("heron/1.jpg", {"x": b"one"})
    assert [file.closed for _, file in files] == [True, False]
    assert next(stream)["x"] == b"two"
    assert all(file.closed for _, file in files)


def test_names_keys_and_labels_are_given_to_items() -> None:
    for wrap in (IterableWrapper, SequenceWrapper):
        pairs, rows = wrap([("a", 1), ("b", 2)]), wrap([{"__key__": "k", ".x": 1, "y": 2, "z": 3}])
        named = pairs.to_samples(fields="letter number", key=lambda item: f"{item[0]}{item[1]}")
        assert [(sample.key, sample.index, dict(sample)) for sample in named] == [
            ("a1", 0, {"letter": "a", "number": 1}),
            ("b2", 1, {"letter": "b", "number": 2}),
        ]
        computed = pairs.to_samples(fields={"twice": lambda item: item[1] * 2}, label=lambda item: item[0])
        assert [(s.key, dict(s)) for s in computed] == [("0", {"twice": 2, "y": "a"}), ("1", {"twice": 4, "y": "b"})]
        assert [(sample.key, dict(sample)) for sample in rows.to_samples()] == [("k", {"x": 1, "y": 2, "z": 3})]
        assert [dict(sample) for sample in rows.to_samples(fields="z x")] == [{"z": 3, "x": 1}]
        assert [dict(sample) for sample in wrap([3, 4]).to_samples(fields="n")] == [{"n": 3}, {"n": 4}]


def test_keys_of_open_files_are_computed_from_their_bytes() -> None:
    items = [("a.txt", io.BytesIO(b"heron")), ("b.txt", io.BytesIO(b"stork"))]
    stream = IterableWrapper(items, deepcopy=False).to_samples(key=lambda item: item[1].decode(), fields="path x")
    assert [(sample.key, sample["x"]) for sample in stream] == [("heron", b"heron"), ("stork", b"stork")]


@pytest.mark.parametrize("key", [str, None])
def test_own_keys_may_be_numbers_in_any_order(key: Any) -> None:
    def chain() -> Any:
        numbers = IterableWrapper(range(12)).shuffle(buffer_size=5)
        return numbers.to_samples(key=key, fields={"x": int}).cache_in_memory().select("x").deal(batch_size=12)

    if key is None:
        with pytest.raises(kdp.ChainError, match="numbers in the order of arrival"):
            next(iter(chain()))
    else:
        assert sorted(x for batch in chain() for (x,) in batch) == list(range(12))


def test_what_computes_fields_and_labels_runs_when_they_are_read() -> None:
    for wrap in (IterableWrapper, SequenceWrapper):
        seen: list[str] = []
        pipe = wrap(["a", "b"]).to_samples(
            label=lambda item, seen=seen: seen.append("y") or item, fields={"n": lambda item: 1 / 0}
        )
        assert len(pipe) == 2
        first = next(iter(pipe))
        assert (first.key, list(first), seen) == ("a", ["n", "y"], [])
        assert (first["y"], first["y"], seen) == ("a", "a", ["y"])
        with pytest.raises(ZeroDivisionError) as caught:
            first["n"]
        assert caught.value.__notes__ == ["kdpipes: while computing field 'n' of sample 'a' (ordinal 0)"]


def test_samples_stay_what_they_are(letters: kdp.MapPipe) -> None:
    again = letters.to_samples(key=lambda sample: f"letter-{sample.key}", label=lambda sample: sample["y"] + 10)
    assert [(sample.key, dict(sample)) for sample in again][:2] == [
        ("letter-0", {"x": "a", "y": 10}),
        ("letter-1", {"x": "b", "y": 11}),
    ]


def test_items_without_names_are_an_error_with_the_way_out() -> None:
    unnamed: list[tuple[Any, str | None, str]] = [
        ((1, 2), None, 'An item has 2 parts; name each of them: `.to_samples(fields="x y ...")`.'),
        ((1, 2, 3), "x y", "An item has 3 parts; name each of them"),
        (b"bytes", None, 'An item is one bytes; give it one name: `.to_samples(fields="x")`.'),
        (3, "x y", "An item is one int; give it one name"),
        ({"a": 1}, "b", "`fields` names 'b', but an item has only 'a'."),
    ]
    for item, fields, words in unnamed:
        for wrap in (IterableWrapper, SequenceWrapper):
            with pytest.raises(kdp.ChainError) as caught:
                list(wrap([item]).to_samples(fields=fields))
            assert words in str(caught.value)


def test_bad_arguments_are_rejected_at_once() -> None:
    rejected: list[tuple[dict[str, Any], str]] = [
        ({"fields": ["x", "y"]}, '`fields` must be names in one string, like "x y", or functions by name, but is'),
        ({"fields": {"x": 3}}, r"`fields\['x'\]` must be a callable, but is 3 instead"),
        ({"key": "x"}, "`key` must be a callable, but is 'x' instead"),
        ({"label": 3}, "`label` must be a callable, but is 3 instead"),
    ]
    for arguments, words in rejected:
        for wrap in (IterableWrapper, SequenceWrapper):
            with pytest.raises(TypeError, match=words):
                wrap([1]).to_samples(**arguments)


@pytest.mark.parametrize("make", [SequenceWrapper, IterableWrapper])
def test_none_is_a_sample_that_cannot_be_made(make: Any) -> None:
    items = [(1, 0), None, (2, 1)]
    chain = make(items).to_samples(fields="x y").on_error("skip", max_share=1.0).select("x", bare=True)
    assert [x for batch in kdp.Loader(chain.deal(batch_size=1)) for x in batch] == [1, 2]
    with pytest.raises(kdp.DataError, match=r"Item 1 is None: .*`\.on_error\(\"skip\"\)` skips it"):
        list(make(items).to_samples(fields="x y").select("x"))
    with pytest.raises(kdp.DataError, match=r"Item 1 is None: .*Name the fields, like `\.to_samples\(fields="):
        list(make([{"x": 1}, None]).to_samples().select("x"))
