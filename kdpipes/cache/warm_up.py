"""Fill a cache with all samples of its source, and write the list of samples that makes it complete."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kdpipes.cache.key import PLAIN
from kdpipes.cache.open_cache import KEY_SIZE, has_list, write_list
from kdpipes.cache.store import MORE_ROOM, Rejection, bound_to
from kdpipes.core.chain import Chain
from kdpipes.core.column import as_column
from kdpipes.core.errors import DataError, check_count, check_flag
from kdpipes.core.fingerprint import digest
from kdpipes.core.iter_pipe import samples_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import shown_if_slow
from kdpipes.core.randomness import SampleKey, using_key
from kdpipes.core.sample import Sample
from kdpipes.storage.codec import encode
from kdpipes.storage.jobs import check_workers, in_parallel, run_jobs

_MOST = 32  # maximum number of samples in a block
_NUM_BLOCKS = 64  # minimum, so that several processes can share small datasets
_WHAT = "filling the cache"


class _Kept(NamedTuple):
    """One sample's record in the list of samples."""

    key: str
    entries: dict[str, bytes]  # keys of the entries of cached fields
    plain: dict[str, Any]  # values of the other fields


# The first sample of a block, and the records of its samples; None if another process is loading them.
_Block = tuple[int, list[_Kept] | None]


def warm_up(pipe: Any, *, num_threads: int, num_workers: int, executor: Executor | None, progress: bool) -> None:
    """Fill the cache of `pipe`: see `CacheMapDataPipe.warm_up`."""
    check_count("num_threads", num_threads)
    check_flag("progress", progress)
    check_workers(executor, num_workers)
    pipe.prepare_for_workers()
    kept: dict[int, list[_Kept]] = {}
    # Blocks claimed by other processes come last. By then, they are done, or abandoned by a killed process.
    for waits in (False, True):
        filler = _Filler(pipe, num_threads, waits, frozenset(kept))
        run = partial(run_jobs, executor=executor, num_workers=num_workers, what=_WHAT, progress=progress)
        found: Iterator[_Block]
        if not isinstance(pipe, MapPipe):
            found = chain.from_iterable(run(filler.stream, range(max(num_workers, 1))))
        elif num_workers or executor is not None:
            found = chain.from_iterable(run(filler.blocks, filler.jobs()))
        else:
            left = list(chain.from_iterable(filler.jobs()))
            found = in_parallel(filler.block, left, num_threads)
            found = shown_if_slow(found, len(left), _WHAT, "block") if progress else found
        tried = set()
        for start, block in found:
            tried.add(start)
            if block is not None:
                kept[start] = block
        if tried <= kept.keys():
            break
    if not _is_written(pipe, kept):
        _reject(pipe)


def complete(pipe: Any) -> bool:
    """Write the sample list if the cache of an indexed `pipe` holds all samples; return whether it has a list."""
    entries = pipe.operation.entries
    if has_list(entries):  # it may list other samples, but only `warm_up` replaces it
        return True
    filler = _Filler(pipe, 1, waits=False, done=frozenset())
    kept: dict[int, list[_Kept]] = {}
    for start in chain.from_iterable(filler.jobs()):  # random order finds a missing entry soon
        block = filler.found(start)
        if block is None:
            return False
        kept[start] = block
    return _is_written(pipe, kept)


