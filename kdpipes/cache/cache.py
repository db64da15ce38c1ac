"""The caches: each field is looked up when it is read, and stored after a miss."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdpipes.cache.folder import Layout, layout_in
from kdpipes.cache.key import PLAIN, Identity, WatchedCalls
from kdpipes.cache.replayed import Replayable, Replayed
from kdpipes.cache.shared_folder import CacheCounters
from kdpipes.cache.store import CacheStats, CacheStore, Entries, bound_to
from kdpipes.core.chain import Chain
from kdpipes.core.column import Column, Inputs
from kdpipes.core.errors import ChainError, check_choice, check_flag, check_type, must_be
from kdpipes.core.messages import warn
from kdpipes.core.operation import Operation
from kdpipes.core.order import Order
from kdpipes.core.randomness import SampleKey
from kdpipes.core.sample import Block, Sample
from kdpipes.core.sample_pipe import SampleMapper, SampleMapperIterDataPipe, SampleMapperMapDataPipe, register_operation
from kdpipes.core.traits import Traits
from kdpipes.storage.access import Access
from kdpipes.storage.codec import DamagedError, PickledError, decode, encode
from kdpipes.storage.urls import is_local

Verify = Literal["always", "once", "never"]
_OF_DELIVERY = ("draw", "early_draws")  # entries of the ctx that describe one delivery, not the value
_NUM_PROBES = 32


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view: NDArray[Any] = array.view()
    view.flags.writeable = False
    return view


# Make values look as if they came from the cache, for types that need no copy.
_AS_HITS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys((bool, int, float, str, bytes, type(None)), lambda value: value),
    np.ndarray: _read_only,
}


class Cacher(Operation):
    """Keeps fields in a store of your own (functional name: ``cache``).

    `cache_in_memory` describes what is cached, and how entries are identified. `cache_in_memory()`,
    `cache_on_disk(url)` and `cache_in_redis(url)` are this pipe with a store of `kdpipes.cache`: use it to pass them
    further arguments.

    Args:
        store: Where the entries are kept: an object of a subclass of `kdpipes.cache.CacheStore`.
        verify: When checksums are compared: "always", "once" per process and entry, or "never".
        version: A string or an integer that distinguishes these entries from others.
        freeze_randomness: Whether to cache the results of random operations upstream, the same for all epochs.
        allow_pickle: Whether to pickle values that are not plain data. Loading a pickle can execute code, so everyone
            who can write to the store must be trusted.
        bytes_as_views: Whether bytes are returned as read-only memoryviews of the entries instead of copies.

    Memory: that of the store.

    Workers: The store is pickled for workers, and inherited by forked ones.

    Raises:
        ChainError: An operation upstream draws random numbers. Raised when the chain is built, if that is known, or
            when a field is first read.
        TypeError: A value cannot be cached as plain data.

    Example:
        >>> from kdpipes.cache import LmdbStore
        >>> store = LmdbStore("cached", is_durable=False)
        >>> cached = kdp.from_dataset([("heron", 0), ("stork", 1)]).transform("x", str.upper).cache(store)
        >>> [cached[0]["x"] for epoch in range(3)]
        ['HERON', 'HERON', 'HERON']
    """

    def __init__(
        self,
        store: CacheStore,
        *,
        verify: Verify = "always",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        bytes_as_views: bool = False,
    ) -> None:
        given: Any = store
        if not isinstance(given, CacheStore):
            hint = "Subclass `kdpipes.cache.CacheStore`, or use `cache_in_memory()` or `cache_on_disk(url)`."
            raise TypeError(must_be("store", "a `CacheStore`", store, hint))
        check_choice("verify", verify, ("always", "once", "never"))
        check_flag("freeze_randomness", freeze_randomness)
        check_flag("allow_pickle", allow_pickle)
        check_flag("bytes_as_views", bytes_as_views)
        if version is not None and (isinstance(version, bool) or not isinstance(version, str | int)):
            raise TypeError(must_be("version", "a string or an integer", version))
        self._counters = CacheCounters.shared()
        self.entries = Entries(store, self._counters)
        self.freezes = freeze_randomness
        self.traits = Traits(
            role="cache",
            reads=frozenset(),
            changes=frozenset(),
            freezes=freeze_randomness,
            is_transparent=not freeze_randomness,
        )
        self.notes = (version,)
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._bytes_as_views = bytes_as_views
        self._verified = _Verified()  # the first 8 bytes of the keys of entries
        self.is_warming_up = False  # `warm_up` writes the list of samples itself
        self._has_warned = False

    @property
    def completes_itself(self) -> bool:
        """Whether a full epoch writes the list of samples, which looks up each entry."""
        store = self.entries.store
        return store.lifetime == "lasting" and store.has_quick_size

    def counts(self) -> dict[str, int]:
        """Return hits, misses and healed entries of all processes."""
        return self._counters.totals()

    def fingerprint(self) -> Any:
        # `bytes_as_views` does not count: a view equals its bytes.
        return self.freezes, self.notes

    def cache(self, block: Block, identity: Identity, calls: WatchedCalls, added: Callable[[], None]) -> None:
        """Replace the fields of a block by lazy look-ups in the cache.

        Args:
            block: The block.
            identity: Identifies their values.
            calls: Watches the functions upstream while they are called.
            added: Called when the cache has a new entry.
        """
        scope = dict(block.fields)
        # A replayed sample may use other parameters upstream.
        if block.sample().draw.replayed is not None:
            for name, source in scope.items():
                # As the cache does, decode whole images.
                if is_cached(source):
                    block.fields[name] = Column(
                        lambda _, value: _decoded(value), source, what=f"reading field {name!r}"
                    )
            return
        promises = dict(block.promises) if block.is_recording else {}
        for name, source in scope.items():
            if not is_cached(source):
                continue
            entries = [recorded for recorded, promise in promises.items() if source.reaches(promise)]
            entry = _Entry(identity, name, source.inputs(promises.values()), entries)
            load = functools.partial(self._value, entry=entry, calls=calls, added=added)
            column = _CachedColumn(load, entry, what=f"caching field {name!r}", scope={name: source})
            block.fields[name] = column
            block.promises.update(dict.fromkeys(entries, column))

    def _value(self, sample: Sample, *, entry: _Entry, calls: WatchedCalls, added: Callable[[], None]) -> Any:
        name = entry.field
        base = entry.identity.of(sample)
        is_damaged = False
        key = entry.identity.of_field(sample, base, name, entry.inputs)
        try:
            if (found := self._found(key, sample)) is not None:
                self._counters.count(hits=1)
                value, ctx = found
                for recorded, content in ctx.items():
                    sample.ctx.setdefault(recorded, content)
                return value
        except DamagedError:
            is_damaged = True
        except PickledError:
            is_damaged = True
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"The cache holds a pickle for field {name!r} of sample {sample.key!r}. Pickles are not loaded: "
                    "such samples are read from the source instead. If you trust everyone who can write to the cache, "
                    "pass `allow_pickle=True`.",
                )
        # A frozen key depends on the sample alone. If it depended on the delivery, fields could be inconsistent.
        position = int.from_bytes(base[:7], "little")
        frozen = sample.using_key(SampleKey(position=position, is_early=True)) if self.freezes else nullcontext()
        before = set(sample.ctx)
        with calls.watching() as moved, frozen, sample.watching_index() as is_index_read:
            with sample.watching_draws() as drawn:
                value = _decoded(sample[name])
                operation = None if self.freezes else drawn()
            if operation is not None:
                reject_random(operation)
            if not self.freezes and (private := moved()) is not None:
                reject_random(*private)
            index = [sample.position] if is_index_read() else []
        if not is_damaged and not self.entries.takes_more() and type(value) in _AS_HITS:
            # A full cache costs only the look-up: encoding a value that cannot be kept took 60 us.
            self._counters.count(misses=1)
            return _AS_HITS[type(value)](value)
        made = {*entry.recorded, *(set(sample.ctx) - before)} - set(_OF_DELIVERY)
        ctx = {recorded: sample.ctx[recorded] for recorded in made if recorded in sample.ctx}
        try:
            content = b"".join(encode((value, ctx, *index), allow_pickle=self._allow_pickle, key=bound_to(key)))
        except TypeError as error:
            what = f"The ctx ({', '.join(map(repr, ctx))}) of field" if _is_plain(value) else "Field"
            raise TypeError(f"{what} {name!r} cannot be cached. {error}") from error
        is_kept = self.entries.put(key, [content], replace=is_damaged)
        self._counters.count(misses=1, healed=int(is_damaged and is_kept))
        if is_kept and not is_damaged:
            added()
        # The value as later reads return it: a copy of bytes would equal them.
        return value if type(value) is bytes and not self._bytes_as_views else self._read(key, content, False)[0]

    def _found(self, key: bytes, sample: Sample) -> Any:
        """Return the tuple of a value and its entries of the ctx, or None."""
        is_known = self._verify != "always" and key[:8] in self._verified
        content = self.entries.get(key, is_verified=is_known)
        if content is None:
            return None
        found = self._read(key, content, self._verify == "always" or (self._verify == "once" and not is_known))
        if type(found) is not tuple or len(found) not in (2, 3):
            raise DamagedError("The entry was not written by a cache.")
        # A function upstream read the position, which has changed since.
        if len(found) == 3 and found[2] != sample.position:
            raise DamagedError("The entry belongs to another position.")
        if not is_known and self._verify != "always":
            self._verified.add(key[:8])
        return found[:2]

    def _read(self, key: bytes, content: Any, is_checked: bool) -> Any:
        return decode(
            content,
            verify=is_checked,
            allow_pickle=self._allow_pickle,
            bytes_as_views=self._bytes_as_views,
            key=bound_to(key) if is_checked else b"",
        )


class _Entry(NamedTuple):
    """The part of a cache key that all samples of a field share.

    Args:
        identity: Identifies the samples.
        field: The name of the field.
        inputs: What the field is computed from.
        recorded: The entries of the ctx that loading it records.
    """

    identity: Identity
    field: str
    inputs: Inputs
    recorded: list[str]

    def key_of(self, sample: Sample) -> bytes:
        """Return the key of a sample's entry."""
        return self.identity.of_field(sample, self.identity.of(sample), self.field, self.inputs)


