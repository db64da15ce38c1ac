"""Warn about states of torchdata's DataLoader2 that hold a chain, but not where its reading service stands.

DataLoader2 pickles the chain as it was before the first epoch. Only kdpipes' reading services add their position, and
without one of them a loaded state begins at epoch 0 again. DataLoader2 has no hook for that, so a chain notices it when
it is unpickled: a copy that DataLoader2 makes is loaded right after it was pickled, a state is loaded later.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from itertools import count
from typing import NamedTuple

from kdpipes.core.messages import warn

_process = os.urandom(8)
_numbers = count()
_latest = -1
_position_follows = False


class Stamp(NamedTuple):
    """When and where a chain was pickled, and whether a position is stored with it."""

    process: bytes
    number: int
    has_position: bool


def note_position() -> None:
    """Note that a position is stored with the chain that is pickled next."""
    global _position_follows
    _position_follows = True


def stamp() -> Stamp:
    """Return the stamp of a chain that is being pickled."""
    global _latest, _position_follows
    _latest, has_position, _position_follows = next(_numbers), _position_follows, False
    return Stamp(_process, _latest, has_position)


def check_stamp(found: Stamp) -> None:
    """Warn if a chain comes from a state of DataLoader2 that does not hold its epoch."""
    is_copy = found[:2] == (_process, _latest)
    uses_dataloader2 = "torchdata.dataloader2" in sys.modules and multiprocessing.parent_process() is None
    if uses_dataloader2 and not is_copy and not found.has_position:
        warn(
            "This state of DataLoader2 holds neither the epoch nor the batch, so the chain begins at epoch 0. Use "
            "`kdp.Loader(chain)`, whose state is exact, or `reading_service=kdp.ProcessReadingService(...)`.",
        )
