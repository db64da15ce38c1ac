"""Plans that choose other samples in each epoch: a function of (seed, epoch), for any workers, ranks and resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.core.map_pipe import redrawing_name
from kdpipes.delivery import split_ctx
from tests.resuming import FRESH, digests, inline, jitter, of_rank, processes, threads, travelled

LABELS = [n % 3 if n % 7 else 0 for n in range(40)]
NAMES = ["heron", "stork", "gull"]


def source(size: int = 40, first: int = 0) -> Any:
    return kdp.from_ids(range(first, first + size), LABELS[:size], load=int, class_names=NAMES)


def weighted(**given: Any) -> Any:
    return source().sample_weighted({"heron": 1.0, "stork": 4.0}, num_samples=24, seed=3, **given)


def exact(**given: Any) -> Any:
    return source().oversample(mode="exact", **given)


def mixed(**given: Any) -> Any:
    return source().mix(source(12, 100), weights=[1, 2], seed=1, **given)


def nested(**given: Any) -> Any:
    drawn = source(30, 200).sample_weighted({1: 2.0, 2: 1.0}, **given)
    return kdp.concat(drawn.permute(seed=2), mixed(**given)).take_percent(to_percent=0.8)


def mixed_by_epoch() -> Any:
    return source().mix(source(12, 100), weights=lambda epoch: [4 - epoch, epoch], num_samples=30)


def heated() -> Any:
    return source().mix(source(12, 100), temperature=lambda epoch: 1.0 + epoch, stop="all")


def weighted_by_epoch() -> Any:
    return source().sample_weighted(lambda epoch: {"heron": 1.0, "stork": 1.0 + epoch}, num_samples=24, seed=3)


PLANS: list[Callable[..., Any]] = [weighted, exact, mixed, nested]
CHANGING: list[Callable[..., Any]] = [mixed_by_epoch, heated, weighted_by_epoch]
every_plan = pytest.mark.parametrize("plan", [*PLANS, *CHANGING], ids=lambda plan: plan.__name__)
redrawn_or_not = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)


def dealt(plan: Any, **given: Any) -> Any:
    chain = plan.record_ctx().transform("x", jitter).select("x y key ordinal", return_ctx=True)
    return chain.deal(**({"global_batch_size": 6, "shuffle": True, "seed": 5} | given)).collate_samples()


def keys_of(plan: Any, num_epochs: int = 3) -> list[list[str]]:
    chain = plan.select("key").deal(batch_size=5)
    return [[key for batch in chain for (key,) in batch] for _ in range(num_epochs)]


@every_plan
def test_epochs_differ_and_are_as_long(plan: Any) -> None:
    epochs = keys_of(plan())
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 3
    assert {len(epoch) for epoch in epochs} == {len(plan())}
    assert epochs == keys_of(plan())


@redrawn_or_not
def test_without_redraw_all_epochs_are_the_first(plan: Any) -> None:
    epochs = keys_of(plan(redraw=False))
    assert epochs == keys_of(plan(), 1) * 3
    assert epochs[0] == plan().column("key").tolist()


def test_draws_of_each_epoch_follow_the_weights() -> None:
    pipe = source().sample_weighted({"heron": 1.0, "stork": 4.0}, num_samples=4000)
    weights = {0: LABELS.count(0), 1: 4 * LABELS.count(1)}
    for epoch in range(3):
        labels = np.asarray(LABELS)[pipe.chosen(epoch)]
        assert abs((labels == 1).mean() - weights[1] / sum(weights.values())) < 0.03


def test_samples_take_turns_in_being_repeated_once_more() -> None:
    for epoch in keys_of(exact(), 3):
        assert len(set(Counter(LABELS[int(key)] for key in epoch).values())) == 1
        assert len({*epoch}) == 40
    num_epochs = LABELS.count(1) * LABELS.count(2)
    counts = Counter(key for epoch in keys_of(exact(), num_epochs) for key in epoch)
    for label in range(3):
        assert len({count for key, count in counts.items() if LABELS[int(key)] == label}) == 1


def test_a_mix_goes_on_where_the_last_epoch_stopped() -> None:
    letters, digits = kdp.from_dataset(list("abcde"), "x"), kdp.from_dataset(list("123"), "x")

    def epochs(**given: Any) -> list[str]:
        chain = letters.mix(digits, **given).select("x").deal(batch_size=20)
        return ["".join(sorted(x for (x,) in next(iter(chain)))) for _ in range(3)]

    assert epochs() == ["123abc", "123ade", "123bcd"]
    assert epochs(redraw=False) == ["123abc"] * 3
    assert epochs(weights=[5, 4], stop="all") == ["11223abcde", "11233abcde", "12233abcde"]


@every_plan
@pytest.mark.parametrize("service", [processes(1), processes(2), FRESH, threads(2)], ids=lambda make: make.__name__)
def test_batches_are_the_same_with_workers(plan: Any, service: Any) -> None:
    chain = dealt(plan())
    expected = [digests(chain) for _ in range(3)]
    with kdp.Loader(dealt(plan()), reading_service=service()) as loader:
        assert [digests(loader) for _ in range(3)] == expected


@every_plan
def test_a_run_resumes_within_epoch_two_with_other_workers(plan: Any) -> None:
    chain = dealt(plan())
    expected = [digests(chain) for _ in range(4)]
    with kdp.Loader(dealt(plan()), num_workers=2) as loader:
        list(loader), list(loader)
        batches = iter(loader)
        next(batches), next(batches)
        state = travelled(loader.state_dict())
    for service in (inline, processes(3), threads(2)):
        with kdp.Loader(dealt(plan()), reading_service=service()) as loader:
            loader.load_state_dict(state)
            assert [digests(loader), digests(loader)] == [expected[2][2:], expected[3]]


@every_plan
def test_a_batch_of_a_later_epoch_is_rebuilt(plan: Any) -> None:
    with kdp.Loader(dealt(plan())) as loader:
        expected = [digests(loader) for _ in range(3)]
        state = loader.state_dict()
    for number in range(3):
        assert digests([kdp.find(dealt(plan()), state, number, epoch=2).load()]) == [expected[2][number]]


@every_plan
def test_ranks_share_each_epoch(plan: Any) -> None:
    whole = dealt(plan(), uneven="drop")
    ranks = [of_rank(dealt(plan(), uneven="drop"), 2, rank) for rank in range(2)]
    for _ in range(3):
        expected = [key for (_, _, keys, _), _ in whole for key in keys]
        parts = [[keys for (_, _, keys, _), _ in rank] for rank in ranks]
        assert [key for batches in zip(*parts, strict=True) for keys in batches for key in keys] == expected


@every_plan
def test_samples_of_later_epochs_are_replayed_by_key(plan: Any) -> None:
    chain = dealt(plan())
    list(chain), list(chain)
    (xs, _, keys, _), ctx = next(iter(chain))
    for place, entry in enumerate(split_ctx(ctx)):
        (again, *_), _ = kdp.replay(keys[place], entry, chain)
        assert again == xs[place]


@every_plan
def test_caches_serve_every_epoch(plan: Any, tmp_path: Path) -> None:
    expected_chain = plan().transform("x", str).select("x ordinal").deal(batch_size=5, shuffle=True)
    expected = [list(expected_chain) for _ in range(3)]
    chain = plan().transform("x", str).cache_on_disk(tmp_path).select("x ordinal").deal(batch_size=5, shuffle=True)
    with kdp.Loader(chain, num_workers=2) as loader:
        assert [list(loader) for _ in range(3)] == expected


def test_shards_are_shuffled_as_they_are_drawn(photo_shards: str) -> None:
    shards = kdp.open_shards(photo_shards).rename_fields(x="jpg", y="cls")

    def chain() -> Any:
        pipe = shards.sample_weighted(np.arange(160.0), num_samples=60).select("key")
        return pipe.deal(batch_size=10, shuffle=kdp.by_shard(window=20), seed=1)

    inline_chain, plain = chain(), shards.sample_weighted(np.arange(160.0), num_samples=60)
    expected = [list(inline_chain) for _ in range(3)]
    for epoch, batches in enumerate(expected):
        chosen = shards.column("key")[plain.chosen(epoch)]
        assert Counter(key for batch in batches for (key,) in batch) == Counter(chosen.tolist())
    with kdp.Loader(chain(), num_workers=2) as loader:
        assert [list(loader) for _ in range(3)] == expected


def test_choices_by_value_downstream_keep_the_first_draw() -> None:
    with pytest.warns(UserWarning, match=r"`sample_weighted` gives the same samples in every epoch here.*filter_cla"):
        plan = weighted().filter_classes(valid=["heron", "stork"])[:]
    balanced = plan.oversample(mode="exact")
    epochs = keys_of(balanced)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert {len(epoch) for epoch in epochs} == {len(balanced)}
    for epoch in epochs:
        assert set(epoch) == set(plan.column("key").tolist())
        assert len(set(Counter(LABELS[int(key)] for key in epoch).values())) == 1
    mapped = exact().map_classes({"heron": "bird", "stork": "bird", "gull": "sea"})  # labels stay where they are
    assert len({tuple(epoch) for epoch in keys_of(mapped)}) == 3
    assert [sample["y"] for sample in mapped] == mapped.column("y").tolist()


def test_a_slice_has_the_same_samples_in_every_epoch() -> None:
    few = weighted()[[3, 5, 7]]
    assert keys_of(few) == [weighted().column("key")[[3, 5, 7]].tolist()] * 3
    rare = weighted()
    assert {LABELS[int(key)] for epoch in keys_of(rare[rare.column("y") == 1]) for key in epoch} == {1}


def test_batches_by_length_keep_the_first_draw() -> None:
    plan = weighted().add_field("length", lambda sample: sample["x"] % 5 + 1)
    chain = plan.select("key length").deal(shuffle=True, batching=kdp.by_length("length", max_tokens=12))
    with pytest.warns(UserWarning, match=r"because `kdp\.by_length\(...\)` after it depends on their values"):
        num_batches = len(chain)
    chosen = Counter(weighted().column("key").tolist())
    for _ in range(3):
        batches = list(chain)
        assert len(batches) == num_batches
        assert Counter(key for batch in batches for key, _ in batch) == chosen
        assert all(len(batch) * max(length for _, length in batch) <= 12 for batch in batches)


@redrawn_or_not
def test_a_state_tells_redrawn_plans_from_fixed_ones(plan: Any) -> None:
    with kdp.Loader(dealt(plan(redraw=False))) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    with kdp.Loader(dealt(plan())) as loader, pytest.raises(ValueError, match="have changed"):
        loader.load_state_dict(state)


def test_plans_with_nothing_to_redraw_are_as_before() -> None:
    pairs = [
        (lambda redraw: source().oversample(redraw=redraw)),
        (lambda redraw: source(6).mix(source(6, 100), redraw=redraw)),
        (lambda redraw: kdp.from_dataset([*"abcd"], "x", labels=[0, 0, 1, 1]).oversample(mode="exact", redraw=redraw)),
    ]
    for make in pairs:
        with kdp.Loader(dealt(make(redraw=False))) as loader:
            state = loader.state_dict()
        with kdp.Loader(dealt(make(redraw=True))) as loader:
            loader.load_state_dict(state)
        assert redrawing_name(make(redraw=True)) is None


def test_redraw_must_be_true_or_false() -> None:
    for build in (weighted, exact, mixed):
        with pytest.raises(TypeError, match="`redraw` must be True or False, but is 1 instead"):
            build(redraw=1)
