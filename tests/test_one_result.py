"""Random chains give the same values, keys, ctx, errors and skips sample by sample and in batches of any size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain as joined
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

SIZES = (1, 4, 8, 64, 300)  # of batches: one sample, few, as many as are read at once, and more than a block
NUM = 90
ROWS = [(number, number % 3) for number in range(NUM)]
MISTAKES = ("ChainError", "FieldError")  # in the chain, which `on_error` never skips
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Getters(kdp.SampleSource):
    def __len__(self) -> int:
        return NUM

    def getitem_x(self, index: int) -> int:
        return index

    def getitem_y(self, index: int) -> int:
        return index % 3


class Batched:
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[int, int]:
        return ROWS[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [ROWS[index] for index in indices]


class Plain:
    """The fields of a data set without a base class."""

    def __len__(self) -> int:
        return NUM

    def getitem_x(self, index: int) -> int:
        return index

    def getitem_y(self, index: int, rng: Any = None) -> int:
        return index % 3


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stored")
    rows = kdp.from_ids([f"k{n}" for n in range(NUM)], labels=[n % 3 for n in range(NUM)], load=number_of)
    kdp.write_shards(
        rows.rename_fields(npy="x", cls="y").transform("npy", np.atleast_1d), str(folder / "%02d.tar"), max_samples=20
    )
    kdp.write_records(rows, folder / "records")
    return {"shards": str(folder / "*.tar"), "records": str(folder / "records")}


def number_of(name: str) -> int:
    return int(name[1:])


def single(x: Any) -> int:
    return int(x[0])


def shards(stored: dict[str, str]) -> Any:
    return kdp.open_shards(stored["shards"]).rename_fields(x="npy", y="cls").transform("x", single)


SOURCES: dict[str, Callable[[dict[str, str]], Any]] = {
    "a list": lambda stored: kdp.from_dataset(ROWS),
    "dictionaries": lambda stored: kdp.from_dataset([{"x": x, "y": y} for x, y in ROWS]),
    "labels": lambda stored: kdp.from_dataset(ROWS, labels=["a", "b", "c"] * (NUM // 3)),
    "batched": lambda stored: kdp.from_dataset(Batched()),
    "methods": lambda stored: kdp.from_dataset(Plain()),
    "SampleSource": lambda stored: Getters(),
    "from_ids": lambda stored: kdp.from_ids([f"k{n}" for n in range(NUM)], labels=[y for _, y in ROWS], load=number_of),
    "from_table": lambda stored: kdp.from_table({"x": [x for x, _ in ROWS], "y": [y for _, y in ROWS]}),
    "a table with keys": lambda stored: kdp.from_table(
        {"id": [f"k{n}" for n in range(NUM)], "x": [x for x, _ in ROWS], "kind": [y for _, y in ROWS]},
        key="id",
        label="kind",
    ),
    "open_shards": shards,
    "open_records": lambda stored: kdp.open_records(stored["records"]),
    "a field named key": lambda stored: kdp.from_dataset([(x, y, f"id{x}") for x, y in ROWS], "x y key"),
}


def jittered(x: Any, rng: np.random.Generator) -> Any:
    return x, int(rng.integers(1000))


def globally(x: Any) -> Any:
    return x, random.random(), np.random.rand()


def sometimes(x: Any) -> Any:
    return (x, random.random()) if hash(str(x)) and "1" in str(x) else x


def noted(x: Any, ctx: dict[str, Any], rng: np.random.Generator) -> Any:
    ctx["noted"] = int(rng.integers(50))
    return x, ctx["noted"]


def fails(x: Any) -> Any:
    if "17" in str(x) or "33" in str(x):
        raise ValueError(f"bad {str(x)[:4]}")
    return x


def fails_at_random(x: Any, rng: np.random.Generator) -> Any:
    if rng.random() < 0.03:
        raise RuntimeError("unlucky")
    return x


def paired(values: list[Any], rngs: list[np.random.Generator]) -> list[Any]:
    return [(value, int(rng.integers(9))) for value, rng in zip(values, rngs, strict=True)]


def lazily(sample: Any) -> Any:
    return sample["x"] if sample.key.endswith("2") else "unread"


def drawn(sample: Any, rng: np.random.Generator) -> Any:
    return int(rng.integers(100)), str(sample["x"])


@kdp.sample_pipe("one_result_mark", changes="m", reads="x")
def mark(sample: Any, *, rng: np.random.Generator) -> Any:
    sample["m"] = int(rng.integers(10)), str(sample["x"])
    return sample


def other(number: int = 40) -> Any:
    return kdp.from_dataset([(1000 + n, n % 3) for n in range(number)])


WORK: dict[str, Callable[[Any], Any]] = {
    "jittered": lambda pipe: pipe.transform("x", jittered),
    "jittered twice": lambda pipe: pipe.transform("x", jittered, jittered),
    "globally": lambda pipe: pipe.transform("x", globally),
    "sometimes": lambda pipe: pipe.transform("x", sometimes),
    "noted": lambda pipe: pipe.transform("x", noted),
    "fails": lambda pipe: pipe.transform("x", fails),
    "fails at random": lambda pipe: pipe.transform("x", fails_at_random),
    "skip": lambda pipe: pipe.on_error("skip"),
    "record_ctx": lambda pipe: pipe.record_ctx(),
    "paired": lambda pipe: pipe.transform_batch("x", paired),
    "lazily": lambda pipe: pipe.add_field("lazy", lazily),
    "drawn": lambda pipe: pipe.add_field("drawn", drawn),
    "mark": lambda pipe: pipe.one_result_mark(),
    "rename twice": lambda pipe: pipe.rename_fields(x="x", z="x"),
    "swap": lambda pipe: pipe.rename_fields(x="y", y="x"),
    "label": lambda pipe: pipe.transform("y", jittered),
    "own key": lambda pipe: pipe.rename_fields(renamed="key"),
    "as key": lambda pipe: pipe.rename_fields(x="x", index="x"),
}
PLAN: dict[str, Callable[[Any], Any]] = {
    "permute": lambda pipe: pipe.permute(3),
    "slice": lambda pipe: pipe[5:-3:2],
    "filter_classes": lambda pipe: pipe.filter_classes(invalid=[1]),
    "oversample": lambda pipe: pipe.oversample(),
    "exact": lambda pipe: pipe.oversample(mode="exact"),
    "repeat_until": lambda pipe: pipe.repeat_until(min_size=130),
    "take_percent": lambda pipe: pipe.take_percent(to_percent=0.7),
    "weighted": lambda pipe: pipe.sample_weighted(np.arange(1, len(pipe) + 1), num_samples=70),
    "few_shot": lambda pipe: pipe.few_shot(9, seed=1),
    "mix": lambda pipe: pipe.mix(other()),
    "mix weighted": lambda pipe: other(7).mix([pipe, other(3)], weights=[2, 3, 1]),
    "mix more": lambda pipe: pipe.mix(other().transform("x", jittered), weights=[3, 1], stop="all"),
    "concat": lambda pipe: kdp.concat(other(), pipe),
    "join": lambda pipe: pipe.join(kdp.from_dataset(list(range(200)), "joined")),
}
MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("x y key index ordinal is_padding", {}),
    ("x x y", {}),
    ("a=x b=x k=key", {"as_dict": True}),
    ("x", {"bare": True}),
    ("key y", {}),
    ("y x key", {"return_ctx": True}),
    ("x ctx key", {}),
)


def built(source: str, names: list[str], mode: int, stored: dict[str, str]) -> Any:
    """Return a chain; None if it is refused where it is built, or planned."""
    try:
        pipe = SOURCES[source](stored)
        for name in names:
            pipe = {**WORK, **PLAN}[name](pipe)
        text, options = MODES[mode]
        pipe = pipe.select(text, **options)
        len(pipe)
    except (kdp.KdpipesError, ValueError, TypeError, AttributeError, RuntimeError):
        return None
    return pipe


def outcome(make: Callable[[], Any]) -> Any:
    try:
        return "made", repr(make())
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]


def naive(pipe: Any, epoch: int) -> list[Any]:
    """Return what `pipe[i]` gives for each i: a value or an error."""
    pipe.set_epoch(epoch)
    return [outcome(lambda i=i: pipe[i]) for i in range(len(pipe))]


def until_error(items: Iterator[Any]) -> list[Any]:
    """Return the outcomes of an iteration, which ends at the first error."""
    found: list[Any] = []
    try:
        found.extend(("made", repr(item)) for item in items)
    except Exception as error:
        found.append((type(error).__name__, str(error).partition("\n")[0]))
    return found


def upto_error(outcomes: list[Any], size: int = 1) -> list[Any]:
    """Return the outcomes of whole batches of a size before the first error, and the error."""
    first = next((place for place, (kind, _) in enumerate(outcomes) if kind != "made"), None)
    return outcomes if first is None else [*outcomes[: first - first % size], outcomes[first]]


CHAINS = (
    st.sampled_from(sorted(SOURCES)),
    st.lists(st.sampled_from(sorted({**WORK, **PLAN})), max_size=6),
    st.integers(0, len(MODES) - 1),
)


@settings(max_examples=60, deadline=None)
@given(*CHAINS)
@example("a list", ["jittered", "mix", "fails", "record_ctx", "noted"], 5)
@example("from_ids", ["fails", "skip", "globally", "permute"], 0)
@example("a field named key", ["own key", "jittered"], 0)
@example("from_table", ["mix", "mix weighted", "paired"], 2)
def test_batches_of_any_size_are_the_samples_one_by_one(
    stored: dict[str, str], source: str, names: list[str], mode: int
) -> None:
    pipe = built(source, names, mode, stored)
    if pipe is None:
        return
    for epoch in range(2):
        expected = naive(pipe, epoch)
        pipe.set_epoch(epoch)
        assert until_error(iter(pipe)) == upto_error(expected)
        skipped = [text for kind, text in expected if kind != "made"]
        mistake = next((place for place, (kind, _) in enumerate(expected) if kind in MISTAKES), None)
        for size in SIZES:
            dealt = pipe.deal(batch_size=size)
            with kdp.Loader(dealt) as loader:
                loader.set_epoch(epoch)
                found = until_error(joined.from_iterable(loader))
                if "skip" in names and mistake is not None:
                    made = [entry for entry in expected[: mistake - mistake % size] if entry[0] == "made"]
                    assert found == [*made, expected[mistake]]
                elif "skip" in names and found and "more than `max_share=" in found[-1][1]:
                    *made, _ = found
                    assert made == [entry for entry in expected if entry[0] == "made"][: len(made)]
                    assert len(skipped) > 10
                elif "skip" in names:
                    assert [skip["error"].partition(": ")[2] for skip in loader.skipped] == skipped
                    assert found == [entry for entry in expected if entry[0] == "made"]
                else:
                    assert found == upto_error(expected, size)


STREAM_PLAN = ("filter_classes", "repeat_until")
STREAMS: dict[str, Callable[[dict[str, str]], Any]] = {
    "stream_shards": lambda stored: (
        kdp.stream_shards(stored["shards"]).rename_fields(x="npy", y="cls").transform("x", single)
    ),
    "to_samples": lambda stored: IterableWrapper(ROWS).to_samples(fields="x y"),
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(STREAMS)),
    st.lists(st.sampled_from(sorted([*WORK, *STREAM_PLAN])), max_size=5),
    st.integers(0, len(MODES) - 1),
)
def test_batches_of_a_stream_of_any_size_are_its_samples(
    stored: dict[str, str], source: str, names: list[str], mode: int
) -> None:
    def chain(size: int) -> Any:
        pipe = STREAMS[source](stored)
        for name in names:
            pipe = {**WORK, **PLAN}[name](pipe)
        text, options = MODES[mode]
        return pipe.select(text, **options).deal(batch_size=size, split="samples")

    try:
        chain(1)
    except (kdp.KdpipesError, ValueError, TypeError, AttributeError):
        return
    for epoch in range(2):
        results = []
        for size in SIZES:
            with kdp.Loader(chain(size)) as loader:
                loader.set_epoch(epoch)
                found = until_error(joined.from_iterable(loader))
                results.append((found, [(skip["ordinal"], skip["key"], skip["error"]) for skip in loader.skipped]))
        expected = results[0]
        for size, result in zip(SIZES, results, strict=True):
            is_ended = bool(expected[0]) and expected[0][-1][0] != "made"
            num_failing = len({"fails", "fails at random"} & set(names))
            is_mixed = is_ended and num_failing + (expected[0][-1][0] in MISTAKES) > 1
            if is_ended and expected[1]:  # more samples failed than `on_error` allows, and their batch is lost
                *made, error = result[0]
                assert (made, error) == (expected[0][: len(made)], expected[0][-1])
                assert len(expected[0]) - 1 - len(made) < size
                assert result[1] == expected[1]
            elif is_mixed and size > 1:
                # A batch is read before it is made, so a later sample may fail first, in an earlier pipe.
                assert result[0][:-1] == upto_error(expected[0], size)[:-1]
                assert result[0][-1][0] != "made"
            else:
                assert result == ((upto_error(expected[0], size), expected[1]) if is_ended else expected)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_makes_its_samples(stored: dict[str, str], source: str) -> None:
    made = {(sample["x"], sample["y"]) for sample in SOURCES[source](stored)}  # records are shuffled
    assert len(made) == NUM
    assert made & {(17, 2), (17, "c")}


@pytest.mark.parametrize("source", STREAMS)
def test_every_stream_makes_its_samples(stored: dict[str, str], source: str) -> None:
    assert [(sample["x"], sample["y"]) for sample in STREAMS[source](stored)][17] == (17, 2)
