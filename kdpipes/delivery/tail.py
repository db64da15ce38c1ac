"""The work pipes at the end of a stream, which work on the samples of a batch together, as in indexed chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from kdpipes.core.bulk import Bulk, BulkSource, read_samples
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.operation import Operation
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import SampleMapperIterDataPipe


def tail_of(source: Any) -> list[SampleMapperIterDataPipe]:
    """Return the work pipes at the end of a stream that can work on many samples together, upstream first.

    They must end in `select`. A pipe that is being profiled has a `samples` of its own, and is not among them.
    """
    pipes: list[SampleMapperIterDataPipe] = []
    pipe = source
    while type(pipe) is SampleMapperIterDataPipe and "samples" not in vars(pipe) and _works_together(pipe.operation):
        pipes.insert(0, pipe)
        pipe = pipe.source
    return pipes if len(pipes) > 1 and pipes[-1].traits.gives == "items" else []


def _works_together(operation: Operation) -> bool:
    kind = type(operation)
    return kind.read_fields is not Operation.read_fields or kind.read_items is not Operation.read_items


def head_samples(source: Any, number: int) -> Iterator[Sample]:
    """Return the samples of a stream before its last `number` pipes."""
    name = ""
    for _ in range(number):
        source, name = source.source, source.name
    return samples_of(source, name)


def together(tail: Sequence[SampleMapperIterDataPipe], samples: Sequence[Sample]) -> BulkSource:
    """Return a source of what the pipes make of some samples, by their places."""
    source: BulkSource = _Held(samples)
    for pipe in tail:
        source = _Worked(pipe.operation, source)
    return source


class _Held:
    """Samples that have been read, but not loaded."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def field_names(self) -> frozenset[str]:
        names = self._samples[0].names
        if any(sample.names != names or sample.failure is not None for sample in self._samples):
            raise ValueError("The samples have different fields, or failed.")  # each is then made by itself
        return frozenset(names)

    def read_fields(self, names: Sequence[str], positions: NDArray[Any], bulk: Bulk) -> list[Sequence[Any]] | None:
        return read_samples(self._samples.__getitem__, names, positions, bulk)

    def read_items(self, positions: NDArray[Any], bulk: Bulk) -> list[Any] | None:
        return None


class _Worked:
    """A `BulkSource` that applies an operation to another one."""

    def __init__(self, operation: Operation, source: BulkSource) -> None:
        self._operation, self._source = operation, source

    def field_names(self) -> frozenset[str] | None:
        known = self._source.field_names()
        return None if known is None else self._operation.traits.fields_after(known)

    def read_fields(self, names: Sequence[str], positions: NDArray[Any], bulk: Bulk) -> list[Sequence[Any]] | None:
        return self._operation.read_fields(self._source, names, positions, bulk)

    def read_items(self, positions: NDArray[Any], bulk: Bulk) -> list[Any] | None:
        return self._operation.read_items(self._source, positions, bulk)
