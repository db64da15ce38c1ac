"""Random numbers depend on (seed, epoch, position, operation) alone; the global generators are restored."""

from __future__ import annotations

import functools
import multiprocessing
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.randomness import (
    EpochCounter,
    SampleKey,
    borrowed_generator,
    current_key,
    generator,
    hash_key,
    seeded_globals,
    using_key,
)

Numbers = tuple[float, float, float]


def _globals() -> Numbers:
    return random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))


def _in_fork(function: Callable[[], Any]) -> Any:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(function()))
    child.start()
    answer = answers.get()
    child.join()
    return answer


def _word(key: SampleKey, operation: str = "crop") -> int:
    return int(key.rng(operation).bit_generator.random_raw())


def test_generators_differ_by_seed_epoch_position_and_operation() -> None:
    key = SampleKey(seed=1, epoch=2, position=3)
    others = [
        key._replace(seed=2),
        key._replace(epoch=3),
        key._replace(position=4),
        SampleKey(2, 1, 3),
        SampleKey(1, 3, 2),
    ]
    words = [_word(key), _word(key, "flip"), *map(_word, others)]
    assert len(set(words)) == len(words)


def test_generators_of_the_same_key_agree_wherever_they_are_made() -> None:
    key = SampleKey(seed=1, epoch=2, position=3)
    assert _word(key) == _word(SampleKey(1, 2, 3)) == _word(key._replace(is_padding=True)) == 7660910468906000103
    assert _in_fork(lambda: _word(key)) == _word(key)


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 5)), max_size=6))
def test_a_borrowed_generator_draws_what_a_new_one_draws(keys: list[tuple[bytes, int]]) -> None:
    for key, number in keys:
        borrowed, own = borrowed_generator(key), generator(key)
        for _ in range(number):
            assert borrowed.integers(7, dtype=np.uint32) == own.integers(7, dtype=np.uint32), "half a word is left over"
            assert borrowed.random() == own.random()
        assert repr(borrowed.bit_generator.state) == repr(own.bit_generator.state)


def test_each_thread_borrows_a_generator_of_its_own() -> None:
    mine = borrowed_generator(bytes(16))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(borrowed_generator, bytes(16)).result() is not mine


