"""What every store promises, of one kind after the other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.cache.file_store import FileStore
from kdpipes.cache.store import Entries, bound_to, claim_by
from kdpipes.storage.codec import decode, encode
from kdpipes.testing.stores import STORE_PROMISES, lends_claims, serves_processes
from tests.cache.entries import open_files, open_lmdb, open_memory, open_redis

ALL_KINDS = ["memory", "named", "disk", "files", "object-storage", "redis"]
SHARED_KINDS = [kind for kind in ALL_KINDS if kind != "object-storage"]  # which is in the memory of one process
Open = Callable[[], Any]


@pytest.fixture(params=ALL_KINDS)
def open_store(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> Iterator[Open]:
    """Open one and the same cache, as often as it is called."""
    name = namespace.replace("/", "-")
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
        yield lambda: open_redis(url, namespace)
        return
    if request.param == "memory":
        owner = [open_memory(max_bytes=1 << 26)]
        yield lambda: pickle.loads(pickle.dumps(owner[0]))
        owner.clear()  # the test is over, but what pytest passes to it still there
        return
    yield {
        "named": lambda: open_memory(name, max_bytes=1 << 26),
        "disk": lambda: open_lmdb(tmp_path / "cache", max_bytes=1 << 26, is_durable=False),
        "files": lambda: open_files(tmp_path / "cache"),
        "object-storage": lambda: open_files(f"memory://{name}/cache"),
    }[request.param]


shared_only = pytest.mark.parametrize("open_store", SHARED_KINDS, indirect=True)


def key(number: int) -> bytes:
    return f"entry {number}".encode()


def value(number: int, size: int = 40_000) -> np.ndarray[Any, Any]:
    """Return an array that tells which it is, all through."""
    return np.full(size + number, number, dtype=np.int32)


def whole(entry: memoryview | None, number: int) -> bool:
    """Return whether an entry is there, undamaged, and of that number."""
    return entry is not None and np.array_equal(decode(entry), value(number, len(decode(entry)) - number))


def in_children(function: Callable[[int], Any], num_children: int) -> list[Any]:
    """Return what `function(number)` returns in forked processes that run at once; raise if one of them fails."""
    context = multiprocessing.get_context("fork")
    children = []
    for number in range(num_children):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=answer, args=(sender, function, number))
        child.start()
        sender.close()  # so that the end of the child, however it comes, is the end of the pipe
        children.append((child, receiver))
    found = []
    for child, receiver in children:
        with receiver:
            found.append(receiver.recv())
        child.join()
    errors = [error for _, error in found if error]
    assert not errors, errors[0]
    return [value for value, _ in found]


def answer(sender: Any, function: Callable[[int], Any], number: int) -> None:
    """Send what `function(number)` returns, and the traceback of its error."""
    try:
        found = function(number), ""
    except BaseException:
        found = None, traceback.format_exc()
    sender.send(found)


@pytest.mark.parametrize("promise", STORE_PROMISES, ids=lambda promise: promise.__name__)
def test_every_store_keeps_each_promise(open_store: Open, promise: Any) -> None:
    if promise in (lends_claims, serves_processes) and "memory://" in str(open_store().store):
        return  # object storage in the memory of one process
    promise(lambda: open_store().store)


def test_what_was_put_is_found(open_store: Open) -> None:
    store = open_store()
    assert store.get(b"a") is None
    assert not store.contains(b"a")
    assert store.put(b"a", [b"he", memoryview(b"ro"), np.frombuffer(b"n", dtype=np.uint8)])
    entry = store.get(b"a")
    assert isinstance(entry, memoryview)
    assert (bytes(entry), entry.readonly, entry.format) == (b"heron", True, "B")
    assert store.contains(b"a")
    assert not store.contains(b"b")


def test_an_entry_stays_as_it_is_unless_it_is_to_be_replaced(open_store: Open) -> None:
    store = open_store()
    if isinstance(store.store, FileStore) and store.store._url.startswith("memory://"):
        assert store.put(b"a", [b"first"])  # object storage is not asked whether there is one
    else:
        assert store.put(b"a", [b"first"])
        assert store.put(b"a", [b"second"])
    assert bytes(store.get(b"a")) == b"first"
    for number in range(3):
        assert store.put(b"a", [b"third %d" % number], replace=True)
        assert bytes(store.get(b"a")) == b"third %d" % number
    assert bytes(open_store().get(b"a")) == b"third 2"
    assert store.put(b"b", [b"new"], replace=True)
    assert store.stats().entries == 2


def test_work_is_claimed_by_one_at_a_time(open_store: Open) -> None:
    store, other = open_store(), open_store()
    store.put(b"a", [b"heron"])
    with store.claim(b"work", waits=False) as first, other.claim(b"other work", waits=True) as second:
        assert (first, second) == (True, True)
        with other.claim(b"work", waits=False) as third:
            assert not third
    with other.claim(b"work", waits=False) as again:
        assert again
    assert store.stats().entries == 1


def test_a_claim_by_a_record_that_is_not_renewed_is_taken_over(monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    monkeypatch.setattr("kdpipes.cache.store.PATIENCE_S", 0.0)
    monkeypatch.setattr("kdpipes.cache.store._POLL_S", 0.0)
    held: list[bytes] = [b"of a process that was killed"]

    def create(content: bytes) -> bytes:
        held[:] = held or [content]
        return held[0]

    def replace(content: bytes) -> None:
        held[:] = [content]

    with claim_by(create, replace, held.clear, waits=False) as is_held:
        assert not is_held
    with claim_by(create, replace, held.clear, waits=True) as is_held:
        assert is_held
    assert not held


class Unknown:
    """Is no plain data, and pickles."""


def cached_by(store: Any, load: Callable[[str], Any], **options: Any) -> Any:
    """Return a chain of three samples that are cached in a store."""
    return kdp.from_ids(list("abc"), load=load).cache(store.store, **options)


def keys_of(cached: Any) -> list[bytes]:
    """Return the keys of a chain's entries."""
    return [cached.entry_key(sample, "x") for sample in cached.source]


