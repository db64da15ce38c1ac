"""One data set through all sources: the same classes, names, plan and batches, whatever its labels are."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import webdataset as wds
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.core.column import as_column
from kdpipes.core.labels import as_classes, number_labels

NAMES = ("heron", "stork", "gull")
Text = Enum("Text", {name.upper(): name for name in NAMES}, type=str)
Bird = Enum("Bird", {name: f"a {name}" for name in NAMES})

SORTED = tuple(sorted(NAMES))
FEW = [1, 0, 2, 1]
FEW_NAMES = ["stork", "heron", "gull", "stork"]
FEW_SORTED = [2, 1, 0, 2]
LARGE = [2**63 + 1, 2**63, 2**63 + 5, 2**63 + 1]
SOME_LARGE = [2**63 + 1, 1, 2**63 + 1, 1]

# Each kind of labels, and its numbers without class names and names; None where labels are no classes.
KINDS: dict[str, tuple[list[Any], list[int] | None, tuple[str, ...] | None]] = {
    "integers": (FEW, FEW, None),
    "integers with gaps": ([3, 7, 70, 7], [3, 7, 70, 7], None),
    "unsigned integers": (list(np.array([1, 0, 200, 1], dtype=np.uint8)), [1, 0, 200, 1], None),
    "large integers only": (LARGE, LARGE, None),
    "large integers": (SOME_LARGE, SOME_LARGE, None),
    "tensors": (list(map(torch.tensor, FEW)), FEW, None),
    "arrays": (list(map(np.array, FEW)), FEW, None),
    "whole floats": ([1.0, 10.0, float("nan"), 1.0], [1, 10, -1, 1], None),
    "integers, one missing": ([1, 0, None, 1], [1, 0, -1, 1], None),
    "booleans": ([True, False, False, True], [1, 0, 0, 1], None),
    "texts": (FEW_NAMES, FEW_SORTED, SORTED),
    "texts, one missing": (["stork", None, "gull", "stork"], [1, -1, 0, 1], ("gull", "stork")),
    "byte strings": (list(map(str.encode, FEW_NAMES)), FEW_SORTED, SORTED),
    "texts of integers": (["1", "10", "2", "1"], [1, 10, 2, 1], None),
    "padded texts": (["01", "10", "02", "01"], [0, 2, 1, 0], ("01", "02", "10")),
    "exponents": (["1e5", "2e5", "NA", "1e5"], [0, 1, 2, 0], ("1e5", "2e5", "NA")),
    "members of an enum": ([Bird[name] for name in FEW_NAMES], FEW, NAMES),
    "members of an enum of texts": (list(map(Text, FEW_NAMES)), FEW_SORTED, SORTED),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Items:
    """A data set whose items hold the labels."""

    def __init__(self, labels: Any) -> None:
        self._items = list(zip(range(len(labels)), labels, strict=True))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class Targets(Items):
    """A data set that also has all labels as an attribute."""

    def __init__(self, labels: Any) -> None:
        super().__init__(labels)
        self.targets = labels


class Rows(kdp.SampleSource):
    def __init__(self, labels: list[Any], names: tuple[str, ...] | None) -> None:
        self._rows, self._names = labels, names

    def __len__(self) -> int:
        return len(self._rows)

    def getitem_x(self, index: int) -> int:
        return index

    def getitem_y(self, index: int) -> Any:
        return self._rows[index]

    def class_names(self) -> tuple[str, ...] | None:
        return self._names


def _ids(labels: Any, names: Any) -> Any:
    return kdp.from_ids(range(len(labels)), labels, load=int, class_names=names)


def _series(labels: Any, names: Any) -> Any:
    return kdp.from_ids(range(len(labels)), pd.Series(labels, dtype=object), load=int, class_names=names)


def _labels(labels: Any, names: Any) -> Any:
    return kdp.from_dataset(list(range(len(labels))), "x", labels=labels, class_names=names)


def _targets(labels: Any, names: Any) -> Any:
    return kdp.from_dataset(Targets(labels), class_names=names)


def _table(labels: Any, names: Any) -> Any:
    plain = [
        label.name if isinstance(label, Bird) else getattr(label, "item", lambda label=label: label)()
        for label in labels
    ]
    return kdp.from_table({"x": list(range(len(labels))), "label": plain}, label="label", class_names=names)


def _items(labels: Any, names: Any) -> Any:
    return kdp.from_dataset(Items(labels), class_names=names)


def _rows(labels: Any, names: Any) -> Any:
    return Rows(labels, names)


def _samples(labels: Any, names: Any) -> Any:
    return SequenceWrapper(Items(labels)).to_samples(fields="x y", class_names=names)


def _concat(labels: Any, names: Any) -> Any:
    return kdp.concat(_items(labels, None), _ids([], names))


ALL_AT_ONCE = [_ids, _series, _labels, _targets, _table]
ONE_BY_ONE = [_items, _rows, _samples]


def names_of(sources: list[Any]) -> Any:
    return pytest.mark.parametrize("source", sources, ids=lambda source: source.__name__[1:])


def batch_of(pipe: Any) -> Any:
    _, y = next(iter(pipe.select("x y").deal(batch_size=64).collate_samples()))
    return y.tolist() if isinstance(y, torch.Tensor) else y


def plans_of(pipe: Any, label: int | str) -> list[Any]:
    """The positions that plan pipes choose."""
    chains = [pipe.filter_classes(valid=[label]), pipe.oversample(mode="exact"), pipe.take_per_class(num_samples=1)]
    return [chain.column("x").tolist() for chain in chains]


@each_kind
@names_of(ALL_AT_ONCE)
def test_sources_that_know_all_labels_number_them_alike(kind: str, source: Any) -> None:
    labels, numbers, names = KINDS[kind]
    if source is _table and kind == "members of an enum":
        numbers, names = FEW_SORTED, SORTED  # Arrow has no enums
    pipe = source(labels, None)
    before = [sample["y"] for sample in pipe]
    assert pipe.class_names() == names
    if source is not _targets:  # whose items are left as they are, unless they are texts
        assert pipe.column("y").tolist() == batch_of(pipe) == before == numbers
    assert as_classes(pipe.column("y")).tolist() == as_classes(as_column(before)).tolist() == numbers
    assert str([sample["y"] for sample in pipe]) == str([pipe[n]["y"] for n in range(4)]) == str(before)
    expected = _ids(numbers, None)
    assert plans_of(pipe, numbers[0]) == plans_of(expected, numbers[0])


@each_kind
@names_of(ONE_BY_ONE)
def test_labels_read_with_samples_stay_but_are_planned_alike(kind: str, source: Any) -> None:
    labels, numbers, _ = KINDS[kind]
    pipe = source(labels, None)
    assert pipe.class_names() is None
    first, before = pipe[0]["y"], [sample["y"] for sample in pipe]
    assert first is labels[0] or first == labels[0]
    assert numbers is not None
    plain = number_labels(labels).column if not isinstance(first, str | bytes | Enum) else None
    name = first.value if isinstance(first, Text) else getattr(first, "name", first)
    chosen = numbers[0] if plain is not None else name
    chosen = chosen.decode() if isinstance(chosen, bytes) else chosen
    assert plans_of(pipe, chosen)[::2] == plans_of(_ids(numbers, None), numbers[0])[::2]
    after = [sample["y"] for sample in pipe]
    assert all(one is other or one == other for one, other in zip(before, after, strict=True) if one == one)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "enum" not in kind])
@names_of([_ids, _items])
def test_records_hold_the_labels_and_names_of_their_chain(kind: str, source: Any, tmp_path: Path) -> None:
    pipe = source(KINDS[kind][0], None)
    kdp.write_records(pipe, tmp_path, num_parts=1)
    records = kdp.open_records(tmp_path)
    found = sorted(records, key=lambda sample: sample["x"])  # they are written in a random order
    assert [str(sample["y"]) for sample in found] == [str(sample["y"]) for sample in pipe]
    assert records.class_names() == pipe.class_names()
    assert kdp.class_counts(records) == kdp.class_counts(pipe)


NAMED = {
    "texts": ["stork", "heron", None, "gull"],
    "byte strings": [b"stork", b"heron", None, b"gull"],
    "numbers": [1, 0, None, 2],
    "floats": [1.0, 0.0, float("nan"), 2.0],
    "texts of numbers": ["1", "0", "", "2"],
    "NumPy's numbers": [np.int8(1), np.uint64(0), np.float32("nan"), np.int64(2)],
    "missing of pandas": ["stork", "heron", pd.NA, "gull"],
    "arrays": [np.array("stork"), np.array("heron"), None, np.array("gull")],
    "no time": ["stork", "heron", pd.NaT, "gull"],
    "masked": [1, 0, np.ma.masked, 2],
    "bfloat16": list(torch.tensor([1, 0, torch.nan, 2], dtype=torch.bfloat16)),
    "members of an enum": [Bird.stork, Bird.heron, None, Bird.gull],
}


def _shards(folder: Path, labels: list[Any]) -> str:
    url = str(folder / "named-000.tar")
    with wds.TarWriter(url) as tar:
        for index, label in enumerate(labels):
            text = "" if label is None or label != label else getattr(label, "name", label)
            content = text if isinstance(text, bytes) else str(text).encode()
            tar.write({"__key__": f"{index:03}", "x.json": json.dumps(index).encode(), "cls": content})
    return url


@pytest.mark.parametrize("kind", NAMED)
@names_of([*ALL_AT_ONCE, *ONE_BY_ONE, _concat])
def test_class_names_number_labels_of_all_kinds_alike(kind: str, source: Any) -> None:
    if kind == "masked" and source in (_targets, _table):
        source = _items  # NumPy finds no shape of such a list of targets, nor Arrow a type
    pipe = source(NAMED[kind], NAMES)
    assert [pipe[n]["y"] for n in range(4)] == batch_of(pipe) == pipe.column("y").tolist() == [1, 0, -1, 2]
    assert pipe.class_names() == NAMES
    assert plans_of(pipe, "stork") == plans_of(_ids([1, 0, -1, 2], NAMES), "stork")
    assert [sample["y"] for sample in pipe.map_classes({"gull": "bird"}, unmapped="drop")] == [0]


@pytest.mark.parametrize("kind", ["texts", "byte strings", "numbers", "texts of numbers", "members of an enum"])
def test_class_names_number_labels_of_shards_and_streams_alike(kind: str, tmp_path: Path) -> None:
    labels = NAMED[kind]
    url = _shards(tmp_path, labels)
    streamed: list[Callable[[], Any]] = [
        lambda: kdp.stream_shards(url, class_names=NAMES).rename_fields(x="x.json", y="cls"),
        lambda: kdp.from_webdataset(wds.WebDataset(url, shardshuffle=False), class_names=NAMES).rename_fields(
            x="x.json", y="cls"
        ),
        lambda: _stream(labels, NAMES),
    ]
    opened = kdp.open_shards(url, class_names=NAMES).rename_fields(x="x.json", y="cls")
    assert opened.column("y").tolist() == batch_of(opened) == [opened[n]["y"] for n in range(4)] == [1, 0, -1, 2]
    assert opened.filter_classes(valid=["stork"]).column("key").tolist() == ["named-000.tar/000"]
    for make in streamed:
        assert [sample["y"] for sample in make()] == [1, 0, -1, 2]
        assert make().class_names() == NAMES
        assert len(list(make().filter_classes(valid=["stork", "gull"]))) == 2


@pytest.mark.parametrize("label", ["swan", 3, -2, 1.5, b"swan", "7"])
def test_a_label_without_a_name_is_an_error_everywhere(label: Any, tmp_path: Path) -> None:
    labels = ["heron", label] if isinstance(label, str | bytes) else [0, label]
    for known in (_ids, _labels, _table):
        with pytest.raises(ValueError, match=r"`label(s)?` has"):
            known(labels, NAMES)
    url = _shards(tmp_path, labels)
    for pipe in (
        *(source(labels, NAMES) for source in (*ONE_BY_ONE, _concat)),
        _targets(labels, NAMES),
        kdp.open_shards(url, class_names=NAMES).rename_fields(y="cls"),
        kdp.stream_shards(url, class_names=NAMES).rename_fields(y="cls"),
        _stream(labels, NAMES),
    ):
        with pytest.raises(kdp.DataError, match=r"Sample .*1' has class"):
            [sample["y"] for sample in pipe]
    with pytest.raises(kdp.DataError):  # not only ValueError: it names the sample
        kdp.class_counts(_concat(labels, NAMES))


def test_a_mix_numbers_labels_by_the_names_of_one_source() -> None:
    texts, numbers = ["stork", "heron"], [1, 0]
    for one, other in (
        (_items(texts, None), _ids(numbers, NAMES)),
        (_stream(numbers, NAMES).shuffle(), _items(texts, None)),
        (_stream(texts, None), _ids(numbers, NAMES)),
    ):
        mixed = one.mix(other)
        assert (mixed.class_names(), {sample["y"] for sample in mixed}) == (NAMES, {0, 1})
    changing = _ids(numbers, NAMES).mix(_items([None, "stork", "swan"], None), weights=lambda _: [1, 1], num_samples=4)
    assert changing.column("y").tolist() == [sample["y"] for sample in changing]
    with pytest.raises(kdp.DataError):
        [sample["y"] for sample in _stream(["swan"], None).mix(_ids(numbers, NAMES))]


def test_a_join_has_the_names_of_the_labels_it_adds(tmp_path: Path) -> None:
    url = _shards(tmp_path, ["stork", "heron"])
    for names, expected in ((NAMES, [0, -1, 1]), (None, ["heron", None, "stork"])):
        other = kdp.open_shards(url, class_names=names).rename_fields(y="cls")
        joined = kdp.from_ids(["001", "9", "000"], load=str, class_names=["a"]).join(other, how="left")
        assert (joined.class_names(), joined.column("y").tolist()) == (names, expected)
        assert [sample["y"] for sample in joined] == expected


def test_classes_that_map_classes_keeps_need_names() -> None:
    for pipe in (_items([0, None, 1, 3], None), _stream([0, -2], None)):
        mapped = pipe.map_classes({0: "stork"}, class_names=NAMES, unmapped="keep")
        with pytest.raises(ValueError, match="must include"):
            list(mapped)


def test_folders_are_names_even_if_they_are_numbers(tmp_path: Path) -> None:
    for name in ("0", "1", "10", "2"):
        (tmp_path / name).mkdir()
        Image.new("L", (1, 1)).save(tmp_path / name / "a.png")
    folder = kdp.image_folder(tmp_path)
    assert (folder.class_names(), folder.column("y").tolist()) == (("0", "1", "10", "2"), [0, 1, 2, 3])
    table = kdp.from_table({"label": ["10", "2"]}, label="label", class_names=folder.class_names())
    assert table.column("y").tolist() == [2, 3]


VECTORS: list[list[Any]] = [
    [[1, 0], [0, 1]],
    [(1, 2), (3,)],
    [np.array([1, 0]), np.array([0, 1])],
    [torch.tensor([1, 0]), torch.tensor([0, 1])],
    [["heron", "gull"], []],
    [{"box": 1}, {"box": 2}],
]


@pytest.mark.parametrize("names", [None, NAMES])
@pytest.mark.parametrize("labels", VECTORS, ids=str)
def test_vectors_and_dictionaries_stay_as_they_are(labels: list[Any], names: Any) -> None:
    for source in (_ids, _labels, _items, _rows, _samples, _targets):
        for one, other in zip(source(labels, names).column("y"), labels, strict=True):
            assert type(one) is type(other)
            assert str(one) == str(other)
    one_hot = _labels(np.eye(3)[[2, 0]], names)
    assert one_hot[0]["y"].tolist() == [0, 0, 1]


REGRESSION: list[Any] = [
    [23.5, 1.25, 100.0],
    np.array([23.5, 1.25, 100.0], dtype=np.float32),
    [np.float32(23.5), 1.25, 100],
    ["23.5", "1.25", "100.0"],
    ["23.5", "1.25e0", "1e2"],
]


@pytest.mark.parametrize("values", REGRESSION, ids=str)
def test_numbers_that_are_no_classes_stay_numbers(values: Any) -> None:
    for source in (_ids, _labels, _table, _items, _rows, _samples):
        pipe = source(values, None)
        if source in (_ids, _labels, _table):
            assert pipe.column("y").tolist() == batch_of(pipe) == [23.5, 1.25, 100]
        assert pipe.class_names() is None
        for plan in (
            lambda pipe=pipe: pipe.filter_classes(valid=[1]).column("x"),
            lambda pipe=pipe: pipe.oversample(mode="exact").column("x"),
            lambda pipe=pipe: pipe.map_classes({1: 0}).column("x"),
            lambda pipe=pipe: pipe.few_shot(1).column("x"),
            lambda pipe=pipe: kdp.class_counts(pipe),
            lambda pipe=pipe: list(pipe.deal(batching=kdp.by_class(1, 1))),
        ):
            with pytest.raises((kdp.DataError, TypeError), match=r"must be whole numbers\. .*`\.transform\('y'"):
                plan()
    stream = IterableWrapper([(1, 23.5)]).to_samples(fields="x y")
    for made in (stream.filter_classes(valid=[1]), stream.oversample(class_counts={1: 1}), stream.map_classes({1: 0})):
        with pytest.raises(kdp.DataError, match="must be whole numbers"):
            list(made)


MISSING_TEXTS = [None, "", b"", float("nan"), pd.NA, pd.NaT, -1]
each_missing = pytest.mark.parametrize("missing", MISSING_TEXTS, ids=str)


def _stream(labels: Any, names: Any) -> Any:
    return IterableWrapper(list(Items(labels))).to_samples(fields="x y", class_names=names)


@each_missing
@names_of(ONE_BY_ONE)
def test_missing_texts_are_no_class_for_any_plan(missing: Any, source: Any) -> None:
    pipe = source(["stork", missing, "gull", b"stork"], None)
    assert kdp.class_counts(pipe) == {-1: 1, "gull": 1, "stork": 2}
    assert pipe.oversample(mode="exact").column("x").tolist() == [2, 2, 0, 3]
    assert pipe.take_per_class(num_samples=1).column("x").tolist() == [0, 2]
    assert 1 not in [*pipe.few_shot(1).column("x"), *pipe.few_shot(1, rest=True).column("x")]
    assert 1 not in pipe.sample_weighted(temperature=2, num_samples=20).column("x")
    batches = pipe.select("x").deal(batching=kdp.by_class(2, 1))
    assert all(x != 1 for batch in batches for (x,) in batch)


@each_missing
@names_of([*ONE_BY_ONE, _stream])
def test_missing_texts_are_chosen_and_mapped_by_both_flavours(missing: Any, source: Any) -> None:
    def chosen(**classes: Any) -> list[int]:
        return [sample["x"] for sample in pipe.filter_classes(**classes)]

    def mapped(mapping: Any, unmapped: Any) -> list[Any]:
        return [sample["y"] for sample in pipe.map_classes(mapping, unmapped=unmapped)]

    pipe = source([missing, "stork", missing, "gull"], None)
    assert [chosen(valid=["stork"]), chosen(invalid=["stork"])] == [[1], [0, 2, 3]]
    assert [chosen(valid=[-1]), chosen(invalid=[None]), chosen(valid=[None, "gull"])] == [[0, 2], [1, 3], [0, 2, 3]]
    assert mapped({"stork": "bird"}, "keep") == [-1, "bird", -1, "gull"]
    assert mapped({"stork": "bird", -1: "none"}, "drop") == ["none", "bird", "none"]
    assert mapped({"stork": "bird"}, "drop") == ["bird"]


@names_of([_ids, *ONE_BY_ONE, _stream])
def test_missing_numbers_are_mapped_whatever_comes_first(source: Any) -> None:
    for labels in ([None, 1, 0, None], [1, None, None, 0], [None, None]):
        mapped = source(labels, None).map_classes({-1: 7, 0: 8}, unmapped="keep")
        assert [sample["y"] for sample in mapped] == [{None: 7, 0: 8, 1: 1}[label] for label in labels]


@names_of(ONE_BY_ONE)
def test_texts_without_any_class_are_unlabeled(source: Any) -> None:
    for labels in (["", ""], [None, None], ["", None], ["-1", "-1"]):
        assert kdp.class_counts(source(labels, None)) == {-1: 2}


@names_of([*ONE_BY_ONE, _stream])
def test_texts_of_integers_are_chosen_by_number_or_text(source: Any) -> None:
    for classes in ([1], ["1"]):
        chosen = source(["1", "10", "-1", "1"], None).filter_classes(valid=classes)
        assert [sample["x"] for sample in chosen] == [0, 3]


@names_of([*ALL_AT_ONCE[:-1], *ONE_BY_ONE])
def test_integers_of_any_size_are_classes(source: Any) -> None:
    labels = [2**70, 1, -1, 2**70]
    pipe = source(labels, None)
    assert pipe.column("y").tolist() == [pipe[n]["y"] for n in range(4)] == labels
    assert kdp.class_counts(pipe) == {-1: 1, 1: 1, 2**70: 2}
    assert pipe.oversample(mode="exact").column("x").tolist() == [1, 1, 0, 3]
    assert pipe.filter_classes(valid=[2**70]).column("x").tolist() == [0, 3]


SIZES = ["small", "large", None, "small"]
ORDERED = ("small", "medium", "large")
CATEGORIES: dict[str, Any] = {
    "pandas": pd.Series(pd.Categorical(SIZES, categories=ORDERED, ordered=True)),
    "pandas, without an order": pd.Series(pd.Categorical(SIZES, categories=ORDERED)),
    "pandas' array": pd.Categorical(SIZES, categories=ORDERED),
    "Arrow": pa.DictionaryArray.from_arrays(pa.array([0, 2, None, 0], pa.int8()), list(ORDERED)),
    "Arrow's chunks": pa.chunked_array(
        [
            pa.DictionaryArray.from_arrays(pa.array([0, 2, None], pa.uint32()), list(ORDERED)),
            pa.DictionaryArray.from_arrays(pa.array([0], pa.uint32()), list(ORDERED)),
        ]
    ),
}


@pytest.mark.parametrize("kind", CATEGORIES)
def test_categories_keep_their_order_and_names(kind: str) -> None:
    labels = CATEGORIES[kind]
    table = pd.DataFrame({"label": labels}) if "pandas" in kind else pa.table({"label": labels})
    for source in (_labels, _ids, lambda _, names: kdp.from_table(table, label="label", class_names=names)):
        pipe = source(labels, None)
        assert (pipe.column("y").tolist(), pipe.class_names()) == ([0, 2, -1, 0], ORDERED)
        named = source(labels, ("large", "small"))
        assert (named.column("y").tolist(), named.class_names()) == ([1, 0, -1, 1], ("large", "small"))


def test_categories_of_numbers_stay_numbers() -> None:
    pipe = _labels(pd.Categorical([3, 1, None, 3]), None)
    assert (pipe.column("y").tolist(), pipe.class_names()) == ([3, 1, -1, 3], None)


@pytest.mark.parametrize(
    "labels",
    [
        pd.Series([1, None, 0], dtype="Int64"),
        pd.Series([True, None, False], dtype="boolean"),
        pd.Series(["1", None, "0"], dtype="string"),
        pd.array([1, None, 0], dtype="UInt8"),
        np.ma.masked_array([1, 5, 0], [False, True, False]),
        np.ma.masked_array([1.0, 5.5, 0.0], [False, True, False]),
        pa.array([1, None, 0]),
        pa.chunked_array([pa.array([1, None], pa.uint8()), pa.array([0], pa.uint8())]),
        pa.array([1.0, None, 0.0]),
        pa.array([True, None, False]),
        torch.tensor([1.0, torch.nan, 0.0], requires_grad=True),
        torch.tensor([1.0, torch.nan, 0.0], dtype=torch.bfloat16),
        [pa.scalar(1), pa.scalar(None), pa.scalar(0)],
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_missing_labels_of_every_kind_are_minus_one(labels: Any) -> None:
    assert _labels(labels, None).column("y").tolist() == [1, -1, 0]
    assert _labels(labels, ("a", "b")).column("y").tolist() == [1, -1, 0]


def test_no_labels_are_no_classes() -> None:
    for labels in ([], pa.array([], pa.string()), np.zeros(0), pd.Series([], dtype=object)):
        assert _labels_of_nothing(labels).dtype == np.int64


def _labels_of_nothing(labels: Any) -> Any:
    return kdp.from_dataset([], "x", labels=labels).column("y")


def test_booleans_have_the_names_true_and_false() -> None:
    for source in (_ids, _labels, _table, _items, _rows):
        assert source([True, False], ("true", "false")).column("y").tolist() == [0, 1]
        assert source([True, False], ("no", "yes")).column("y").tolist() == [1, 0]
