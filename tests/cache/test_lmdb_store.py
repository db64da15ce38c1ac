"""LMDB: shared memory goes with its owner, fullness and damage are survived, and views stay safe."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdpipes.cache import folder_watcher, lmdb_store, shared_folder
from kdpipes.cache.folder import LocalFolder, read_metadata
from kdpipes.cache.shared_folder import SharedFolder, clear_named, named_folders
from kdpipes.cache.store import Entries
from kdpipes.core.errors import DataError
from kdpipes.storage.codec import DamagedError, decode, encode
from tests.cache.entries import metadata, open_lmdb, open_memory

OnDisk = Callable[..., Any]
GULL = np.arange(5000, dtype=np.int32)


@pytest.fixture
def name(namespace: str) -> Iterator[str]:
    """A name for shared memory, which is free again afterwards."""
    own = namespace.replace("/", "-")
    yield own
    gc.collect()
    if own in named_folders():
        clear_named(own)


def fill(store: Entries, most: int = 1000) -> list[int]:
    """Put entries until one is rejected; return the numbers of those that were taken."""
    taken = []
    for number in range(most):
        if not store.put(b"%d" % number, encode(np.full(5000, number, dtype=np.int32))):
            break
        taken.append(number)
    return taken


def all_whole(store: Any, numbers: list[int]) -> bool:
    return all(bool((decode(store.get(b"%d" % number)) == number).all()) for number in numbers)


def run_in_child(function: Callable[[Any], None]) -> tuple[Any, Any]:
    """Start `function(pipe)` in a forked process; return the process and the other end of the pipe."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=function, args=(there,))
    child.start()
    there.close()
    return child, here


def test_memory_goes_with_the_store_and_its_last_copy() -> None:
    store = open_memory(max_bytes=1 << 20)
    store.put(b"a", encode(GULL))
    folder, twin = Path(store.store.folder), pickle.loads(pickle.dumps(store))
    assert folder.stat().st_mode & 0o777 == 0o700
    view = decode(twin.get(b"a"))
    del store
    gc.collect()
    assert folder.is_dir()
    del twin
    gc.collect()
    assert not folder.exists()
    assert (view == GULL).all()


def test_memory_of_a_process_that_ends_is_gone(name: str, interpreter: Any) -> None:
    code = (
        "import sys; from kdpipes.cache.lmdb_store import LmdbStore; name = sys.argv[1]\n"
        "stores = [LmdbStore.in_memory(), LmdbStore.in_memory(name), LmdbStore.in_memory(name + '-kept', keep=True)]\n"
        "for store in stores: store.put(b'a', b'heron', replace=False); print(store.folder)\n"
    )
    status, printed, told = interpreter.run(code, name)
    assert status == 0, told
    folders = [Path(line) for line in printed.split()]
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert f"{name}-kept" in named_folders()
    assert bytes(open_memory(f"{name}-kept").get(b"a") or b"") == b"heron"
    clear_named(f"{name}-kept")
    assert not folders[2].exists()
    with pytest.raises(FileNotFoundError, match=r"no folder .*-kept' in shared memory"):
        clear_named(f"{name}-kept")


def test_memory_of_a_killed_process_goes_at_the_next_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_watcher, "_CAN_WATCH", False)  # which has been killed, too

    def work(pipe: Any) -> None:
        stores = [open_memory(), open_memory(name)]
        for store in stores:
            store.put(b"a", [b"heron"])
        pipe.send([store.store.folder for store in stores])
        pipe.recv()

    child, pipe = run_in_child(work)
    folders = [Path(folder) for folder in pipe.recv()]
    open_memory(max_bytes=1 << 20)
    assert all(folder.exists() for folder in folders)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    open_memory(max_bytes=1 << 20)
    assert not any(folder.exists() for folder in folders)


def test_named_memory_is_shared_and_goes_with_the_last_user(name: str) -> None:
    first, second = open_memory(name, max_bytes=1 << 20), open_memory(name)
    folder = Path(first.store.folder)
    first.put(b"a", [b"heron"])
    del first
    gc.collect()
    open_memory(max_bytes=1 << 20)  # which looks for what was left
    assert bytes(second.get(b"a") or b"") == b"heron"
    del second
    gc.collect()
    assert not folder.exists()


def test_a_name_stays_usable_when_it_was_cleared_under_a_store(name: str) -> None:
    store = open_memory(name, max_bytes=1 << 20)
    store.put(b"a", encode(GULL))
    clear_named(name)
    assert decode(store.get(b"a")).sum() == GULL.sum()
    other = open_memory(name, max_bytes=1 << 20)
    assert other.get(b"a") is None
    assert other.put(b"b", [b"new"])
    assert store.get(b"b") is None


