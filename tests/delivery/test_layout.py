"""Layouts: every ordinal once, whatever the number of ranks and workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from kdpipes.core.arithmetic import Permutation
from kdpipes.delivery.batching import EqualEpoch
from kdpipes.delivery.layout import Layout, Sharding


@given(
    num_samples=st.integers(0, 60),
    num_ranks=st.integers(1, 4),
    num_workers=st.integers(1, 4),
    size=st.integers(1, 5),
    uneven=st.sampled_from(["keep", "pad", "drop"]),
)
def test_ranks_and_workers_share_out_each_ordinal_once(
    num_samples: int, num_ranks: int, num_workers: int, size: int, uneven: str
) -> None:
    layout = Layout(size, None, uneven)
    num_batches = layout.num_batches(num_samples, num_ranks)
    got: list[int] = []
    counts = set()
    for rank in range(num_ranks):
        here = 0
        for worker in range(num_workers):
            sharding = Sharding(rank, num_ranks, worker, num_workers)
            for batch in range(worker, num_batches, num_workers):
                try:
                    got += layout.ordinals(batch, num_samples, sharding)
                except ValueError:
                    assert uneven == "keep"
                    assert batch == num_batches - 1
                    return
                here += 1
        counts.add(here)
    assert len(counts) == 1
    global_size = size * num_ranks
    whole = {"keep": num_samples, "drop": num_samples // global_size * global_size}
    assert sorted(got) == list(range(whole.get(uneven, num_batches * global_size)))


def test_a_rank_takes_a_contiguous_slice_of_the_global_batch() -> None:
    layout = Layout(None, 8, "keep")
    assert [list(layout.ordinals(1, 100, Sharding(rank, 2))) for rank in range(2)] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert list(layout.ordinals(1, 100, Sharding(0, 1))) == list(range(8, 16))


def test_a_short_batch_that_leaves_a_rank_empty_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"1 sample for 2 ranks.*uneven=\"pad\""):
        Layout(2, None, "keep").ordinals(1, 5, Sharding(0, 2))


def test_a_global_batch_that_ranks_cannot_share_is_rejected() -> None:
    with pytest.raises(ValueError, match="divisible by the number of ranks, 3, but is 8"):
        Layout(None, 8, "keep").size_of(3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, None, "keep"), "Exactly one of `batch_size` or `global_batch_size` must be given, but neither"),
        ((1, 2, "keep"), "but both are"),
        ((0, None, "keep"), "`batch_size` must be an integer of at least 1, but is 0"),
        ((None, 0, "keep"), "`global_batch_size` must be an integer of at least 1"),
        ((4, None, "wrap"), "`uneven` must be one of 'keep', 'pad', 'drop', but is 'wrap'"),
    ],
)
def test_bad_arguments_are_rejected(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [SHARDING_PRIORITIES.DISTRIBUTED, SHARDING_PRIORITIES.MULTIPROCESSING])
def test_ranks_and_workers_are_told_one_after_the_other(group: SHARDING_PRIORITIES) -> None:
    other = (
        SHARDING_PRIORITIES.MULTIPROCESSING
        if group == SHARDING_PRIORITIES.DISTRIBUTED
        else SHARDING_PRIORITIES.DISTRIBUTED
    )
    numbers = {SHARDING_PRIORITIES.DISTRIBUTED: (4, 3), SHARDING_PRIORITIES.MULTIPROCESSING: (2, 1)}
    sharding = Sharding().applied(*numbers[group], group, 1).applied(*numbers[other], other, 1)
    assert sharding == Sharding(rank=3, num_ranks=4, worker=1, num_workers=2)


def test_the_one_number_of_torchs_dataloader_is_taken_apart() -> None:
    for rank in range(2):
        for worker in range(3):
            told = Sharding().applied(6, worker * 2 + rank, SHARDING_PRIORITIES.DEFAULT, 2)
            assert told == Sharding(rank, 2, worker, 3)


@pytest.mark.parametrize(("local", "num_told"), [(None, 1), ("1", 1), ("2", 2), ("4", 4), ("3", 1), ("all", 1)])
@pytest.mark.parametrize("first", [0, 2])
def test_the_order_of_an_epoch_is_that_of_this_hosts_ranks(
    monkeypatch: pytest.MonkeyPatch, local: str | None, num_told: int, first: int
) -> None:
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    for rank in range(4):
        epochs = [EqualEpoch(40, Layout(2, None, "keep"), Sharding(one, 4)) for one in range(4)]
        begin = rank - rank % num_told
        here = epochs[begin : begin + num_told]
        want = [position for batch in range(first, 5) for one in here for position in one.positions(batch)]
        assert [position for part in epochs[rank].windows(first) for position in part.tolist()] == want
    assert not list(EqualEpoch(40, Layout(2, None, "keep"), Sharding(), Permutation(40, key=b"")).windows(0))


@pytest.mark.parametrize("batch_size", [1, 7, 300, 2_000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_positions_are_independent_of_batches_read_before(batch_size: int, shuffled: bool) -> None:
    order = Permutation(5_000, key=b"") if shuffled else None
    layout = Layout(None, 2 * batch_size, "pad")
    for worker in range(3):
        epoch = EqualEpoch(5_000, layout, Sharding(1, 2, worker, 3), order)
        batches = [*range(worker, epoch.num_batches, 3), *range(epoch.num_batches)[::-5]]
        for batch in batches:
            start = batch * 2 * batch_size + batch_size
            places = np.arange(start, start + batch_size) % 5_000
            assert np.array_equal(epoch.positions(batch), places if order is None else order[places])
