"""`filter_samples`: by one column or several, on indexed sources and streams, and what it rejects."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

SIZES = [{"x": name, "json": {"size": {"w": w}}} for name, w in (("a", 300), ("b", 20), ("c", 256))]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_it_keeps_what_a_loop_keeps(pairs: list[tuple[int, int]]) -> None:
    indexed = kdp.from_dataset(pairs, "w h")
    kept = indexed.filter_samples(columns=["w", "h"], keep=lambda w, h: (w >= 3) & (h < 7))
    expected = [pair for pair in pairs if pair[0] >= 3 and pair[1] < 7]
    assert [(sample["w"], sample["h"]) for sample in kept] == expected


def test_columns_may_be_entries_of_a_dictionary_on_both_flavors() -> None:
    def large(source: Any) -> list[Any]:
        return [sample["x"] for sample in source.filter_samples(columns="json.size.w", keep=lambda w: w > 100)]

    assert large(kdp.from_dataset(SIZES, "x json")) == ["a", "c"]
    assert large(IterableWrapper(SIZES).to_samples()) == ["a", "c"]


def test_no_image_is_opened() -> None:
    class Photos(kdp.SampleSource):
        def __len__(self) -> int:
            return 4

        def getitem_w(self, index: int) -> int:
            return 100 * index

        def getitem_x(self, index: int) -> Any:
            raise AssertionError("an image was opened")

    assert len(Photos().filter_samples(columns="w", keep=lambda w: w >= 200)) == 2


def test_keys_are_a_column_too() -> None:
    pipe = kdp.from_dataset(["a", "b", "c"], "x")
    assert pipe.filter_samples(columns="key", keep=lambda key: np.isin(key, ["0", "2"])).column("x").tolist() == [
        "a",
        "c",
    ]


def test_batches_are_the_same_with_workers_and_after_a_resume() -> None:
    chain = kdp.from_dataset(range(50), "x").filter_samples(columns="x", keep=lambda x: x % 3 > 0).select("x")
    chain = chain.deal(batch_size=4, shuffle=True, seed=1)
    with kdp.Loader(chain) as loader:
        whole = list(loader)
    with kdp.Loader(chain, reading_service=kdp.ThreadReadingService(2)) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(3)]
        state = loader.state_dict()
    with kdp.Loader(chain) as loader:
        loader.load_state_dict(state)
        assert first + list(loader) == whole


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"columns": [], "keep": len}, TypeError, "`columns` must be the name of a field"),
        ({"columns": 3, "keep": len}, TypeError, "`columns` must be the name of a field"),
        ({"columns": "x", "keep": 3}, TypeError, "`keep` must be"),
        (
            {"columns": "x", "keep": lambda x: x},
            TypeError,
            r"`keep` must return one boolean for each sample, `\[3\] bool`",
        ),
        ({"columns": "x", "keep": lambda x: True}, TypeError, "`keep` must return one boolean"),
        ({"columns": "z", "keep": lambda z: z > 1}, kdp.FieldError, "no field 'z'"),
        ({"columns": "x.w", "keep": lambda w: w > 1}, kdp.DataError, "looks up 'w' in a dictionary, but found int"),
    ],
)
def test_what_it_rejects(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        len(kdp.from_dataset([1, 2, 3], "x").filter_samples(**arguments))


def test_and_in_place_of_an_ampersand_gets_a_hint() -> None:
    pipe = kdp.from_dataset([1, 2, 3], "x").filter_samples(columns="x", keep=lambda x: x > 1 and x < 3)
    with pytest.raises(ValueError, match=r"`keep` must work on arrays.*Write `&`"):
        len(pipe)


def test_a_missing_entry_names_those_that_exist() -> None:
    pipe = kdp.from_dataset(SIZES, "x json").filter_samples(columns="json.width", keep=lambda w: w > 1)
    with pytest.raises(kdp.FieldError, match="no entry 'width'; there is 'size'"):
        len(pipe)


def noise(_: Any, rng: np.random.Generator) -> int:
    return int(rng.integers(3))


def global_noise(_: Any) -> int:
    return random.randrange(3)


CHOOSERS: dict[str, Any] = {
    "filter_classes": lambda pipe: pipe.filter_classes(valid=[0]),
    "filter_samples": lambda pipe: pipe.filter_samples(columns="y", keep=lambda y: y == 0),
    "oversample": lambda pipe: pipe.oversample(),
    "few_shot": lambda pipe: pipe.few_shot(1, seed=0),
    "take_per_class": lambda pipe: pipe.take_per_class(share=0.5),
    "split": lambda pipe: kdp.split(pipe, by="y", a=0.5, b=0.5).a,
    "through a plan": lambda pipe: pipe.permute(1).filter_classes(valid=[0]),
    "deal": lambda pipe: pipe.deal(batching=kdp.by_length("y", max_tokens=8)),
}


@pytest.mark.parametrize("draw", [noise, global_noise])
@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize("is_looked_at", [False, True])
def test_random_values_cannot_choose_samples(choose: str, draw: Any, is_looked_at: bool) -> None:
    pipe = kdp.from_dataset([(n, n % 3) for n in range(12)]).transform("y", draw)
    if is_looked_at:
        assert len(pipe.column("y")) == 12  # looking is allowed
    with pytest.raises(kdp.ChainError, match=r"chooses samples by 'y', which `(global_)?noise` draws at random"):
        len(CHOOSERS[choose](pipe))


def test_values_that_are_not_drawn_choose_samples() -> None:
    pipe = kdp.from_dataset([(n, n % 3) for n in range(12)]).transform("x", noise).add_field("z", lambda sample: 1)
    assert len(pipe.filter_samples(columns=["y", "z"], keep=lambda y, z: y == z)) == 4
    with pytest.raises(kdp.ChainError, match="`noise` draws at random"):
        len(pipe.add_field("w", lambda sample: sample["x"]).filter_samples(columns="w", keep=lambda w: w == 1))


def test_entries_of_a_field_that_is_drawn_cannot_choose_samples() -> None:
    pipe = kdp.from_dataset([(n, {"w": n}) for n in range(12)], "x size").transform("size", dict)
    assert len(pipe.filter_samples(columns="size.w", keep=lambda w: w < 5)) == 5
    drawn = pipe.transform("size", lambda _, rng: {"w": int(rng.integers(3))})
    with pytest.raises(kdp.ChainError, match=r"by 'size\.w', which `lambda"):
        len(drawn.filter_samples(columns="size.w", keep=lambda w: w == 1))
