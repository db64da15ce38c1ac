"""How many samples `on_error` may leave out, and samples that take the places of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

import kdpipes as kdp

SERVICES = [None, kdp.ProcessReadingService(2), kdp.ThreadReadingService(3)]
services = pytest.mark.parametrize("service", SERVICES, ids=["inline", "processes", "threads"])


class FailAt:
    """Fails for some of the numbers."""

    def __init__(self, is_bad: Callable[[int], bool]) -> None:
        self.is_bad = is_bad

    def __call__(self, x: int) -> int:
        if self.is_bad(x):
            raise OSError(f"{x} is broken")
        return x


def indexed(is_bad: Callable[[int], bool], *action: Any, size: int = 1000, deal: Any = None, **options: Any) -> Any:
    chain = kdp.from_dataset([(number, 0) for number in range(size)]).transform("x", FailAt(is_bad))
    return chain.on_error(*action, **options).select("x", bare=True).deal(**(deal or {"batch_size": 10}))


def stream(is_bad: Callable[[int], bool], *action: Any, size: int = 1000, **options: Any) -> Any:
    source = IterableWrapper([(number, 0) for number in range(size)]).to_samples(fields="x y")
    chain = source.transform("x", FailAt(is_bad)).on_error(*action, **options).select("x", bare=True)
    return chain.deal(batch_size=10)


FLAVOURS = pytest.mark.parametrize("make", [indexed, stream])


def until_error(batches: Any) -> tuple[list[Any], str]:
    """Return the batches before an error, and what it says."""
    given: list[Any] = []
    with pytest.raises(kdp.DataError) as caught:
        given.extend(batches)
    return given, str(caught.value).partition("\n")[0]


@FLAVOURS
def test_a_bug_in_a_transform_ends_the_epoch_soon(make: Any) -> None:
    tried: list[int] = []

    def is_bad(x: int) -> bool:
        tried.append(x)
        return True

    given, error = until_error(make(is_bad, "skip"))
    assert given == []
    assert len(tried) == 11, "10 of the first 100 are allowed"
    assert error == (
        "11 of about 11 samples could not be made: more than `max_share=0.1`. The last one is '10': OSError: 10 is "
        "broken. If a pipe has a bug, fix it. If the data are really that bad, raise the limits `max_share` and "
        "`max_samples` of `.on_error(...)`."
    )


@FLAVOURS
@services
def test_the_error_comes_at_the_same_sample_for_any_workers(make: Any, service: Any) -> None:
    def is_bad(x: int) -> bool:
        return x >= 300 and x % 4 == 0

    expected = until_error(make(is_bad, "skip"))
    assert "50 of about 497 samples could not be made: more than `max_share=0.1`" in expected[1]
    with kdp.Loader(make(is_bad, "skip"), reading_service=service) as loader:
        assert until_error(loader) == expected
        assert until_error(loader) == expected, "in the next epoch, too"


@FLAVOURS
def test_fewer_bad_samples_than_the_share_are_left_out(make: Any) -> None:
    for max_share, every in ((0.1, 10), (0.5, 2), (0.01, 100)):
        kept = [x for batch in make(lambda x: x % every == every - 1, "skip", max_share=max_share) for x in batch]  # noqa: B023
        assert len(kept) == 1000 - 1000 // every
    assert sum(map(len, make(lambda x: x < 900, "skip", max_share=1))) == 100


@FLAVOURS
@services
def test_an_epoch_without_a_sample_is_an_error(make: Any, service: Any) -> None:
    with kdp.Loader(make(lambda x: True, "skip", size=4), reading_service=service) as loader:
        assert until_error(loader)[1].startswith("No sample could be made. The last one is '3': OSError")
    with pytest.raises(kdp.DataError, match="No sample could be made"):
        list(make(lambda x: True, "skip", size=40, max_share=1))


@FLAVOURS
@services
def test_an_empty_source_is_not_an_error(make: Any, service: Any) -> None:
    with kdp.Loader(make(lambda x: True, "skip", size=0), reading_service=service) as loader:
        assert list(loader) == []


@FLAVOURS
@services
def test_the_number_of_bad_samples_can_be_limited(make: Any, service: Any) -> None:
    def is_bad(x: int) -> bool:
        return x % 50 == 49

    with kdp.Loader(make(is_bad, "skip", max_samples=20), reading_service=service) as loader:
        for _ in range(2):  # each epoch counts its own
            assert sum(map(len, loader)) == 980
    with kdp.Loader(make(is_bad, "skip", max_samples=3), reading_service=service) as loader:
        given, error = until_error(loader)
    assert len(given) == 19
    assert error.startswith("4 samples could not be made: more than `max_samples=3`. The last one is '199'")
    assert len(until_error(make(is_bad, "skip", max_samples=0))[0]) == 4
    assert len(until_error(make(is_bad, "skip", max_share=0))[0]) == 4


def test_a_resumed_epoch_counts_from_where_it_goes_on() -> None:
    chain = indexed(lambda x: x >= 800 and x % 2 == 0, "skip")
    with kdp.Loader(chain) as loader:
        batches = iter(loader)
        for _ in range(80):
            next(batches)
        state = loader.state_dict()
    with kdp.Loader(indexed(lambda x: x >= 800 and x % 2 == 0, "skip")) as loader:
        loader.load_state_dict(state)
        given, error = until_error(loader)
    assert len(given) == 2
    assert "11 of about 30 samples" in error


def test_a_resumed_epoch_may_end_without_a_sample() -> None:
    chain = indexed(lambda x: x >= 990, "skip")
    with kdp.Loader(chain, num_workers=2) as loader:
        assert len(list(loader)) == 99
        state = {**loader.state_dict(), "epoch": 0, "batch": 99}
        loader.load_state_dict(state)
        assert list(loader) == [], "of the batch that is left, every sample is bad"
        assert len(list(loader)) == 99


def test_a_resumed_chain_counts_from_where_it_goes_on() -> None:
    def resumed(is_bad: Callable[[int], bool], batch: int) -> Any:
        chain = indexed(is_bad, "skip")
        chain.load_state_dict({**chain.state_dict(), "batch": batch})
        return chain

    assert "11 of about 30 samples" in until_error(resumed(lambda x: x >= 800 and x % 2 == 0, 80))[1]
    assert list(resumed(lambda x: x >= 990, 99)) == [], "of the batch that is left, every sample is bad"


def test_ranks_of_torchrun_count_their_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    chain = indexed(lambda x: x % 100 in (0, 1, 2, 3), "skip", max_share=0.05, deal={"global_batch_size": 20})
    assert "6 of about 51 samples" in until_error(chain)[1]


def test_ranks_count_their_own_samples() -> None:
    def of_rank(rank: int, max_share: float) -> Any:
        deal = {"global_batch_size": 20}  # rank 0 gets 8 bad ones of 100, rank 1 none
        chain = indexed(lambda x: x % 100 in (0, 1, 2, 3), "skip", max_share=max_share, deal=deal)
        apply_sharding(chain, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        return chain

    assert "6 of about 51 samples" in until_error(of_rank(0, 0.05))[1]
    assert sum(map(len, of_rank(0, 0.2))) == 460
    assert sum(map(len, of_rank(1, 0))) == 500


def test_workers_of_other_loaders_count_their_own_samples() -> None:
    def of_worker(size: int) -> Any:
        chain = indexed(lambda x: True, "skip", size=size)
        apply_sharding(chain, 2, 1, SHARDING_PRIORITIES.MULTIPROCESSING)
        return chain

    assert "11 of about 16 samples" in until_error(of_worker(1000))[1]
    assert list(of_worker(20)) == [], "the other worker may have good ones"
    loader = DataLoader(indexed(lambda x: x % 50 == 0, "skip"), batch_size=None, num_workers=2)
    assert sum(map(len, loader)) == 980


def test_quarantined_samples_are_named_where_they_may_be_good(tmp_path: Path) -> None:
    chain = indexed(lambda x: True, "quarantine", path=tmp_path / "bad.jsonl")
    assert "fix it, and remove the samples that '" in until_error(chain)[1]


def test_looking_at_a_batch_does_not_count(tmp_path: Path) -> None:
    dealt = indexed(lambda x: x < 15, "skip", deal={"batch_size": 30})
    assert len(dealt.whole_samples(0, 0)) == 15


@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        ({"max_share": 2}, ValueError, "`max_share` must be a share, from 0 to 1, but is 2 instead"),
        ({"max_share": -0.1}, ValueError, "`max_share` must be a share"),
        ({"max_share": "all"}, TypeError, "`max_share` must be a share"),
        ({"max_share": True}, TypeError, "`max_share` must be a share"),
        ({"max_samples": -1}, ValueError, "`max_samples` must be an integer of at least 0"),
        ({"max_samples": 0.5}, TypeError, "`max_samples` must be an integer"),
    ],
)
def test_limits_out_of_range_are_errors(options: Any, error: Any, rule: str) -> None:
    with pytest.raises(error, match=rule):
        indexed(lambda x: True, "skip", **options)


class Jitter:
    """Adds a recorded number."""

    def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"by": float(rng.random())}

    def apply(self, value: Any, params: dict[str, Any]) -> Any:
        return value + params["by"]


def substituted(is_bad: Callable[[int], bool] = lambda x: x % 20 == 7, **deal: Any) -> Any:
    chain = kdp.from_dataset([(number, 0) for number in range(200)]).transform("x", FailAt(is_bad))
    chain = chain.record_ctx().transform("x", Jitter()).on_error("substitute")
    deal = {"batch_size": 8, "shuffle": True, "seed": 5, **deal}
    return chain.select("key ordinal is_padding x", return_ctx=True).deal(**deal)


@services
def test_substitutes_keep_the_shapes_and_are_the_same_everywhere(service: Any) -> None:
    here = substituted()
    expected = [list(here) for _ in range(2)]
    assert [len(batch) for batch in expected[0]] == [8] * 25
    with kdp.Loader(substituted(), reading_service=service) as loader:
        assert [list(loader) for _ in range(2)] == expected
        assert loader.stats()["samples"] == 400
        skipped = [skip for skip in loader.skipped if skip["epoch"] == 0]
    items = {item[1]: item for batch in expected[0] for item, _ in batch}
    assert sorted(items) == list(range(200)), "ordinals stay"
    places = {skip["ordinal"] for skip in skipped}
    assert len(places) == 10
    assert all(skip["is_replaced"] for skip in skipped)
    assert {ordinal for ordinal, item in items.items() if item[2]} == places, "marked as padding"
    assert not {item[0] for item in items.values()} & {str(x) for x in range(7, 200, 20)}
    others = [[item for batch in epoch for item, _ in batch if item[2]] for epoch in expected]
    assert {item[0] for item in others[0]} != {item[0] for item in others[1]}, "drawn anew in each epoch"


def test_substitutes_are_the_same_after_a_resume_for_any_ranks() -> None:
    expected = list(substituted())
    with kdp.Loader(substituted(), num_workers=2) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(11)]
        state = loader.state_dict()
    with kdp.Loader(substituted()) as loader:
        loader.load_state_dict(state)
        assert first + list(loader) == expected
    assert kdp.find(substituted(), state, 3, epoch=0).load() == expected[3]
    parts = []
    for rank in range(2):
        part = substituted(batch_size=None, global_batch_size=8)
        apply_sharding(part, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        parts += [item for batch in part for item in batch]
    assert sorted(parts, key=lambda item: item[0][1]) == [item for batch in expected for item in batch]


def test_substitutes_can_be_replayed() -> None:
    chain = substituted()
    (key, _, _, x), ctx = next((item, ctx) for batch in chain for item, ctx in batch if item[2])
    (_, _, _, again), _ = kdp.replay(key, ctx, chain)
    assert again == x


def test_substitutes_may_fail_too() -> None:
    chain = kdp.from_dataset([(number, 0) for number in range(50)]).transform("x", FailAt(lambda x: x % 2 == 0))
    dealt = chain.on_error("substitute", max_share=1).select("x", bare=True).deal(batch_size=10)
    assert [len(batch) for batch in dealt] == [10] * 5
    assert all(x % 2 for batch in dealt for x in batch)


def test_a_bug_is_an_error_where_samples_are_substituted() -> None:
    with pytest.raises(kdp.DataError, match="11 of about 11 samples could not be made"):
        list(substituted(lambda x: True))
    chain = kdp.from_dataset([(number, 0) for number in range(50)]).transform("x", FailAt(lambda x: True))
    with pytest.raises(kdp.DataError, match=r"32 samples drawn to replace it; .* is OSError: \d+ is broken"):
        list(chain.on_error("substitute", max_share=1).select("x").deal(batch_size=10))


def test_streams_and_batches_by_length_cannot_substitute() -> None:
    with pytest.raises(kdp.ChainError, match=r"needs an indexed source.* but `select` is a stream"):
        stream(lambda x: False, "substitute")
    chain = kdp.from_dataset([([1], 1)], "x length").on_error("substitute").select("x")
    with pytest.raises(kdp.ChainError, match=r"cannot be used with `kdp\.by_length\("):
        chain.deal(batching=kdp.by_length("length", max_tokens=4))
