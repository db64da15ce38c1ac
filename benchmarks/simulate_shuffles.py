"""How far apart do the neighbors of a shard end up, and how many shards does a batch have, by the way of shuffling?

Command: `python benchmarks/simulate_shuffles.py`. It simulates 256 shards of 1,000 samples in random order, and batches
of 64: kdpipes' lanes with a `.shuffle(buffer_size=...)` in each, webdataset's `.shuffle(...)` in each worker, and
Mosaic's algorithms py1s (shards one after the other, the samples of each shuffled) and py1e (each sample is moved by up
to half a block). No data is read. The table is in docs/delivery.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHARDS, SIZE, BATCH = 256, 1000, 64
Order = NDArray[np.int64]  # the number of the sample at each place; sample n is in shard n // SIZE


def buffered(order: Order, buffer_size: int, rng: np.random.Generator) -> Order:
    """Return the order after a buffer that gives a random one of its samples for each new one."""
    buffer, given = order[:buffer_size].tolist(), []
    for sample, place in zip(order[buffer_size:].tolist(), rng.integers(0, buffer_size, len(order)), strict=False):
        given.append(buffer[place])
        buffer[place] = sample
    return np.array(given + rng.permutation(buffer).tolist())


def in_turn(parts: list[Order]) -> Order:
    """Return the batches of several lanes or workers, one of each in turn."""
    return np.concatenate([part[at : at + BATCH] for at in range(0, len(parts[0]), BATCH) for part in parts])


def read_by(num_parts: int, buffer_size: int, rng: np.random.Generator) -> Order:
    """Return the order of lanes or workers that take the shards in turn and have a buffer each."""
    shards = rng.permutation(SHARDS)
    parts = [(shards[part::num_parts, None] * SIZE + np.arange(SIZE)).ravel() for part in range(num_parts)]
    return in_turn([buffered(part, buffer_size, rng) if buffer_size else part for part in parts])


def py1s(rng: np.random.Generator) -> Order:
    return np.concatenate([shard * SIZE + rng.permutation(SIZE) for shard in rng.permutation(SHARDS)])


def py1e(block_size: int, rng: np.random.Generator) -> Order:
    shards = rng.permutation(SHARDS)
    moved = np.arange(SHARDS * SIZE) + rng.uniform(-1, 1, SHARDS * SIZE) * max(block_size - SIZE, 0) / 2
    return (shards[:, None] * SIZE + [rng.permutation(SIZE) for _ in range(SHARDS)]).ravel()[np.argsort(moved)]


def measured(order: Order) -> str:
    """Return the mean distance of neighbors in a shard, and the mean number of shards in a batch."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    distance = np.abs(np.diff(places.reshape(SHARDS, SIZE), axis=1)).mean()
    batches = np.sort(order[: len(order) // BATCH * BATCH].reshape(-1, BATCH) // SIZE, axis=1)
    return f"{distance:,.0f} | {1 + (np.diff(batches, axis=1) != 0).sum(axis=1).mean():.1f}"


def main() -> None:
    rng = np.random.default_rng(0)
    for lanes, size in ((16, 0), (16, 1000), (16, 4000), (1, 1000)):
        print(f"| {lanes} lanes, buffer of {size} | {measured(read_by(lanes, size, rng))} |")
    for workers in (1, 4):
        print(f"| webdataset, {workers} workers, buffer of 1000 | {measured(read_by(workers, 1000, rng))} |")
    print(f"| Mosaic's py1s | {measured(py1s(rng))} |")
    for block in (16_000, 64_000):
        print(f"| Mosaic's py1e, blocks of {block} | {measured(py1e(block, rng))} |")


if __name__ == "__main__":
    main()
