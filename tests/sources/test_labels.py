"""Labels that are text become class numbers; the names of classes come from where a dataset says them."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

BIRDS = ("heron", "stork", "gull")


def batch_of(pipe: Any) -> list[int]:
    _, y = next(iter(pipe.select("x y").deal(batch_size=9).collate_samples()))
    assert isinstance(y, torch.Tensor)
    return y.tolist()


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


@pytest.mark.parametrize("names", [{"a", "b"}, {"a": 1, "b": 0}])
def test_class_names_without_an_order_are_an_error(names: Any) -> None:
    with pytest.raises(TypeError, match="`class_names` must be a sequence of names"):
        kdp.from_ids(["1", "2"], ["a", "b"], load="{id}", class_names=names)


def test_class_names_that_come_twice_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"`class_names` must be unique.*'a' occurs more than once"):
        kdp.from_ids(["1", "2"], ["a", "b"], load="{id}", class_names=["a", "b", "a"])


def test_texts_that_differ_in_nul_characters_are_two_classes() -> None:
    names = ["a\0", "a", "b"]
    pipe = kdp.from_ids(names, names, load=str)
    assert (pipe.column("y").tolist(), pipe.column("key").tolist()) == ([1, 0, 2], names)
    table = kdp.from_table({"name": names, "bird": names}, label="bird", key="name")
    assert [table.column(field).tolist() for field in ("y", "key", "name")] == [[1, 0, 2], names, names]
    items = kdp.from_dataset(list(enumerate([*names, None, "a\0"])))
    assert kdp.class_counts(items) == {-1: 1, "a": 1, "a\0": 2, "b": 1}
    assert items.filter_classes(valid=["a\0"]).column("x").tolist() == [0, 4]
    assert items.oversample(mode="exact").column("x").tolist() == [1, 1, 0, 4, 2, 2]
    assert [sample["y"] for sample in items.map_classes({"a\0": "c"}, unmapped="keep")] == ["c", "a", "b", -1, "c"]
    assert len(list(items[[0, 1, 1, 4]].deal(batching=kdp.by_class(2, 2)))) == 1


def test_tensors_of_several_numbers_are_no_classes() -> None:
    with pytest.raises(TypeError):
        kdp.class_counts(kdp.from_dataset([(n, torch.tensor([0, 1])) for n in range(2)]))
