"""Classes renamed, merged and dropped, on indexed sources and on streams alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

PETS = ("cat", "pony", "dog", "horse")


def both(labels: list[Any], known: Any, mapping: Any, **given: Any) -> tuple[list[str], list[Any], Any]:
    """Return keys, labels and class names behind the mapping, after seeing that both flavours agree."""
    rows = list(zip(map(str, range(len(labels))), labels, strict=True))
    given.setdefault("unmapped", "drop")
    indexed = kdp.from_dataset(rows, class_names=known)
    indexed = indexed.map_classes(mapping, **given)

    class Named(kdp.IterPipe):
        def __init__(self, source: Any) -> None:
            super().__init__()
            self.source = source

        def samples(self) -> Any:
            return self.source.samples()

        def class_names(self) -> Any:
            return known

    stream = Named(IterableWrapper(rows).to_samples(fields="x y")).map_classes(mapping, **given)
    found = [(sample["x"], sample["y"]) for sample in indexed]
    assert found == [(sample["x"], sample["y"]) for sample in stream]
    assert indexed.class_names() == stream.class_names()
    assert [y for _, y in found] == indexed.column("y").tolist()
    assert len(indexed) == len(found)
    return [x for x, _ in found], [y for _, y in found], indexed.class_names()


def test_classes_are_merged_and_numbered_as_mapped() -> None:
    assert both([0, 1, 2, 3, 1], PETS, {"pony": "horse", "horse": "horse", "cat": "feline"}) == (
        ["0", "1", "3", "4"],
        [1, 0, 0, 0],
        ("horse", "feline"),
    )


def test_other_classes_are_kept_behind_them() -> None:
    keys, labels, names = both([0, 1, 2, 3, -1], PETS, {"pony": "horse"}, unmapped="keep")
    assert keys == list("01234")
    assert names == ("horse", "cat", "dog")
    assert labels == [1, 0, 2, 0, -1]


def test_numbers_are_mapped_to_numbers() -> None:
    assert both([0, 1, 2, 5], None, {0: 7, 5: 7}) == (["0", "3"], [7, 7], None)
    assert both([0, 1], PETS, {"cat": 9})[2] is None


def test_classes_that_are_mapped_to_numbers_lose_their_names() -> None:
    assert both([0, 1, 2], PETS, {0: 2, 2: 0}, unmapped="keep") == (["0", "1", "2"], [2, 1, 0], None)
    assert both([0, 1], PETS, {"cat": 1, "pony": 0}) == (["0", "1"], [1, 0], None)


def test_new_classes_are_numbered_by_the_given_names() -> None:
    birds = ["crow", "dog", "cat"]
    assert both([0, 1, 2], PETS, {"cat": 2, "pony": 0}, class_names=birds) == (["0", "1"], [2, 0], tuple(birds))
    assert both([0, 1, 2], PETS, {"cat": "cat", "pony": "crow"}, class_names=birds)[1] == [2, 0]
    assert both(["cat", "pony", "newt"], None, {"cat": 2, "pony": 0}, class_names=birds)[1] == [2, 0]
    assert both(["a", "cat", "dog"], None, {"a": "crow"}, unmapped="keep", class_names=birds)[1] == [0, 2, 1]
    kept = both([0, 2, 1, -1], PETS[:3], {"pony": "crow"}, unmapped="keep", class_names=birds)
    assert kept[1:] == ([2, 1, 0, -1], tuple(birds))
    assert both([7, 3], None, {7: 1, 3: 0}, class_names=birds)[1] == [1, 0]


def test_pascal_voc_becomes_cifar_10() -> None:
    cifar = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    voc = {"aeroplane": "airplane", "car": "automobile", "bird": "bird", "cat": "cat", "dog": "dog", "frog": "frog"}
    objects = [["aeroplane"], ["person"], ["bird", "person"], ["dog"], ["car"], []]
    assert both(objects, None, voc, class_names=cifar) == (["0", "3", "4"], [0, 5, 1], tuple(cifar))
    numbers = {name: cifar.index(new) for name, new in voc.items()}
    assert both(objects, None, numbers, class_names=cifar) == (["0", "3", "4"], [0, 5, 1], tuple(cifar))


@pytest.mark.parametrize(
    ("mapping", "given", "error", "words"),
    [
        ({"cat": "crov"}, {}, ValueError, "`mapping` must be among the classes crow, dog, but is 'crov'.* 'crow'"),
        ({"cat": 2}, {}, ValueError, "`mapping` must be class numbers below 2, or names of crow, dog"),
        ({"cat": "dog"}, {"unmapped": "keep"}, ValueError, "`class_names` must include 'pony', which"),
    ],
)
def test_classes_that_have_no_name_are_rejected(mapping: Any, given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        both([0], PETS, mapping, class_names=["crow", "dog"], **given)


def test_labels_that_are_names_stay_names() -> None:
    assert both(["cat", "pony", "newt"], None, {"pony": "horse", "cat": "cat"}) == (["0", "1"], ["cat", "horse"], None)


def test_only_images_with_one_object_of_a_class_that_is_mapped() -> None:
    objects = [["aeroplane"], ["person"], ["bird", "person"], ["bird"], [], ["bird", "bird"]]
    keys, labels, _ = both(objects, None, {"aeroplane": "airplane", "bird": "bird"})
    assert (keys, labels) == (["0", "3"], ["airplane", "bird"])


def test_what_is_not_mapped_can_be_an_error() -> None:
    for labels in ([0, 1], [0, -1], [0, None]):
        with pytest.raises(kdp.DataError, match=r"of sample .* is not in `mapping`"):
            both(labels, None, {0: 1}, unmapped="raise")


@given(st.lists(st.integers(-1, 5), max_size=20), st.dictionaries(st.integers(0, 5), st.integers(0, 5), min_size=1))
def test_any_mapping_is_the_naive_one(labels: list[int], mapping: dict[int, int]) -> None:
    expected = [(str(place), mapping[y]) for place, y in enumerate(labels) if y in mapping]
    keys, found, _ = both(labels, None, mapping)
    assert list(zip(keys, found, strict=True)) == expected


def test_the_plan_goes_on_behind_it() -> None:
    pipe = kdp.from_dataset(list("abcdef"), "x", labels=[0, 1, 2, 3, 1, 1], class_names=PETS)
    mapped = pipe.map_classes({"pony": "horse", "horse": "horse", "dog": "dog"}, unmapped="drop").oversample(
        mode="exact"
    )
    assert mapped.column("y").tolist() == [0] * 4 + [1] * 4
    assert [sample["y"] for sample in mapped.filter_classes(valid=["dog"])] == [1] * 4
    assert mapped.select("x y").deal(batch_size=8).collate_samples()


@pytest.mark.parametrize(
    ("mapping", "error", "words"),
    [
        ({}, TypeError, "`mapping` must be a dictionary"),
        ([("a", "b")], TypeError, "`mapping` must be a dictionary"),
        ({1.5: 0}, TypeError, "a dictionary of class numbers or names"),
    ],
)
def test_bad_mappings_are_rejected(mapping: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kdp.from_dataset([(1, 0)]).map_classes(mapping)


def test_an_unknown_class_is_rejected_with_the_closest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'pony'"):
        both([0], PETS, {"poni": "horse"})
    with pytest.raises(ValueError, match="`unmapped` must be one of"):
        both([0], PETS, {"pony": "horse"}, unmapped="ignore")


def test_targets_are_numbers_or_names_but_not_both() -> None:
    for make in (lambda: kdp.from_dataset([("a", 0)]), lambda: IterableWrapper([("a", 0)]).to_samples(fields="x y")):
        with pytest.raises(ValueError, match="a mapping to numbers, or one to names, not to both"):
            make().map_classes({0: "bird", 1: 2})


def test_integers_of_numpy_are_class_numbers() -> None:
    pipe = kdp.from_dataset([("a", 0), ("b", 1)]).map_classes({np.int64(0): np.int64(5), 1: 6})
    assert pipe.column("y").tolist() == [5, 6]


def test_classes_without_a_mapping_are_dropped_with_a_warning() -> None:
    labels = [*"abcdefgh", -1, "b"]
    pipe = kdp.from_dataset([(n, label) for n, label in enumerate(labels)])
    with pytest.warns(UserWarning, match=r"not name: 'c', 'd', 'e', 'f', 'g' and 1 more\. Pass `unmapped=\"keep\"`"):
        assert len(pipe.map_classes({"a": "x", "b": "x"})) == 3
    stream = IterableWrapper([(0, "a"), (1, "b"), (2, "b")]).to_samples(fields="x y")
    with pytest.warns(UserWarning, match="not name: 'b'") as caught:
        assert len(list(stream.map_classes({"a": "x"}))) == 1
    assert len(caught) == 1
    assert len(kdp.from_dataset([(0, 0), (1, -1)]).map_classes({0: 1})) == 1, "no warning of unlabeled samples"
