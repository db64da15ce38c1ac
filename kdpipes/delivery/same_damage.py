"""Workers that read the same stream must give up the same shards at the same places, or their batches do not fit."""

from __future__ import annotations

from itertools import chain

from kdpipes.core.errors import DataError
from kdpipes.delivery.skipping import Skip

__all__ = ["SameDamage"]


class SameDamage:
    """What workers have said of shards that they could not read on, in one epoch.

    Args:
        num_workers: How many there are.
    """

    def __init__(self, num_workers: int) -> None:
        self._told: list[set[Skip]] = [set() for _ in range(num_workers)]
        self._done = [-1.0] * num_workers

    def note(self, worker: int, skip: Skip) -> None:
        """Note a shard that a worker has given up, before the batch that it comes to next."""
        self._told[worker].add(skip)

    def check(self, worker: int, batch: float) -> None:
        """Refuse a worker's batch, if another one has not read the same up to there.

        Args:
            worker: The number of the worker.
            batch: The number of the batch; infinity at the end.

        Raises:
            DataError: One of them could read a shard that the other could not.
        """
        self._done[worker] = batch
        if not any(self._told):
            return
        for other, done in enumerate(self._done):
            both = min(done, batch)
            odd = _places(self._told[worker], both) ^ _places(self._told[other], both)
            if odd:
                skip = next(skip for skip in chain(self._told[worker], self._told[other]) if skip.place in odd)
                raise DataError(
                    f"Shard {skip.key!r} could be read by one of workers {worker} and {other}, and not by the other "
                    f"({skip.error}). Each reads the whole stream to make its own batches: samples would be lost and "
                    'doubled. Go on from the last state, or use `deal(split="shards")`.'
                )


def _places(skips: set[Skip], batch: float) -> set[tuple[int, int, bool, str]]:
    return {skip.place for skip in skips if skip.batch <= batch}
