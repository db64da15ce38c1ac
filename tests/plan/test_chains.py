"""Random chains of plan pipes against the same chain on lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps none of:UserWarning")

Items = list[tuple[int, int]]
Step = tuple[str, Any]

CLASSES = st.lists(st.integers(0, 3), max_size=3)
INDEXED_STEPS = st.one_of(
    st.tuples(st.just("valid"), CLASSES),
    st.tuples(st.just("invalid"), CLASSES),
    st.tuples(st.just("oversample"), st.sampled_from(["multiply", "exact"])),
    st.tuples(st.just("repetitions"), st.integers(1, 3)),
    st.tuples(st.just("min_size"), st.integers(1, 20)),
    st.tuples(
        st.just("slice"), st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.sampled_from([None, -1, 2]))
    ),
    st.tuples(st.just("subset"), st.lists(st.integers(-1, 0), max_size=4)),
    st.tuples(st.just("map"), st.dictionaries(st.integers(0, 3), st.integers(0, 3), min_size=1)),
    st.tuples(st.just("first"), st.integers(1, 3)),
    st.tuples(st.just("half"), st.booleans()),
    st.tuples(st.just("permute"), st.integers(0, 3)),
    st.tuples(st.just("twice"), st.none()),
)
ON_INDEXES_ONLY = {"slice", "subset", "first", "half", "permute", "twice"}
STREAM_STEPS = INDEXED_STEPS.filter(lambda step: step[0] not in ON_INDEXES_ONLY and step[1] != "exact")


def naive_oversample(items: Items, mode: str) -> Items:
    groups = [[item for item in items if item[1] == label] for label in sorted({y for _, y in items})]
    largest = max(map(len, groups), default=0)
    if mode == "exact":
        return [group[place % len(group)] for group in groups for place in range(largest)]
    return items + [item for group in groups for item in group * (largest // len(group) - 1)]


def naive_first(items: Items, number: int) -> Items:
    seen: Counter[int] = Counter()
    kept = []
    for item in items:
        seen[item[1]] += 1
        if seen[item[1]] <= number:
            kept.append(item)
    return kept


def naive_permute(items: Items, seed: int) -> Items:
    order = np.arange(len(items))
    np.random.default_rng(seed).shuffle(order)
    return [items[place] for place in order]


NAIVE: dict[str, Callable[[Items, Any], Items]] = {
    "map": lambda items, mapping: [(x, mapping[y]) for x, y in items if y in mapping],
    "first": naive_first,
    "half": lambda items, is_second: items[len(items) // 2 :] if is_second else items[: len(items) // 2],
    "permute": naive_permute,
    "twice": lambda items, _: items + items,
    "valid": lambda items, classes: [item for item in items if item[1] in classes],
    "invalid": lambda items, classes: [item for item in items if item[1] not in classes],
    "oversample": naive_oversample,
    "repetitions": lambda items, times: items * times,
    "min_size": lambda items, size: items * -(-size // len(items)) if items else items,
    "slice": lambda items, cut: items[cut],
    "subset": lambda items, indices: [items[index] for index in indices] if items else items,
}


def in_place(items: Items, mode: str) -> Items:
    """A stream's `oversample`: a sample's repetitions follow it directly."""
    counts = Counter(y for _, y in items)
    return [item for item in items for _ in range(max(counts.values()) // counts[item[1]])]


def follow(pipe: Any, items: Items, step: Step, *, is_stream: bool) -> tuple[Any, Items]:
    """Add one step to the chain and to the list; what an empty source rejects is left out."""
    name, value = step
    if not items and (name in {"min_size", "subset"} or (is_stream and name == "oversample")):
        return pipe, items
    expected = in_place(items, value) if is_stream and name == "oversample" else NAIVE[name](items, value)
    if name in {"valid", "invalid"}:
        return pipe.filter_classes(**{name: value}), expected
    if name == "oversample":
        counts = {"class_counts": Counter(y for _, y in items)} if is_stream else {}
        return pipe.oversample(mode=value, **counts), expected
    if name in {"repetitions", "min_size"}:
        return pipe.repeat_until(**{name: value}), expected
    build: dict[str, Callable[[], Any]] = {
        "slice": lambda: pipe[value],
        "subset": lambda: pipe.subset(value),
        "map": lambda: pipe.map_classes(value, unmapped="drop"),
        "first": lambda: pipe.take_per_class(num_samples=value),
        "half": lambda: pipe.take_percent(**{"from_percent" if value else "to_percent": 0.5}),
        "permute": lambda: pipe.permute(value),
        "twice": lambda: kdp.concat(pipe, pipe),
    }
    return build[name](), expected


LABELS = st.lists(st.integers(0, 3), max_size=8)


@settings(max_examples=300, deadline=None)
@given(labels=LABELS, steps=st.lists(INDEXED_STEPS, max_size=4))
def test_a_chain_on_an_index_is_the_chain_on_a_list(labels: list[int], steps: list[Step]) -> None:
    items = list(enumerate(labels))
    pipe: Any = kdp.from_dataset(list(items))
    for step in steps:
        pipe, items = follow(pipe, items, step, is_stream=False)
    for _ in range(2):
        assert [(sample["x"], sample["y"]) for sample in pipe] == items
    assert len(pipe) == len(items)
    assert pipe.column("x").tolist() == [x for x, _ in items]
    assert pipe.column("y").tolist() == [y for _, y in items]


@settings(max_examples=200, deadline=None)
@given(labels=LABELS, steps=st.lists(STREAM_STEPS, max_size=4))
def test_a_chain_on_a_stream_is_the_chain_on_a_list(labels: list[int], steps: list[Step]) -> None:
    items = list(enumerate(labels))
    pipe: Any = IterableWrapper(list(items)).to_samples(fields="x y")
    for step in steps:
        pipe, items = follow(pipe, items, step, is_stream=True)
    for _ in range(2):
        assert [(sample["x"], sample["y"]) for sample in pipe] == items
