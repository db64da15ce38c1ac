"""What all caches have in common: fields are looked up when they are read, and kept when they had to be loaded."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, Literal

import numpy as np

from kdpipes._draw import Draw
from kdpipes._graph import random_name, walk
from kdpipes._sample_pipe import SampleMapperIterDataPipe, SampleMapperMapDataPipe
from kdpipes.cache.identity import Identity, eager_names, key_of
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.replayed import Replayed
from kdpipes.cache.shared_tally import SharedTally
from kdpipes.cache.store import CacheStats, CacheStore, bound_to
from kdpipes.cache.warm_up import warm_up
from kdpipes.cache.watched_calls import WatchedCalls
from kdpipes.core.order import Order
from kdpipes.errors import ChainError, check_choice, check_flag, must_be
from kdpipes.sample import Lazy, Sample
from kdpipes.storage.codec import DamagedError, PickledError, decode, encode

__all__ = ["CacheIterDataPipe", "CacheMapDataPipe", "Cacher", "Verify"]

Verify = Literal["always", "once", "never"]
_OF_DRAWS = ("draw", "early_draws")  # entries of the ctx that are about one delivery
_NUM_PROBES = 32
_PLAIN = (bool, int, float, str, type(None), np.generic)


class Cacher:
    """A cache of fields, as an operation of a pipe. Subclasses say where it lies.

    Args:
        store: Where entries are kept.
        verify: When checksums are compared: at every read, once per entry and process, or never.
        version: What users count besides what is seen.
        freeze_randomness: Whether random operations upstream may be cached.
        allow_pickle: Whether values that are no plain data may be pickled.
        bytes_as_views: Whether bytes come as views, which are not copied.
    """

    def __init__(
        self,
        store: CacheStore,
        *,
        verify: Verify,
        version: str | int | None,
        freeze_randomness: bool,
        allow_pickle: bool,
        bytes_as_views: bool = False,
    ) -> None:
        check_choice("verify", verify, ("always", "once", "never"))
        flags = {"freeze_randomness": freeze_randomness, "allow_pickle": allow_pickle, "bytes_as_views": bytes_as_views}
        for name, value in flags.items():
            check_flag(name, value)
        if version is not None and (isinstance(version, bool) or not isinstance(version, str | int)):
            raise TypeError(must_be("version", "a string or an integer", version))
        self.store = store
        self.freezes = freeze_randomness
        self.changes_no_sample = not freeze_randomness
        self.tally = SharedTally()
        self.notes = (version,)
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._bytes_as_views = bytes_as_views
        self._verified = _Verified()
        self._has_warned = False

    def _get_again(self, key: bytes) -> memoryview | None:
        store = self.store
        return store.get_again(key) if isinstance(store, LmdbStore) else store.get(key)

    def begin_epoch(self) -> None:
        """Check the cache's file before this process reads the samples of another epoch.

        Raises:
            DataError: The cache's file has been truncated.
        """
        if isinstance(self.store, LmdbStore):
            self.store.check_size()

    def cached_as(self) -> Any:
        """Return what another cache behind this one knows it by."""
        return self.freezes, self.notes

    def fingerprinted(self) -> Any:
        """Return what makes a chain give other samples: nothing, but for frozen randomness."""
        return self.freezes, self.notes  # a view is equal to the bytes that it is a view of

    def field_names(self, known: frozenset[str]) -> frozenset[str]:
        return known

    def column_name(self, name: str) -> str | None:
        return name

    def ignores(self, name: str) -> bool:
        """Return whether what it makes does not depend on a field: it makes nothing."""
        return True

    def cache(self, sample: Sample, base: bytes, calls: WatchedCalls) -> Sample:
        """Let the fields of a sample come from the cache.

        Args:
            sample: The sample.
            base: What its values are known by.
            calls: What watches the functions upstream while they are called.
        """
        if sample.draw.replayed is not None:  # which may use other parameters upstream
            return _settled(sample)
        scope = sample.scope()
        promises = sample.promises() if sample.is_recording else {}
        for name, source in scope.items():
            if not is_cached(source):
                continue
            reached = source.reaches(list(promises.values())) if promises else []
            entries = [entry for entry, promise in promises.items() if any(promise is other for other in reached)]
            load = functools.partial(self._value, name=name, base=base, entries=entries, calls=calls)
            sample[name] = value = Lazy(load, what=f"caching field {name!r}", scope=scope)
            for entry in entries:
                sample.promise_ctx(entry, value)
        return sample

    def _value(self, sample: Sample, *, name: str, base: bytes, entries: list[str], calls: WatchedCalls) -> Any:
        key, is_damaged, found = key_of(base, name), False, None
        try:
            found = self._found(key)
        except DamagedError:
            is_damaged = True
        except PickledError:
            is_damaged = True
            self._warn_of_pickle(sample, name)
        if found is None:
            # A frozen draw depends on the sample alone: on its delivery, each field could keep another one.
            frozen = sample.drawing_as(_frozen(base)) if self.freezes else nullcontext()
            with calls.watching() as moved, frozen:
                return self._loaded(sample, name, key, entries, is_damaged, moved)
        self.tally.count(hits=1)
        value, ctx = found
        for entry, content in ctx.items():
            sample.ctx.setdefault(entry, content)
        return value

    def _found(self, key: bytes) -> Any:
        """Return a value and the entries of its ctx in a tuple, or None."""
        is_known = self._verify != "always" and key in self._verified
        content = self._get_again(key) if is_known else self.store.get(key)
        if content is None:
            return None
        is_checked = self._verify == "always" or (self._verify == "once" and not is_known)
        found = self._read(key, content, is_checked)
        if type(found) is not tuple or len(found) != 2:
            raise DamagedError("The entry was not written by a cache.")
        if not is_known and self._verify != "always":
            self._verified.add(key)
        return found

    def _loaded(
        self,
        sample: Sample,
        name: str,
        key: bytes,
        entries: list[str],
        is_damaged: bool,
        moved: Callable[[], tuple[str, str] | None],
    ) -> Any:
        before = set(sample.ctx)
        with sample.watching_draws() as drawn:
            value = _decoded(sample[name])
            operation = None if self.freezes else drawn()
        if operation is not None:
            refuse_random(operation)
        if not self.freezes and (private := moved()) is not None:
            refuse_private(*private)
        made = {*entries, *(set(sample.ctx) - before)} - set(_OF_DRAWS)
        ctx = {entry: sample.ctx[entry] for entry in made if entry in sample.ctx}
        try:
            content = b"".join(encode((value, ctx), allow_pickle=self._allow_pickle, key=bound_to(key)))
        except TypeError as error:
            what = f"The ctx ({', '.join(map(repr, ctx))}) of field" if _is_plain(value) else "Field"
            raise TypeError(f"{what} {name!r} cannot be cached. {error}") from error
        is_kept = self.store.put(key, [content], replace=is_damaged)
        self.tally.count(misses=1, healed=int(is_damaged and is_kept))
        is_as_hits_give_it = type(value) is bytes and not self._bytes_as_views
        return value if is_as_hits_give_it else self._read(key, content, False)[0]

    def _read(self, key: bytes, content: Any, is_checked: bool) -> Any:
        return decode(
            content,
            verify=is_checked,
            allow_pickle=self._allow_pickle,
            bytes_as_views=self._bytes_as_views,
            key=bound_to(key) if is_checked else b"",
        )

    def _warn_of_pickle(self, sample: Sample, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The cache holds a pickle for field {name!r} of sample {sample.key!r}. Pickles are not read: this "
                "sample, and others like it, are loaded from the source. If you trust everyone who can write to the "
                "cache, pass `allow_pickle=True`.",
                stacklevel=2,
            )


class _Verified:
    """Entries that this process has checked. A copy has checked none."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Verified, ()

    def __contains__(self, key: bytes) -> bool:
        return int.from_bytes(key[:8], "little") in self._seen

    def add(self, key: bytes) -> None:
        """Note that an entry has been checked."""
        self._seen.add(int.from_bytes(key[:8], "little"))