class _CachedColumn(Column):
    """A field that is looked up in a cache."""

    __slots__ = ("entry",)

    def __init__(self, load: Callable[..., Any], entry: _Entry, *, what: str, scope: Mapping[str, Column]) -> None:
        super().__init__(load, what=what, scope=scope, reads_once=True)
        self.entry = entry


class _Verified(set[bytes]):
    """The entries whose checksums this process has compared. Copying or pickling it gives an empty set."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Verified, ()


def is_cached(value: Column) -> bool:
    """Return whether a field is cached: not if it is loaded already, or cheap to load."""
    return not value.is_loaded and not value.is_cheap


def _is_plain(value: Any) -> bool:
    with suppress(TypeError):
        encode(value)
        return True
    return False


def _decoded(value: Any) -> Any:
    decode_all = getattr(value, "decoded", None)
    return decode_all() if decode_all is not None else value


def reject_random(operation: str, generator: str | None = None, *, is_eager: bool = False) -> None:
    """Raise the error for a cache downstream of an operation that draws random numbers.

    Args:
        operation: The name of the operation.
        generator: The name of the function's own generator, if it has drawn from that.
        is_eager: Whether the operation draws before the cache is asked, so that the cache cannot freeze the results.
    """
    if is_eager:
        raise ChainError(
            f"`{operation}` draws random numbers when a sample passes, which a cache downstream cannot keep. Put the "
            "cache upstream of it. If the same numbers are wanted in every epoch, draw them in a function of "
            "`.transform()` or `.add_field()`, and pass `freeze_randomness=True`."
        )
    if generator is None:
        raise ChainError(
            f"`{operation}` draws random numbers, and a cache downstream would give the same ones in every epoch. Put "
            "the cache upstream of it. If the same numbers are wanted, pass `freeze_randomness=True`."
        )
    raise ChainError(
        f"A function of `{operation}` draws random numbers from its own generator `{generator}`, and a cache "
        "downstream would give the same ones in every epoch. Put the cache upstream of it, and let the function take a "
        "parameter `rng`, a generator for each sample. If the same numbers are wanted, pass `freeze_randomness=True`."
    )


class _CachePipe(SampleMapper):
    """The part of a cache that is the same for indexed sources and streams."""

    for_users: ClassVar[tuple[str, ...]] = ("stats", "warm_up")

    _operation: Cacher
    _identity: Identity
    _has_warned = False
    _epoch = -1

    def _configure(self, source_datapipe: Any, operation: Cacher, name: str) -> None:  # type: ignore[override]
        super()._configure(source_datapipe, operation, name)
        chain = Chain.of(self.source)
        if (culprit := chain.random_name(is_eager=True)) is not None:
            reject_random(culprit, is_eager=True)
        if not operation.freezes and (culprit := chain.random_name()) is not None:
            reject_random(culprit)
        is_shared = operation.entries.store.lifetime != "chain"
        self._identity = Identity(self.source, operation.notes, is_shared=is_shared)
        self._calls = WatchedCalls(self.source, is_shared)
        # Eager operations may load fields, and draw from the global generators, before the cache looks for the sample.
        eager = [node for node in reversed(chain) if node.operation is not None and node.traits.is_eager]
        self._eager = ", ".join(f"`{node.name}`" for node in eager)
        drawing = [node.operation for node in eager if node.operation is not None and node.traits.seeds]
        self._drawing = drawing if operation.freezes else []

    def unhashed(self) -> list[str]:
        """Return the names of values that functions upstream read, if neither the key nor `version` follows them."""
        return [] if self._operation.notes != (None,) else self._identity.unhashed()

    def entry_key(self, sample: Sample, name: str) -> bytes:
        """Return the key of the entry of a field of a sample upstream or downstream of the cache."""
        value = sample.lazy(name)
        if isinstance(value, _CachedColumn):
            return value.entry.key_of(sample)
        promises = sample.block.promises.values() if sample.block.is_recording else ()
        return _Entry(self._identity, name, value.inputs(promises), []).key_of(sample)

    def prepare_for_workers(self) -> None:
        # Otherwise each worker would compute them.
        self._identity.prepare()

    def counters(self) -> dict[str, int]:
        """Return counts for a loader's statistics; of the store only what it knows without a search."""
        entries = self._operation.entries
        if entries.store.has_quick_size:
            counted = entries.stats()._asdict()
        else:
            counted = self._operation.counts()
        return {f"cache_{name}": number for name, number in counted.items()}

    def apply(self, block: Block) -> Sequence[Block]:
        sample = block.sample()
        if self._eager and not self._has_warned:
            loaded = (name for name, value in block.fields.items() if value.is_loaded)
            if (name := next((name for name in loaded if not isinstance(sample[name], PLAIN)), None)) is not None:
                self._has_warned = True
                warn(
                    f"Field {name!r} is loaded when it comes to the cache, and therefore is not cached: {self._eager} "
                    "may load fields as samples pass. `.transform()` and `.add_field()` call functions only when the "
                    "fields are needed.",
                )
        for operation in self._drawing:
            if names := operation.drawing():
                reject_random(names[0], is_eager=True)
        if sample.draw.epoch != self._epoch:
            self._epoch = sample.draw.epoch
            self._operation.entries.check()
        self._operation.cache(block, self._identity, self._calls, self.entry_added)
        return (block,)

    def entry_added(self) -> None:
        """Count an entry that this process has added."""

    def end_epoch(self, *, in_worker: bool) -> None:
        self._operation.entries.flush()

    def stats(self) -> CacheStats:
        """Return the size of the cache, and the hits, misses and healed entries in all processes of this chain."""
        return self._operation.entries.stats()

    def warm_up(
        self, *, num_threads: int = 4, num_workers: int = 0, executor: Executor | None = None, progress: bool = True
    ) -> CacheStats:
        """Fill the cache with the missing samples of the source, and mark it complete.

        After an interruption it continues where it stopped. Processes, ranks and machines that fill the same cache at
        once share the work. A complete cache on disk opens without its source: `kdp.open_cache`.

        Args:
            num_threads: The number of threads that load samples, in each worker.
            num_workers: The number of worker processes; 0 loads in this process. With `executor`, the number of jobs
                that it runs at a time, if it does not report that itself. Each worker reads a whole stream, but loads
                only its share of the samples.
            executor: Runs the work: an executor from `concurrent.futures`, Dask (`client.get_executor()`), ...
            progress: Whether to show a progress bar.

        Raises:
            DataError: The cache is too small for all samples, or its store rejects new entries.
        """
        from kdpipes.cache.warm_up import warm_up

        self._operation.is_warming_up = True
        try:
            warm_up(self, num_threads=num_threads, num_workers=num_workers, executor=executor, progress=progress)
        finally:
            self._operation.is_warming_up = False
        return self.stats()


