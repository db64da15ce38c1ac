"""Slots: batches that are put together where they travel come as they were made, and none is written over another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kdpipes as kdp
from kdpipes.delivery.collate_samples import collate
from kdpipes.delivery.packing import pack, unpack
from kdpipes.delivery.shared_slots import LentSlots, Slots
from kdpipes.delivery.wire import ReceivedFile


class Pair:
    """Both ends of a worker's slots."""

    def __init__(self) -> None:
        self.worker, self.main = Slots(2), LentSlots()

    def send(self, item: Any) -> tuple[Any, int]:
        """Return what comes of an item, and in which slot."""
        stream, buffers = pack(item)
        slot, file = self.worker.put(buffers)
        if file is not None:
            self.main.attach(slot, ReceivedFile(os.dup(file)))
        return unpack(stream, self.main.lend(slot, [buffer.nbytes for buffer in buffers])), slot


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A worker's slots and the main process's, in one process."""
    pair = Pair()
    yield pair
    pair.main.close()
    for file in pair.worker._files.values():
        os.close(file)


def filled(worker: Slots, shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    memory = worker.empty(shape, dtype)
    assert memory is not None
    return memory.fill_(value)


def address(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr())


def test_a_batch_travels_in_the_memory_in_which_it_was_put_together(pair: Pair) -> None:
    for value in (1, 2):
        pair.worker.begin()
        x, y = filled(pair.worker, (2, 300), value), filled(pair.worker, (2,), -value, torch.int64)
        places = [address(one) - address(x) for one in (x, y)]
        (there, labels), slot = pair.send((x, y))
        assert (there.unique().tolist(), labels.tolist()) == ([value], [-value] * 2)
        assert [address(one) - address(there) for one in (there, labels)] == places
        y += 1
        assert labels.tolist() == [1 - value] * 2, "they are the same memory"
        del there, labels, x, y
        pair.worker.give_back(slot)


def test_arrays_that_travel_in_another_order_are_not_written_over_each_other(pair: Pair) -> None:
    pair.worker.begin()
    x, y = filled(pair.worker, (1000,), 1), filled(pair.worker, (1000,), 2)
    other = torch.full((500,), 3, dtype=torch.uint8)
    found, _ = pair.send((other, y, x))
    assert [part.unique().tolist() for part in found] == [[3], [2], [1]]


def test_what_has_grown_meanwhile_keeps_what_was_put_there_before(pair: Pair) -> None:
    pair.worker.begin()
    x = filled(pair.worker, (10,), 1)
    y = filled(pair.worker, (100_000,), 2)
    (first, second), _ = pair.send((x, y))
    assert (first.tolist(), second.unique().tolist()) == ([1] * 10, [2])


def test_a_batch_that_was_not_sent_gives_its_slot_to_the_next(pair: Pair) -> None:
    for value in range(5):
        pair.worker.begin()
        x = filled(pair.worker, (100,), value)
        assert pair.worker.num_free == 2
    assert pair.send((x,))[0][0].unique().tolist() == [4]
    assert pair.worker.num_free == 1


def test_there_is_no_memory_without_a_free_slot_and_for_nothing(pair: Pair) -> None:
    held = []
    for _ in range(2):
        pair.worker.begin()
        held.append(pair.send((filled(pair.worker, (100,), 1),)))
    pair.worker.begin()
    assert pair.worker.empty((100,), torch.uint8) is None
    pair.worker.give_back(held[0][1])
    assert pair.worker.empty((0, 3), torch.uint8) is None
    assert pair.worker.empty((1,), torch.uint8) is not None


@pytest.mark.parametrize("kind", ["u1", "<i8", "f4", "?", "c8"])
def test_arrays_are_put_together_where_they_will_travel(pair: Pair, kind: str) -> None:
    arrays = [np.full((20, 30), number, dtype=kind) for number in range(3)]
    pair.worker.begin()
    batch = collate(arrays, memory=pair.worker)
    (there,), _ = pair.send((batch,))
    assert there.tolist() == np.stack(arrays).tolist()
    batch[0, 0, 0] = batch[-1, 0, 0]
    assert there[0, 0, 0] == there[-1, 0, 0], "they are the same memory"


@pytest.mark.parametrize("kind", [">f4", ">i8"])
def test_arrays_of_another_byte_order_become_tensors_in_workers_too(pair: Pair, kind: str) -> None:
    batch = collate([np.full((20, 30), number, dtype=kind) for number in range(3)], memory=pair.worker)
    assert batch[:, 0, 0].tolist() == [0, 1, 2]


def test_arrays_of_several_dtypes_become_one_tensor_all_the_same(pair: Pair) -> None:
    batch = collate([np.zeros(300, "u1"), np.full(300, 0.5, "f4")], memory=pair.worker)
    assert (batch.dtype, batch.sum().item()) == (torch.float32, 150)


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
            kept = list(loader)  # more than there are slots
            for batch, expected in zip(kept, list(pipe), strict=True):
                for part, same in zip(batch, expected, strict=True):
                    if isinstance(same, list):
                        assert part == same
                    else:
                        torch.testing.assert_close(part, same, rtol=0, atol=0)