def is_cached(value: Lazy) -> bool:
    """Return whether a field is worth an entry: reading it costs something."""
    return not value.is_loaded and not value.is_cheap


def _frozen(base: bytes) -> Draw:
    """Return the draw of a sample whose randomness is frozen, as one that the ctx records by operation."""
    return Draw(ordinal=int.from_bytes(base[:7], "little"), is_early=True)


def _is_plain(value: Any) -> bool:
    with suppress(TypeError):
        encode(value)
        return True
    return False


def _decoded(value: Any) -> Any:
    decode_all = getattr(value, "decoded", None)
    return decode_all() if decode_all is not None else value


def _settled(sample: Sample) -> Sample:
    """Let encoded images be decoded whole, as the cache does."""
    for name, value in sample.scope().items():
        if is_cached(value):
            sample[name] = Lazy(lambda sample, found: _decoded(found), value, what=f"reading field {name!r}")
    return sample


def refuse_random(operation: str) -> None:
    """Raise the error for a cache behind an operation that draws random numbers."""
    raise ChainError(
        f"`{operation}` draws random numbers, and a cache behind it would give the same ones in every epoch. Put the "
        "cache before it; if it is wanted, pass `freeze_randomness=True`."
    )


def refuse_private(operation: str, generator: str) -> None:
    """Raise the error for a cache behind a function that draws from a generator of its own."""
    raise ChainError(
        f"What `{operation}` calls draws random numbers from its own generator `{generator}`, and a cache behind it "
        "would give the same ones in every epoch. Put the cache before it, and take a parameter `rng`, which is one "
        "for each sample; if it is wanted, pass `freeze_randomness=True`."
    )


