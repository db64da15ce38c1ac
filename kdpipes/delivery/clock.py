"""`EpochClock`: tracks the position of a dealt chain or a loader within its epochs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kdpipes.core.randomness import EpochCounter
from kdpipes.delivery.lanes import Cursors, merged


class Progress(NamedTuple):
    """The progress within a batch, sent along with each of its items or with its end.

    Args:
        offset: The number of items of the batch so far, if more may follow; 0 if the batch is complete.
        num_samples: The number of samples in the batch; sent with its first item.
        cursors: The cursors of the lanes from which the batch was made, if the batch is complete.
        hashes: The hashes of the batch's samples, for a stream; sent with its first item.
    """

    offset: int = 0
    num_samples: int = 0
    cursors: Cursors = ()
    hashes: bytes = b""


class Position(NamedTuple):
    """A point between two items of an epoch.

    Args:
        epoch: The number of the epoch, from 0.
        number: The number of the next batch, or of the one being delivered; without `deal`, the number of the item.
        offset: The number of items of that batch already delivered, if pipes after `deal` split a batch into several
            items.
        cursors: The known cursors of the lanes of a stream.
        hashes: The hashes of the samples in the batch whose first item was delivered last, for a stream.
    """

    epoch: int = 0
    number: int = 0
    offset: int = 0
    cursors: Cursors = ()
    hashes: bytes = b""

    def after(self, number: int, progress: Progress) -> Position:
        """Return the position after an item, or the end, of batch `number`."""
        if progress.offset:
            return self._replace(number=number, offset=progress.offset, hashes=progress.hashes)
        return Position(self.epoch, number + 1, 0, merged(self.cursors, progress.cursors), progress.hashes)


class EpochClock(EpochCounter):
    """Tracks the current position and the start of the next iteration.

    Each iteration is the next epoch, unless another epoch or position is chosen. A loader's clock counts the user's
    iterations. The clock of `deal` counts when the chain runs without a kdpipes loader.

    Attributes:
        continues: Whether an epoch begins at the cursors where the previous one ended.
        is_fresh: Whether an epoch has begun, but no item has been requested yet.
        latest: The position after the last item of the last iteration.
        ahead: The positions after the items that pipes of the main process still hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.continues = self.is_fresh = False
        self.latest = Position()
        self.ahead: deque[Position] = deque()
        self._is_next = True  # the position is the start of the next iteration
        self._start: Position | None = None  # from a loaded state; valid for its own epoch only
        self._return: Position | None = None  # where an interrupted iterator continues

    @property
    def position(self) -> Position:
        """The position to save in a state: after the last item, or the chosen start of the next iteration."""
        return self.upcoming() if self._is_next else self.latest

    @property
    def is_resumed(self) -> bool:
        """Whether the next iteration resumes from a state."""
        return self._start is not None and self._start.epoch == self.peek()

    def upcoming(self) -> Position:
        """Return the start of the next iteration."""
        if self._return is not None:
            return self._return
        epoch = self.peek()
        if self._start is not None and self._start.epoch == epoch:
            return self._start
        if not self.continues or self.latest.epoch > epoch:
            return Position(epoch)
        return Position(epoch, cursors=self.latest.cursors)  # even if that epoch was abandoned

    def seeded(self) -> None:
        super().seeded()
        self._is_next = True

    def choose(self, epoch: int) -> None:
        """Make `epoch` the next one in this process. A state loaded for that epoch stays valid."""
        self.set(epoch)
        self._is_next = True
        self.is_fresh = False

    def resume_at(self, position: Position) -> None:
        """Let the next iteration begin at a position."""
        self.move_to(position.epoch)
        self._start = position
        self._is_next = True
        self.is_fresh = False

    def return_to(self, position: Position) -> None:
        """Let the next iteration continue an interrupted epoch. An epoch chosen since then comes after it."""
        self._return = position
        self.is_fresh = False

    def pass_over(self) -> None:
        """Skip the rest of an epoch whose state was loaded, unless items have been delivered since."""
        if self._start is not None and self._start.number:
            self.skip(1)
            self._start = None
            self._is_next = True

    def start(self) -> Position:
        """Begin an iteration, and return its first position."""
        self.latest = self.upcoming()
        if self._return is None:
            self.begin()
            self._start = None
            self._is_next = False
        self._return = None
        self.is_fresh = True
        self.ahead.clear()
        return self.latest

    def note(self, epoch: int, number: int, cursors: Cursors) -> None:
        """Record that batch `number` of an epoch comes next, and update the known cursors."""
        self.latest = Position(epoch, number, 0, merged(self.latest.cursors, cursors))

    def deliver(self, *, is_one_to_one: bool) -> Position:
        """Record the delivery of an item, and return the position after it.

        Args:
            is_one_to_one: Whether the pipes of the main process yield exactly one item per input item.
        """
        if is_one_to_one:
            self.latest = self.ahead.popleft()
        elif self.ahead:
            hashes = b"".join(position.hashes for position in self.ahead)
            self.latest = self.ahead[-1]._replace(hashes=hashes)
            self.ahead.clear()
        return self.latest

    def end(self, *, is_part: bool = False) -> int:
        """Record the end of an epoch, and return its number; `is_part`: other workers may not have finished it yet."""
        epoch = self.latest.epoch
        self.latest = self.latest._replace(number=max(self.latest.number, 1)) if is_part else self.upcoming()
        return epoch
