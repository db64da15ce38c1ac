"""Shared buffers: batches made in them arrive unchanged, and none is written over another."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp
from kdpipes.delivery import empty_batch
from kdpipes.delivery.collate_samples import collate
from kdpipes.loader.buffers import BorrowedBuffers, SharedBuffers, pack, unpack
from kdpipes.loader.channel import SharedFile


class Pair:
    """Both ends of a worker's buffers, in one process."""

    def __init__(self) -> None:
        self.worker, self.main = SharedBuffers(2), BorrowedBuffers()
        self._arena = 0

    def send(self, item: Any) -> Any:
        """Return what arrives of an item."""
        stream, arrays = pack(item, self.worker.given)
        number, places = self.worker.put(arrays)
        self.worker.begin_batch()
        if self._arena != self.worker.arena:
            self._arena = self.worker.arena
            assert self.worker.file is not None
            self.main.attach(self._arena, SharedFile(os.dup(self.worker.file.number)))
        assert self.main.arena is not None
        return unpack(stream, self.main.borrow(self.main.arena, number, places))

    def acknowledge(self) -> None:
        """Let the worker know which buffers have been released."""
        released = self.main.take_released()
        if released is not None:
            arena, buffers, is_detached = released
            self.worker.release(arena, buffers, is_detached=is_detached)

    def is_shared(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.worker.given


@pytest.fixture
def pair() -> Pair:
    """Buffers that have carried a batch of 100,000 bytes."""
    pair = Pair()
    pair.send(torch.zeros(100_000, dtype=torch.uint8))
    pair.acknowledge()
    return pair


def filled(pair: Pair, shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return pair.worker.empty(shape, dtype).fill_(value)


def address(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr())


def test_a_batch_arrives_in_the_memory_in_which_it_was_made(pair: Pair) -> None:
    for value in (1, 2):
        x, y = filled(pair, (2, 300), value), filled(pair, (2,), -value, torch.int64)
        places = [address(one) - address(x) for one in (x, y)]
        there, labels = pair.send((x, y))
        assert (there.unique().tolist(), labels.tolist()) == ([value], [-value] * 2)
        assert [address(one) - address(there) for one in (there, labels)] == places
        y += 1
        assert labels.tolist() == [1 - value] * 2, "they are the same memory"
        del there, labels, x, y
        pair.acknowledge()


def test_tensors_sent_reordered_or_as_views_arrive_unchanged(pair: Pair) -> None:
    x, y = filled(pair, (1000,), 1), filled(pair, (1000,), 2)
    turned = filled(pair, (2, 3), 5)
    turned[0] = 4
    other = torch.full((500,), 3, dtype=torch.uint8)
    found = pair.send((other, y, x[::2], x, turned.t_()))
    assert [part.unique().tolist() for part in found] == [[3], [2], [1], [1], [4, 5]]
    assert found[-1].tolist() == [[4, 5]] * 3


def test_a_batch_that_outgrows_the_arena_keeps_earlier_data(pair: Pair) -> None:
    x = filled(pair, (10,), 1)
    y = filled(pair, (1_000_000,), 2)
    assert [pair.is_shared(one) for one in (x, y)] == [True, False]
    first, second = pair.send((x, y))
    assert (first.tolist(), second.unique().tolist()) == ([1] * 10, [2])
    assert pair.is_shared(filled(pair, (1_000_000,), 2)), "the new arena is large enough"


def test_a_buffer_is_not_written_while_a_view_of_it_is_held(pair: Pair) -> None:
    held = [pair.send(filled(pair, (100,), value)) for value in (1, 2)]
    pair.acknowledge()
    assert not pair.worker.has_room
    assert not pair.is_shared(pair.worker.empty((100,), torch.uint8))
    view = held.pop()[10:20]
    pair.acknowledge()
    assert not pair.worker.has_room
    assert view.tolist() == [2] * 10
    del view
    pair.acknowledge()
    assert pair.is_shared(filled(pair, (100,), 3))
    assert held[0].tolist() == [1] * 100


def test_an_empty_tensor_needs_no_buffer(pair: Pair) -> None:
    assert not pair.is_shared(pair.worker.empty((0, 3), torch.uint8))
    assert pair.send(pair.worker.empty((0, 3), torch.uint8)).shape == (0, 3)


def test_a_detached_arena_is_not_written_again(pair: Pair) -> None:
    held = pair.send(filled(pair, (100,), 1))
    BorrowedBuffers.detach_borrowed()  # as before a fork
    pair.acknowledge()
    assert pair.main.take_released() is None, "the worker is told once"
    later = [pair.send(torch.full((100,), value, dtype=torch.uint8)) for value in (2, 3)]
    assert held.tolist() == [1] * 100
    assert [tensor.unique().tolist() for tensor in later] == [[2], [3]]
    del held, later
    pair.acknowledge()
    assert pair.is_shared(filled(pair, (100,), 4)), "the next arena is in use"


@pytest.mark.parametrize("kind", ["u1", "<i8", "f4", "?", "c8"])
def test_arrays_are_collated_where_they_are_sent(pair: Pair, kind: str) -> None:
    arrays = [np.full((20, 30), number, dtype=kind) for number in range(3)]
    batch = collate(arrays, empty=pair.worker.empty)
    assert pair.is_shared(batch)
    there = pair.send(batch)
    assert there.tolist() == np.stack(arrays).tolist()
    batch[0, 0, 0] = batch[-1, 0, 0]
    assert there[0, 0, 0] == there[-1, 0, 0], "they are the same memory"


@pytest.mark.parametrize("kind", [">f4", ">i8"])
def test_arrays_of_another_byte_order_become_worker_tensors(pair: Pair, kind: str) -> None:
    batch = collate([np.full((20, 30), number, dtype=kind) for number in range(3)], empty=pair.worker.empty)
    assert batch[:, 0, 0].tolist() == [0, 1, 2]


def test_arrays_of_several_dtypes_become_one_tensor_all_the_same(pair: Pair) -> None:
    batch = collate([np.zeros(300, "u1"), np.full(300, 0.5, "f4")], empty=pair.worker.empty)
    assert (batch.dtype, batch.sum().item()) == (torch.float32, 150)


def stacked(batch: list[Any]) -> torch.Tensor:
    x = empty_batch((len(batch), 30_000), torch.uint8)
    for row, (value,) in enumerate(batch):
        x[row] = value
    return x


def held_back(batches: Any) -> Any:
    return batches.batch(3).unbatch()


@pytest.mark.parametrize("after", [lambda chain: chain, held_back], ids=["last", "before a pipe that holds back"])
def test_batches_of_users_are_made_where_they_are_sent(after: Any) -> None:
    chain = kdp.from_dataset([(number, 0) for number in range(26)]).select("x").deal(batch_size=2).map(stacked)
    expected = [batch[:, 0].tolist() for batch in after(chain)]
    with kdp.Loader(after(chain), num_workers=2) as loader:
        for _ in range(2):
            assert [batch[:, -1].tolist() for batch in list(loader)] == expected


def test_a_worker_takes_six_descriptors_at_most() -> None:
    chain = kdp.from_dataset([(torch.zeros(9000), 0)] * 40).select("x y").deal(batch_size=1).collate_samples()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with kdp.Loader(chain, num_workers=3, start_method="fork") as loader:
        assert len([None for _ in loader]) == 40
        assert len(multiprocessing.active_children()) == 3
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 3 * 6


KINDS: dict[str, Any] = {
    "images": lambda n: torch.full((3, 40, 40), n, dtype=torch.uint8),
    "turned": lambda n: torch.full((40, 40, 3), n, dtype=torch.float32).permute(2, 0, 1),
    "arrays": lambda n: np.full((40, 40), n),
    "views": lambda n: (torch.full((50, 50), n), torch.full((9, 9), -n)),
    "gradients": lambda n: torch.full((50, 50), float(n), requires_grad=True),
    "lists": lambda n: [n] * 900,
    "texts": lambda n: "abc" * 3000 + str(n),
}


@pytest.mark.parametrize("order", ["x y", "y x"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_workers_are_those_of_the_main_process(kind: str, order: str) -> None:
    pipe = kdp.from_dataset([(KINDS[kind](n), n) for n in range(26)], "x y").select(order).deal(4).collate_samples()
    with kdp.Loader(pipe, num_workers=2) as loader:
        for _ in range(2):
            kept = list(loader)  # more than there are buffers
            for batch, expected in zip(kept, list(pipe), strict=True):
                for part, same in zip(batch, expected, strict=True):
                    if isinstance(same, list):
                        assert part == same
                    else:
                        torch.testing.assert_close(part, same, rtol=0, atol=0)
