"""Datasets as samples: items load whole and once, `getitem_*` fields singly, labels not at all."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import kdpipes as kdp


class Counting:
    """Pairs of a letter and a label; counts which items are loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[str, int]:
        self.loaded.append(index)
        return "abc"[index], index % 2


class Rows(kdp.SampleSource):
    """Fields of their own; `x` cannot be loaded, `rows` records what it did."""

    def __len__(self) -> int:
        return 3

    def key_of(self, index: int) -> str:
        return f"row-{index}"

    def getitem_x(self, index: int) -> Any:
        raise OSError(5, f"disk {index}")

    def getitem_y(self, index: int) -> int:
        return index % 2

    def getitem_rows(self, index: int, ctx: dict[str, Any]) -> int:
        ctx["rows"] = index * 10
        return index * 100


def test_an_item_is_loaded_whole_and_once_when_a_field_is_read() -> None:
    dataset = Counting()
    samples = list(kdp.from_dataset(dataset))
    assert [(sample.key, sample.index, list(sample)) for sample in samples] == [
        (str(index), index, ["x", "y"]) for index in range(3)
    ]
    assert dataset.loaded == []
    assert [samples[1][name] for name in "yxy"] == [1, "b", 1]
    assert dataset.loaded == [1]


def test_items_of_any_kind_get_names() -> None:
    tensors = kdp.from_dataset(TensorDataset(torch.arange(2), torch.arange(2) + 5), "a b")
    assert [{name: int(value) for name, value in sample.items()} for sample in tensors] == [
        {"a": 0, "b": 5},
        {"a": 1, "b": 6},
    ]
    assert [dict(sample) for sample in kdp.from_dataset([{"a": 1, "b": 2, "c": 3}], "c a")] == [{"c": 3, "a": 1}]
    assert [dict(sample) for sample in kdp.from_dataset(np.array([3, 4]), "n")] == [{"n": 3}, {"n": 4}]
    assert list(kdp.from_dataset([])) == []


def test_labels_come_from_the_argument_without_items() -> None:
    dataset = Counting()
    pipe = kdp.from_dataset(dataset, labels=[0, 1, 0], class_names=["heron", "stork"])
    assert len(pipe.filter_classes(valid=["heron"]).oversample()) == 2
    assert dataset.loaded == []
    assert kdp.from_dataset(["a", "b"], "x", labels=torch.tensor([4, 5]))[1]["y"] == 5


def test_fields_with_methods_of_their_own_load_singly() -> None:
    for source in (Rows(), kdp.from_dataset(Rows())):
        assert [sample["y"] for sample in source.filter_classes(valid=[0])] == [0, 0]
        assert source.column("rows").tolist() == [0, 100, 200]
        assert source.record_ctx().select("rows y", return_ctx=True)[2] == ((200, 0), {"rows": 20})
        assert source.select("rows", return_ctx=True)[2] == ((200,), {"rows": 20})
        with pytest.raises(OSError) as caught:
            source[1]["x"]
        assert caught.value.args == (5, "disk 1")
        assert caught.value.__notes__ == [f"kdpipes: while loading field 'x' of sample {source[1].key!r} (ordinal 1)"]


def test_an_own_source_names_its_samples_and_fields_and_travels() -> None:
    source = Rows()
    source.shift = 3
    with pytest.raises(kdp.FieldError, match=r"^Rows has no field 'z'; it has 'rows', 'x', 'y'\.$"):
        source.column("z")
    with pytest.raises(kdp.FieldError, match=r"has no field 'row'.* Did you mean 'rows'"):
        source.select("row y")
    twin = pickle.loads(pickle.dumps(source))
    assert (twin.shift, [sample.key for sample in twin]) == (3, ["row-0", "row-1", "row-2"])