class CacheMapDataPipe(_CachePipe, SampleMapperMapDataPipe):
    """A cache of an indexed source."""

    _num_left: int | None = None  # entries that this process adds before it looks again
    _num_seen = -1  # entries when it last looked
    _is_listed = False

    def entry_added(self) -> None:
        if not self._operation.completes_itself:
            return
        # In a loop without a loader, nothing else shows that an epoch is over.
        if self._num_left is None:
            self._num_left = max(len(self) - self._operation.entries.stats().entries, 0) + 1
        self._num_left -= 1
        if self._num_left <= 0:
            self._num_left = len(self)
            self.end_epoch(in_worker=False)

    def end_epoch(self, *, in_worker: bool) -> None:
        """Write the last group; in the main process, write the list of samples if the cache has all of them now."""
        super().end_epoch(in_worker=in_worker)
        operation = self._operation
        if in_worker or self._is_listed or not operation.completes_itself or operation.is_warming_up:
            return
        num_entries = operation.entries.stats().entries
        if num_entries != self._num_seen:
            self._num_seen = num_entries
            from kdpipes.cache.warm_up import complete

            self._is_listed = complete(self)

    def prefetch(self, order: Order) -> None:
        """Pass on the positions that are not cached; of an epoch, all unless a probe of it is cached completely."""
        if not self._eager and any(node.traits.is_remote for node in Chain.of(self.source)):
            positions = order.probe(_NUM_PROBES) if order.is_epoch else order.positions()
            missing = positions[[not self._is_there(position) for position in positions.tolist()]]
            if len(positions) and not len(missing):
                return
            order = order if order.is_epoch else Order.of_next(missing)
        super().prefetch(order)

    def _is_there(self, position: int) -> bool:
        """Return whether a field of a sample is cached: fields that are read are cached together."""
        sample = self.source.fetch(position)
        names = [name for name, value in sample.scope().items() if is_cached(value)]
        return not names or any(self._operation.entries.contains(self.entry_key(sample, name)) for name in names)


