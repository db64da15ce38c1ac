"""Receipts of epochs, and what several of them show together."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

import kdpipes as kdp
from kdpipes.testing import kill_one_worker, verify_receipts
from kdpipes.testing.checks import as_rank


def chain(size: int = 40, **options: Any) -> Any:
    source = kdp.from_dataset([(n, n % 3) for n in range(size)])
    return source.select("x").deal(**{"global_batch_size": 4, "shuffle": True, **options})


def run(pipe: Any, rank: int = 0, num_ranks: int = 1, *, kill: bool = False, **options: Any) -> Any:
    """Return the receipt of a rank's epoch, as it comes from a file."""
    with as_rank(rank, num_ranks), kdp.Loader(pipe, **options) as loader:
        for number, _ in enumerate(loader):
            if kill and not number:
                assert kill_one_worker()
        return json.loads(json.dumps(loader.receipt()))


def test_four_ranks_with_killed_workers_deliver_an_epoch_once() -> None:
    receipts = [run(chain(), rank, 4, num_workers=2, kill=True) for rank in range(4)]
    verdict = verify_receipts(receipts)
    assert verdict == (True, 40, 0, (0,), (), ())
    assert str(verdict) == "Every sample of epoch 0 was delivered exactly once: 40 samples."
    assert len({receipt["order"] for receipt in receipts}) == 4
    assert [receipt["order"] for receipt in receipts] == [run(chain(), rank, 4)["order"] for rank in range(4)]


def test_a_missing_rank_and_one_that_came_twice_are_found() -> None:
    receipts = [run(chain(), rank, 4) for rank in range(4)]
    assert verify_receipts(receipts[:3]).problems == ("Epoch 0: batches 0 to 9 of rank 3 of 4: not delivered.",)
    twice = verify_receipts([*receipts, receipts[1]])
    assert twice.problems == ("Epoch 0: batches 0 to 9 of rank 1 of 4: delivered 2 times.",)
    assert not twice.is_complete


def test_the_parts_of_a_resumed_epoch_fit_together() -> None:
    with as_rank(0, 1), kdp.Loader(chain()) as loader:
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        state, first = loader.state_dict(), loader.receipt()
        next(batches)
    rest = []
    for rank in range(2):
        with as_rank(rank, 2), kdp.Loader(chain(), num_workers=1) as loader:
            loader.load_state_dict(state)
            assert len(list(loader)) == 4
            rest.append(loader.receipt())
    assert verify_receipts([first, *rest]).is_complete
    gaps = verify_receipts([first, rest[0]]).problems
    assert gaps == ("Epoch 0: batches 6 to 9 of rank 1 of 2: not delivered.",)
    assert not verify_receipts(rest).is_complete


def test_four_ranks_with_kills_and_a_resume_deliver_once() -> None:
    receipts: list[Any] = []
    for rank in range(4):
        with as_rank(rank, 4), kdp.Loader(chain(), num_workers=2) as loader:
            batches = iter(loader)
            next(batches)
            assert kill_one_worker()
            for _ in range(3):
                next(batches)
            state = loader.state_dict()
            receipts.append(loader.receipt())
        with as_rank(rank, 4), kdp.Loader(chain(), num_workers=1) as loader:
            loader.load_state_dict(state)
            list(loader)
            receipts.append(loader.receipt())
    assert verify_receipts(receipts) == (True, 40, 0, (0,), (), ())
    assert not verify_receipts(receipts[:-1]).is_complete


def test_batches_after_a_state_that_is_loaded_count_once() -> None:
    with kdp.Loader(chain()) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        next(batches)
        loader.load_state_dict(state)
        assert len(list(loader)) == 7
        assert verify_receipts([loader.receipt()]).is_complete


