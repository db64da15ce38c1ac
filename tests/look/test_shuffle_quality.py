"""How well a chain shuffles."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.testing import shuffle_quality


def numbers(size: int = 2000, num_classes: int = 4) -> Any:
    return kdp.from_dataset([(n, n * num_classes // size) for n in range(size)])


def stream(size: int = 2000) -> Any:
    items = IterableWrapper([(n, n * 4 // size) for n in range(size)])
    return items.to_samples(fields="x y", key=lambda item: f"{item[0]:06}")


def test_a_full_shuffle_is_perfect_in_every_measure() -> None:
    found = shuffle_quality(numbers().select("x").deal(batch_size=16, shuffle=True))
    assert found.is_good
    assert found.num_samples == 2000
    for share in (found.spread, found.apart, found.renewal):
        assert share == pytest.approx(1, abs=0.05)
    assert found.class_runs == pytest.approx(1, abs=0.1)
    assert found.longest_run is not None
    assert found.longest_run < 20


def test_the_order_of_the_source_is_weak_in_every_measure() -> None:
    found = shuffle_quality(numbers().select("x").deal(batch_size=16))
    assert not found.is_good
    assert (found.spread, found.renewal, found.longest_run) == (0, 0, 500)
    assert found.apart < 0.1
    assert found.class_runs is not None
    assert found.class_runs > 100


def test_a_fixed_permutation_repeats_its_batches_in_each_epoch() -> None:
    found = shuffle_quality(numbers().permute(seed=0).select("x").deal(batch_size=16))
    assert found.spread == pytest.approx(1, abs=0.05), "it counts from the source, before the plan"
    assert (found.renewal, found.is_good) == (0, False)


def test_a_small_buffer_leaves_neighbours_together() -> None:
    small, large = (
        shuffle_quality(stream().shuffle(buffer_size=size).select("x").deal(batch_size=16)) for size in (20, 2000)
    )
    assert small.spread < 0.1 < 0.5 < large.spread
    assert (small.is_good, large.is_good) == (False, True)
    assert small.longest_run is not None
    assert small.longest_run > 400


def test_two_sources_are_told_apart() -> None:
    mixed = kdp.concat(numbers(500, 1), numbers(500, 1)).select("x").deal(batch_size=10, shuffle=True)
    found = shuffle_quality(mixed)
    assert (found.is_good, found.class_runs, found.longest_run) == (True, None, None), "there is one class only"


def test_batches_of_one_sample_have_no_pairs() -> None:
    found = shuffle_quality(numbers(50).select("x").deal(batch_size=1, shuffle=True))
    assert found.renewal is None


def test_no_sample_of_an_indexed_chain_is_read() -> None:
    def fail(x: Any) -> Any:
        raise AssertionError("read")

    chain = numbers().transform("x", fail).select("x").deal(batch_size=16, shuffle=True)
    assert shuffle_quality(chain, epoch=3, max_samples=160).num_samples == 160


def test_it_prints_and_is_plain_data() -> None:
    found = shuffle_quality(numbers().select("x").deal(batch_size=16))
    assert str(found).startswith("The shuffle is weak, compared with a perfect one (2,000 samples):\n")
    assert "neighbors of the source end up apart by" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["is_good"] is False


def test_a_chain_without_batches_is_an_error() -> None:
    with pytest.raises(kdp.ChainError, match="has no batches"):
        shuffle_quality(numbers())
    with pytest.raises(kdp.ChainError, match="fewer than two samples"):
        shuffle_quality(numbers(1).deal(batch_size=1))