class _Filler:
    """Loads the samples missing in the cache of a pipe, except blocks whose first positions are in `done`.

    It may be sent to worker processes. With `waits`, it waits for samples that another process is loading; otherwise it
    skips them.
    """

    def __init__(self, pipe: Any, num_threads: int, waits: bool, done: frozenset[int]) -> None:
        self._pipe = pipe
        self._num_threads = num_threads
        self._waits = waits
        self._done = done
        self._name = digest(Chain.of(pipe).fingerprints())
        self._handler = Chain.of(pipe).error_handler()
        self._size = min(max(len(pipe) // _NUM_BLOCKS, 1), _MOST) if isinstance(pipe, MapPipe) else 1

    def jobs(self) -> list[list[int]]:
        """Return the remaining blocks in random order, so that processes rarely try the same block at the same time."""
        left = [start for start in range(0, len(self._pipe), self._size) if start not in self._done]
        random.SystemRandom().shuffle(left)
        return [left[start : start + self._num_threads] for start in range(0, len(left), self._num_threads)]

    def blocks(self, starts: Sequence[int]) -> list[_Block]:
        """Load some blocks."""
        return list(in_parallel(self.block, starts, self._num_threads))

    def block(self, start: int) -> _Block:
        """Load a block of an indexed source unless another process has claimed it."""
        indices = range(start, min(start + self._size, len(self._pipe)))
        return start, self._claimed(start, [(index, self._pipe.fetch) for index in indices])

    def stream(self, worker: int) -> list[_Block]:
        """Read a stream, and load the samples that no other process has claimed."""
        return [
            (number, self._claimed(number, [(number, partial(_same, sample))]))
            for number, sample in enumerate(samples_of(self._pipe, "warm_up"))
            if number not in self._done
        ]

    def found(self, start: int) -> list[_Kept] | None:
        """Return the records of the samples of a block; None if an entry is missing in the cache."""
        kept: list[_Kept] = []
        for index in range(start, min(start + self._size, len(self._pipe))):
            if self._add(kept, index, self._pipe.fetch, loads=False):
                return None
        return kept

    def _claimed(self, start: int, samples: Sequence[tuple[int, Callable[[int], Sample]]]) -> list[_Kept] | None:
        cache = self._pipe.operation.entries
        with cache.claim(digest([self._name, start]), waits=self._waits) as is_held:
            if not is_held:
                return None
            kept: list[_Kept] = []
            missing = [key for index, make in samples for key in self._add(kept, index, make, loads=True)]
            cache.flush()
            if not all(map(cache.contains, missing)):
                _reject(self._pipe)
        return kept

    def _add(self, kept: list[_Kept], index: int, make: Callable[[int], Sample], *, loads: bool) -> list[bytes]:
        """Append the record of a sample unless it may be skipped; return the keys of entries that were missing."""
        cache = self._pipe.operation.entries
        plain: dict[str, Any] = {}
        entries = dict[str, bytes]()
        missing = list[bytes]()
        try:
            with using_key(SampleKey(position=index)):
                sample = make(index)
                for name, value in sample.scope().items():
                    is_free = value.is_loaded or value.is_cheap
                    if is_free and isinstance(sample[name], PLAIN):
                        plain[name] = sample[name]
                        continue
                    key = entries[name] = self._pipe.entry_key(sample, name)
                    if cache.contains(key):
                        continue
                    missing.append(key)
                    if loads and is_free:
                        cache.put(key, encode((sample[name], {}), key=bound_to(key)))
                    elif loads:
                        sample[name]  # reading the field stores it
        except Exception as error:
            if self._handler is None or not self._handler.tolerates(error):
                raise
            return []
        kept.append(_Kept(sample.key, entries, plain))
        return missing


def _same(sample: Sample, index: int) -> Sample:
    return sample


def _reject(pipe: Any) -> NoReturn:
    stats = pipe.stats()
    reason, hint = pipe.operation.entries.rejection or Rejection("takes no more", MORE_ROOM)
    raise DataError(
        f"The cache cannot keep all samples: it has {stats.entries} entries of {stats.bytes:,} bytes in all, and "
        f"{reason}. What it has stays. {hint}"
    )


def _is_written(pipe: Any, blocks: dict[int, list[_Kept]]) -> bool:
    """Write the sample list, and return whether the cache could store it."""
    kept = [one for start in sorted(blocks) for one in blocks[start]]
    fields = list(dict.fromkeys(name for one in kept for name in (*one.plain, *one.entries)))
    notes = {
        "entries": {name: _present([name in one.entries for one in kept]) for name in fields},
        "keys": {name: _keys([one.entries.get(name) for one in kept]) for name in fields},
        "columns": {name: _column([one.plain.get(name) for one in kept]) for name in fields},
        "in_columns": {name: _present([name in one.plain for one in kept]) for name in fields},
        "class_names": pipe.class_names(),
    }
    return write_list(pipe.operation.entries, [one.key for one in kept], notes)


def _present(flags: list[bool]) -> Any:
    """Return one flag per sample, or a single bool if all are equal."""
    return flags[0] if len(set(flags)) == 1 else np.asarray(flags, dtype=bool)


def _keys(keys: list[bytes | None]) -> Any:
    """Return the keys of the entries of a field, `[num_samples, 20] uint8`, zeros without an entry; None if none."""
    if not any(keys):
        return None
    return np.frombuffer(b"".join(key or bytes(KEY_SIZE) for key in keys), dtype=np.uint8).reshape(-1, KEY_SIZE)


def _column(values: list[Any]) -> Any:
    column = as_column(values)
    return column if column.dtype != object else [v.item() if isinstance(v, np.generic) else v for v in values]