def test_a_receipt_is_that_of_the_last_epoch_that_delivered() -> None:
    with kdp.Loader(chain()) as loader:
        assert loader.receipt()["num_samples"] == 0
        first = [list(loader), loader.receipt()][1]
        batches = iter(loader)
        assert loader.receipt() == first
        next(batches)
        second = loader.receipt()
        assert (second["epoch"], second["batches"], second["num_samples"]) == (1, [0, 1], 4)
        list(batches)
        both = verify_receipts([first, loader.receipt()])
        assert (both.is_complete, both.epochs) == (True, (0, 1))
        loader.set_epoch(0)
        list(loader)
        assert loader.receipt() == first


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_a_short_last_batch_is_planned_as_it_is_dealt(uneven: str) -> None:
    pipe = chain(39, uneven=uneven)
    receipts = [run(pipe, rank, 2) for rank in range(2)]
    assert verify_receipts(receipts).is_complete
    assert sum(receipt["num_padding"] for receipt in receipts) == (uneven == "pad")
    assert sum(receipt["num_samples"] for receipt in receipts) == (36 if uneven == "drop" else 39)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"num_batches": 15}, 60),
        ({"num_batches": 3}, 12),
        ({"batching": kdp.own_order(lambda epoch: [0, 1, 2, 0, 1, 39, 0, 5]), "shuffle": False}, 8),
    ],
)
def test_an_epoch_of_another_length_than_its_source_is_planned(options: Any, size: int) -> None:
    receipts = [run(chain(**options), rank, 2) for rank in range(2)]
    assert [receipt["num_samples"] for receipt in receipts] == [size // 2] * 2
    assert sum(receipt["num_padding"] for receipt in receipts) == 0
    assert verify_receipts(receipts).num_samples == size


def test_batches_by_length_have_receipts() -> None:
    source = kdp.from_dataset([("a" * n, n) for n in range(1, 30)]).select("x")
    pipe = source.deal(shuffle=True, uneven="pad", batching=kdp.by_length("y", global_max_tokens=64))
    assert verify_receipts([run(pipe, rank, 2) for rank in range(2)]).is_complete


def test_skipped_samples_are_counted_and_are_no_gap() -> None:
    source = kdp.from_dataset([(n, 0) for n in range(12)]).transform("x", lambda x: 1 / (x - 5)).on_error("skip")
    receipts = [run(source.select("x").deal(global_batch_size=4), rank, 2, num_workers=1) for rank in range(2)]
    verdict = verify_receipts(receipts)
    assert (verdict.is_complete, verdict.num_samples, verdict.num_skipped) == (True, 11, 1)
    assert "except for 1 that `on_error` skipped" in str(verdict)
    ends = kdp.from_dataset([(n, 0) for n in range(12)]).transform("x", lambda x: 1 / (x < 8)).on_error("skip")
    assert verify_receipts([run(ends.select("x").deal(batch_size=4))]).is_complete, "the last batch is empty"


def test_other_samples_are_found_by_the_digest() -> None:
    receipt = run(chain())
    changed = {**receipt, "digest": receipt["order"]}
    assert verify_receipts([changed]).problems == (
        "Epoch 0: 40 samples were delivered or skipped, but they are not the 40 planned ones.",
    )
    other = run(chain(seed=1), 1, 2)
    (text,) = verify_receipts([run(chain(), 0, 2), other]).problems
    assert "the receipts differ in `pipes`" in text


def test_ranks_that_got_the_same_part_are_found() -> None:
    source = kdp.from_dataset([(n, 0) for n in range(8)])
    both = [run(source.select("x").deal(batch_size=4, ranks=1), rank, 2) for rank in range(2)]
    assert verify_receipts(both).problems == ("Epoch 0: batches 0 to 1: delivered 2 times.",)


def test_what_is_not_a_receipt_is_an_error() -> None:
    receipt = run(chain())
    for wrong, text in (
        ([], "at least one receipt"),
        ([{}], "`receipt` must be what `receipt\\(\\)` of a Loader returns"),
        ([{**receipt, "version": 9}], "version 9"),
        ([{**receipt, "rank": 1}], "from 0 to 0"),
    ):
        with pytest.raises(ValueError, match=text):
            verify_receipts(wrong)


def test_a_stock_stream_has_a_receipt_by_keys() -> None:
    stream = IterableWrapper([(n, 0) for n in range(4)]).to_samples(fields="x y").select("x").deal(batch_size=2)
    receipt = run(stream, num_workers=2)
    assert verify_receipts([receipt]).unknown == (
        "No sample came twice.",
        "How many samples the stream has is not known.",
    )
    assert receipt["batches"] == [0, None]
    plain = (
        IterableWrapper([(n, 0) for n in range(4)]).to_samples(fields="x y").select("x").map(list).deal(batch_size=2)
    )
    with kdp.Loader(plain) as loader:
        list(loader)
        with pytest.raises(kdp.ChainError, match="A receipt of a stream needs the keys of its samples"):
            loader.receipt()
    held = kdp.from_dataset([0, 1], "x").select("x").deal(batch_size=1).shuffle()
    with kdp.Loader(held) as loader, pytest.raises(kdp.ChainError, match=r"A receipt needs `\.deal"):
        loader.receipt()


def test_digests_of_parts_add_up_to_that_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        size, num_ranks = int(rng.integers(9, 60)), int(rng.integers(1, 5))
        pipe = chain(size, global_batch_size=num_ranks * int(rng.integers(1, 4)), uneven="pad")
        receipts = [run(pipe, rank, num_ranks) for rank in range(num_ranks)]
        assert verify_receipts(receipts).is_complete


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("end", ["filter", "flatmap"])
def test_batches_that_a_filter_drops_are_not_delivered(num_workers: int, end: str) -> None:
    def keep(batch: list[Any]) -> bool:
        return batch[0][0] % 8 == 0

    dealt = chain(shuffle=False)
    pipe = dealt.filter(keep) if end == "filter" else dealt.flatmap(lambda batch: [batch] if keep(batch) else [])
    with kdp.Loader(pipe, num_workers=num_workers) as loader:
        for _epoch in range(2):
            delivered = sum(map(len, loader))
            verdict = verify_receipts([loader.receipt()])
            assert (verdict.num_samples, bool(verdict)) == (delivered, False) == (20, False)
            assert "20 samples were delivered or skipped, but they are not the 40 planned" in str(verdict)


def test_batches_of_skipped_samples_alone_are_not_dropped() -> None:
    def fails(value: int) -> int:
        if 8 <= value < 14:
            raise ValueError("bad")
        return value

    source = kdp.from_dataset([(n, 0) for n in range(40)]).transform("x", fails).on_error("skip").select("x")
    receipt = run(source.deal(batch_size=4).filter(lambda batch: True))
    assert verify_receipts([receipt])[:3] == (True, 34, 6)


def test_a_part_resumed_after_a_dropped_batch_forgets_it() -> None:
    with kdp.Loader(chain(shuffle=False).filter(lambda batch: batch[0][0] != 8)) as loader:
        next(iter(loader))
        state = loader.state_dict()
        list(loader)
        loader.load_state_dict(state)
        assert len(list(loader)) == 8
        assert loader.receipt()["num_samples"] == 36


def test_a_rank_set_by_apply_sharding_is_that_of_the_receipt() -> None:
    receipts = []
    for rank in range(2):
        pipe = chain(31, global_batch_size=6, uneven="pad")
        apply_sharding(pipe, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
        receipts.append(run(pipe))
    assert [(receipt["rank"], receipt["num_ranks"]) for receipt in receipts] == [(0, 2), (1, 2)]
    assert not verify_receipts(receipts[:1])
    assert verify_receipts(receipts)[:2] == (True, 31)