def test_a_worker_that_outlives_the_owner_goes_on_without() -> None:
    stores = [open_memory(max_bytes=1 << 20)]
    stores[0].put(b"a", [b"heron"])

    def work(pipe: Any) -> None:
        store = stores[0]
        pipe.recv()
        with pytest.warns(UserWarning, match=r"has ended.*as if there were no cache"):
            found = store.get(b"a")
        pipe.send((found, store.put(b"b", [b""]), store.contains(b"a")))

    child, pipe = run_in_child(work)
    stores.clear()
    gc.collect()
    pipe.send("gone")
    assert pipe.recv() == (None, False, False)
    child.join()


@pytest.mark.parametrize("wrong", ["", ".", "a/b", "_x", "ä", 3])
def test_wrong_names_are_rejected(wrong: Any) -> None:
    with pytest.raises(ValueError, match="`name` must be"):
        SharedFolder(wrong)
    with pytest.raises(ValueError, match="`keep` must be False without a name"):
        SharedFolder(keep=True)


def test_a_folder_that_is_open_to_others_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "root", lambda: tmp_path)
    path = tmp_path / f"{shared_folder.prefix()}birds"
    path.mkdir()
    path.chmod(0o777)
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # somebody uses it
    with pytest.raises(PermissionError, match="other users can access it"):
        open_memory("birds")
    os.close(lock)


def test_a_full_cache_keeps_what_it_has_and_says_so_once(tmp_path: Path, warned_once: Callable[[str], Any]) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 19, is_durable=False)
    with warned_once(r"is full: it has reached `max_bytes` of [\d,]+"):
        taken = fill(store)
        assert not store.put(b"small", [b"x"])
    assert len(taken) >= 10
    assert all_whole(store, taken)
    assert store.stats().entries == len(taken)
    assert store.stats().bytes <= 1 << 19
    assert all_whole(open_lmdb(tmp_path / "cache"), taken)


def test_of_full_shared_memory_one_process_warns_for_all() -> None:
    store = open_memory(max_bytes=1 << 18)
    with pytest.warns(UserWarning, match="is full"):
        taken = fill(store)

    def work(pipe: Any) -> None:
        pipe.send((store.put(b"new", [bytes(100_000)]), all_whole(store, taken)))  # warnings are errors

    child, pipe = run_in_child(work)
    assert pipe.recv() == (False, True)
    child.join()


def test_small_shared_memory_is_taken_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, warned_once: Callable[[str], Any]
) -> None:
    monkeypatch.setattr(lmdb_store, "free_bytes", lambda folder: 1 << 18)
    with warned_once(r"262,144 bytes of shared memory that were free.*--shm-size"):
        store = open_memory(max_bytes=1 << 30)
        taken = fill(store)
    assert len(taken) >= 5
    assert all_whole(store, taken)


def test_full_shared_memory_ends_no_process(on_small_disk: OnDisk) -> None:
    def work(folder: Path, remount: Any) -> Any:
        store = open_memory()
        store.store._max_bytes = 1 << 30  # more than there is, as when others fill it meanwhile
        taken = fill(store)
        return len(taken), all_whole(store, taken), store.put(b"new", [b"x"]), store.stats().entries == len(taken)

    answer, warned = on_small_disk(work, 1 << 20, Path("/dev/shm"))
    assert answer[0] >= 20
    assert answer[1:] == (True, False, True)
    assert len(warned) == 1
    assert "No space left on device" in warned[0]


@pytest.mark.parametrize("is_set_up", [False, True])
def test_without_free_shared_memory_there_is_no_cache(on_small_disk: OnDisk, is_set_up: bool) -> None:
    def work(folder: Path, remount: Any) -> Any:
        store = open_memory()
        if is_set_up:
            read_metadata(LocalFolder(store.store.folder), store.store.folder, "lmdb", {"max_bytes": 1 << 20})
        with (folder / "others").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
        return store.put(b"a", [b"x"]), store.get(b"a"), store.stats()

    answer, warned = on_small_disk(work, 1 << 18, Path("/dev/shm"))
    assert answer == (False, None, (0, 0, 0, 0, 0))
    assert len(warned) == 1
    assert "No space left on device" in warned[0]


