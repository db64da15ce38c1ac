"""One call of `write_shards`: what is there is found, what is missing is written, and both are counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError
from kdpipes.core.pipe import Pipe
from kdpipes.core.progress import shown_if_slow
from kdpipes.storage.catalog import index_beside
from kdpipes.write._keys import KnownKeys, hashes_of
from kdpipes.write._shard_job import Coming, Limits, Measuring, Recipe, ShardJob, ShardReport, Span, Writing
from kdpipes.write._shard_notes import ShardNotes
from kdpipes.write._shard_places import ShardPlaces
from kdpipes.write._tar_shard import TarSample
from kdpipes.write.jobs import run_jobs

__all__ = ["ShardRun", "ShardsResult"]

_MEASURED = 512  # samples that one job measures
_END: Any = object()


class ShardsResult(NamedTuple):
    """What `write_shards` has done.

    Args:
        urls: The shards, in order.
        num_samples: How many samples are in them.
        num_bytes: How many bytes they have.
        num_found: How many of the shards were there from an earlier run.
        num_left_out: How many samples `on_error` has left out in this run.
        class_names: The names of the classes 0, 1, ..., if the chain knows them: `kdp.open_shards(class_names=...)`.
    """

    urls: list[str]
    num_samples: int
    num_bytes: int
    num_found: int = 0
    num_left_out: int = 0
    class_names: tuple[str, ...] | None = None


class ShardRun:
    """One call.

    Args:
        recipe: What becomes of the samples.
        places: Where to.
        limits: Of a shard.
        notes: What is known of the job.
        was_begun: Whether an earlier run may have left shards.
        size: The number of samples; None for a stream.
    """

    def __init__(
        self,
        recipe: Recipe,
        places: ShardPlaces,
        limits: Limits,
        notes: ShardNotes,
        was_begun: bool,
        size: int | None,
    ) -> None:
        self._recipe, self._places, self._limits, self._notes = recipe, places, limits, notes
        self._was_begun, self._size = was_begun, size
        self._known = KnownKeys(self._keys_of)
        self._reports: dict[int, ShardReport] = {}
        self._num_found = self._num_left_out = 0

    def do(self, num_workers: int, executor: Executor | None) -> ShardsResult:
        """Write what is missing."""
        if self._was_begun:
            self._places.remove_parts()
        try:
            stops = self._stops(num_workers, executor)
            if stops is None:
                self._write_on()
            else:
                self._write_jobs(stops, num_workers, executor)
            self._known.check()
        except BaseException:
            if executor is None:
                self._places.remove_parts()  # of workers that were ended
            raise
        return self._finished()

    def _stops(self, num_workers: int, executor: Executor | None) -> list[int] | None:
        """Return up to which position each shard goes; None where that will be seen."""
        if self._size is None:
            return None
        if self._limits.max_bytes is None:
            return self._limits.even_stops(self._size)
        if self._notes.stops is not None:
            return list(self._notes.stops)
        if not num_workers and executor is None:
            return None
        spans = [Span(start, min(start + _MEASURED, self._size)) for start in range(0, self._size, _MEASURED)]
        self._prepare()
        sizes = run_jobs(
            Measuring(self._recipe), spans, executor=executor, num_workers=num_workers, what="measuring samples"
        )
        with closing(sizes):  # type: ignore[type-var]  # a generator
            stops = self._limits.stops(np.concatenate([np.zeros(0, dtype=np.int64), *sizes]))
        self._num_left_out = 0 if stops else self._size
        self._notes = self._notes.keep(self._places, stops=stops)
        return stops

    def _prepare(self) -> None:
        """Let pipes do here what is done once."""
        for pipe in Chain.of(self._recipe.pipe).of_type(Pipe):
            pipe.prepare_for_workers()

    def _write_jobs(self, stops: list[int], num_workers: int, executor: Executor | None) -> None:
        self._find(range(len(stops)))
        spans = map(Span, [0, *stops], stops)
        jobs = [ShardJob(number, self._places.url(number), span) for number, span in enumerate(spans)]
        missing = [job for job in jobs if job.number not in self._reports]
        if num_workers or executor is not None:
            self._prepare()
        writing = Writing(self._recipe, self._places)
        reports = run_jobs(writing, missing, executor=executor, num_workers=num_workers, what="writing shards")
        with closing(reports):  # type: ignore[type-var]  # a generator
            for report in reports:
                self._add(report)

    def _find(self, numbers: range) -> None:
        """Take note of the shards of an earlier run."""
        if self._was_begun:
            for number, written in self._places.finished(numbers):
                self._add(ShardReport.of(number, written))
        self._num_found = len(self._reports)

    def _add(self, report: ShardReport) -> None:
        self._reports[report.number] = report
        self._known.add(report.hashes, report.number)

    def _write_on(self) -> None:
        """Write shards as the samples come, behind those that are there."""
        self._find_up_to_a_gap()
        samples = self._recipe.stream() if self._size is None else self._recipe.samples(Span(0, self._size))
        samples = shown_if_slow(samples, self._size, "writing shards")
        cutter = _Cutter(self._recipe.kept(self._behind(samples)), self._limits)
        for number in count(self._num_found):
            if cutter.is_over:
                break
            self._add(ShardReport.of(number, self._places.write(number, cutter.shard())))
        self._num_left_out = cutter.num_left_out

    def _find_up_to_a_gap(self) -> None:
        """Take note of the shards of an earlier run that nothing is missing before."""
        found = self._places.finished(range(len(self._places.there()) if self._was_begun else 0))
        with closing(found):  # type: ignore[type-var]  # a generator
            for number, written in found:
                if number != len(self._reports):
                    break
                self._add(ShardReport.of(number, written))
        self._num_found = len(self._reports)

    def _behind(self, samples: Iterator[Coming]) -> Iterator[Coming]:
        """Yield the samples behind those that are written; those that were left out in between are left out."""
        due = np.concatenate([np.zeros(0, dtype=np.uint64), *(report.hashes for report in self._reports.values())])
        place, keys = 0, self._recipe.keys(samples)
        while place < len(due):
            key = next(keys, _END)
            if key is _END:
                raise self._gone_error(place)
            place += key is not None and bool(hashes_of([key])[0] == due[place])
        yield from samples

    def _gone_error(self, place: int) -> DataError:
        keys = (key for number in self._reports for key in self._keys_of(number))
        return DataError(
            f"The chain does not give what it gave: sample {next(islice(keys, place, None))!r}, of a shard that is "
            "there, does not come, or not in its place. Give its random pipes a seed; or remove the shards, to begin "
            "anew."
        )

    def _keys_of(self, number: int) -> Sequence[str]:
        index = index_beside(self._places.url(number))
        return [] if index is None else index.keys

    def _finished(self) -> ShardsResult:
        reports = [self._reports[number] for number in range(len(self._reports))]
        shards = [[len(report.hashes), report.num_bytes] for report in reports]
        if self._notes.shards != shards:
            self._notes.keep(self._places, shards=shards)
        names = self._notes.class_names
        return ShardsResult(
            urls=[self._places.url(report.number) for report in reports],
            num_samples=sum(num_samples for num_samples, _ in shards),
            num_bytes=sum(num_bytes for _, num_bytes in shards),
            num_found=self._num_found,
            num_left_out=self._num_left_out + sum(report.num_left_out for report in reports),
            class_names=None if names is None else tuple(names),
        )


class _Cutter:
    """Cuts samples into shards as they come.

    Args:
        samples: As they stand in tars; None for one that is left out.
        limits: Of a shard.
    """

    def __init__(self, samples: Iterator[TarSample | None], limits: Limits) -> None:
        self.num_left_out = 0
        self._samples, self._limits = self._kept(samples), limits
        self._next: TarSample = next(self._samples, _END)

    @property
    def is_over(self) -> bool:
        """Whether no sample is left."""
        return self._next is _END

    def shard(self) -> Iterator[TarSample]:
        """Yield the samples of the next shard."""
        num_samples = num_bytes = 0
        while not self.is_over and self._limits.allow(num_samples, num_bytes, size := self._next.num_bytes):
            yield self._next
            num_samples, num_bytes = num_samples + 1, num_bytes + size
            self._next = next(self._samples, _END)

    def _kept(self, samples: Iterator[TarSample | None]) -> Iterator[TarSample]:
        for sample in samples:
            if sample is not None:
                yield sample
            self.num_left_out += sample is None
