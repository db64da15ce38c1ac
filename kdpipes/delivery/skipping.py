"""Skip samples that cannot be made, as `on_error` allows: `Skipper`, `SkipLimits` and the record of each skip."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, without_notes
from kdpipes.core.messages import logger
from kdpipes.core.operation import ErrorHandler, entry_names, position_of
from kdpipes.core.randomness import SampleKey
from kdpipes.core.sample import Sample

LEFT_OUT: Any = object()
MOST_SKIPS = 1 << 16  # kept in memory

_QUARANTINED = "in quarantine, not tried: "
_log = logger("kdpipes")


@dataclass(frozen=True)
class Skip:
    """A sample that was left out of its batch, or the rest of a shard that a stream cannot read.

    Args:
        epoch: The number of the epoch.
        batch: The number of the batch among those of the rank: the one being read when the sample or shard failed.
        ordinal: The sample's position in the epoch; for a shard, the number of samples that the stream gave before.
        key: The sample's key, or the shard's name.
        error: The error's text.
        is_shard: Whether it is a shard.
        is_replaced: Whether another sample replaces it.
    """

    epoch: int
    batch: int
    ordinal: int
    key: str
    error: str
    is_shard: bool = False
    is_replaced: bool = False

    @property
    def place(self) -> tuple[int, int, bool, str]:
        """Return the values that identify this sample or shard, for any worker that reports it."""
        return self.epoch, self.ordinal, self.is_shard, self.key

    def log(self) -> None:
        """Log it as a warning; as information if it was known before."""
        level = logging.INFO if self.error.startswith(_QUARANTINED) else logging.WARNING
        what = "The rest of shard %r is left out from batch %d on: %s"
        if not self.is_shard:
            what = f"Sample %r is {'replaced in' if self.is_replaced else 'left out of'} batch %d: %s"
        _log.log(level, what, self.key, self.batch, self.error)


def keep_skip(kept: dict[Any, Skip], skip: Skip) -> Skip | None:
    """Add a skip to a dictionary of limited size. Return the oldest one if it had to be dropped."""
    kept[skip.place] = skip
    return kept.pop(next(iter(kept))) if len(kept) > MOST_SKIPS else None


@contextmanager
def unrecorded(pipe: Any) -> Iterator[None]:
    """Put no sample into quarantine meanwhile, not even in workers: looking at a chain must not change later runs."""
    handlers = Chain.of(pipe).operations(ErrorHandler)
    for handler in handlers:
        handler.num_looking += 1
    try:
        yield
    finally:
        for handler in handlers:
            handler.num_looking -= 1


def _reject_twin(known: dict[str, int], key: str, number: int) -> None:
    """Note the number of a sample in quarantine; raise ChainError if another sample of the stream has the same key."""
    first = known.setdefault(key, number)
    if first != number:
        raise ChainError(
            f"Samples {first} and {number} of the stream both have the key {key!r}, which is in quarantine: it cannot "
            "tell them apart. Give them keys of their own: `.to_samples(key=...)`."
        )


class SkipLimits:
    """Counts the samples skipped in one epoch, and raises if they are more than `on_error` allows.

    Args:
        handler: The operation of `.on_error(...)`.
        num_parts: The number of ranks, or of ranks and workers that count separately, that the samples are divided
            between.
        first_batch: The batch at which the epoch begins or is resumed.
        rejects_twins: Whether two samples in quarantine that have the same key are an error. They may lie in lanes
            that different workers read.
    """

    def __init__(self, handler: Any, num_parts: int, first_batch: int, *, rejects_twins: bool) -> None:
        self._handler = handler
        self._rejects_twins = rejects_twins
        self._ordinals: dict[str, int] = {}  # of the samples in quarantine, by key
        self._num_parts = num_parts
        self._first_batch = first_batch
        self._recent: dict[Any, Skip] = {}
        self._num_skipped = 0
        self._last: Skip | None = None

    def count(self, skip: Skip) -> None:
        """Count a skipped sample, in the order of their ordinals; raise DataError if there are too many."""
        self._last = skip
        if skip.is_shard:
            return
        if self._rejects_twins and skip.error.startswith(_QUARANTINED):
            _reject_twin(self._ordinals, skip.key, skip.ordinal)
        self._num_skipped += skip.place not in self._recent  # a replaced worker makes its batch again
        keep_skip(self._recent, skip)
        # The ordinal gives the number of samples so far, so that batches need not be counted after `deal`.
        share_here = (skip.batch + 1 - self._first_batch) / (skip.batch + 1)
        num_seen = max(round((skip.ordinal // self._num_parts + 1) * share_here), self._num_skipped)
        self._handler.reject_many(self._num_skipped, num_seen, skip.key, skip.error)

    def end(self) -> None:
        """End an epoch that has given no batch; raise DataError if all of its samples were skipped."""
        if self._last is not None and not self._first_batch:
            self._handler.reject_all(self._last.key, self._last.error)


class Skipper:
    """Makes samples, and leaves out those that cannot be made.

    Args:
        handler: The operation of `.on_error(...)`.
        monitor: Follows the samples that are made and left out (see `dealer.Monitor`). It bans samples at which workers
            have died.
        limits: Counts skipped samples; None if a loader does.
        is_indexed: Whether samples keep their positions in all epochs.
    """

    def __init__(
        self,
        handler: Any,
        monitor: Any,
        limits: SkipLimits | None,
        *,
        is_indexed: bool,
    ) -> None:
        self._is_indexed = is_indexed
        self._seen = monitor.seen
        self._limits = limits
        self._handler = handler
        self.substitutes: bool = handler.substitutes
        self.last_error: Exception | None = None
        self._listed: Mapping[str, str] = {**handler.listed(), **monitor.banned}
        # Whether there are samples that must not be tried, so that the key of each sample must be looked up.
        self.knows_bad_samples = bool(self._listed)
        self._tell = monitor.skip

    def without_twins(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a stream; raise ChainError for a second sample with a key that is in quarantine."""
        numbers: dict[str, int] = {}
        for item in items:
            if isinstance(item, Sample) and item.key in self._listed:
                _reject_twin(numbers, item.key, item.index)
            yield item

    def make(self, sample_key: SampleKey, batch: int, fetch: Callable[[], Any], finish: Callable[[Any], Any]) -> Any:
        """Return `finish(fetch())`, or LEFT_OUT if the sample is skipped; `fetch` returns the sample unloaded."""
        sample: Any = None
        try:
            sample = fetch()
            names = entry_names(sample) if self._listed and isinstance(sample, Sample) else ()
            if (name := next((name for name in names if name in self._listed), None)) is not None:
                error = _QUARANTINED + self._listed[name]
                return self._leave_out(self._skip(sample_key, batch, sample.key, error))
            item = finish(sample)
            if isinstance(item, Sample):
                if self._seen is not None:
                    self._seen(item)
                dict(item)  # loads all fields: an error later could not be skipped any more
        except Exception as raised:
            if not self._handler.tolerates(raised):
                raise
            key = sample.key if isinstance(sample, Sample) else f"ordinal {sample_key.position}"
            # Its traceback refers to this object, so it is kept only if it is needed.
            self.last_error = raised if self.substitutes else None
            skip = self._skip(sample_key, batch, key, f"{type(raised).__name__}: {without_notes(raised)}")
            is_indexed = self._is_indexed and isinstance(sample, Sample)
            self._handler.write_down(key, skip.error, position=position_of(sample) if is_indexed else ())
            return self._leave_out(skip)
        return item

    def give_up(self, epoch: int, batch: int, key: str, index: int, error: Exception) -> bool:
        """Leave out the rest of a shard, after `index` samples; return False if `on_error` does not allow it."""
        if isinstance(error, ImportError) or not self._handler.tolerates(error):
            return False
        skip = Skip(epoch, batch, index, key, f"{type(error).__name__}: {without_notes(error)}", is_shard=True)
        if key not in self._listed:
            self._handler.write_down(key, skip.error, once=True)
        self._leave_out(skip)
        return True

    def _skip(self, sample_key: SampleKey, batch: int, key: str, error: str) -> Skip:
        return Skip(sample_key.epoch, batch, sample_key.position, key, error, is_replaced=self.substitutes)

    def _leave_out(self, skip: Skip) -> Any:
        self._tell(skip)
        if self._limits is not None:
            self._limits.count(skip)
        return LEFT_OUT
