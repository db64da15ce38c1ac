"""`EpochClock`, which says where a dealt chain or a loader stands in its epochs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kdpipes.core.randomness import EpochCounter
from kdpipes.delivery.lanes import Cursors, merged


class Progress(NamedTuple):
    """How much of a batch is delivered with one of its items, or with its end.

    Args:
        offset: The number of items of the batch so far, if it may have more; 0 if the batch is over.
        num_samples: The number of samples of the batch, with its first item.
        cursors: The cursors of the lanes that the batch was made of, if the batch is over.
        hashes: The hashes of the samples of a stream in the batch, with its first item.
    """

    offset: int = 0
    num_samples: int = 0
    cursors: Cursors = ()
    hashes: bytes = b""


class Position(NamedTuple):
    """A point between two items of an epoch.

    Args:
        epoch: The number of the epoch, from 0.
        number: The number of the batch that is next, or that is being delivered; the number of the item, where nothing
            is dealt.
        offset: The number of items of that batch that have been delivered, where a batch becomes several items after
            `deal`.
        cursors: The cursors of the lanes of a stream, as far as they are known.
        hashes: The hashes of the samples of a stream in the batch that the last item begins.
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
    """Knows the current position, and where the next iteration begins.

    Each iteration is the next epoch, unless another epoch or position is chosen. The clock of a loader counts for the
    user. The clock of `deal` counts where no loader of kdpipes runs the chain.

    Attributes:
        continues: Whether an epoch begins at the cursors where the one before has ended.
        is_fresh: Whether an epoch has begun, but no item of it has been requested.
        latest: The position after the last item of the last iteration.
        ahead: The positions after the items that pipes of the main process still hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.continues = self.is_fresh = False
        self.latest = Position()
        self.ahead: deque[Position] = deque()
        self._is_next = True  # the position is the start of the next iteration
        self._start: Position | None = None  # a loaded state; it counts for its own epoch only
        self._return: Position | None = None  # where an interrupted iterator goes on

    @property
    def position(self) -> Position:
        """The position that a state holds: after the last item, or where the next iteration was chosen to begin."""
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
        return Position(epoch, cursors=self.latest.cursors)  # also those of an epoch that was left early

    def seeded(self) -> None:
        super().seeded()
        self._is_next = True

    def choose(self, epoch: int) -> None:
        """Make `epoch` the next one in this process. A state that was loaded for it stays valid."""
        self.set(epoch)
        self._is_next, self.is_fresh = True, False

    def resume_at(self, position: Position) -> None:
        """Let the next iteration begin at a position."""
        self.move_to(position.epoch)
        self._start, self._is_next, self.is_fresh = position, True, False

    def return_to(self, position: Position) -> None:
        """Let the next iteration go on with an epoch that was interrupted; what was chosen since follows it."""
        self._return, self.is_fresh = position, False

    def pass_over(self) -> None:
        """Skip the rest of an epoch whose state was loaded, if nothing was delivered since."""
        if self._start is not None and self._start.number:
            self.skip(1)
            self._start, self._is_next = None, True

    def start(self) -> Position:
        """Begin an iteration, and return its first position."""
        self.latest = self.upcoming()
        if self._return is None:
            self.begin()
            self._start, self._is_next = None, False
        self._return, self.is_fresh = None, True
        self.ahead.clear()
        return self.latest

    def note(self, epoch: int, number: int, cursors: Cursors) -> None:
        """Note that batch `number` of an epoch is next, and cursors that are known."""
        self.latest = Position(epoch, number, 0, merged(self.latest.cursors, cursors))

    def deliver(self, *, is_one_to_one: bool) -> Position:
        """Note that an item is delivered, and return the position after it.

        Args:
            is_one_to_one: Whether the pipes of the main process give one item for each one that they take.
        """
        if is_one_to_one:
            self.latest = self.ahead.popleft()
        elif self.ahead:
            hashes = b"".join(position.hashes for position in self.ahead)
            self.latest = self.ahead[-1]._replace(hashes=hashes)
            self.ahead.clear()
        return self.latest

    def end(self, *, is_part: bool = False) -> int:
        """Note that an epoch is over, and return its number; `is_part`: other workers may not have ended it yet."""
        epoch = self.latest.epoch
        self.latest = self.latest._replace(number=max(self.latest.number, 1)) if is_part else self.upcoming()
        return epoch
