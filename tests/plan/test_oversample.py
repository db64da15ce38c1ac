"""`oversample`: classes balanced by repetition, the repetitions augmented anew."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.demo import PHOTO_CLASSES

LABELS = [0, 1, 0, 2, 0, 1, 0]
ITEMS = list(zip("abcdefg", LABELS, strict=True))
COUNTS = {0: 4, 1: 2, 2: 1}


def stream(items: list[Any]) -> Any:
    return IterableWrapper(items).to_samples(fields="x y")


def epochs(pipe: Any) -> list[str]:
    return ["".join(sample["x"] for sample in pipe) for _ in range(2)]


def naive_multiply(items: list[Any]) -> str:
    counts = Counter(y for _, y in items)
    order = [x for x, _ in items]
    for label in sorted(counts):
        order += [x for x, y in items if y == label] * (max(counts.values()) // counts[label] - 1)
    return "".join(order)


def naive_exact(items: list[Any]) -> str:
    groups = [[x for x, y in items if y == label] for label in sorted({y for _, y in items})]
    largest = max(map(len, groups))
    return "".join((group * largest)[:largest][place] for group in groups for place in range(largest))


def test_multiply_gives_all_samples_then_rare_classes_again() -> None:
    pipe: Any = kdp.from_dataset(ITEMS).oversample()
    assert naive_multiply(ITEMS) == "abcdefgbfddd"
    assert epochs(pipe) == [naive_multiply(ITEMS)] * 2
    assert len(pipe) == 12
    assert kdp.class_counts(pipe.column("y")) == {0: 4, 1: 4, 2: 4}
    rare = list(zip("abcdefgh", [0, 1, 0, 0, 0, 1, 0, 0], strict=True))
    assert naive_multiply(rare) == "abcdefghbfbf"
    assert epochs(kdp.from_dataset(rare).oversample()) == ["abcdefghbfbf"] * 2


def test_exact_gives_classes_in_turn_at_the_largest_size() -> None:
    items = [*ITEMS, ("h", 1)]
    pipe: Any = kdp.from_dataset(items).oversample(mode="exact")
    assert naive_exact(items) == "acegbfhbdddd"
    assert epochs(pipe) == [naive_exact(items)] * 2
    assert kdp.class_counts(pipe.column("y")) == {0: 4, 1: 4, 2: 4}


def test_a_stream_repeats_each_sample_in_its_place() -> None:
    for mode in ("multiply", "exact"):
        assert epochs(stream(ITEMS).oversample(mode=mode, class_counts=COUNTS)) == ["abbcddddeffg"] * 2
    uneven = {0: 5, 1: 2}
    items = list(zip("abcdefg", [0, 1, 0, 0, 1, 0, 0], strict=True))
    assert epochs(stream(items).oversample(class_counts=uneven)) == ["abbcdeefg"] * 2
    fixed = stream(items).oversample(mode="exact", class_counts=uneven, redraw=False)
    assert epochs(fixed) == ["abbcdeeefg"] * 2


def test_a_stream_repeats_other_samples_in_each_epoch() -> None:
    items = list(zip("abcdefg", [0, 1, 0, 0, 1, 0, 0], strict=True))
    pipe = stream(items).oversample(mode="exact", class_counts={0: 5, 1: 2})
    assert epochs(pipe) == ["abbcdeeefg", "abbbcdeefg"]
    dealt = stream(items).oversample(mode="exact", class_counts={0: 5, 1: 2}).select("x").deal(batch_size=10)
    expected = [[[(x,) for x in epoch]] for epoch in ("abbcdeeefg", "abbbcdeefg")]
    with kdp.Loader(dealt, num_workers=2) as loader:
        assert [list(loader), list(loader)] == expected == [list(dealt), list(dealt)]


def test_exact_balances_a_stream_if_the_counts_are_true() -> None:
    for num_rare in range(1, 8):
        items = [("a", 0)] * 7 + [("b", 1)] * num_rare
        pipe = stream(items).oversample(mode="exact", class_counts={0: 7, 1: num_rare})
        assert [Counter(xs) for xs in epochs(pipe)] == [{"a": 7, "b": 7}] * 2


class Blind(kdp.SampleSource):
    """Labels that can be read, images that cannot."""

    def __init__(self, labels: list[int]) -> None:
        super().__init__()
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def getitem_x(self, index: int) -> Any:
        raise OSError("an image was opened")

    def getitem_y(self, index: int) -> int:
        return self.labels[index]


def unreadable(item: Any) -> Any:
    raise OSError("an image was opened")


def test_only_labels_are_read() -> None:
    pipe: Any = Blind(LABELS).oversample()
    assert [[sample.index for sample in pipe] for _ in range(2)] == [[0, 1, 2, 3, 4, 5, 6, 1, 5, 3, 3, 3]] * 2
    blind = IterableWrapper(range(7)).to_samples(fields={"x": unreadable, "y": LABELS.__getitem__})
    streamed = blind.oversample(class_counts=COUNTS)
    assert [[sample.index for sample in streamed] for _ in range(2)] == [[0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 6]] * 2


def jitter(x: str, rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 60))


WORK: dict[str, Any] = {
    "transform": lambda pipe: pipe.transform("x", jitter),
    "add_field": lambda pipe: pipe.add_field("x", lambda sample, rng: jitter(sample["y"], rng)),
    "both": lambda pipe: pipe.transform("x", jitter).add_field("x", lambda sample: sample["x"]),
}


@pytest.mark.parametrize("work", WORK)
def test_a_repeated_sample_is_augmented_anew(work: str) -> None:
    for source, arguments in ((kdp.from_dataset(ITEMS), {}), (stream(ITEMS), {"class_counts": COUNTS})):
        for pipe in (WORK[work](source).oversample(**arguments), WORK[work](source.oversample(**arguments))):
            dealt = pipe.select("x").deal(batch_size=4)
            drawn = [x for _ in range(2) for batch in dealt for (x,) in batch]
            assert len(drawn) == len(set(drawn)) == 24


@pytest.mark.filterwarnings("ignore:.* keeps none of:UserWarning")
def test_an_empty_or_emptied_source_stays_empty() -> None:
    for mode in ("multiply", "exact"):
        for items in ([], ITEMS):
            assert epochs(kdp.from_dataset(items).filter_classes(valid=[]).oversample(mode=mode)) == ["", ""]
            emptied = stream(items).filter_classes(valid=[]).oversample(mode=mode, class_counts=COUNTS)
            assert epochs(emptied) == ["", ""]


def test_a_stream_without_counts_says_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"`class_counts` must be given for a stream.*`kdp.open_shards`") as error:
        stream(ITEMS).oversample()
    assert "{class: number of samples}" in str(error.value)


def test_a_class_that_was_not_counted_names_the_sample() -> None:
    pipe = stream(ITEMS).oversample(class_counts={0: 4, 1: 2})
    for _ in range(2):
        with pytest.raises(kdp.DataError, match="Sample '3' has class 2, which is not in `class_counts`"):
            list(pipe)


def test_bad_arguments_are_rejected_when_the_chain_is_built() -> None:
    for source, given in ((kdp.from_dataset(ITEMS), {}), (stream(ITEMS), {"class_counts": COUNTS})):
        with pytest.raises(ValueError, match="`mode` must be one of 'multiply', 'exact', but is 'exactly' instead"):
            source.oversample(mode="exactly", **given)
        with pytest.raises(kdp.ChainError, match=r"Put `.oversample\(\)` before `.select\(\)`"):
            source.select("x").oversample(**given)
    for counts in ({}, [4, 2, 1]):
        with pytest.raises(TypeError, match="`class_counts` must be a dictionary of counts by class"):
            stream(ITEMS).oversample(class_counts=counts)
    with pytest.raises(ValueError, match=r"`class_counts\[1\]` must be an integer of at least 1, but is 0"):
        stream(ITEMS).oversample(class_counts={0: 4, 1: 0})


def test_counts_of_a_stream_may_go_by_name(photo_shards: str) -> None:
    names = PHOTO_CLASSES
    photos = kdp.stream_shards(photo_shards, class_names=names).rename_fields(y="cls").filter_classes(valid=[4, 5])
    by_name, by_number = photos.oversample(class_counts={"grass": 8, "gravel": 2}), {4: 8, 5: 2}
    keys = [sample.key for sample in by_name]
    assert keys == [sample.key for sample in photos.oversample(class_counts=by_number)]
    assert len(keys) == 8 + 4 * 6
    with pytest.raises(ValueError, match="Did you mean 'grass'"):
        list(photos.oversample(class_counts={"gras": 8}))
