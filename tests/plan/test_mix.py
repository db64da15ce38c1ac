"""Sources mixed, joined and drawn from by weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.arithmetic import interleave
from kdpipes.testing import check_elastic, check_resumable

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=4, max_size=4)
SIZES = st.lists(st.integers(0, 12), min_size=2, max_size=4)


def sources(sizes: list[int], flavour: str) -> list[Any]:
    """Sources whose x are like "b3": the third sample of the second one."""
    rows = [[(f"{name}{place}", 0) for place in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    if flavour == "map":
        return [kdp.from_dataset(row) for row in rows]
    return [IterableWrapper(row, deepcopy=False).to_samples(fields="x y") for row in rows]


def mixed(sizes: list[int], flavour: str, **given: Any) -> list[str]:
    first, *others = sources(sizes, flavour)
    return [sample["x"] for sample in first.mix(others, **given)]


@given(
    SIZES, st.lists(st.floats(0.1, 10), min_size=4, max_size=4), st.integers(0, 9), st.sampled_from(["first", "all"])
)
def test_a_mix_is_in_order_and_ends_where_it_says(sizes: list[int], weights: list[float], seed: int, stop: Any) -> None:
    sizes = [size + 1 for size in sizes]
    weights = weights[: len(sizes)]
    found = mixed(sizes, "map", weights=weights, seed=seed, stop=stop)
    assert found == mixed(sizes, "iter", weights=weights, seed=seed, stop=stop)
    counts = Counter(x[0] for x in found)
    for name, size in zip("abcd", sizes, strict=False):
        own = [int(x[1:]) for x in found if x[0] == name]
        assert own == [place % size for place in range(counts[name])]
    whole = [counts[name] >= size for name, size in zip("abcd", sizes, strict=False)]
    assert all(whole) if stop == "all" else any(whole)
    assert stop == "all" or all(counts[name] <= size for name, size in zip("abcd", sizes, strict=False))


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.integers(0, 99), st.data())
def test_any_stretch_has_the_proportions(weights: list[float], seed: int, data: Any) -> None:
    chosen, _ = interleave([300] * len(weights), weights, seed, until_all=False)
    begin = data.draw(st.integers(0, len(chosen)))
    stretch = chosen[begin : data.draw(st.integers(begin, len(chosen)))]
    shares = np.asarray(weights) / sum(weights)
    off = np.bincount(stretch, minlength=len(weights)) - shares * len(stretch)
    assert np.abs(off).max() < len(weights)


def test_an_empty_source_ends_a_mix() -> None:
    for sizes in ([0, 3], [0, 0]):
        for stop in ("first", "all"):
            assert mixed(sizes, "map", stop=stop) == []
    assert len(mixed([0, 3], "iter", stop="all")) <= 1
    assert mixed([0, 0], "iter", stop="all") == []


def test_a_stream_read_again_is_shuffled_alike_in_workers() -> None:
    def pipe() -> Any:
        short, long = sources([9, 60], "iter")
        mix = short.shuffle(buffer_size=9).to_samples().mix(long, stop="all")
        return mix.select("x").deal(batch_size=4, seed=3)

    expected = list(pipe())
    assert expected == list(pipe())
    with kdp.Loader(pipe(), num_workers=3) as loader:
        assert list(loader) == expected
    own = [x for batch in expected for (x,) in batch if x[0] == "a"]
    assert len({tuple(own[place : place + 9]) for place in range(0, 54, 9)}) > 1
    assert all(len({*own[place : place + 9]}) == 9 for place in range(0, 54, 9))


def test_the_plan_continues_after_a_mix_with_any_workers() -> None:
    one = kdp.from_dataset(list("abc"), "x", labels=[0, 1, 0], class_names=["heron", "stork"])
    other = kdp.from_dataset(list("de"), "x", labels=[1, 1], class_names=["heron", "stork"])
    pipe = one.mix(other, stop="all").oversample(mode="exact")
    assert pipe.class_names() == ("heron", "stork")
    assert len(set(Counter(pipe.column("y").tolist()).values())) == 1
    dealt = pipe.select("x y").deal(batch_size=3, shuffle=True)
    with kdp.Loader(dealt, num_workers=2) as loader:
        assert list(loader) == list(dealt)


def test_sources_one_after_the_other() -> None:
    joined = kdp.concat(*sources([2, 0, 3], "map"))
    assert [sample["x"] for sample in joined] == ["a0", "a1", "c0", "c1", "c2"] == joined.column("x").tolist()
    assert (len(joined), joined[-1]["x"], len(kdp.concat(*sources([0, 0], "map")))) == (5, "c2", 0)
    both = kdp.concat(kdp.from_dataset([1], "x", labels=[0]), kdp.from_dataset([(2, "newt")]))
    assert both.column("y").tolist() == [0, "newt"]


@pytest.mark.parametrize("join", [kdp.concat, lambda one, other: one.mix(other)])
def test_sources_that_number_classes_differently_are_rejected(join: Any) -> None:
    one = kdp.from_dataset(["a"], "x", labels=[0], class_names=["heron", "stork"])
    other = kdp.from_dataset(["b"], "x", labels=[0], class_names=["stork", "heron"])
    with pytest.raises(kdp.ChainError, match=r"source 0 has heron, stork, but source 1 has stork, heron.*map_classes"):
        join(one, other)
    agreed = join(one, other.map_classes({"heron": "heron", "stork": "stork"}))
    assert agreed.class_names() == ("heron", "stork")
    assert sorted(agreed.column("y").tolist()) == [0, 1]


def weighted(weights: Any, labels: list[Any], **given: Any) -> list[int]:
    pipe = kdp.from_dataset([0] * len(labels), "x", labels=labels, class_names=["heron", "stork"])
    found: list[int] = pipe.sample_weighted(weights, **given).chosen().tolist()
    return found


def test_draws_follow_the_weights_and_the_seed() -> None:
    labels = [0] * 50 + [1] * 50
    drawn = weighted({"heron": 3.0, "stork": 1.0}, labels, num_samples=4000)
    assert len(drawn) == 4000
    assert 0.7 < sum(place < 50 for place in drawn) / 4000 < 0.8
    assert (
        drawn
        == weighted({0: 3.0, 1: 1.0}, labels, num_samples=4000)
        == weighted([3] * 50 + [1] * 50, labels, num_samples=4000)
    )
    assert drawn != weighted({0: 3.0, 1: 1.0}, labels, num_samples=4000, seed=1)
    assert sorted(weighted([1.0] * 100, labels, replacement=False)) == list(range(100))
    assert set(weighted({"stork": 1.0}, [0, 1, -1, None])) == {1}


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: weighted([1.0], [0, 1]), ValueError, "one weight for each of 2 samples, but has 1"),
        (lambda: weighted([0.0, 0.0], [0, 1]), ValueError, "only 0 have a weight above 0"),
        (
            lambda: weighted([1, 0], [0, 1], replacement=False),
            ValueError,
            "must draw 2 samples from a source of 2, but only 1",
        ),
        (lambda: weighted([-1.0, 1.0], [0, 1]), ValueError, "finite and at least 0"),
        (lambda: weighted("ab", [0, 1]), TypeError, "`weights` must be numbers"),
        (lambda: weighted({"newt": 1.0}, [0, 1]), ValueError, "among the classes heron, stork"),
        (lambda: weighted({"stork": 1.0}, [0, 0]), kdp.DataError, "No sample belongs to a class with a weight"),
        (lambda: weighted([1, 1], [0, 1], replacement="no"), TypeError, "`replacement`"),
        (lambda: mixed([1, 1], "map", weights=[1]), ValueError, "must be 2 numbers, one for each source"),
        (lambda: mixed([1, 1], "iter", weights=[1, "a"]), TypeError, "`weights` must be numbers above 0"),
        (lambda: mixed([1, 1], "map", weights=[0, 1]), ValueError, "`weights` must be finite and above 0"),
        (lambda: mixed([1, 1], "map", stop="last"), ValueError, "`stop` must be one of 'first', 'all'"),
        (lambda: mixed([1], "map"), kdp.ChainError, "at least one other source"),
        (lambda: kdp.concat(), kdp.ChainError, "takes one or more sources"),
        (lambda: kdp.concat([1, 2]), kdp.ChainError, "as separate arguments"),
    ],
)
def test_bad_arguments_are_rejected(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (lambda pipe: pipe.concat(pipe), r"`kdp\.concat\(one, other\)`"),
        (lambda pipe: pipe.map(abs), r"`\.transform\(\.\.\.\)`"),
        (lambda pipe: pipe.shuffle(), r"`\.permute\(seed\)`"),
    ],
)
def test_stock_pipes_that_lose_columns_are_an_error_with_ours(stock: Any, ours: str) -> None:
    with pytest.raises(kdp.ChainError, match=ours):
        kdp.concat(stock(kdp.from_dataset([(1, 0)])))


def test_several_pipes_without_a_list_are_an_error_with_hint() -> None:
    one = kdp.from_dataset([(0, 0)])
    with pytest.raises(TypeError, match="Put the pipes into one list"):
        one.mix(one, one, weights=[1, 1, 1])  # type: ignore[call-arg]


@given(st.lists(st.lists(st.floats(0, 5), min_size=3, max_size=3), min_size=4, max_size=4), st.integers(1, 40))
def test_weights_of_each_epoch_continue_in_each_source(weights: list[list[float]], num_samples: int) -> None:
    weights = [[first + 0.1, *rest] for first, *rest in weights]
    first, *others = sources([7, 5, 3], "map")
    pipe = first.mix(others, weights=lambda epoch: weights[epoch], num_samples=num_samples)
    chain = pipe.select("x", bare=True).deal(batch_size=num_samples)
    taken = Counter[str]()
    for epoch in range(4):
        [batch] = chain
        shares = np.asarray(weights[epoch]) / sum(weights[epoch])
        mixture = pipe.mixture(epoch)
        for name, size, share, found in zip("abc", [7, 5, 3], shares, mixture, strict=True):
            own = [int(x[1:]) for x in batch if x[0] == name]
            assert own == [(taken[name] + place) % size for place in range(len(own))]
            assert abs(len(own) - share * num_samples) < 1
            assert found == (size, len(own), len(own) / num_samples, len(own) / size)
            taken[name] += len(own)


def test_temperature_weighs_sources_by_their_sizes() -> None:
    big, small = sources([1000, 10], "map")
    for temperature, share in ((1, 10 / 1010), (2, 10**0.5 / (1000**0.5 + 10**0.5)), (1e9, 0.5)):
        _, found = big.mix(small, temperature=temperature, num_samples=2000).mixture()
        assert abs(found.share - share) < 0.001
        assert found.num_epochs == found.num_samples / 10
    cooling = big.mix(small, temperature=lambda epoch: 5.0 if epoch == 0 else 1.0, num_samples=2000)
    assert cooling.mixture(0)[1].share > 0.25 > 0.02 > cooling.mixture(1)[1].share


def test_temperature_weighs_classes_by_their_sizes() -> None:
    rows = kdp.from_dataset(list(range(1000)), "x", labels=[-1] + [0] * 900 + [1] * 99)
    for temperature, share in ((1.0, 99 / 999), (1e9, 0.5)):
        drawn = rows.sample_weighted(temperature=temperature, num_samples=20_000).column("y")
        assert -1 not in drawn
        assert abs((drawn == 1).mean() - share) < 0.02


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weights": [1, 2], "temperature": 2.0}, "`weights` and `temperature` cannot be given together"),
        ({"weights": [1, 2], "per_batch": [1, 2]}, "`weights` and `per_batch` cannot be given together"),
        ({"batches": "per_source", "per_batch": [1, 2]}, "`per_batch` and `batches` cannot be given together"),
        ({"per_batch": [1, 2, 3]}, "must be 2 numbers, one for each source"),
        ({"per_batch": [1, 0]}, "`per_batch` must be finite and above 0"),
        ({"temperature": 0}, "`temperature` must be a number above 0, but is 0.0 instead"),
        ({"temperature": lambda epoch: None}, "`temperature` must be a number above 0"),
        ({"weights": lambda epoch: [0, 0]}, "not all 0"),
        ({"weights": lambda epoch: [1]}, "must be 2 numbers, one for each source"),
        ({"weights": lambda epoch: [1, epoch], "redraw": False}, "`redraw=False` keeps the mix of epoch 0"),
        ({"weights": lambda epoch: [1, 1], "batches": "stratified"}, "weights that are numbers"),
        ({"batches": "by_source"}, "`batches` must be one of 'per_source', 'stratified'"),
    ],
)
def test_arguments_that_cannot_be_mixed_are_errors(arguments: Any, words: str) -> None:
    first, second = sources([4, 4], "map")
    with pytest.raises(ValueError, match=words):
        len(first.mix(second, **arguments))


def test_a_mix_that_needs_an_empty_source_is_an_error() -> None:
    first, empty = sources([4, 0], "map")
    with pytest.raises(kdp.ChainError, match=r"Source 1 of `mix` \(counting from 0\) is empty"):
        len(first.mix(empty, num_samples=4))


def test_weights_by_function_are_checked_in_each_epoch() -> None:
    rows = kdp.from_dataset(list(range(4)), "x", labels=[0, 0, 1, 1])
    with pytest.raises(ValueError, match="Exactly one of `weights` or `temperature`"):
        rows.sample_weighted()
    with pytest.raises(ValueError, match="`redraw` must be True if"):
        rows.sample_weighted(lambda epoch: {0: 1.0}, redraw=False)
    with pytest.raises(ValueError, match="finite and at least 0"):
        len(rows.sample_weighted(lambda epoch: [1, 1, 1, -1]))
    with pytest.raises(ValueError, match="`weights` must have one weight for each of 4 samples"):
        len(rows.sample_weighted(lambda epoch: [1]))


def named(name: str, size: int) -> Any:
    return kdp.from_dataset([(name, number) for number in range(size)], "s n")


def naive_epochs(sources: list[Any], pattern: list[int], num_epochs: int) -> list[list[Any]]:
    """Read each source as one endless sequence of its epochs."""
    streams = [iter(source) for source in sources]
    return [[next(streams[number]) for number in pattern] for _ in range(num_epochs)]


def endless(pipe: Any) -> Any:
    epochs = pipe.select("s n").deal(batch_size=10_000)
    while True:
        for batch in epochs:
            yield from batch


@pytest.mark.parametrize("weights", [[1, 1], [3, 2], [1, 2]])
@pytest.mark.parametrize("through", [lambda pipe: pipe, lambda pipe: pipe.map_classes({}, unmapped="keep"), "deep"])
def test_a_mix_of_a_mix_reads_each_source_as_one_sequence(weights: list[int], through: Any) -> None:
    def inner() -> Any:
        made = named("a", 30).mix(named("b", 7), weights=[2, 1])
        if through == "deep":
            made = made.mix(named("d", 9))
        return made

    outer = inner().mix(named("c", 5), weights=weights)
    pattern = outer.chosen().chosen.tolist()
    chain = outer.select("s n").deal(batch_size=10_000)
    found = [[item for batch in chain for item in batch] for _ in range(60)]
    assert found == naive_epochs([endless(inner()), endless(named("c", 5))], pattern, 60)
    assert {("a", n) for n in range(30)} <= {item for epoch in found for item in epoch}


@pytest.mark.parametrize("weights", [lambda epoch: [1 + epoch % 3, 2], [2, 1]])
def test_a_mix_of_a_mix_is_elastic_and_starves_no_sample(weights: Any) -> None:
    def make() -> Any:
        inner = named("a", 40).mix([named("b", 7), named("e", 3)], weights=[3, 1, 1])
        outer = inner.mix(named("c", 6), weights=weights)
        return outer.repeat_until(min_size=40).select("s n").deal(global_batch_size=4, uneven="pad", shuffle=True)

    check_elastic(make(), num_epochs=3, num_workers=())
    check_resumable(make(), num_workers=(0,))
    chain = make()
    seen = {item for _ in range(60) for batch in chain for item in batch}
    assert {("a", n) for n in range(40)} <= seen


def test_a_mix_of_per_batch_mixes_gives_each_batch_its_shares() -> None:
    inner = named("a", 30).mix(named("b", 7), weights=[2, 1])
    chain = inner.mix(named("c", 50), per_batch=[3, 1]).select("s n").deal(batch_size=4, shuffle=True)
    seen = set()
    for _ in range(60):
        for batch in chain:
            assert [s for s, _ in batch].count("c") == 1
            seen.update(batch)
    assert {("a", n) for n in range(30)} <= seen


def test_an_absurd_epoch_of_changing_weights_is_an_error() -> None:
    chain = named("a", 9).mix(named("b", 5), weights=lambda epoch: [1 + epoch % 2, 1]).select("s n").deal(batch_size=4)
    state = {**chain.state_dict(), "epoch": 10**9 - 1}
    with kdp.Loader(chain) as loader:
        loader.load_state_dict({**loader.state_dict(), **state})
        with pytest.raises(ValueError, match="`epoch` must be at most 1000000 if the weights of `mix` change"):
            next(iter(loader))