def numbered(name: str) -> Any:
    return value(ord(name), 2000)


def test_entries_that_were_swapped_are_loaded_again(open_store: Open) -> None:
    cached = cached_by(open_store(), numbered)
    before = [sample["x"].tolist() for sample in cached]
    store, keys = open_store(), keys_of(cached)
    swapped = [bytes(store.get(key)) for key in (keys[1], keys[0])]
    for key, content in zip(keys, swapped, strict=False):
        assert store.put(key, [content], replace=True)
    again = cached_by(open_store(), numbered)
    assert [sample["x"].tolist() for sample in again] == before
    assert again.stats()[:2] == (1, 2)
    assert again.stats().healed == 2
    assert [sample["x"].tolist() for sample in again] == before
    assert again.stats()[:2] == (4, 2)


def test_an_entry_of_a_pickle_is_a_miss_with_a_warning(open_store: Open, warned_once: Callable[[str], Any]) -> None:
    trusting = cached_by(open_store(), lambda name: Unknown(), allow_pickle=True)
    assert isinstance(trusting[0]["x"], Unknown)
    cached = cached_by(open_store(), numbered)
    with warned_once("holds a pickle for field 'x' of sample 'a'.*`allow_pickle=True`"):
        for number, key in enumerate(keys_of(cached)):
            open_store().put(key, encode((Unknown(), {}), allow_pickle=True, key=bound_to(key)))
            assert whole_array(cached[number]["x"], "abc"[number])
    assert [whole_array(sample["x"], name) for sample, name in zip(cached, "abc", strict=True)] == [True] * 3
    assert cached.stats()[:2] == (3, 3)


def whole_array(array: Any, name: str) -> bool:
    return bool(np.array_equal(array, numbered(name)))


def test_views_outlive_the_store(open_store: Open) -> None:
    store = open_store()
    store.put(b"a", encode(value(5)))
    array = decode(store.get(b"a"))[10:20]
    store.close()
    del store
    gc.collect()
    assert array.tolist() == [5] * 10
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_views_stay_as_they_are_while_others_write(open_store: Open) -> None:
    store = open_store()
    views = {}
    for number in range(60):
        size = (10, 900, 1100, 5000)[number % 4]  # in LMDB, of its own pages and of others'
        store.put(key(number), encode(value(number, size)))
        views[number] = store.get(key(number))
        if number % 7 == 0:
            store.put(key(number), encode(value(number, size)), replace=True)
    assert all(whole(view, number) for number, view in views.items())


@shared_only
def test_processes_fill_a_cache_together(open_store: Open) -> None:
    store = open_store()
    store.put(b"before", encode(value(1)))
    view = decode(store.get(b"before"))

    def work(child: int) -> bool:
        for number in range(30):
            store.put(key((number + 10 * child) % 30), encode(value((number + 10 * child) % 30, 3000)))
        return int(view.sum()) == view.size and whole(store.get(b"before"), 1)

    assert in_children(work, 3) == [True] * 3
    assert all(whole(entry, number) for number, entry in enumerate(map(store.get, map(key, range(30)))))
    assert store.stats().entries == 31


@shared_only
def test_processes_may_be_forked_while_threads_work(open_store: Open) -> None:
    store = open_store()
    is_over = threading.Event()

    def work() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            store.put(key(number % 40), encode(value(number % 40, 2000)))
            store.get(key(number % 40))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert in_children(lambda child: store.put(b"child", [b"x"]) and bytes(store.get(b"child")), 1) == [b"x"]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


class Opened(FileStore):
    """A store that a thread opens for as long as `may_open` is not set."""

    is_opening, may_open = threading.Event(), threading.Event()

    @cached_property
    def connection(self) -> bool:
        self.is_opening.set()
        return self.may_open.wait(60)

    def contains(self, key: bytes) -> bool:
        return self.connection


def test_a_process_may_be_forked_while_a_store_is_opened(tmp_path: Path) -> None:
    entries = Entries(Opened(str(tmp_path / "cache")))
    thread = threading.Thread(target=entries.contains, args=(b"a",))
    thread.start()
    Opened.is_opening.wait(60)

    def contains(_: int) -> bool:
        Opened.may_open.set()  # of the child
        return entries.contains(b"a")

    try:
        assert in_children(contains, 1) == [True]
    finally:
        Opened.may_open.set()
        thread.join()


@shared_only
def test_processes_killed_during_a_put_leave_entries_whole(open_store: Open) -> None:
    store = open_store()
    context = multiprocessing.get_context("fork")

    def work(start: int, answers: Any) -> None:
        for number in range(start, start + 350):  # all of them fit into the cache
            if store.put(key(number), encode(value(number, 25_000))):
                answers.send(number)

    done: set[int] = set()
    for attempt in range(6):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(10_000 * attempt, sender))
        child.start()
        sender.close()
        for _ in range(3 + attempt):
            done.add(receiver.recv())
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        while True:
            try:
                done.add(receiver.recv())
            except (EOFError, OSError):
                break
        receiver.close()
    assert len(done) >= 33
    later = open_store()
    assert all(whole(later.get(key(number)), number) for number in done)
    assert later.put(b"after", [b"all"])
    assert later.stats().entries <= len(done) + 7  # of which nobody was told in time
    if isinstance(later.store, FileStore):
        assert not list(Path(later.store._url, ".partial").iterdir())
