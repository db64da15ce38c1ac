"""What workers do: samples of a chain as they stand in tars, whole shards of them, or only their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.callback import Callback
from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import seed_chain
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.sample import Sample, as_sample
from kdpipes.write._keys import as_tar_key, check_tar_key, hashes_of
from kdpipes.write._left_out import made_or_left_out
from kdpipes.write._members import MemberEncoder
from kdpipes.write._shard_places import ShardPlaces, Written
from kdpipes.write._tar_shard import END_MARK, TarSample, as_tar_sample

__all__ = ["Coming", "Limits", "Measuring", "Recipe", "ShardJob", "ShardReport", "Span", "Writing"]

Made = TypeVar("Made")
_BLOCK = 64  # samples that a source that lies elsewhere is told of at a time


@dataclass(frozen=True)
class Limits:
    """How large shards may be; a sample that is larger than that gets a shard of its own."""

    max_samples: int | None
    max_bytes: int | None

    def allow(self, num_samples: int, num_bytes: int, size: int) -> bool:
        """Return whether a shard with so many samples and bytes takes one more, of some size."""
        if num_samples == 0:
            return True
        fits = self.max_bytes is None or num_bytes + size + len(END_MARK) <= self.max_bytes
        return fits and (self.max_samples is None or num_samples < self.max_samples)

    def stops(self, sizes: NDArray[np.int64]) -> list[int]:
        """Return up to which sample each shard goes; a size of 0 is that of a sample that is left out."""
        stops, num_samples, num_bytes = list[int](), 0, 0
        for position, size in enumerate(sizes.tolist()):
            if size and not self.allow(num_samples, num_bytes, size):
                stops.append(position)
                num_samples = num_bytes = 0
            num_samples, num_bytes = num_samples + bool(size), num_bytes + size
        return [*stops, len(sizes)] if num_samples else stops

    def even_stops(self, num_samples: int) -> list[int]:
        """Return the same where only the number of samples counts."""
        step = self.max_samples or num_samples
        return [min(start + step, num_samples) for start in range(0, num_samples, step)] if num_samples else []


class Span(NamedTuple):
    """Positions of a chain from `start` up to `stop`."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"samples {self.start} to {self.stop - 1}"


class ShardJob(NamedTuple):
    """One shard to be written."""

    number: int
    url: str
    span: Span

    def __str__(self) -> str:
        return f"shard {self.url!r}, {self.span}"


class ShardReport(NamedTuple):
    """What has become of a shard.

    Args:
        number: The shard's.
        hashes: Of the keys, 64 bits each.
        num_bytes: Of the tar.
        num_left_out: How many samples `on_error` has left out.
    """

    number: int
    hashes: NDArray[np.uint64]
    num_bytes: int
    num_left_out: int = 0

    @classmethod
    def of(cls, number: int, written: Written, num_left_out: int = 0) -> ShardReport:
        return cls(number, hashes_of(written.keys), written.num_bytes, num_left_out)


class Coming(NamedTuple):
    """A sample that has not been made yet.

    Args:
        position: In the chain.
        fetch: Returns the sample, or fails.
    """

    position: int
    fetch: Callable[[], Sample]


class Recipe:
    """Makes samples of a chain into members.

    Args:
        pipe: The chain.
        encoder: What becomes of the fields.
        key: Returns the key of a sample; None for the sample's own.
    """

    def __init__(self, pipe: Any, encoder: MemberEncoder, key: Callable[[Sample], str] | None) -> None:
        self.pipe = pipe
        self._encoder = encoder
        self._key = None if key is None else Callback("key", key)

    def fingerprint(self) -> Any:
        """Return what the bytes depend on besides the chain."""
        return self._encoder, self._key

    def samples(self, span: Span) -> Iterator[Coming]:
        """Yield the samples of an indexed chain."""
        for start in range(*span, _BLOCK):
            if isinstance(self.pipe, MapPipe):
                due = np.arange(start if start == span.start else start + _BLOCK, min(start + 2 * _BLOCK, span.stop))
                if len(due):
                    self.pipe.announce(due)
            for index in range(start, min(start + _BLOCK, span.stop)):
                yield Coming(index, partial(self._sample, index))

    def _sample(self, index: int) -> Sample:
        return _as_sample(self.pipe[index], index)

    def stream(self) -> Iterator[Coming]:
        """Yield the samples of a stream as its epoch 0 gives them, wherever the stream itself stands."""
        copied = Chain.of(self.pipe).copy_streams()
        seed_chain(copied, 0, 0)
        return (Coming(index, partial(_as_sample, item, index)) for index, item in enumerate(copied))

    def key_of(self, sample: Sample) -> str:
        """Return what a sample is called in its tar."""
        return as_tar_key(sample.key) if self._key is None else check_tar_key(self._key(sample))

    def keys(self, samples: Iterable[Coming]) -> Iterator[str | None]:
        """Yield what samples are called in their tars, and None for each that `on_error` leaves out."""
        return self._made(samples, self.key_of)

    def kept(self, samples: Iterable[Coming]) -> Iterator[TarSample | None]:
        """Yield samples as they stand in tars, and None for each that `on_error` leaves out."""
        return self._made(samples, lambda sample: as_tar_sample(self.key_of(sample), self._encoder(sample)))

    def _made(self, samples: Iterable[Coming], make: Callable[[Sample], Made]) -> Iterator[Made | None]:
        handler = Chain.of(self.pipe).error_handler()
        for position, fetch in samples:
            yield made_or_left_out(fetch, make, position=position, handler=handler, once=True)


def _as_sample(item: Any, index: int) -> Sample:
    return item if isinstance(item, Sample) else as_sample(item, index, "write_shards")


class Writing:
    """Writes shards.

    Args:
        recipe: How.
        places: Where to.
    """

    def __init__(self, recipe: Recipe, places: ShardPlaces) -> None:
        self._recipe, self._places = recipe, places

    def __call__(self, job: ShardJob) -> ShardReport:
        made = self._recipe.kept(self._recipe.samples(job.span))
        written = self._places.write(job.number, (sample for sample in made if sample is not None))
        num_left_out = job.span.stop - job.span.start - len(written.keys)
        return ShardReport.of(job.number, written, num_left_out)


class Measuring:
    """Finds out how many bytes samples take in a tar; 0 for one that is left out.

    Args:
        recipe: How they are written.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __call__(self, span: Span) -> NDArray[np.int64]:
        made = self._recipe.kept(self._recipe.samples(span))
        sizes = (0 if sample is None else sample.num_bytes for sample in made)
        return np.fromiter(sizes, dtype=np.int64, count=span.stop - span.start)