class CacheIterDataPipe(_CachePipe, SampleMapperIterDataPipe):
    """A cache of a stream."""

    def samples(self) -> Iterator[Sample]:
        """Yield new samples, front to back. Shards that an earlier epoch has read are not opened again."""
        path: list[Any] = []
        shards = self.source
        while isinstance(shards, SampleMapperIterDataPipe) and not isinstance(shards, CacheIterDataPipe):
            path.append(shards)
            shards = shards.source
        if not isinstance(shards, Replayable):
            yield from super().samples()
            return
        for raw in Replayed(shards, self._operation.entries).samples():
            sample = raw
            for mapper in reversed(path):
                sample = mapper.apply_to(sample)
            yield self.apply_to(sample)


class CacherInMemory(Cacher):
    """Keeps fields in shared memory, one copy for all workers (functional name: ``cache_in_memory``).

    torchdata's `in_memory_cache` keeps whole samples, separately in each worker, and fixes their order. This cache is
    one step in the work of a chain, and changes neither order nor randomness. Fields are cached one by one, when they
    are read, under the key of the sample; put it upstream of random operations. Upstream of `.decode_images()`, it
    stores encoded images, which are small. Downstream, it stores the pixels of whole images, which are faster to read;
    crops may then differ by one or two gray levels from crops that are decoded on their own. Labels and other values
    that a source knows anyway are not cached.

    An entry is identified by the source (its arguments; path, size and modification time of local files; the ETag of
    remote files, from listings and shards), the sample's key, the field, and the work pipes upstream: their arguments,
    decoders, the code, defaults and closures of functions, and the globals that these read. Plan pipes are not part of
    it, and neither are files that a function opens: change `version` if they change. A damaged entry is loaded from the
    source again and replaced.

    A stream keeps its order. If only work pipes stand between `kdp.stream_shards` and the cache, a stream that was read
    to its end once is repeated without opening a shard. For other streams, the values are cached, but the source is
    still read in every epoch.

    Args:
        name: The name of a cache that all chains and processes of the same user on this host share, for example all
            ranks. It is deleted when no process uses it any more (see `keep`). Without a name, the cache is deleted
            together with this chain.
        max_bytes: The maximum size; by default half of the free shared memory. Entries are never evicted. When the
            cache is full, a warning is issued once, and values that are not in it are loaded from the source every
            time.
        keep: Whether a named cache stays until `kdpipes cache clear` when no process uses it any more.
        version: A string or an integer that distinguishes these entries from others.
        freeze_randomness: Whether to cache the results of random operations upstream, the same for all epochs.
        allow_pickle: Whether to pickle values other than numbers, strings, bytes, arrays, tensors, images, and lists
            and dictionaries of these.
        bytes_as_views: Whether bytes are returned as read-only memoryviews of the cache instead of copies. Copying
            takes a third of the time of a hit of 100 KB. Use it only if the functions downstream accept memoryviews,
            and the values are not sent to another process.

    Memory: the entries, once per host, in `/dev/shm`. On Linux a small helper process removes them however the process
        ends.

    Workers: Workers of any kind use the cache that was made with the chain. Arrays from it are read-only.

    Raises:
        ChainError: An operation upstream draws random numbers. Raised when the chain is built, if that is known, or
            when a field is first read.
        TypeError: A value cannot be cached as plain data.

    Example:
        >>> cached = kdp.from_dataset([("heron", 0), ("stork", 1)]).transform("x", str.upper).cache_in_memory()
        >>> [cached[0]["x"] for epoch in range(3)]
        ['HERON', 'HERON', 'HERON']
        >>> cached.stats().hits, cached.stats().misses
        (2, 1)
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        max_bytes: int | None = None,
        keep: bool = False,
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        bytes_as_views: bool = False,
    ) -> None:
        from kdpipes.cache.lmdb_store import LmdbStore  # stores are imported on use: most chains have one or none

        super().__init__(
            LmdbStore.in_memory(name, max_bytes=max_bytes, keep=keep),
            verify="once",
            version=version,
            freeze_randomness=freeze_randomness,
            allow_pickle=allow_pickle,
            bytes_as_views=bytes_as_views,
        )


class CacherOnDisk(Cacher):
    """Keeps fields on disk, or in object storage, for later runs (functional name: ``cache_on_disk``).

    torchdata's `on_disk_cache` keeps files whose names a pipe of your own chooses. This cache is one step in the work
    of a chain, and names entries itself; `cache_in_memory` describes what is cached, and how entries are identified.
    Any number of processes fill it at once. An epoch that reads all samples of an indexed source completes it, and so
    does `warm_up()`, which continues after an interruption. A complete cache opens without the source, by
    `kdp.open_cache(url)`, even if its folder was moved or packed.

    Args:
        url: A folder, by path or by any URL that fsspec knows. It need not exist.
        layout: "lmdb", one file, for local folders (no network file system); "files", one per entry, in any storage.
            By default that of an existing cache, else "lmdb" for paths and "files" for URLs.
        max_bytes: The maximum size of an LMDB file; by default half of the free space on the disk.
        version: A string or an integer that distinguishes these entries from others.
        freeze_randomness: Whether to cache the results of random operations upstream, the same for all epochs.
        allow_pickle: Whether to pickle values that are not plain data. Loading a pickle can execute code, so everyone
            who can write to the cache must be trusted.
        storage_options: For URLs: the arguments of fsspec's file system, such as `{"key": ..., "secret": ...}`. They
            are neither shown nor written.

    Memory: only the system's file cache.

    Workers: They share the cache with each other, with other processes and, by a URL, with other machines. Arrays from
        it are read-only.

    Raises:
        ChainError: An operation upstream draws random numbers. Raised when the chain is built, if that is known, or
            when a field is first read.
        TypeError: A value cannot be cached as plain data.
        ImportError: The package of the file system (`gs://`: gcsfs) is not installed.
        DataError: The folder contains other files, or a cache of another version of kdpipes.

    Example:
        >>> cached = kdp.from_dataset([("heron", 0), ("stork", 1)]).transform("x", str.upper).cache_on_disk("cached")
        >>> cached.warm_up().entries, kdp.open_cache("cached")[1]["x"]
        (4, 'STORK')
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        max_bytes: int | None = None,
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_type("url", url, str | os.PathLike, "a path or a URL")
        if not os.fspath(url):
            raise ValueError(must_be("url", "the name of a folder", url))
        place = os.fspath(url).removeprefix("file://")
        check_choice("layout", layout, ("lmdb", "files", None))
        access = Access(storage_options=storage_options)
        if layout is None:
            layout = "files" if not is_local(place) or layout_in(place, access) == "files" else "lmdb"
        if layout == "files" and max_bytes is not None:
            raise ValueError(must_be("max_bytes", "None", max_bytes, 'The layout "files" has no limit of its own.'))
        from kdpipes.cache.file_store import FileStore
        from kdpipes.cache.lmdb_store import LmdbStore

        store: CacheStore
        if layout == "lmdb":
            store = LmdbStore(place, max_bytes=max_bytes)
        else:
            store = FileStore(place, storage_options=storage_options)
        super().__init__(store, version=version, freeze_randomness=freeze_randomness, allow_pickle=allow_pickle)


