"""A DataLoader2 that knows its length, closes itself, and can be iterated again whatever happened."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch.distributed
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, InProcessReadingService
from torchdata.dataloader2.graph._serialization import clone
from torchdata.dataloader2.random import seed_generator

from kdpipes._graph import walk
from kdpipes._pipe import Streaming
from kdpipes.delivery.layout import group_size
from kdpipes.delivery.worker_processes import WorkerProcesses
from kdpipes.draw import hash_key
from kdpipes.errors import ChainError, check_count, must_be
from kdpipes.storage.shared import sharing

__all__ = ["Loader", "Shipped"]


class Shipped(Streaming[Any], IterDataPipe[Any]):
    """A chain that is copied by cloudpickle, so that lambdas and classes of a notebook come along.

    Args:
        source_datapipe: The chain.
    """

    def __init__(self, source_datapipe: Any) -> None:
        self._chain = source_datapipe

    def iterate(self) -> Iterator[Any]:
        return iter(self._chain)

    def __getstate__(self) -> Any:
        if IterDataPipe.getstate_hook is not None:
            return IterDataPipe.getstate_hook(self.__dict__)
        return {"payload": cloudpickle.dumps(self._chain)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._chain = cloudpickle.loads(state["payload"])


class Loader(DataLoader2[Any]):  # type: ignore[misc]  # torchdata carries no types
    """A DataLoader2 over a chain of pipes: `for batch in loader`, each time the next epoch.

    It has a length, is a context manager, starts no CUDA context, can be iterated again after an error in the chain,
    and many of them live side by side. In a process group of torch.distributed, each rank gets its part. Lambdas,
    closures and classes of a notebook reach its workers.

    Args:
        source_datapipe: A chain that ends in a stream, as `deal` and `collate_samples` make it. It is copied: what
            happens to it later does not reach the loader.
        num_workers: The number of worker processes; 0 loads in this process.
        multiprocessing_context: How workers start, "fork", "spawn" or "forkserver"; by default, the platform's way.
        reading_service: One of torchdata's, in place of the two arguments above.

    Length: the number of batches of an epoch, where the chain knows it.

    Raises:
        ChainError: There are several workers, but nothing in the chain shards, so that each would give everything.

    Example:
        >>> pipe = kdp.from_dataset([(n, n % 2) for n in range(4)]).select("x y").deal(batch_size=2).collate_samples()
        >>> with kdp.Loader(pipe) as loader:
        ...     [x.tolist() for x, y in loader]
        [[0, 1], [2, 3]]
    """

    _terminated = True  # until the constructor is through: `__del__` shuts down what has begun

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any] | MapDataPipe[Any],
        num_workers: int = 0,
        *,
        multiprocessing_context: str | None = None,
        reading_service: Any = None,
    ) -> None:
        if not isinstance(source_datapipe, IterDataPipe | MapDataPipe):
            raise TypeError(must_be("source_datapipe", "a datapipe", source_datapipe))
        check_count("num_workers", num_workers, minimum=0)
        if reading_service is not None and (num_workers or multiprocessing_context):
            raise ValueError("`reading_service` must be given alone: it has `num_workers` and the like of its own.")
        self._service = reading_service or _service(num_workers, multiprocessing_context)
        _refuse_doubling(source_datapipe, getattr(self._service, "num_workers", 0))
        self._base_seed = int.from_bytes(os.urandom(7), "little")
        self._num_begun = 0
        self._is_closed = False
        chain = source_datapipe.to_iter_datapipe() if isinstance(source_datapipe, MapDataPipe) else source_datapipe
        with _seeds_without_cuda(), sharing():
            self._pristine = _dealt_to_this_rank(clone(Shipped(chain)))
            super().__init__(self._pristine, reading_service=self._service)
        self._pristine = self._datapipe_before_reading_service_adapt

    def __len__(self) -> int:
        return len(self._pristine._chain)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        if self._is_closed:
            raise RuntimeError("The loader has been shut down; make a new one.")
        if self._terminated:
            self._revive()
        if self._reset_iter:
            super().seed(int.from_bytes(hash_key(self._base_seed, self._num_begun)[:7], "little"))
            self._num_begun += 1
        return super().__iter__()

    def seed(self, seed: int) -> None:
        """Seed the stock pipes behind `deal`. Order and augmentation come from `deal(seed=...)` alone."""
        self._base_seed = seed

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. The loader cannot be iterated any more; closing it again does nothing."""
        self._is_closed = True
        self.shutdown()

    def _revive(self) -> None:
        """Begin anew after DataLoader2 has shut itself down because of an error in the chain."""
        with sharing():
            self.datapipe = clone(self._pristine)
        for pipe in walk(self.datapipe):
            if hasattr(pipe, "set_epoch"):
                pipe.set_epoch(self._num_begun)
        self.reading_service = clone(self._service)
        self._adapted, self._reset_iter, self._terminated = False, True, False


def _service(num_workers: int, multiprocessing_context: str | None) -> Any:
    if num_workers == 0:
        return InProcessReadingService()
    return WorkerProcesses(num_workers, multiprocessing_context)


def _dealt_to_this_rank(pipe: Any) -> Any:
    """Tell the chain's `deal` which rank of torch's process group this is, where there is one."""
    if group_size() > 1:
        for upstream in walk(pipe):
            if hasattr(upstream, "set_epoch"):
                upstream.apply_sharding(group_size(), torch.distributed.get_rank(), SHARDING_PRIORITIES.DISTRIBUTED)
    return pipe


def _refuse_doubling(pipe: Any, num_workers: int) -> None:
    if num_workers > 1 and not any(_shards(upstream) for upstream in walk(pipe)):
        raise ChainError(
            f"Each of the {num_workers} workers would give every sample: nothing in the chain shards. "
            "End it with `.deal(batch_size=...)`, or put `.sharding_filter()` behind its source."
        )


def _shards(pipe: Any) -> bool:
    return hasattr(pipe, "apply_sharding") or type(pipe).__name__ == "ShardingRoundRobinDispatcherIterDataPipe"


_seeding = threading.Lock()


@contextmanager
def _seeds_without_cuda() -> Iterator[None]:
    """Keep DataLoader2's constructor from starting CUDA on every device, which it does to draw one random number."""
    with _seeding:
        original = seed_generator._get_torch_random_seed
        seed_generator._get_torch_random_seed = lambda: int.from_bytes(os.urandom(8), "little")
        try:
            yield
        finally:
            seed_generator._get_torch_random_seed = original
