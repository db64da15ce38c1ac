"""Warn of random transforms that repeat, because an indexed chain is read again and again in the same epoch."""

from __future__ import annotations

import mmap
import os
from typing import Any

from torch.utils.data import get_worker_info

from kdpipes.core.messages import warn

_MAX_WATCHED = 1024  # positions
_MIN_REPEATS = 32  # rereading a few samples is normal, as in a notebook
TAG = "_kdpipes_tag"  # an attribute of all pipes: random bytes that identify the pipe
_NUM_BYTES = 8  # of a tag and of a seed
_WARNED = b"\xff" * _NUM_BYTES  # not a valid seed: it would be negative
# This page is shared with processes that are forked later. torch's DataLoader starts new workers for each epoch, whose
# copies of a chain know nothing of earlier workers. So the first worker notes the chain and the seed of its loader's
# epoch here. Of two chains whose tags begin with the same byte, only the last one is known.
_page = mmap.mmap(-1, 256 * 2 * _NUM_BYTES)
_page_owner = os.getpid()


class Reads:
    """The reads of one indexed chain without `deal`, in the epoch set last if any.

    Args:
        chain: The chain.
        random_name: The name of an operation of the chain that draws random numbers; None if there is none.
        has_epoch: Whether `set_epoch` was called. Then, only workers that outlive an epoch can miss the next one.
    """

    def __init__(self, chain: Any, random_name: str | None, *, has_epoch: bool) -> None:
        self._random_name = random_name
        self._has_epoch = has_epoch
        self._min_repeats = min(len(chain), _MIN_REPEATS)
        self._tag: bytes = vars(chain)[TAG]
        self._worker: Any = None
        self._watched: set[int] = set()
        self._num_repeats = 0
        self._last = -1

    def note(self, position: int) -> None:
        """Record the read of a position, and warn if many positions are read a second time."""
        if self._random_name is None:
            return
        worker = get_worker_info()
        if worker is not self._worker:
            self._worker = worker
            if not self._has_epoch and self._is_of_another_epoch(worker):
                self._warn()
        if position == self._last or (self._has_epoch and worker is None):
            return
        self._last = position
        if position in self._watched:
            self._note_repeat()
        elif len(self._watched) < _MAX_WATCHED:
            self._watched.add(position)

    def _note_repeat(self) -> None:
        self._num_repeats += 1
        # A sampler may draw a sample twice in an epoch that was set. Only a whole second pass is another epoch.
        least = max(self._min_repeats, len(self._watched)) if self._has_epoch else self._min_repeats
        if self._num_repeats >= least:
            self._warn()

    def _is_of_another_epoch(self, worker: Any) -> bool:
        """Return whether workers of an earlier epoch have read the chain. Spawned workers cannot tell and assume so."""
        if _page_owner == os.getpid():
            return bool(worker.id == 0)
        seed = ((worker.seed - worker.id) % (1 << 63)).to_bytes(_NUM_BYTES, "little")
        middle = (2 * self._tag[0] + 1) * _NUM_BYTES
        entry = slice(middle - _NUM_BYTES, middle + _NUM_BYTES)
        known = _page[entry]
        is_known = known.startswith(self._tag)
        is_of_another = is_known and not known.endswith((seed, _WARNED))
        if not (is_known and known.endswith(_WARNED)):
            _page[entry] = self._tag + (_WARNED if is_of_another else seed)
        return is_of_another

    def _warn(self) -> None:
        warn(
            f"`{self._random_name}` draws the same random numbers in every epoch: samples were read again, but the "
            "epoch of the chain was not set. torch's DataLoader does not pass it to an indexed chain. Use "
            "`kdp.Loader(chain.deal(batch_size=..., shuffle=True).collate_samples())`. Or call "
            "`chain.set_epoch(epoch)` before each epoch, and use `persistent_workers=False`.",
        )
        self._watched.clear()
        self._num_repeats = 0