class CacherInRedis(Cacher):
    """Keeps fields in a redis server, for several machines (functional name: ``cache_in_redis``).

    `cache_in_memory` describes what is cached, and how entries are identified. Only keys that begin with the namespace
    are touched, and the server is never flushed; evicted entries are loaded again. An entry is also loaded again and
    replaced if it is damaged, is a pickle, is longer than 512 MiB, or belongs to another key (its checksum includes its
    key). `cache(RedisStore(...))` takes further arguments, such as a smaller limit.

    Args:
        url: The server: `redis://`, `rediss://` (encrypted) or `unix://`, with user, password and database.
        namespace: The beginning of all keys: letters, digits, and "_", ".", "/", "-".
        ttl_s: How long an entry is kept, in seconds; None for no limit.
        on_unreachable: What to do if the server cannot be reached: "raise" an error, or "go_on" without the cache, with
            a warning, until the server is reachable again.
        version: A string or an integer that distinguishes these entries from others.
        freeze_randomness: Whether to cache the results of random operations upstream, the same for all epochs.
        allow_pickle: Whether to pickle values that are not plain data. Loading a pickle can execute code, so everyone
            who can write to the server must be trusted.

    Memory: only the server's.

    Workers: Each worker has its own connection.

    Raises:
        ImportError: redis is not installed.
        ConnectionError: On use: the server cannot be reached.
        ChainError: An operation upstream draws random numbers. Raised when the chain is built, if that is known, or
            when a field is first read.
        TypeError: A value cannot be cached as plain data.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "kdpipes",
        ttl_s: float | None = None,
        on_unreachable: Literal["raise", "go_on"] = "raise",
        version: str | int | None = None,
        freeze_randomness: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        from kdpipes.cache.redis_store import RedisStore

        super().__init__(
            RedisStore(url, namespace, ttl_s=ttl_s, on_unreachable=on_unreachable),
            version=version,
            freeze_randomness=freeze_randomness,
            allow_pickle=allow_pickle,
        )


_PIPES = (CacheMapDataPipe, CacheIterDataPipe)
register_operation("cache", Cacher, Cacher, _PIPES)
register_operation("cache_in_memory", CacherInMemory, CacherInMemory, _PIPES)
register_operation("cache_on_disk", CacherOnDisk, CacherOnDisk, _PIPES)
register_operation("cache_in_redis", CacherInRedis, CacherInRedis, _PIPES)