def test_a_full_disk_leaves_every_entry_whole(tmp_path: Path) -> None:
    def work(pipe: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        store = open_lmdb(tmp_path / "cache", max_bytes=1 << 26, is_durable=False)
        with pytest.warns(UserWarning, match="takes no more.*keeps what it has"):
            taken = fill(store)
        pipe.send((taken, all_whole(store, taken)))

    child, pipe = run_in_child(work)
    taken, was_whole = pipe.recv()
    child.join()
    assert was_whole
    assert len(taken) >= 10
    later = open_lmdb(tmp_path / "cache")
    assert all_whole(later, taken)
    assert later.put(b"more", encode(GULL))


def test_a_read_only_folder_is_read(on_small_disk: OnDisk) -> None:
    def work(folder: Path, remount: Callable[[], int]) -> Any:
        open_lmdb(folder / "cache").put(b"a", [b"heron"])
        gc.collect()
        assert remount() == 0
        store = open_lmdb(folder / "cache")
        return bytes(store.get(b"a") or b""), store.get(b"b"), store.put(b"b", [b"x"]), store.put(b"c", [b"x"])

    answer, warned = on_small_disk(work, 1 << 22)
    assert answer == (b"heron", None, False, False)
    assert len(warned) == 1
    assert "takes no more" in warned[0]


def test_a_missing_read_only_folder_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned_once: Callable[[str], Any]
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    store = open_lmdb(tmp_path / "cache")
    with warned_once("cannot be read.*Permission denied"):
        assert (store.get(b"a"), store.put(b"a", [b""]), store.contains(b"a")) == (None, False, False)


def flip(folder: str | Path, content: bytes) -> None:
    """Change one byte in the middle of each entry that holds `content`."""
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    with Path(folder, "data.mdb").open("r+b") as file:
        data = file.read()
        assert content in data
        file.seek(0)
        file.write(data.replace(content, changed))


@pytest.mark.parametrize("size", [50, 5000])
def test_a_damaged_entry_heals(tmp_path: Path, size: int) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 22, is_durable=False)
    store.put(b"a", encode(GULL[:size]))
    store.put(b"b", encode(GULL[:size]))
    flip(tmp_path / "cache", GULL[:size].tobytes())
    damaged = store.get(b"b")
    with pytest.raises(DamagedError):
        decode(damaged)
    for _ in range(2):
        assert store.put(b"b", encode(GULL[:size]), replace=True)
        whole = store.get(b"b")
        fill(store, 20)
        assert (decode(open_lmdb(tmp_path / "cache").get(b"b")) == GULL[:size]).all()
        assert (decode(whole) == GULL[:size]).all(), "healing again leaves what is whole in its place"
    assert store.stats().entries == 22


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere nobody tells where LMDB has mapped the file.")
def test_large_entries_are_read_without_a_copy(tmp_path: Path) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 22, is_durable=False)
    store.put(b"a", encode(GULL))
    view = decode(store.get(b"a"))
    assert (view == GULL).all()
    flip(tmp_path / "cache", GULL.tobytes())
    assert (view != GULL).sum() == 1


def test_reading_again_returns_the_newest_entry_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = open_lmdb(folder, max_bytes=1 << 22, is_durable=False)
    assert store.get(b"a", is_verified=True) is None
    store.put(b"a", encode(GULL))
    store.put(b"small", encode("gull"))
    for _ in range(3):
        assert (decode(store.get(b"a", is_verified=True)) == GULL).all()
        assert decode(store.get(b"small", is_verified=True)) == "gull"
    store.put(b"a", encode(GULL + 1), replace=True)
    assert (decode(store.get(b"a", is_verified=True)) == GULL + 1).all()
    view = store.get(b"a", is_verified=True)
    fill(store, 20)
    store.close()
    assert (decode(store.get(b"a", is_verified=True)) == GULL + 1).all(), "opened again"
    store.close()
    shutil.rmtree(folder)
    other = open_lmdb(folder, max_bytes=1 << 22, is_durable=False)
    other.put(b"b", encode(GULL))
    assert store.get(b"a", is_verified=True) is None
    assert (decode(view) == GULL + 1).all()


def test_a_forked_process_reads_again_what_its_parent_has_read(tmp_path: Path) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 22, is_durable=False)
    store.put(b"a", encode(GULL))
    assert store.get(b"a", is_verified=True) is not None

    def work(pipe: Any) -> None:
        same = (decode(store.get(b"a", is_verified=True)) == GULL).all()
        pipe.send(
            (same, store.put(b"b", encode(GULL + 1)), (decode(store.get(b"b", is_verified=True)) == GULL + 1).all())
        )

    child, pipe = run_in_child(work)
    assert pipe.recv() == (True, True, True)
    child.join()
    assert (decode(store.get(b"b", is_verified=True)) == GULL + 1).all()


