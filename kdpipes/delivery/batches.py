"""The batches of one epoch, as a loader gives them: an interrupt ends the workers, and can be followed by the rest."""

from __future__ import annotations

from typing import Any

from torchdata.dataloader2.dataloader2 import DataLoader2Iterator

from kdpipes.core.processes import uninterrupted
from kdpipes.delivery.producer import Position

__all__ = ["Batches"]


class Batches(DataLoader2Iterator):  # type: ignore[misc]  # torchdata carries no types
    """DataLoader2's iterator, but for Ctrl-C, after which DataLoader2 leaves workers to whoever holds the loader.

    In a notebook that is the last traceback, whatever the user deletes. So the workers end with the interrupt, and
    start again when the next batch is asked for, or the next epoch.

    Args:
        loader: The loader.
        number: Which of its iterators this is; the latest is the one that gives batches.
    """

    iterator_id: int

    def __init__(self, loader: Any, number: int) -> None:
        super().__init__(loader, number)
        self._interrupted_at: Position | None = None
        self._is_fresh = True

    def __next__(self) -> Any:
        if self._is_fresh and self.dataloader._reset_iter and self.iterator_id == self.dataloader.valid_iterator_id:
            self.iterator_id = self.dataloader._begun().iterator_id  # the epoch was set after `iter(loader)`
        self._is_fresh = False
        if self._interrupted_at is not None and self.iterator_id == self.dataloader.valid_iterator_id:
            self.iterator_id = self.dataloader._begun_again(self._interrupted_at)
            self._interrupted_at = None
        try:
            return super().__next__()
        except KeyboardInterrupt:
            with uninterrupted():
                self._interrupted_at = self.dataloader._interrupted()
            raise
