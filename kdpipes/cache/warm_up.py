"""Filling a cache with all samples of its source, and saying then what it holds."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kdpipes.cache.key import key_of
from kdpipes.cache.open_cache import write_contents
from kdpipes.cache.store import MORE_ROOM, Refusal, bound_to
from kdpipes.core.chain import Chain
from kdpipes.core.errors import DataError, check_count, check_flag
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.map_pipe import MapPipe, as_column
from kdpipes.core.operation import ErrorHandler
from kdpipes.core.progress import shown_if_slow
from kdpipes.core.randomness import SampleKey, using_key
from kdpipes.core.sample import Sample
from kdpipes.storage.codec import encode

__all__ = ["warm_up"]

_BLOCK = 32  # samples that one thread does at a time
_PLAIN = (bool, int, float, str, type(None), np.generic)


class _Kept(NamedTuple):
    """What is noted of a sample that is in the cache.

    Args:
        key: The sample's.
        base: What its entries are found by.
        entries: The fields that are entries.
        plain: The values of those that are numbers or strings, and need none.
    """

    key: str
    base: bytes
    entries: tuple[str, ...]
    plain: dict[str, Any]


def warm_up(pipe: Any, *, num_threads: int, progress: bool) -> None:
    """Fill the cache of `pipe`: see `CacheMapDataPipe.warm_up`."""
    check_count("num_threads", num_threads)
    check_flag("progress", progress)
    pipe.prepare_for_workers()
    kept = _of_index(pipe, num_threads, progress) if isinstance(pipe, MapPipe) else _of_stream(pipe, progress)
    names = pipe.class_names()
    if not write_contents(pipe.operation.store, [one.key for one in kept], _notes(kept, names)):
        _refuse(pipe)


def _of_index(pipe: Any, num_threads: int, progress: bool) -> list[_Kept]:
    """Keep the samples in blocks, in an order of this process's own, so that others are busy elsewhere."""
    size = len(pipe)
    starts = list(range(0, size, _BLOCK))
    random.SystemRandom().shuffle(starts)
    kept: list[_Kept | None] = [None] * size
    tolerates = _tolerates(pipe)

    def keep_block(start: int) -> Iterator[int]:
        for index in range(start, min(start + _BLOCK, size)):
            with using_key(SampleKey(position=index)):
                kept[index] = _keep(pipe, functools.partial(pipe.fetch, index), tolerates)
        return iter(range(start, min(start + _BLOCK, size)))

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            done = (index for block in pool.map(keep_block, starts) for index in block)
            for _ in _shown(done, size, progress):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [one for one in kept if one is not None]


def _of_stream(pipe: Any, progress: bool) -> list[_Kept]:
    tolerates = _tolerates(pipe)
    found = (_keep(pipe, functools.partial(_same, sample), tolerates) for sample in samples_of(pipe, "warm_up"))
    return [one for one in _shown(found, None, progress) if one is not None]


def _same(sample: Sample) -> Sample:
    return sample


def _shown(items: Iterable[Any], total: int | None, progress: bool) -> Iterator[Any]:
    return shown_if_slow(items, total, "filling the cache") if progress else iter(items)


def _tolerates(pipe: Any) -> Callable[[Exception], bool]:
    """Return what says whether a sample may be left out."""
    handler = next(iter(Chain.of(pipe).operations(ErrorHandler)), None)
    return (lambda error: False) if handler is None else handler.tolerates


def _keep(pipe: Any, make: Callable[[], Sample], tolerates: Callable[[Exception], bool]) -> _Kept | None:
    """Put the fields of a sample into the cache, and return what is noted of it; None if it is left out."""
    try:
        return _kept(pipe, make())
    except Exception as error:
        if not tolerates(error):
            raise
        return None


def _kept(pipe: Any, sample: Sample) -> _Kept:
    operation, base = pipe.operation, pipe._identity.of(sample)
    plain: dict[str, Any] = {}
    entries = []
    for name, value in sample.scope().items():
        is_free = value.is_loaded or value.is_cheap
        if is_free and isinstance(sample[name], _PLAIN):
            plain[name] = sample[name]
            continue
        entries.append(name)
        key = key_of(base, name)
        if operation.store.contains(key):
            continue
        if is_free:
            operation.store.put(key, encode((sample[name], {}), key=bound_to(key)))
        else:
            sample[name]  # which puts it there
        if not operation.store.contains(key):
            _refuse(pipe)
    return _Kept(sample.key, base, tuple(entries), plain)


def _refuse(pipe: Any) -> NoReturn:
    stats, refusal = pipe.stats(), pipe.operation.store.refusal
    reason, hint = refusal or Refusal("takes no more", MORE_ROOM)
    raise DataError(
        f"The cache cannot keep all samples: it has {stats.entries} entries of {stats.bytes:,} bytes in all, and "
        f"{reason}. What it has stays. {hint}"
    )


def _notes(kept: Sequence[_Kept], class_names: tuple[str, ...] | None) -> dict[str, Any]:
    fields = list(dict.fromkeys(name for one in kept for name in (*one.plain, *one.entries)))
    return {
        "bases": np.frombuffer(b"".join(one.base for one in kept), dtype=np.uint8),
        "entries": {name: _present([name in one.entries for one in kept]) for name in fields},
        "columns": {name: _column([one.plain.get(name) for one in kept]) for name in fields},
        "in_columns": {name: _present([name in one.plain for one in kept]) for name in fields},
        "class_names": class_names,
    }


def _present(flags: list[bool]) -> Any:
    """Return which samples have something: one flag where all or none do."""
    return flags[0] if len(set(flags)) == 1 else np.asarray(flags, dtype=bool)


def _column(values: list[Any]) -> Any:
    column = as_column(values)
    return column if column.dtype != object else [v.item() if isinstance(v, np.generic) else v for v in values]
