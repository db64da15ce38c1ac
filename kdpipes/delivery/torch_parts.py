"""The attributes of torch's DataLoader that trainers expect of a loader: its dataset and its samplers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, Dataset, SequentialSampler, get_worker_info

if TYPE_CHECKING:
    from kdpipes.delivery.loader import Loader

__all__ = ["BatchNumbers", "EpochSampler", "NumberedBatches"]


class EpochSampler(SequentialSampler):
    """The `sampler` of a loader: Lightning calls its `set_epoch`, and does not replace sequential samplers.

    Args:
        loader: The loader.
    """

    data_source: Loader

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration."""
        self.data_source.set_epoch(epoch)


class BatchNumbers(BatchSampler):
    """The `batch_sampler` of a loader: the numbers of the batches of an epoch, each in a list.

    transformers' Trainer calls its `set_epoch`; `accelerate.skip_first_batches` leaves out the first numbers.

    Args:
        loader: The loader.
    """

    sampler: EpochSampler

    def __init__(self, loader: Loader) -> None:
        self.sampler = EpochSampler(loader)
        self.batch_size = loader.batch_size  # type: ignore[assignment]  # None for batches by length
        self.drop_last = loader.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        try:
            numbers: Any = range(len(self))
        except TypeError:
            numbers = count()  # the loader ends the epoch
        return ([number] for number in numbers)


class NumberedBatches(Dataset[Any]):
    """The `dataset` of a loader: returns the batches of its next epoch by number, in order, starting at any batch.

    The length is the number of samples of an epoch, as `len(loader.dataset)` is with torch's DataLoader.

    Args:
        loader: The loader.
        source: The source of its `deal`, if it has one.
    """

    def __init__(self, loader: Loader, source: Any) -> None:
        self._loader, self._source = loader, source
        self._batches: Iterator[Any] = iter(())
        self._next = -1

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, numbers: list[int]) -> Any:
        if get_worker_info() is not None:
            raise RuntimeError("A `kdp.Loader` has its own workers: read its `dataset` with `num_workers=0`.")
        (number,) = numbers
        if number != self._next:
            self._batches, self._next = self._loader.from_batch(number), number
        self._next += 1
        try:
            return next(self._batches)
        except StopIteration:
            self._next = -1
            raise