def test_one_who_asks_for_more_gets_it_and_others_follow(tmp_path: Path) -> None:
    small = open_lmdb(tmp_path / "cache", max_bytes=1 << 18, is_durable=False)
    small.put(b"a", encode(GULL))
    view = decode(small.get(b"a"))

    def work(pipe: Any) -> None:
        pipe.send(fill(open_lmdb(tmp_path / "cache", max_bytes=1 << 24, is_durable=False), 50))

    child, pipe = run_in_child(work)
    taken = pipe.recv()
    child.join()
    assert len(taken) == 50
    assert all_whole(small, taken)
    assert (view == GULL).all()


def test_a_killed_reader_does_not_hold_space_for_long(tmp_path: Path) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 24, is_durable=False)
    store.put(b"a", encode(GULL))

    def work(pipe: Any) -> None:
        pipe.send("reading")
        while True:
            store.get(b"a")

    for _ in range(3):
        child, pipe = run_in_child(work)
        pipe.recv()
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
    store.close()
    assert fill(store, 30) == list(range(30))
    assert store.store._environment._env.reader_check() == 0


def test_a_folder_of_another_version_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = open_lmdb(folder)
    store.put(b"a", [b"heron"])
    (folder / "METADATA").write_text(metadata(format=99, layout="lmdb"))
    rejected = "cache of format 99 and layout 'lmdb'. This version of kdpipes reads format 3.*another folder, or delete"
    for call in (lambda s: s.get(b"a"), lambda s: s.put(b"a", [b""]), lambda s: s.stats()):
        with pytest.raises(DataError, match=rejected):
            call(open_lmdb(folder))
    (folder / "METADATA").write_text("{")
    with pytest.raises(DataError, match="METADATA file is damaged"):
        open_lmdb(folder).get(b"a")


def test_a_folder_that_holds_something_else_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "heron.jpg").touch()
    with pytest.raises(DataError, match=r"is not a cache, but holds 'heron.jpg'"):
        open_lmdb(tmp_path).put(b"a", [b""])
    assert [path.name for path in tmp_path.iterdir()] == ["heron.jpg"]


def test_a_file_that_was_cut_or_is_none_of_lmdb_is_rejected(tmp_path: Path) -> None:
    for number, damage in enumerate([lambda data: data[: len(data) // 2], lambda data: b"\1" * len(data)]):
        folder = tmp_path / str(number)
        store = open_lmdb(folder, max_bytes=1 << 24)
        fill(store, 20)
        store.close()
        data = folder / "data.mdb"
        data.write_bytes(damage(data.read_bytes()))
        with pytest.raises(DataError, match="Delete"):
            open_lmdb(folder).get(b"1")


def test_a_file_that_grows_while_it_is_checked_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_lmdb(tmp_path / "cache", is_durable=False)
    store.put(b"small", [b"x"])
    data, stat = tmp_path / "cache" / "data.mdb", Path.stat
    earlier = [stat(data)] * 2  # asked for: which file it is, and how large
    store.put(b"large", [bytes(1 << 20)])
    assert stat(data).st_size > earlier[0].st_size

    def stat_late(path: Path, **options: Any) -> os.stat_result:
        return earlier.pop() if path == data and earlier else stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat_late)  # as if another process had written in between
    store.check()
    assert not earlier
    os.truncate(data, 1 << 14)
    with pytest.raises(DataError, match="truncated"):
        store.check()


@pytest.mark.parametrize(("wrong", "error"), [(10, ValueError), ("1", TypeError), (True, TypeError)])
def test_wrong_sizes_are_rejected(tmp_path: Path, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`max_bytes` must be an integer of at least 65536"):
        open_lmdb(tmp_path, max_bytes=wrong)


def test_a_url_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"`folder` must be a local folder.*`FileStore` takes URLs"):
        open_lmdb("s3://bucket/cache")


def test_a_kept_cache_is_opened_again_however_little_is_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_memory(name, max_bytes=1 << 20, keep=True)
    taken = fill(store, 40)
    del store
    gc.collect()
    monkeypatch.setattr(lmdb_store, "free_bytes", lambda folder: 1 << 18)
    store = open_memory(name, max_bytes=1 << 20)
    assert all_whole(store, taken)


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 22)
    taken = fill(store, 5)
    store.close()
    (tmp_path / "cache").rename(tmp_path / "moved")
    assert all_whole(open_lmdb(tmp_path / "moved"), taken)
