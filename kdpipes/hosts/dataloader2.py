"""Support of kdpipes' loader and services for torchdata's DataLoader2 and reading services.

DataLoader2 pickles the chain in its state before the first epoch. Only kdpipes' reading services add their position;
without one of them, a loaded state begins at epoch 0 again. DataLoader2 has no hook to detect this, so a chain detects
it when it is unpickled: a copy made by DataLoader2 is unpickled right after pickling, a state later.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle

from kdpipes.core import pickling
from kdpipes.core.chain import Chain
from kdpipes.core.errors import must_be
from kdpipes.core.iter_pipe import Streaming
from kdpipes.core.messages import warn
from kdpipes.core.stock import load_torchdata
from kdpipes.core.torch_pipes import IterDataPipe
from kdpipes.delivery.dealer import fix_ranks
from kdpipes.delivery.state import Checkpointer, Counting
from kdpipes.loader.merge import compare_ranks
from kdpipes.loader.services import ENDED, ReadingService

_latest = b""
_position_follows = False


class Shipped(Streaming[Any], IterDataPipe[Any]):
    """A chain that is pickled by cloudpickle for other processes."""

    def __init__(self, source_datapipe: Any) -> None:
        self.chain = source_datapipe

    def iterate(self) -> Iterator[Any]:
        return iter(self.chain)

    def __getstate__(self) -> Any:
        if IterDataPipe.getstate_hook is not None:
            return IterDataPipe.getstate_hook({"chain": self.chain})
        return pickling.dumps(self.chain)

    def __setstate__(self, payload: bytes) -> None:
        self.chain = cloudpickle.loads(payload)


def introduce_to_torchdata(service: type) -> None:
    """Register a class of reading services with DataLoader2, if DataLoader2 has been imported.

    DataLoader2 saves only the state of registered classes.
    """
    known = sys.modules.get("torchdata.dataloader2.reading_service")
    if known is not None:
        known.CheckpointableReadingServiceInterface.register(service)


class ForeignService(ReadingService):
    """Runs chains with a reading service of torchdata or a user. It begins whole epochs only.

    Args:
        service: The other reading service.

    Raises:
        TypeError: It contains one of kdpipes' services, or is not a reading service.
    """

    has_workers = False
    is_exact = False

    def __init__(self, service: Any) -> None:
        super().__init__()
        if not hasattr(service, "initialize_iteration"):
            raise TypeError(must_be("reading_service", "a reading service", service))
        parts = _parts(service)
        own = next((part for part in parts if isinstance(part, ReadingService)), None)
        if own is not None:
            raise TypeError(
                f"A Loader reads the ranks itself. Pass the {type(own).__name__} without {type(service).__name__}."
            )
        self.service = service
        self.num_workers = max(1, *(getattr(part, "num_workers", 0) for part in parts))

    def initialize(self, datapipe: Any) -> None:
        counting = [pipe for pipe in Chain.of(datapipe).pipes if isinstance(pipe, Counting)]
        epochs = [pipe.next_epoch() for pipe in counting]
        for pipe, epoch in zip(counting, epochs, strict=True):
            pipe.set_epoch(max(epoch + self.clock.peek() - epochs[0], 0))
        fix_ranks(datapipe)
        self._chain = datapipe
        self._checkpointer = Checkpointer(datapipe, self.num_workers)
        self._items = self.service.initialize(Shipped(datapipe))

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> None:
        module = load_torchdata("torchdata.dataloader2.random")
        if module is not None:
            seed_generator = module.SeedGenerator(seed_generator.seed)
        reset = self.service.initialize_iteration(seed_generator)
        self._items = self._items if reset is None else reset(self._items)

    def finalize_iteration(self) -> None:
        self.service.finalize_iteration()

    def finalize(self) -> None:
        if self.is_running:  # other services cannot be ended before they have started
            self._items = None
            self.service.finalize()

    @property
    def is_running(self) -> bool:
        return self._items is not None

    def deliver(self, _: Any = None) -> Any:
        if not self.is_running:
            raise RuntimeError(ENDED)
        if self.clock.is_fresh:
            self.clock.is_fresh = False
            compare_ranks(self._chain, self.clock.latest, self._checkpointer.pipes)
        try:
            return next(self._epoch)
        except StopIteration:
            self.clock.end()
            raise


def _parts(service: Any) -> list[Any]:
    """Return a reading service, and those that it runs in sequence."""
    return [service, *(part for inner in getattr(service, "reading_services", ()) for part in _parts(inner))]


def note_position() -> None:
    """Record that a position is stored with the next chain that is pickled."""
    global _position_follows
    _position_follows = True


def stamp() -> tuple[bytes, bool]:
    """Return what identifies a chain that is being pickled, and whether a position is stored with it."""
    global _latest, _position_follows
    _latest = os.urandom(8)
    has_position = _position_follows
    _position_follows = False
    return _latest, has_position


def check_stamp(loaded: tuple[bytes, bool]) -> None:
    """Warn if a chain comes from a state of DataLoader2 that lacks its epoch."""
    identity, has_position = loaded
    uses_dataloader2 = "torchdata.dataloader2" in sys.modules and multiprocessing.parent_process() is None
    if uses_dataloader2 and identity != _latest and not has_position:
        warn(
            "This state of DataLoader2 holds neither the epoch nor the batch, so the chain begins at epoch 0. Use "
            "`kdp.Loader(chain)`, whose state is exact, or `reading_service=kdp.ProcessReadingService(...)`.",
        )
