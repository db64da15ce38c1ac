"""`filter_classes`: which classes stay, by number and by name, read from the labels alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.demo import PHOTO_CLASSES
from tests.plan.test_oversample import Blind, unreadable

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps none of:UserWarning")

ITEMS = list(zip("abcdef", [0, 1, 0, 2, 0, 1], strict=True))


def indexed(items: list[Any]) -> Any:
    return kdp.from_dataset(items)


def stream(items: list[Any]) -> Any:
    return IterableWrapper(items).to_samples(fields="x y")


FLAVOURS = pytest.mark.parametrize("make", [indexed, stream])


def epochs(pipe: Any) -> list[list[Any]]:
    return [[(sample["x"], sample["y"]) for sample in pipe] for _ in range(2)]


@FLAVOURS
@pytest.mark.parametrize("param", ["valid", "invalid"])
def test_the_chosen_classes_stay_in_order_and_keep_labels(make: Any, param: str) -> None:
    for classes in ([0], [2, 1], (1,), np.array([0, 2]), [], [9]):
        kept = [(x, y) for x, y in ITEMS if (y in list(classes)) == (param == "valid")]
        assert epochs(make(ITEMS).filter_classes(**{param: classes})) == [kept, kept], classes


def test_an_indexed_source_reports_what_is_left(letters: kdp.MapPipe) -> None:
    pipe: Any = letters.filter_classes(invalid=["gull"])
    assert len(pipe) == 5
    assert pipe.column("y").tolist() == [0, 1, 0, 0, 1]
    assert pipe.column("x").tolist() == list("abcef")
    assert pipe.class_names() == ("heron", "stork", "gull")


def test_class_names_mean_the_same_on_a_stream_as_on_an_index(photo_shards: str) -> None:
    names = {"x": "jpg", "y": "cls"}
    by_name = kdp.stream_shards(photo_shards, class_names=PHOTO_CLASSES).rename_fields(**names)
    by_number: Any = kdp.open_shards(photo_shards).rename_fields(**names)
    expected = [sample.key for sample in by_number.filter_classes(valid=[7, 1])]
    assert len(expected) == 64
    kept = by_name.filter_classes(valid=["rocket", "cat"])
    assert [[sample.key for sample in kept] for _ in range(2)] == [expected, expected]


def test_only_labels_are_read() -> None:
    blind = IterableWrapper(range(4)).to_samples(fields={"x": unreadable, "y": lambda item: item % 2})
    for source in (Blind([0, 1] * 2), blind):
        pipe: Any = source.filter_classes(valid=[1])
        for _ in range(2):
            assert [sample.index for sample in pipe] == [1, 3]
        with pytest.raises(OSError, match="an image was opened"):
            next(iter(pipe))["x"]


def test_an_empty_source_stays_empty() -> None:
    for make in (indexed, stream):
        assert epochs(make([]).filter_classes(valid=[0])) == [[], []]
        assert epochs(make(ITEMS).filter_classes(valid=[]).filter_classes(invalid=[0])) == [[], []]


UNKNOWN: list[tuple[list[Any], str]] = [
    (["hreon"], "must be among the classes heron, stork, gull, but is 'hreon' instead. Did you mean 'heron'?"),
    ([3], "must be class numbers below 3, or names of heron, stork, gull, but is 3 instead."),
    ([-2], "must be class numbers below 3"),
]


def test_an_unknown_class_is_rejected_with_a_suggestion(letters: kdp.MapPipe) -> None:
    streamed = IterableWrapper([(0, 0)]).to_samples(fields="x y", class_names=["heron", "stork", "gull"])
    for classes, message in UNKNOWN:
        for source in (letters, streamed):
            with pytest.raises(ValueError) as error:
                next(iter(source.filter_classes(valid=classes)))
            assert message in str(error.value)


def test_names_without_class_names_are_rejected_with_the_way_out() -> None:
    for make in (indexed, stream):
        with pytest.raises(ValueError, match=r"does not know class names. Pass it `class_names=\[...\]`"):
            next(iter(make(ITEMS).filter_classes(invalid=["heron"])))


def test_bad_arguments_are_rejected_when_the_chain_is_built() -> None:
    for make in (indexed, stream):
        for arguments in ({}, {"valid": [0], "invalid": [1]}):
            with pytest.raises(ValueError, match="Exactly one of `valid` or `invalid` must be given"):
                make(ITEMS).filter_classes(**arguments)
        for classes in ([True], [0.5], 1.5):
            with pytest.raises(TypeError, match="`valid` must be class numbers or class names"):
                make(ITEMS).filter_classes(valid=classes)
        with pytest.raises(kdp.ChainError, match=r"Put `.filter_classes\(\)` before `.select\(\)`"):
            make(ITEMS).select("x y").filter_classes(valid=[0])


@pytest.mark.filterwarnings("error")
def test_a_choice_that_leaves_nothing_is_said(letters: kdp.MapPipe) -> None:
    unnamed = kdp.from_dataset([("a", 0), ("b", 1)])
    with pytest.warns(UserWarning, match=r"filter_classes\(valid=\[99\]\)` keeps none of 2 samples; .* are 0, 1\."):
        assert len(unnamed.filter_classes(valid=[99])) == 0


def test_labels_that_are_names_are_checked_by_name() -> None:
    named = kdp.from_dataset([("a", "heron"), ("b", "stork")])
    with pytest.raises(
        ValueError, match=r"among the classes heron, stork, but is 'hron' instead\. Did you mean 'heron'"
    ):
        len(named.filter_classes(valid=["hron"]))


def test_class_names_are_not_the_sources_once_labels_change(letters: kdp.MapPipe) -> None:
    assert letters.transform("x", str.upper).class_names() == ("heron", "stork", "gull")
    changed = letters.transform("y", lambda y: 2 - y)
    assert changed.class_names() is None
    with pytest.raises(ValueError, match="The source does not know class names"):
        len(changed.filter_classes(valid=["gull"]))


@pytest.mark.parametrize("label", [b"x", [1]])
def test_labels_that_are_neither_numbers_nor_names_are_rejected(label: object) -> None:
    pipe = kdp.from_dataset([("a", 0), ("b", label)])
    for plan in (pipe.filter_classes(valid=[0]), pipe.oversample()):
        with pytest.raises(kdp.DataError, match=rf"but sample '1' has {re.escape(repr(label))}"):
            len(plan)


def test_samples_without_a_label_are_a_class_of_their_own() -> None:
    items = [("a", 0), ("b", None), ("c", 1), ("d", -1)]
    named = {"class_names": ["heron", "stork"]}
    for make in (lambda: kdp.from_dataset(items, **named), lambda: stream(items)):
        for classes, kept in (({"invalid": [-1]}, "ac"), ({"invalid": [None]}, "ac"), ({"valid": [None, 1]}, "bcd")):
            assert "".join(sample["x"] for sample in make().filter_classes(**classes)) == kept
