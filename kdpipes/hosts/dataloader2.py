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
from itertools import count
from typing import Any, NamedTuple

import cloudpickle

from kdpipes.core import pickling
from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import Streaming
from kdpipes.core.messages import warn
from kdpipes.core.shared import Shared, is_sharing
from kdpipes.core.stock import load_torchdata
from kdpipes.core.torch_pipes import IterDataPipe

_process = os.urandom(8)
_numbers = count()
_latest = -1
_position_follows = False


class Shipped(Streaming[Any], IterDataPipe[Any]):
    """A chain whose copies in this process share its data, and which is pickled by cloudpickle for other processes."""

    def __init__(self, source_datapipe: Any) -> None:
        self.chain = source_datapipe
        self._copy: Shared[Any] | None = None

    def iterate(self) -> Iterator[Any]:
        return iter(self.chain)

    def __getstate__(self) -> Any:
        if IterDataPipe.getstate_hook is not None:
            return IterDataPipe.getstate_hook({"chain": self.chain})
        if is_sharing():
            self._copy = Shared(Chain.of(self.chain).copy_streams())  # kept until it has arrived
            return {"copy": self._copy}
        return {"payload": pickling.dumps(self.chain)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.chain = state["copy"].value if "copy" in state else cloudpickle.loads(state["payload"])
        self._copy = None


def unshipped(datapipe: Any) -> Any:
    """Return the chain that a service should run."""
    return datapipe.chain if isinstance(datapipe, Shipped) else datapipe


def introduce_to_torchdata(service: type) -> None:
    """Register a class of reading services with DataLoader2, if DataLoader2 has been imported.

    DataLoader2 saves only the state of registered classes.
    """
    known = sys.modules.get("torchdata.dataloader2.reading_service")
    if known is not None:
        known.CheckpointableReadingServiceInterface.register(service)


def generator_of_seeds(seed: int) -> Any:
    """Return the seed generator that torchdata's reading services expect; None without torchdata."""
    module = load_torchdata("torchdata.dataloader2.random")
    return None if module is None else module.SeedGenerator(seed)


class Stamp(NamedTuple):
    """The time and process in which a chain was pickled, and whether a position is stored with it."""

    process: bytes
    number: int
    has_position: bool


def note_position() -> None:
    """Record that a position is stored with the next chain that is pickled."""
    global _position_follows
    _position_follows = True


def stamp() -> Stamp:
    """Return the stamp of a chain that is being pickled."""
    global _latest, _position_follows
    _latest = next(_numbers)
    has_position = _position_follows
    _position_follows = False
    return Stamp(_process, _latest, has_position)


def check_stamp(found: Stamp) -> None:
    """Warn if a chain comes from a state of DataLoader2 that lacks its epoch."""
    is_copy = found[:2] == (_process, _latest)
    uses_dataloader2 = "torchdata.dataloader2" in sys.modules and multiprocessing.parent_process() is None
    if uses_dataloader2 and not is_copy and not found.has_position:
        warn(
            "This state of DataLoader2 holds neither the epoch nor the batch, so the chain begins at epoch 0. Use "
            "`kdp.Loader(chain)`, whose state is exact, or `reading_service=kdp.ProcessReadingService(...)`.",
        )
