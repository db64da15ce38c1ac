"""The contract of cache stores: what `cache` needs of a store, checked one promise after the other."""

from __future__ import annotations

import multiprocessing
import pickle
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kdpipes.cache.store import CacheStore, Entries
from kdpipes.core import pickling
from kdpipes.core.errors import must_be
from kdpipes.sources.from_ids import IdReaderMapDataPipe
from kdpipes.testing.checks import require

Open = Callable[[], CacheStore]
_SIZES = (0, 1, 4095, 4096, 3_000_000)
_ODD_KEYS = (b"\0", b"\xff" * 255, b"a/../b", b"*", "\u00e4 b\n".encode())
_NUM_ENTRIES = 40


def _content(store: CacheStore, key: bytes) -> bytes | None:
    content = store.get(key)
    return None if content is None else bytes(content)


def keeps_entries(open_store: Open) -> None:
    """An entry is found under its key, by every store of the same storage, until it is replaced or deleted."""
    store = open_store()
    key = secrets.token_bytes(20)
    require(store.get(key) is None and not store.contains(key), "`get` must return None for an unknown key.")
    for size in _SIZES:
        key = secrets.token_bytes(20)
        content = np.random.default_rng(size).bytes(size)
        store.put(key, content, replace=False)
        require(_content(store, key) == content, f"An entry of {size:,} bytes comes back changed, or is missing.")
        require(_content(open_store(), key) == content, "Another store of the same storage does not have the entry.")
        require(store.contains(key), "`contains` must be True for an entry that was put.")
    for key in _ODD_KEYS:
        store.put(key, key[::-1], replace=True)
    for key in _ODD_KEYS:
        require(_content(store, key) == key[::-1], f"The entry of the key {key[:9]!r} is that of another key.")
        store.delete(key)
    key = secrets.token_bytes(20)
    store.delete(key)
    for content in (b"first", b"second", b"third, which is longer"):
        store.put(key, content, replace=True)
        require(_content(store, key) == content, "`put(..., replace=True)` must replace the entry.")
    store.delete(key)
    require(store.get(key) is None and not store.contains(key), "`delete` must delete the entry.")
    before, _ = store.size()
    for number in range(3):
        store.put(secrets.token_bytes(20), bytes(10_000 + number), replace=False)
    after, num_bytes = store.size()
    require(after == before + 3, f"`size` counts {after - before} new entries after 3 were put.")
    require(num_bytes >= 30_000, f"`size` counts {num_bytes:,} bytes for 30,000 bytes of entries.")


def opens_again(open_store: Open) -> None:
    """A store can be used after it was closed, and a pickled copy uses the same storage."""
    store = open_store()
    key = secrets.token_bytes(20)
    store.put(key, b"heron", replace=False)
    try:
        copied: Any = pickle.loads(pickling.dumps(store))  # noqa: S301 - what was pickled here
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        hint = "Open connections in a `functools.cached_property`."
        raise AssertionError(f"The store cannot be pickled: {error}. {hint}") from error
    require(_content(copied, key) == b"heron", "A pickled copy of the store does not have its entries.")
    store.close()
    store.close()
    require(_content(store, key) == b"heron", "The store has lost an entry after `close`.")


def serves_threads(open_store: Open) -> None:
    """Several threads use a store at once."""
    store = open_store()
    start = secrets.token_hex(8)

    def work(number: int) -> bool:
        key = f"{start} {number % 10}".encode()
        store.put(key, key * 1000, replace=False)
        return _content(store, key) == key * 1000

    with ThreadPoolExecutor(4) as threads:
        require(all(threads.map(work, range(_NUM_ENTRIES))), "Threads that use the store at once get other entries.")


def serves_processes(open_store: Open) -> None:
    """Forked processes use the store of their parent, also if it is open."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    store = open_store()
    start = secrets.token_hex(8)
    store.put(start.encode(), b"heron", replace=False)
    context = multiprocessing.get_context("fork")
    entries = Entries(store)  # which lets the store open its connections again

    def work(child: int) -> None:
        for number in range(_NUM_ENTRIES):
            key = f"{start} {(number + 20 * child) % _NUM_ENTRIES}".encode()
            entries.put(key, [key * 1000])
        entries.flush()

    children = [context.Process(target=work, args=(child,)) for child in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    require(all(child.exitcode == 0 for child in children), "A forked process that uses the store has failed.")
    for number in range(_NUM_ENTRIES):
        key = f"{start} {number}".encode()
        require(_content(store, key) == key * 1000, "An entry that a forked process has put is missing or damaged.")
    require(_content(store, start.encode()) == b"heron", "An entry is lost after a fork.")


def lends_claims(open_store: Open) -> None:
    """Only one process at a time gets a claim."""
    one = open_store()
    other = open_store()
    name = secrets.token_bytes(20)
    with one.claim(name, waits=False) as first, other.claim(name, waits=False) as second:
        require(first and not second, "Two stores get the same claim: `put(..., replace=False)` must keep an entry.")
    with other.claim(name, waits=False) as again:
        require(again, "A claim that was given back is still held: `delete` must delete the entry.")


def serves_a_cache(open_store: Open) -> None:
    """A chain finds its values again, and replaces damaged entries."""

    def cached() -> Any:
        loaded = IdReaderMapDataPipe(["a", "b", "c"], load=lambda name: np.full(20_000, ord(name), np.uint8))
        return loaded.cache(open_store(), version=version)

    version = secrets.token_hex(8)
    first = cached()
    expected = [sample["x"].tolist() for sample in first]
    again = cached()
    require([sample["x"].tolist() for sample in again] == expected, "A cache returns other values than its source.")
    require(again.stats().hits == 3, f"A cache finds {again.stats().hits} of 3 values again.")
    store = open_store()
    keys = [again.entry_key(sample, "x") for sample in again.source]
    store.put(keys[0], (_content(store, keys[1]) or b"")[:-1], replace=True)
    healed = cached()
    require([sample["x"].tolist() for sample in healed] == expected, "A cache returns a damaged value.")
    require(healed.stats().healed == 1, "A cache cannot replace a damaged entry.")


STORE_PROMISES: tuple[Callable[[Open], None], ...] = (
    keeps_entries,
    opens_again,
    serves_threads,
    serves_processes,
    lends_claims,
    serves_a_cache,
)


def check_store(open_store: Open) -> None:
    """Check what every store of a cache promises: see `kdpipes.cache.CacheStore`.

    The storage may hold other entries. Some entries stay.

    Args:
        open_store: A function that returns a new store of the same storage each time it is called.

    Raises:
        AssertionError: A promise is broken; the message says which.

    Example:
        >>> from kdpipes.cache import FileStore
        >>> check_store(lambda: FileStore("entries"))
    """
    if not callable(open_store) or not isinstance(open_store(), CacheStore):
        raise TypeError(must_be("open_store", "a function that returns a `CacheStore`", open_store))
    for promise in STORE_PROMISES:
        try:
            promise(open_store)
        except AssertionError as error:
            raise AssertionError(f"{promise.__name__.replace('_', ' ')}: {error}") from None