class _CachePipe:
    """What both flavours share."""

    _source: Any
    _operation: Cacher
    _identity: Identity
    _name: str

    def _begin(self) -> None:
        operation = self._operation
        name = None if operation.freezes else random_name(self._source)
        if name is not None:
            refuse_random(name)
        is_shared = not (isinstance(operation.store, LmdbStore) and operation.store.is_private)
        self._identity = Identity(self._source, operation.notes, is_shared=is_shared)
        self._calls = WatchedCalls(self._source, warns_of_changed=is_shared)
        self._eager = ", ".join(f"`{name}`" for name in eager_names(self._source))
        self._has_warned = False
        self._epoch = -1

    def identity(self) -> Any:
        """Return what makes this pipe give what it gives."""
        return self._operation.fingerprinted()

    def unhashed(self) -> list[str]:
        """Return names of what functions upstream read whose changes neither the key nor `version` follows."""
        return [] if self._operation.notes != (None,) else self._identity.unhashed()

    def prepare_for_workers(self) -> None:
        """Called before workers start: find out now what would be found out in each of them."""
        self._identity.prepare()

    def counted_by_cache(self) -> dict[str, int]:
        """Return what a loader's statistics show; what a store holds only where it knows that without a search."""
        hits, misses, healed = self._operation.tally.totals()
        counted = {"cache_hits": hits, "cache_misses": misses, "cache_healed": healed}
        if isinstance(self._operation.store, LmdbStore):
            stats = self._operation.store.stats()
            counted |= {"cache_bytes": stats.bytes, "cache_entries": stats.entries}
        return counted

    def apply(self, sample: Sample) -> Sample:
        if self._eager and not self._has_warned:
            self._warn_of_loaded(sample)
        if sample.draw.epoch != self._epoch:
            self._epoch = sample.draw.epoch
            self._operation.begin_epoch()
        return self._operation.cache(sample, self._identity.of(sample), self._calls)

    def _warn_of_loaded(self, sample: Sample) -> None:
        loaded = [name for name, value in sample.scope().items() if value.is_loaded]
        large = [name for name in loaded if not isinstance(sample[name], _PLAIN)]
        if large:
            self._has_warned = True
            warnings.warn(
                f"Field {large[0]!r} is loaded when it comes to the cache, and so is not cached: {self._eager} may do "
                "that as samples pass. `.transform()` and `.add_field()` call functions only when they are needed.",
                stacklevel=2,
            )

    def stats(self) -> CacheStats:
        """Return what the cache holds, and what this chain's processes have counted: hits, misses, healed entries."""
        hits, misses, healed = self._operation.tally.totals()
        return self._operation.store.stats()._replace(hits=hits, misses=misses, healed=healed)

    def warm_up(self, *, num_threads: int = 4, progress: bool = True) -> CacheStats:
        """Fill the cache with all samples of the source, those that are there already left out, and mark it complete.

        It may be broken off, and goes on where it was; several processes may do so at once, and share the work. A cache
        on disk that is complete opens without its source: `kdp.open_cache`.

        Args:
            num_threads: How many threads load samples.
            progress: Whether to show a progress bar.

        Raises:
            DataError: The cache cannot keep all of it.
        """
        warm_up(self, num_threads=num_threads, progress=progress)
        return self.stats()


