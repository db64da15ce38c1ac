"""A DataLoader2 that knows its length, closes itself, and can be iterated again whatever happened."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_all_start_methods
from typing import Any, Protocol, runtime_checkable

import cloudpickle
import torch.distributed
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, InProcessReadingService
from torchdata.dataloader2.graph._serialization import clone
from torchdata.dataloader2.random import seed_generator

from kdpipes._graph import shards, walk
from kdpipes._iter_pipe import Streaming
from kdpipes.delivery.layout import group_size
from kdpipes.delivery.worker_processes import WorkerProcesses
from kdpipes.draw import hash_key
from kdpipes.errors import ChainError, check_choice, check_count, must_be
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
        reading_service: One of torchdata's, or of your own, in place of the two arguments above.

    Length: the number of batches of an epoch, where the chain knows it.

    Raises:
        ChainError: The chain ends indexed; or there are several workers or ranks, but nothing in the chain shards, so
            that each would give everything.

    Example:
        >>> pipe = kdp.from_dataset([(n, n % 2) for n in range(4)]).select("x y").deal(batch_size=2).collate_samples()
        >>> with kdp.Loader(pipe) as loader:
        ...     [x.tolist() for x, y in loader]
        [[0, 1], [2, 3]]
    """

    _terminated = True  # until the constructor is through: `__del__` shuts down what has begun

    def __init__(
        self,
        source_datapipe: Any,
        num_workers: int = 0,
        *,
        multiprocessing_context: str | None = None,
        reading_service: Any = None,
    ) -> None:
        if isinstance(source_datapipe, MapDataPipe):
            raise ChainError("An indexed chain has no epochs. End it with `.deal(batch_size=...)`.")
        if not isinstance(source_datapipe, IterDataPipe):
            raise TypeError(must_be("source_datapipe", "a datapipe", source_datapipe))
        check_count("num_workers", num_workers, minimum=0)
        if multiprocessing_context is not None:
            check_choice("multiprocessing_context", multiprocessing_context, get_all_start_methods())
        if reading_service is not None and (num_workers or multiprocessing_context):
            raise ValueError("`reading_service` must be given alone: it has `num_workers` and the like of its own.")
        self._service = reading_service or _service(num_workers, multiprocessing_context)
        _refuse_doubling(source_datapipe, _num_workers(self._service))
        self._base_seed = int.from_bytes(os.urandom(7), "little")
        self._num_begun = 0
        self._epoch_set: tuple[int, int] | None = None
        self._is_closed = False
        with _one_at_a_time, _seeds_without_cuda(), sharing():
            self._pristine = _dealt_to_this_rank(clone(Shipped(source_datapipe)))
            super().__init__(self._pristine, reading_service=self._service)
        self._pristine = self._datapipe_before_reading_service_adapt

    def __len__(self) -> int:
        return len(self._pristine._chain)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        if self._is_closed:
            raise RuntimeError("The loader has been shut down; make a new one.")
        with _one_at_a_time:
            if self._terminated:
                self._revive()
            if self._reset_iter:
                super().seed(int.from_bytes(hash_key(self._base_seed, self._num_begun)[:7], "little"))
                self._num_begun += 1
            return super().__iter__()

    def seed(self, seed: int) -> None:
        """Seed the stock pipes behind `deal`. Order and augmentation come from `deal(seed=...)` alone."""
        self._base_seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration, from 0: to go on after a restart, say.

        Workers are started anew, unless it is the number that comes next anyway.
        """
        check_count("epoch", epoch, minimum=0)
        if self._epoch_set is not None and epoch == self._epoch_set[0] + self._num_begun - self._epoch_set[1]:
            return
        self._epoch_set = epoch, self._num_begun
        if self._adapted:
            self.shutdown()
        self._terminated = True

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. The loader cannot be iterated any more; closing it again does nothing."""
        self._is_closed = True
        self.shutdown()

    def _revive(self) -> None:
        """Begin anew after DataLoader2 has shut itself down: after an error in the chain, or to set the epoch."""
        with sharing():
            self.datapipe = clone(self._pristine)
        for pipe in walk(self.datapipe):
            if isinstance(pipe, _Counting):
                if self._epoch_set is None:
                    pipe.skip_epochs(self._num_begun)
                else:
                    pipe.set_epoch(self._epoch_set[0] + self._num_begun - self._epoch_set[1])
        self.reading_service = clone(self._service)
        self._adapted, self._reset_iter, self._terminated = False, True, False


@runtime_checkable
class _Counting(Protocol):
    """A pipe that counts its epochs."""

    def set_epoch(self, epoch: int) -> None: ...
    def skip_epochs(self, number: int) -> None: ...


def _service(num_workers: int, multiprocessing_context: str | None) -> Any:
    if num_workers == 0:
        return InProcessReadingService()
    return WorkerProcesses(num_workers, multiprocessing_context)


def _num_workers(service: Any) -> int:
    """Return the number of workers of a reading service, or of the largest of several in sequence."""
    nested = [_num_workers(inner) for inner in getattr(service, "reading_services", ())]
    return max([getattr(service, "num_workers", 0), *nested])


def _dealt_to_this_rank(pipe: Any) -> Any:
    """Tell what shards in the chain which rank of torch's process group this is, where there is one."""
    if group_size() > 1:
        for upstream in walk(pipe):
            if hasattr(upstream, "apply_sharding"):
                upstream.apply_sharding(group_size(), torch.distributed.get_rank(), SHARDING_PRIORITIES.DISTRIBUTED)
    return pipe


def _refuse_doubling(pipe: Any, num_workers: int) -> None:
    parts = {"worker": max(num_workers, 1), "rank": group_size()}
    crowd = next((f"{number} {part}s" for part, number in parts.items() if number > 1), None)
    if crowd is not None and not any(shards(upstream) for upstream in walk(pipe)):
        raise ChainError(
            f"Each of the {crowd} would give every sample: nothing in the chain shards. "
            "End it with `.deal(batch_size=...)`, or put `.sharding_filter()` behind its source."
        )


# torch's graph traversal works through hooks on its classes, which two threads must not set at the same time.
_one_at_a_time = threading.RLock()


@contextmanager
def _seeds_without_cuda() -> Iterator[None]:
    """Keep DataLoader2's constructor from starting CUDA on every device, which it does to draw one random number."""
    original = seed_generator._get_torch_random_seed
    seed_generator._get_torch_random_seed = lambda: int.from_bytes(os.urandom(8), "little")
    try:
        yield
    finally:
        seed_generator._get_torch_random_seed = original