def test_a_transform_that_may_keep_its_generator_borrows_none() -> None:
    """Only kdpipes' own transforms borrow: a subclass that overrides `draw` may keep what it gets."""

    class Keeping(kdp.HorizontalFlip):
        @functools.wraps(kdp.HorizontalFlip.draw)
        def draw(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
            kept.append(rng)
            return super().draw(value, rng)

    kept: list[np.random.Generator] = []
    pipe = kdp.from_dataset([(torch.zeros(3, 2, 2), 0)] * 2).transform("x", Keeping(), kdp.HorizontalFlip(), Keeping())
    for (x,) in pipe.select("x"):
        assert x.shape == (3, 2, 2)
    assert len({id(rng) for rng in kept}) == 4
    assert len({rng.random() for rng in kept}) == 4


def test_a_draw_may_be_any_callable() -> None:
    @dataclass
    class Numbers:  # which has no hash
        def __call__(self, value: Any, rng: np.random.Generator) -> dict[str, Any]:
            return {"number": int(rng.integers(9))}

    class Adding:
        def __init__(self) -> None:
            self.draw = Numbers()

        def apply(self, value: Any, params: dict[str, Any]) -> Any:
            return value + params["number"]

    assert 0 <= kdp.from_dataset([(0, 0)]).transform("x", Adding()).select("x")[0][0] < 9


def test_the_globals_follow_the_key_and_leave_no_trace() -> None:
    def numbers(key: bytes) -> Numbers:
        with seeded_globals(key):
            return _globals()

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    undisturbed = [_globals(), _globals()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before, one, again, other, after = _globals(), numbers(b"a"), numbers(b"a"), numbers(b"b"), _globals()
    assert one == again
    assert all(left != right for left, right in zip(one, other, strict=True))
    assert [before, after] == undisturbed


def test_numpys_other_global_generators_are_seeded_and_restored() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        with seeded_globals(b"a") as has_moved:
            one = np.random.random()
            assert has_moved()
        with seeded_globals(b"a") as has_moved:
            assert not has_moved()
        with seeded_globals(b"a"):
            assert np.random.random() == one
        assert np.random.random() == np.random.Generator(np.random.PCG64(3)).random()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_spawned_generators_are_the_same_in_every_process() -> None:
    def spawned() -> list[float]:
        return [float(one.random()) for one in generator(bytes(range(16))).spawn(2)]

    assert spawned() == _in_fork(spawned)
    assert len(set(spawned())) == 2


def test_the_globals_are_restored_after_an_error() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = _globals()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)

    def fail() -> None:
        with seeded_globals(b"key"):
            raise OSError(_globals())

    with pytest.raises(OSError):
        fail()
    assert _globals() == expected


def test_seeded_globals_nest() -> None:
    with seeded_globals(b"outer"):
        alone = [_globals(), _globals()]
    with seeded_globals(b"outer"):
        first = _globals()
        with seeded_globals(b"inner"):
            inner = _globals()
        assert [first, _globals()] == alone
    assert inner not in alone


def test_the_three_global_streams_differ() -> None:
    with seeded_globals(b"key"):
        streams = list(zip(*(_globals() for _ in range(100)), strict=True))
    assert len({number for stream in streams for number in stream}) == 300


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_a_key_tells_apart_where_parts_begin(one: list[str], other: list[str]) -> None:
    assert (hash_key(*one) == hash_key(*other)) == (one == other)
    assert hash_key("", *one) != hash_key(*one) != hash_key("".join(one), "end")
    assert len(hash_key(*one)) == 32


def test_samples_take_the_key_in_use() -> None:
    def fail() -> None:
        with using_key(SampleKey(5, 6, 7)):
            raise OSError(kdp.Sample({}, index=4).draw)

    with pytest.raises(OSError) as caught:
        fail()
    assert caught.value.args == (SampleKey(5, 6, 7),)
    assert current_key() is None
    assert kdp.Sample({}, index=4).draw == SampleKey(position=4)


def test_epochs_count_from_0_or_where_set_whatever_the_seed() -> None:
    counter, epochs = EpochCounter(), []
    for _ in range(3):
        counter.seeded()
        epochs.append(counter.begin())
    counter.set(7)
    assert [*epochs, counter.begin(), counter.begin()] == [0, 1, 2, 7, 8]


def test_a_new_process_takes_seeds_for_epochs_not_run_here() -> None:
    counter, epochs = EpochCounter(), []
    for _ in range(3):
        counter.seeded()
        epochs.append(_in_fork(lambda: [counter.begin(), counter.begin()]))
        counter.seeded()
    assert epochs == [[0, 1], [1, 2], [2, 3]]
    assert [counter.begin(), counter.begin()] == [3, 4]
    assert _in_fork(counter.begin) == 5
    counter.skip(2)
    assert counter.begin() == 7


def test_workers_of_torchs_loader_run_another_epoch_each_time() -> None:
    chain = IterableWrapper([0, 0]).to_samples(fields="x").transform("x", lambda x, rng: int(rng.integers(10**9)))
    drawn = [SampleKey(0, epoch, place).rng("lambda").integers(10**9) for epoch in range(3) for place in (0, 1)]
    for persistent in (False, True):
        loader = DataLoader(chain.select("x"), batch_size=None, num_workers=1, persistent_workers=persistent)
        assert [x for _ in range(3) for (x,) in loader] == drawn
        del loader


def test_a_process_that_is_forked_while_a_thread_draws_can_draw() -> None:
    inside, done = threading.Event(), threading.Event()

    def draw() -> None:
        with seeded_globals(b"key"):
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=draw)
    thread.start()
    inside.wait(30)
    try:
        in_child = _in_fork(lambda: _drawn(b"key"))
    finally:
        done.set()
        thread.join()
    assert in_child == _drawn(b"key")


def _drawn(key: bytes) -> float:
    with seeded_globals(key):
        return random.random()