class CacheMapDataPipe(_CachePipe, SampleMapperMapDataPipe):
    """A cache of an indexed source.

    Args:
        source_datapipe: A pipe of samples.
        operation: The cache.
        name: The functional name, for errors.
    """

    def __init__(self, source_datapipe: Any, operation: Any, name: str) -> None:
        super().__init__(source_datapipe, operation, name)
        self._begin()

    def prefetch(self, order: Order) -> None:
        """Pass on what is not cached; an epoch's order unless a probe of it is cached completely."""
        if self._reads_ahead():
            positions = order.probe(_NUM_PROBES) if order.is_epoch else order.positions()
            missing = positions[[not self._is_there(position) for position in positions.tolist()]]
            if len(positions) and not len(missing):
                return
            order = order if order.is_epoch else Order.of_next(missing)
        super().prefetch(order)

    def _reads_ahead(self) -> bool:
        return not self._eager and any(getattr(pipe, "is_elsewhere", False) for pipe in walk(self._source))

    def _is_there(self, position: int) -> bool:
        """Return whether a field of a sample is cached: those that are read have been cached together."""
        sample = self._source.fetch(position)
        base = self._identity.of(sample)
        names = [name for name, value in sample.scope().items() if is_cached(value)]
        return not names or any(self._operation.store.contains(key_of(base, name)) for name in names)


class CacheIterDataPipe(_CachePipe, SampleMapperIterDataPipe):
    """A cache of a stream.

    Args:
        source_datapipe: A pipe of samples.
        operation: The cache.
        name: The functional name, for errors.
    """

    def __init__(self, source_datapipe: Any, operation: Any, name: str) -> None:
        super().__init__(source_datapipe, operation, name)
        self._begin()

    def samples(self) -> Iterator[Sample]:
        """Yield new samples, front to back: of shards that have passed before, without opening them."""
        path = list(_work_path(self._source))
        shards = path.pop()
        if not callable(getattr(shards, "place", None)):
            yield from super().samples()
            return
        for raw in Replayed(shards, self._operation.store).samples():
            sample = raw
            for mapper in reversed(path):
                sample = mapper.apply(sample)
            yield self.apply(sample)


def _work_path(pipe: Any) -> Iterator[Any]:
    """Yield the work pipes upstream, nearest first, and then the first pipe that is something else."""
    while isinstance(pipe, SampleMapperIterDataPipe) and not isinstance(pipe, CacheIterDataPipe):
        yield pipe
        pipe = pipe._source
    yield pipe
