"""The state of a dealt chain, and chains as the datasets of torch's DataLoader.

DataLoader wraps a datapipe in an object that only passes its items on, so that trainers find neither `set_epoch` nor a
state, and mistakes go unnoticed. Therefore wrappers of kdpipes' chains become objects of the classes below.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper, _MapDataPipeSerializationWrapper

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.registry import pipe_name
from kdpipes.delivery.behind_deal import DEALERS, one_to_one_path
from kdpipes.delivery.checkpoint import Checkpointer
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.producer import Position

__all__ = ["DealtDataset", "IndexedDataset", "load_state", "state_of"]


def state_of(chain: Any) -> dict[str, Any]:
    """Return the state of a dealt chain: see `Resumable.state_dict`."""
    dealer = _dealer_before(chain)
    epoch, batch, cursor = dealer.position()
    cursors = () if cursor is None else ((dealer.lane(), cursor),)
    return _checkpointer(dealer).state_at(Position(epoch, batch, 0, cursors))


def load_state(chain: Any, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load the state of a dealt chain: see `Resumable.load_state_dict`."""
    dealer = _dealer_before(chain)
    position = _checkpointer(dealer).position_in(state, strict=strict)
    dealer.resume_at(position.epoch, position.number, dict(position.cursors).get(dealer.lane()))


def _dealer_before(chain: Any) -> Dealer:
    """Return the `deal` of a chain whose later pipes make one item of each batch."""
    last = one_to_one_path(chain)[-1]
    if isinstance(last, Dealer):
        return last
    raise ChainError(
        f"The chain has no state, because `{pipe_name(last)}` after `.deal()` may hold batches back or change their "
        "number. Remove it, or use `kdp.Loader(chain)`, which has a state."
    )


def _checkpointer(dealer: Dealer) -> Checkpointer:
    made = Checkpointer(dealer, dealer.sharding().num_workers, dealer.known_pipes, is_part=True)
    dealer.known_pipes = made.pipes
    return made


class DealtDataset(_IterDataPipeSerializationWrapper):
    """A dealt chain as torch's DataLoader holds it: with its epochs, and a state for StatefulDataLoader.

    The workers load a state, but the process that starts the next workers counts the epochs. Therefore the count is
    kept in memory that all of them share.
    """

    _datapipe: Any
    _ahead: torch.Tensor
    _has_loaded = False

    def share_epochs(self, ahead: torch.Tensor, *, is_new: bool) -> None:
        """Count epochs together with the copies of this dataset in other processes.

        Args:
            ahead: One integer in shared memory.
            is_new: Whether it is still to be set.
        """
        self._ahead = ahead
        for dealer in _dealers(self._datapipe):
            dealer.share_epochs(ahead, is_new=is_new)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration, from 0."""
        for dealer in _dealers(self._datapipe):
            dealer.set_epoch(epoch)

    def set_seed(self, seed: int) -> None:
        """Called by DataLoader when an epoch begins; if the end of an epoch was loaded, begin the next one."""
        if self._has_loaded:
            self._has_loaded = False
            _dealer_before(self._datapipe).pass_over()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the part of the chain that this process reads."""
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


class IndexedDataset(_MapDataPipeSerializationWrapper):
    """An indexed chain as torch's DataLoader holds it: Accelerate and transformers' Trainer call its `set_epoch`."""

    _datapipe: Any

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch`, from 0, the epoch of the samples."""
        for pipe in _indexed(self._datapipe):
            pipe.set_epoch(epoch)


def _indexed(chain: Any) -> list[MapPipe]:
    return [pipe for pipe in Chain.of(chain).pipes if isinstance(pipe, MapPipe)]


def _dealers(chain: Any) -> list[Dealer]:
    return [pipe for pipe in Chain.of(chain).pipes if isinstance(pipe, Dealer)]


_wrap_stream: Any = _IterDataPipeSerializationWrapper.__init__
_wrap_indexed: Any = _MapDataPipeSerializationWrapper.__init__


def _init_stream(self: Any, datapipe: Any) -> None:
    """Wrap a stream for a DataLoader, whose constructor calls this."""
    datapipe = datapipe._datapipe if isinstance(datapipe, DealtDataset) else datapipe  # as Accelerate wraps it again
    _wrap_stream(self, datapipe)
    if _dealers(datapipe):
        if isinstance(one_to_one_path(datapipe)[-1], DEALERS):
            _check_batch_size(sys._getframe(1).f_locals)
        self.__class__ = DealtDataset
        ahead: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.share_epochs(ahead, is_new=True)


def _init_indexed(self: Any, datapipe: Any) -> None:
    """Wrap an indexed chain for a DataLoader, whose constructor calls this."""
    _wrap_indexed(self, datapipe)
    if _indexed(datapipe):
        if not isinstance(datapipe, IndexedDataset):  # Accelerate wraps the wrapper again
            _warn_of_equal_epochs(datapipe, sys._getframe(1).f_locals)
        self.__class__ = IndexedDataset


def _warn_of_equal_epochs(chain: Any, arguments: Mapping[str, Any]) -> None:
    """Warn of random operations and choices that would be the same in every epoch of a DataLoader."""
    name, is_persistent = Chain.of(chain).random_name(), bool(arguments.get("persistent_workers"))
    name = name or next((redrawn for pipe in _indexed(chain) if (redrawn := pipe.redrawn_by()) is not None), None)
    if name is not None and (is_persistent or not any(pipe.has_epoch for pipe in _indexed(chain))):
        warnings.warn(
            f"`{name}` will draw the same random numbers in every epoch, because torch's DataLoader does not pass the "
            "epoch to an indexed chain. Use `kdp.Loader(chain.deal(batch_size=..., shuffle=True).collate_samples())`. "
            "Or call `chain.set_epoch(epoch)` before each epoch, the first time before you make the DataLoader, and "
            "use `persistent_workers=False`.",
            stacklevel=4,
        )


def _check_batch_size(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if a DataLoader would make batches of batches."""
    size, collate = arguments.get("batch_size"), arguments.get("collate_fn")
    takes_one = size == 1 and collate not in (None, default_collate)  # as `lambda batches: batches[0]` does
    if size is not None and not takes_one:
        hint = "The chain gives batches already: use `DataLoader(chain, batch_size=None)`."
        raise ValueError(must_be("batch_size", "None", size, hint))


_IterDataPipeSerializationWrapper.__init__ = _init_stream  # type: ignore[method-assign]
_MapDataPipeSerializationWrapper.__init__ = _init_indexed  # type: ignore[method-assign]
