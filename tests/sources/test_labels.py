"""Labels that are text become class numbers; the names of classes come from where a dataset says them."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp

BIRDS = ("heron", "stork", "gull")
TEXT = ["stork", "heron", "gull", "stork"]


def from_ids(labels: Any, **given: Any) -> Any:
    return kdp.from_ids(range(len(labels)), labels, load=float, **given)


def from_labels(labels: Any, **given: Any) -> Any:
    return kdp.from_dataset([float(n) for n in range(len(labels))], "x", labels=labels, **given)


class WithTargets(torch.utils.data.Dataset[Any]):
    def __init__(self, labels: Any) -> None:
        self.targets = labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return float(index), self.targets[index]


def from_targets(labels: Any, **given: Any) -> Any:
    return kdp.from_dataset(WithTargets(labels), **given)


SOURCES = [from_ids, from_labels, from_targets]
every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)


def batch_of(pipe: Any) -> list[int]:
    _, y = next(iter(pipe.select("x y").deal(batch_size=9).collate_samples()))
    assert isinstance(y, torch.Tensor)
    return y.tolist()


@every_source
def test_a_label_that_has_no_name_is_an_error(source: Any) -> None:
    with pytest.raises(ValueError, match=r"has (class )?'stork', which is not among the classes heron, strok.*'strok'"):
        source(TEXT, class_names=["heron", "strok"]).column("y")


def test_labels_of_items_are_numbered_where_names_are_given() -> None:
    items = list(zip([0.0, 1.0], ["stork", "heron"], strict=True))
    pipe = kdp.from_dataset(items, class_names=BIRDS)
    assert batch_of(pipe) == pipe.column("y").tolist() == [1, 0]
    assert kdp.from_dataset(items).column("y").tolist() == ["stork", "heron"]  # these may be sentences
    with pytest.raises(kdp.DataError, match="Sample '0' has class 'stork', which is not among the classes heron"):
        _ = kdp.from_dataset(items, class_names=["heron"])[0]["y"]


@pytest.mark.parametrize("stream", [False, True])
def test_samples_of_stock_pipes_are_numbered_by_the_given_names(stream: bool) -> None:
    items = ["a/stork", "b/gull"]
    pipe: Any = IterableWrapper(items) if stream else SequenceWrapper(items)
    named = pipe.to_samples(fields={"x": len}, label=lambda path: path[2:], class_names=BIRDS)
    assert (batch_of(named), named.class_names()) == ([1, 2], BIRDS)
    assert [sample["x"] for sample in named.filter_classes(valid=["gull"])] == [6]
    wrong = pipe.to_samples(fields={"x": len}, label=lambda path: path, class_names=BIRDS)
    with pytest.raises(kdp.DataError, match="has class 'a/stork', which is not among"):
        _ = next(iter(wrong))["y"]
    plain = pipe.to_samples(fields={"x": len}, label=lambda path: path[2:])
    assert ([sample["y"] for sample in plain], plain.class_names()) == (["stork", "gull"], None)


class Kappa:
    """What KappaData calls a dataset."""

    n_classes = 3
    class_names = list(BIRDS)

    def __len__(self) -> int:
        return 4

    def getitem_x(self, idx: int, ctx: Any = None) -> float:
        return float(idx)

    def getitem_y(self, idx: int, ctx: Any = None) -> Any:
        return [1, "heron", 2, 1][idx]


def test_the_names_of_a_kappadata_dataset_are_known() -> None:
    pipe = kdp.from_dataset(Kappa())
    assert pipe.class_names() == BIRDS
    assert batch_of(pipe) == [1, 0, 2, 1]
    assert pipe.filter_classes(valid=["stork"]).column("x").tolist() == [0.0, 3.0]


def test_a_field_class_is_named_in_the_error_for_y() -> None:
    class Newer(kdp.SampleSource):
        def __len__(self) -> int:
            return 2

        def getitem_class(self, index: int) -> int:
            return index

    with pytest.raises(kdp.FieldError, match=r"no field 'y'; it has 'class'.*`\.rename_fields\(y='class'\)`"):
        Newer().oversample().column("y")
    assert Newer().rename_fields(y="class").oversample().column("y").tolist() == [0, 1]


def test_the_names_of_hugging_faces_class_labels_are_known() -> None:
    features = datasets.Features({"value": datasets.Value("int64"), "label": datasets.ClassLabel(names=list(BIRDS))})
    table = datasets.Dataset.from_dict({"value": [5, 6, 7], "label": [1, 0, 1]}, features=features)
    pipe = kdp.from_dataset(table, "value label").rename_fields(x="value", y="label")
    assert (pipe.class_names(), batch_of(pipe)) == (BIRDS, [1, 0, 1])
    assert pipe.filter_classes(valid=["stork"]).column("x").tolist() == [5, 7]
    assert kdp.from_dataset(table.remove_columns("label"), "value").class_names() is None


def test_datasets_without_positions_are_rejected_with_a_hint() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(1.0, 0), (2.0, 1)])

    streamed = datasets.Dataset.from_dict({"x": [1.0], "y": [0]}).to_iterable_dataset()
    for dataset in (Stream(), streamed):
        with pytest.raises(TypeError, match=r"IterableWrapper\(dataset, deepcopy=False\)\.to_samples\(fields="):
            kdp.from_dataset(dataset)
        assert batch_of(IterableWrapper(dataset, deepcopy=False).to_samples(fields="x y"))


def test_a_table_is_rejected_with_the_way_to_do_it() -> None:
    table = datasets.Dataset.from_dict({"path": ["1", "2"], "label": ["b", "a"]}).to_pandas()
    with pytest.raises(TypeError, match=r"is a table\. Use `kdp\.from_table\(table\)`"):
        kdp.from_dataset(table)
    assert batch_of(kdp.from_ids(table["path"].tolist(), table["label"].tolist(), load=float)) == [1, 0]
    assert kdp.from_dataset(table.to_dict("records"), "path label")[1]["label"] == "a"


@pytest.mark.parametrize("names", [{"a", "b"}, {"a": 1, "b": 0}])
def test_class_names_without_an_order_are_an_error(names: Any) -> None:
    with pytest.raises(TypeError, match="`class_names` must be a sequence of names"):
        kdp.from_ids(["1", "2"], ["a", "b"], load="{id}", class_names=names)


def test_class_names_that_come_twice_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"`class_names` must be unique.*'a' occurs more than once"):
        kdp.from_ids(["1", "2"], ["a", "b"], load="{id}", class_names=["a", "b", "a"])
