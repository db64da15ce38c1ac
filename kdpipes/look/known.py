"""What is known of a chain at next to no cost: nothing is opened, and no sample is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import MapDataPipe

from kdpipes.cache.open_cache import CacheReaderMapDataPipe
from kdpipes.core.chain import upstream_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.sample_pipe import SampleMapper
from kdpipes.delivery.by_length import ByLength
from kdpipes.delivery.deal import DealerIterDataPipe, DealerMapDataPipe
from kdpipes.plan.class_counts import class_counts
from kdpipes.plan.concat import ConcatenatorMapDataPipe
from kdpipes.plan.few_shot import FewShotTakerMapDataPipe
from kdpipes.plan.filter_classes import ClassFilterMapDataPipe
from kdpipes.plan.map_classes import ClassMapperMapDataPipe
from kdpipes.plan.mix import MixerMapDataPipe
from kdpipes.plan.oversample import OversamplerMapDataPipe
from kdpipes.plan.permute import PermuterMapDataPipe
from kdpipes.plan.repeat_until import RepeaterUntilMapDataPipe
from kdpipes.plan.sample_weighted import WeightedSamplerMapDataPipe
from kdpipes.plan.subset import SubsetterMapDataPipe
from kdpipes.plan.take_per_class import PerClassTakerMapDataPipe
from kdpipes.plan.take_percent import PercentTakerMapDataPipe
from kdpipes.sources.from_dataset import DatasetReaderMapDataPipe
from kdpipes.sources.from_ids import IdReaderMapDataPipe
from kdpipes.sources.image_folder import ImageFolderMapDataPipe
from kdpipes.sources.open_records import RecordReaderMapDataPipe
from kdpipes.sources.open_shards import ShardReaderMapDataPipe
from kdpipes.storage.shard_index import Places
from kdpipes.storage.urls import is_local

__all__ = ["Knowledge"]

_FEW = 200_000  # samples whose plan is made in no time
_FEW_FILES = 20_000
_BY_LABEL = (
    ClassFilterMapDataPipe,
    ClassMapperMapDataPipe,
    FewShotTakerMapDataPipe,
    OversamplerMapDataPipe,
    PerClassTakerMapDataPipe,
    WeightedSamplerMapDataPipe,
)
_BY_POSITION = (MixerMapDataPipe, PermuterMapDataPipe, SubsetterMapDataPipe)
_COUNTED = (ConcatenatorMapDataPipe, PercentTakerMapDataPipe, RepeaterUntilMapDataPipe)  # whose plans take no time
_PASSING = (*_COUNTED, *_BY_LABEL, *_BY_POSITION)
_LIBRARIES = ("torch.", "torchdata.", "kdpipes.")


class Knowledge:
    """What is known of the pipes of a chain, which are asked for from the source on.

    Args:
        finds_out: Whether a plan may be made, and a folder of this machine listed, where that is quick.
    """

    def __init__(self, *, finds_out: bool) -> None:
        self._finds_out = finds_out
        self._lengths: dict[int, int | None] = {}

    def length(self, pipe: Any) -> int | None:
        """Return how many items a pipe gives; None where it is not known, or the pipe has no length.

        Raises:
            Exception: What the plan raises, when it is made.
        """
        known = self._lengths[id(pipe)] = None
        if self._is_counted(pipe):
            try:
                known = self._lengths[id(pipe)] = len(pipe)
            except TypeError:  # it has none
                return None
        return known

    def classes(self, pipe: Any) -> dict[Any, int] | None:
        """Return how many samples there are of each class; None where that is not known, or they have no classes."""
        size = self._lengths.get(id(pipe))
        if not self._finds_out or not size or size > _FEW or not has_column(pipe, "y"):
            return None
        labels = pipe.column("y")
        return class_counts(labels) if labels.dtype.kind in "iuU" else None

    def _is_counted(self, pipe: Any) -> bool:
        """Return whether the length of a pipe costs nothing."""
        sources = upstream_of(pipe)
        if isinstance(pipe, PlanPipe) and pipe.is_planned:
            return True
        if any(self._lengths.get(id(source)) is None for source in sources):
            return False
        if isinstance(pipe, PlanPipe) and not isinstance(pipe, _COUNTED):
            return self._is_few(sources) and _is_planned_quickly(pipe)
        if isinstance(pipe, DealerMapDataPipe):
            return not isinstance(pipe._layout, ByLength) or pipe._lengths is not None
        return bool(sources) or self._is_source_counted(pipe)

    def _is_few(self, sources: list[Any]) -> bool:
        return self._finds_out and sum(self._lengths[id(source)] or 0 for source in sources) <= _FEW

    def _is_source_counted(self, pipe: Any) -> bool:
        if isinstance(pipe, ImageFolderMapDataPipe):
            is_quick = self._finds_out and is_local(pipe._root) and _has_few_files(pipe._root)
            return pipe._listing is not None or is_quick
        if isinstance(pipe, ShardReaderMapDataPipe):
            return pipe._catalog is not None
        if isinstance(pipe, RecordReaderMapDataPipe):
            return pipe._records is not None
        if isinstance(pipe, CacheReaderMapDataPipe):
            return pipe._contents is not None
        return isinstance(pipe, MapPipe) or type(pipe).__module__.startswith(_LIBRARIES)


def _is_planned_quickly(pipe: PlanPipe) -> bool:
    return isinstance(pipe, _BY_POSITION) or (isinstance(pipe, _BY_LABEL) and has_column(pipe.source, "y"))


def _has_few_files(root: str) -> bool:
    return sum(1 for _ in islice(_entries_of(root), _FEW_FILES + 1)) <= _FEW_FILES


def _entries_of(root: str) -> Iterator[str]:
    waiting, seen = [root], set[tuple[int, int]]()
    while waiting:
        folder = waiting.pop()
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:  # a link that leads back
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.path
                if Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir():
                    waiting.append(entry.path)


def has_column(pipe: Any, name: str | None) -> bool:
    """Return whether a field of all samples is in memory."""
    while isinstance(pipe, SampleMapper):
        name = None if name is None else pipe.operation.traits.column_before(name)
        pipe = pipe.source
    if name is None or not isinstance(pipe, MapPipe):
        return False
    if isinstance(pipe, _PASSING):
        return all(has_column(source, name) for source in upstream_of(pipe))
    return _source_has_column(pipe, name)


def _source_has_column(source: Any, name: str) -> bool:
    if isinstance(source, ImageFolderMapDataPipe):
        return name == "y" and source._listing is not None
    if isinstance(source, IdReaderMapDataPipe):
        return name == "y" and source._labels is not None
    if isinstance(source, DatasetReaderMapDataPipe):
        is_label = name == "y" and source._known_labels() is not None
        return is_label or (name in source.field_names() and type(source._dataset.value) in (list, tuple))
    if isinstance(source, ShardReaderMapDataPipe):
        known = source._catalog.value.fields if source._catalog is not None else {}
        return name in known and not isinstance(known[name], Places)
    if isinstance(source, RecordReaderMapDataPipe):
        known = source._records.value.fields if source._records is not None else {}
        return name in known and not isinstance(known[name], Places)
    if isinstance(source, CacheReaderMapDataPipe):
        notes = source._contents.value.notes["in_columns"] if source._contents is not None else {}
        return notes.get(name) is True
    return name == "y" and "_kdpipes_kept_labels" in vars(source)


def is_behind_deal(pipe: Any) -> bool:
    """Return whether a pipe gives batches."""
    while not isinstance(pipe, DealerMapDataPipe | DealerIterDataPipe):
        sources = upstream_of(pipe)
        if isinstance(pipe, MapDataPipe) or len(sources) != 1:
            return False
        (pipe,) = sources
    return True