def test_bad_arguments_are_rejected_at_once() -> None:
    rejected: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (("heron",), {}, TypeError, "`dataset` must be a dataset with a length and positions, but is 'heron'"),
        ((iter([1]),), {}, TypeError, "`dataset` must be a dataset with a length and positions"),
        (({"x": 1},), {}, TypeError, "`dataset` must be a dataset with a length and positions"),
        (([1], ["x"]), {}, TypeError, "`fields` must be names in one string, like \"x y\", but is .'x'. instead"),
        (([1], " "), {}, TypeError, "`fields` must be names in one string"),
        (([1, 2],), {"labels": [0]}, ValueError, "as long as `dataset`, but has 1 entries for 2 items"),
    ]
    for arguments, options, kind, words in rejected:
        with pytest.raises(kind, match=words):
            kdp.from_dataset(*arguments, **options)


def test_an_item_that_does_not_fit_is_an_error_with_a_hint() -> None:
    known = {
        "Item 0 has 3 parts, but `fields` names 2: 'x y'": [(1, 2, 3)],
        "Item 0 is a dictionary without the key 'x'. Name the keys": [{"image": 1, "label": 2}],
        'Item 0 is a single int, but `fields` has 2 names. Use `fields="x"`': [5],
    }
    for words, dataset in known.items():
        with pytest.raises(kdp.ChainError) as caught:
            kdp.from_dataset(dataset)[0]["x"]
        assert words in str(caught.value)


def test_a_column_of_bytes_is_complete() -> None:
    assert list(kdp.from_dataset([b"ab\0\0", b"c"], "x").column("x")) == [b"ab\0\0", b"c"]


def test_labels_are_read_once_however_many_plan_pipes_ask() -> None:
    class Counted(kdp.SampleSource):
        reads = 0

        def __len__(self) -> int:
            return 4

        def getitem_y(self, index: int) -> int:
            Counted.reads += 1
            return index % 2

    pipe = Counted().filter_classes(valid=[0, 1]).oversample().filter_classes(valid=[1])
    assert len(pipe) == 2
    assert Counted.reads == 4


def test_attributes_that_would_hide_methods_are_rejected() -> None:
    class Named(kdp.SampleSource):
        def __init__(self) -> None:
            self.class_names = ["a"]

    with pytest.raises(AttributeError, match=r"`class_names` is a method.*from a method `class_names\(self\)`"):
        Named()
    with pytest.raises(AttributeError, match="`deal` is a method of every source"):
        type("Dealt", (kdp.SampleSource,), {"deal": 3})


def test_a_source_without_getters_says_what_it_lacks() -> None:
    class Bare(kdp.SampleSource):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: Any) -> Any:
            return index, 0

    with pytest.raises(kdp.ChainError, match=r"Bare has no fields: give it methods `getitem_x\(index\)`.*from_dataset"):
        Bare().column("y")


def test_a_column_of_another_length_is_rejected() -> None:
    class Short(kdp.SampleSource):
        def __len__(self) -> int:
            return 3

        def getitem_y(self, index: int) -> int:
            return index

        def read_column(self, name: str) -> Any:
            return [0, 1]

    with pytest.raises(kdp.ChainError, match="must return a value for each of 3 samples, but returned 2"):
        Short().filter_classes(valid=[0]).column("y")


class Cropped(kdp.SampleSource):
    """Says in the ctx what it did."""

    def __len__(self) -> int:
        return 3

    def getitem_x(self, index: int, ctx: dict[str, Any]) -> float:
        ctx["crop"] = {"top": index}
        return float(np.random.rand())

    def getitem_y(self, index: int, ctx: dict[str, Any]) -> int:
        return int(ctx.get("crop", {}).get("top", -1))


@pytest.mark.parametrize("source", [Cropped(), kdp.from_dataset(Cropped())])
def test_what_a_source_writes_into_the_ctx_is_returned(source: Any) -> None:
    (_, y), ctx = source.select("x y", return_ctx=True)[2]
    assert (y, ctx) == (2, {"crop": {"top": 2}})
    assert source.select("y", return_ctx=True)[2] == ((-1,), {})
    _, recorded = source.record_ctx().select("x y", return_ctx=True)[2]
    assert (recorded["crop"], set(recorded)) == ({"top": 2}, {"crop", "draw"})
