"""Compatibility with torch and trainers: names of pipes, chains as datasets of a DataLoader, samplers of a Loader.

DataLoader wraps a datapipe in an object that only passes on its items, so trainers find neither `set_epoch` nor a
state. Therefore, the wrappers of kdpipes' chains become instances of `DealtDataset`. DataLoader calls no method of a
datapipe while wrapping it, so the wrapper's class must be changed. This happens when the first chain with `deal` is
built.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, get_worker_info

from kdpipes.core.chain import Chain
from kdpipes.core.registry import Flavour, give_up
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe, _IterDataPipeSerializationWrapper
from kdpipes.delivery.dealer import Dealer, holds
from kdpipes.delivery.state import dealer_before, load_state, state_of

if TYPE_CHECKING:
    from kdpipes.loader.loader import Loader


def _share_names(base: Any, flavour: Flavour) -> None:
    """Let other libraries register pipes under names that kdpipes also uses.

    `functional_datapipe` raises an error if a name is taken. Therefore, if another library registers a name of kdpipes,
    kdpipes gives up the name on all pipes except its own, and a new definition in `__main__` replaces an earlier one.
    """
    register_class = base.register_datapipe_as_function.__func__

    @functools.wraps(register_class)
    def register_datapipe_as_function(
        cls: Any, function_name: Any, cls_to_register: Any, *args: Any, **kwargs: Any
    ) -> None:
        give_up(function_name, cls_to_register, flavour)
        register_class(cls, function_name, cls_to_register, *args, **kwargs)

    base.register_datapipe_as_function = classmethod(register_datapipe_as_function)


_share_names(IterDataPipe, "iter")
_share_names(MapDataPipe, "map")


class DealtDataset(_IterDataPipeSerializationWrapper):
    """A dealt chain as torch's DataLoader holds it: with its epochs, and a state for StatefulDataLoader.

    Workers load states, but epochs are counted by the process that starts the next workers. Therefore, the counter is
    in memory shared by all of them.
    """

    _datapipe: Any
    _ahead: torch.Tensor
    _has_loaded = False

    @property
    def chain(self) -> Any:
        """The dealt chain."""
        return self._datapipe

    def share_epochs(self, ahead: torch.Tensor, *, is_new: bool) -> None:
        """Count epochs together with the copies of this dataset in other processes: see `EpochCounter.share`."""
        self._ahead = ahead
        for dealer in Chain.of(self._datapipe).of_type(Dealer):
            dealer.clock.share(ahead, is_new=is_new)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration, from 0."""
        for dealer in Chain.of(self._datapipe).of_type(Dealer):
            dealer.set_epoch(epoch)

    def set_seed(self, seed: int) -> None:
        """Called by DataLoader when an epoch begins; if the end of an epoch was loaded, begin the next one."""
        if self._has_loaded:
            self._has_loaded = False
            dealer_before(self._datapipe).clock.pass_over()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the part of the chain that is read by this process."""
        return state_of(self._datapipe)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume the next iteration where a state was taken."""
        load_state(self._datapipe, state_dict)
        self._has_loaded = True

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._ahead  # type: ignore[no-untyped-call]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])  # type: ignore[no-untyped-call]
        self.share_epochs(state[1], is_new=False)


@functools.cache
def hold_dealt_chains() -> None:
    """Make every DataLoader created from now on hold a chain with `deal` as a `DealtDataset`."""
    wrap: Any = _IterDataPipeSerializationWrapper.__init__

    def wrap_chain(wrapper: Any, datapipe: Any) -> None:
        # Accelerate wraps a wrapped chain again.
        datapipe = datapipe.chain if isinstance(datapipe, DealtDataset) else datapipe
        wrap(wrapper, datapipe)
        if Chain.of(datapipe).of_type(Dealer):
            wrapper.__class__ = DealtDataset
            ahead = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
            wrapper.share_epochs(ahead, is_new=True)

    _IterDataPipeSerializationWrapper.__init__ = wrap_chain  # type: ignore[method-assign]


def is_shared_out_by_accelerate(pipe: Any) -> bool:
    """Return whether one of Accelerate's loaders has begun an epoch of a chain that contains `pipe`.

    Accelerate's DataLoaderDispatcher reads on rank 0 and sends slices to all ranks; its IterableDatasetShard reads on
    each rank and keeps a part. Either way, the chain must yield every batch.
    """
    accelerate = sys.modules.get("accelerate.data_loader")
    if accelerate is None:
        return False
    info = get_worker_info()
    active = accelerate.GradientState().active_dataloader
    if info is not None and isinstance(info.dataset, accelerate.IterableDatasetShard):
        return holds(info.dataset, pipe)  # spawned workers do not know the active loader
    return active is not None and holds(active.dataset, pipe)


def introduce_to_accelerate(loader: type) -> None:
    """Make `Accelerator.prepare` save and load the state of loaders, if Accelerate has been imported.

    Otherwise, it returns them unchanged, because they are no DataLoaders of torch.
    """
    accelerate = sys.modules.get("accelerate.accelerator")
    if accelerate is not None:
        _save_loaders(accelerate.Accelerator, loader)


@functools.cache
def _save_loaders(accelerator: Any, loader: type) -> None:
    prepare = accelerator.prepare

    @functools.wraps(prepare)
    def prepare_all(self: Any, *objects: Any, **options: Any) -> Any:
        for one in objects:
            if isinstance(one, loader):
                self.prepare_data_loader(one)
        return prepare(self, *objects, **options)

    accelerator.prepare = prepare_all


class EpochSampler(SequentialSampler):
    """The `sampler` of a loader. Lightning calls its `set_epoch`, and does not replace sequential samplers."""

    data_source: Loader

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration."""
        self.data_source.set_epoch(epoch)


class BatchNumbers(BatchSampler):
    """The `batch_sampler` of a loader, which yields the number of each batch of an epoch in a list.

    transformers' Trainer calls its `set_epoch`; `accelerate.skip_first_batches` leaves out the first numbers.
    """

    sampler: EpochSampler

    def __init__(self, loader: Loader) -> None:
        self.sampler = EpochSampler(loader)
        self.batch_size = loader.batch_size  # type: ignore[assignment]  # None for batches by length
        self.drop_last = loader.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration."""
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
    """The `dataset` of a loader, which returns the batches of its next epoch by number, in order from any batch on.

    The length is the number of samples of an epoch, like `len(loader.dataset)` with torch's DataLoader.

    Args:
        loader: The loader.
        chain: The loader's chain.
        source: The source of its `deal`, if it has one.
    """

    def __init__(self, loader: Loader, chain: Any, source: Any) -> None:
        self._loader = loader
        self.chain = chain
        self._source = source
        self._batches: Iterator[Any] = iter(())
        self._next = -1

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, numbers: list[int]) -> Any:
        if get_worker_info() is not None:
            raise RuntimeError("A `kdp.Loader` has its own workers: read its `dataset` with `num_workers=0`.")
        (number,) = numbers
        if number != self._next:
            self._batches = self._loader.from_batch(number)
        self._next = -1
        batch = next(self._batches)
        self._next = number + 1
        return batch
