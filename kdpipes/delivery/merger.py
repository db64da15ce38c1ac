"""The items of several workers in one order: that of their numbers."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kdpipes.core.errors import add_note
from kdpipes.delivery.producer import Frame, Kind, Order, Position
from kdpipes.delivery.same_damage import SameDamage
from kdpipes.delivery.skipping import Skip, SkipLimits

__all__ = ["Lane", "Merger", "Tally"]

_MOST_PIECES = 20_000  # of each worker, for a trace


@dataclass
class Tally:
    """What is counted over the life of a reading service."""

    num_items: int = 0
    num_samples: int = 0
    num_deaths: int = 0
    num_copied: int = 0
    num_slow: int = 0
    busy_s: float = 0.0  # from the first item asked for to the last one delivered, epoch by epoch
    wait_s: float = 0.0  # of that, the time in which no item was there
    skips: dict[tuple[Any, ...], Skip] = field(default_factory=dict)  # by their places
    banned: dict[str, str] = field(default_factory=dict)  # why samples are left out untried, by key
    times: dict[str, dict[str, Any]] = field(default_factory=dict)  # what workers have measured of themselves

    def note(self, skip: Skip) -> None:
        """Note a sample or shard that was left out, once."""
        if skip.place not in self.skips:
            skip.log()
        self.skips[skip.place] = skip

    def note_times(self, told: dict[str, Any]) -> None:
        """Note what a worker has measured so far; pieces of work, since it told the last time: the latest are kept."""
        before = self.times.get(told["id"], {})
        for name in ("events", "batches"):
            kept = before.get(name, deque(maxlen=_MOST_PIECES))
            kept.extend(told[name])
            told[name] = kept
        self.times[told["id"]] = told


class Lane(ABC):
    """One worker, as the one who waits for it sees it."""

    is_torn = False  # whether it was interrupted while something was taken out of it

    @abstractmethod
    def begin(self, order: Order) -> None:
        """Let the worker begin an epoch, whatever it was doing."""

    @abstractmethod
    def peek(self) -> Frame:
        """Wait for the next frame, and return it; an item may not be opened yet."""

    @abstractmethod
    def take(self) -> Any:
        """Remove the frame that `peek` has returned, and return its content."""

    def stop(self) -> None:  # noqa: B027 - most have nothing to do ahead
        """Tell the worker to end, if `close` would wait for that."""

    @abstractmethod
    def close(self) -> None:
        """End the worker."""

    @property
    def num_waiting(self) -> int:
        """How many frames are there."""
        return 0


class Merger:
    """The items of one epoch, from all lanes.

    What has the number n comes from lane n modulo the number of lanes; numbers that a lane leaves out are passed over.

    Args:
        lanes: The workers.
        orders: What each of them is told.
        tally: What is counted.
        has_own_cursors: Whether each lane reads shards of its own.
        limits: The limits of `on_error` on skipped samples.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        orders: Sequence[Order],
        tally: Tally,
        *,
        has_own_cursors: bool = False,
        limits: SkipLimits | None = None,
    ) -> None:
        self._limits = limits
        self._is_empty = True
        self._has_own_cursors = has_own_cursors
        self._lanes = lanes
        self._orders = orders
        self._tally = tally
        self._ended: set[int] = set()
        self.position: Position = orders[0].position
        self._begin()

    def __iter__(self) -> Merger:
        return self

    def __next__(self) -> Any:
        started = time.perf_counter()
        try:
            if any(lane.is_torn for lane in self._lanes):
                self._begin()
            return self._next()
        except StopIteration:
            raise
        except Exception:
            self._ended.update(range(len(self._lanes)))  # nothing comes after an error
            raise
        except BaseException:  # Ctrl-C: what was on its way may be lost
            for lane in self._lanes:
                lane.is_torn = True
            raise
        finally:
            self._tally.wait_s += time.perf_counter() - started

    def _begin(self) -> None:
        self._ended.clear()
        self._same_damage = SameDamage(len(self._lanes))
        for lane, order in zip(self._lanes, self._orders, strict=True):
            lane.begin(replace(order, position=self.position, banned=self._tally.banned))
            lane.is_torn = False

    def _next(self) -> Any:
        while len(self._ended) < len(self._lanes):
            number = self.position.number
            place = number % len(self._lanes)
            lane = self._lanes[place]
            frame = None if place in self._ended else lane.peek()
            if frame is None:
                self.position = self.position._replace(number=number + 1)
            elif frame.kind is Kind.ERROR:
                raise _as_error(lane.take())
            elif frame.kind is Kind.SKIP and frame.number <= number:
                self._note(place, lane.take())
            elif frame.kind is Kind.TIMES:
                self._tally.note_times(lane.take())
            elif frame.kind is Kind.END:
                lane.take()
                self._ended.add(place)
                self._same_damage.check(place, math.inf)
            elif frame.number > number:  # also for skipped samples, which are counted in the order of the batches
                self.position = self.position._replace(number=number + 1)
            else:
                self._same_damage.check(place, frame.number)
                item = lane.take()
                self.position = self.position.after(frame, place if self._has_own_cursors else 0)
                if frame.kind is Kind.ITEM:
                    self._is_empty = False
                    self._tally.num_items += 1
                    self._tally.num_samples += frame.num_samples
                    return item
        if self._is_empty and self._limits is not None:
            self._limits.end()
        raise StopIteration

    def _note(self, place: int, skip: Skip) -> None:
        self._tally.note(skip)
        if self._limits is not None:
            self._limits.count(skip)
        if skip.is_shard and not self._has_own_cursors:
            self._same_damage.note(place, skip)


def _as_error(error: BaseException) -> Exception:
    """Return an error of a worker as one that ends the loop and not the program, nor ends it as if all were there."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    notes: list[str] = getattr(error, "__notes__", [])
    place = next((note.removeprefix("kdpipes: ") for note in notes if note.startswith("kdpipes: while ")), "")
    raised = RuntimeError(f"A worker raised {type(error).__name__}: {error}{place and f', {place}'}")
    raised.__cause__ = error
    for note in notes:
        add_note(raised, note)
    return raised
