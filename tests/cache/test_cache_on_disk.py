"""`cache_on_disk`: transparent at first, filled by many, complete without its source, packed and moved."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.cache import cache
from kdpipes.cache.file_store import FileStore, path_of
from kdpipes.cache.lmdb_store import LmdbStore
from kdpipes.cache.open_cache import check_cache
from kdpipes.demo import write_photo_folder
from kdpipes.storage.files import locked
from tests.cache.entries import open_lmdb
from tests.cache.test_lmdb_store import run_in_child


class Birds(kdp.SampleSource):
    """Arrays of which each load leaves a line behind, whatever process does it."""

    def __init__(self, log: Path, size: int = 40) -> None:
        self._log, self._size = log, size

    def __len__(self) -> int:
        return self._size

    def value_fingerprint(self) -> str:
        return "birds"

    def key_of(self, index: int) -> str:
        return f"bird-{index}"

    def getitem_x(self, index: int) -> Any:
        with self._log.open("ab", buffering=0) as file:
            file.write(b"%d\n" % index)
        return np.full(700, index)


def loaded(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


@pytest.mark.parametrize("layout", ["lmdb", "files"])
def test_a_cache_fills_as_it_is_read_and_later_runs_load_nothing(tmp_path: Path, layout: Any) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache"
    cached = Birds(log).cache_on_disk(folder, layout=layout)
    chain = cached.select("x key").deal(batch_size=8).collate_samples()
    with kdp.Loader(chain, num_workers=2) as loader:
        first = [(x.tolist(), key) for x, key in loader]
        assert sorted(loaded(log)) == list(range(40))
    again = Birds(log).cache_on_disk(folder)
    assert [(x.tolist(), key) for x, key in again.select("x key").deal(batch_size=8).collate_samples()] == first
    assert len(loaded(log)) == 40
    assert again.stats()[:2] == (40, 0)
    assert again.stats().entries == 42
    assert [int(sample["x"][0]) for sample in kdp.open_cache(folder)] == list(range(40))


@pytest.mark.parametrize("layout", ["lmdb", "files"])
@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_a_full_epoch_completes_a_cache(tmp_path: Path, layout: Any, num_workers: int | None) -> None:
    folder = tmp_path / "cache"
    cached = Birds(tmp_path / "log", 90).cache_on_disk(folder, layout=layout)
    if num_workers is None:
        assert [int(sample["x"][0]) for sample in cached] == list(range(90))
    else:
        chain = cached.select("x").deal(batch_size=7, shuffle=True).collate_samples()
        with kdp.Loader(chain, num_workers=num_workers) as loader:
            next(iter(loader))
            with pytest.raises(kdp.DataError, match="is not complete"):
                len(kdp.open_cache(folder))
            assert sum(len(x) for (x,) in loader) == 90
    assert [int(sample["x"][0]) for sample in kdp.open_cache(folder)] == list(range(90))


def test_an_epoch_of_a_part_leaves_the_list_of_all_samples(tmp_path: Path) -> None:
    birds = Birds(tmp_path / "log")
    birds.cache_on_disk(tmp_path / "cache").warm_up(progress=False)
    part = birds[:10].cache_on_disk(tmp_path / "cache")
    assert [int(sample["x"][0]) for sample in part] == list(range(10))
    assert len(kdp.open_cache(tmp_path / "cache")) == 40
    part.warm_up(progress=False)
    assert len(kdp.open_cache(tmp_path / "cache")) == 10


def _fill_and_wait(folder: Path, log: Path, pipe: Any) -> None:
    cached = Birds(log, 500).cache_on_disk(folder)
    pipe.send(sum(int(cached[index]["x"][0] == index) for index in range(200)))
    pipe.recv()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_process_that_ends_leaves_whole_groups_of_entries(tmp_path: Path, is_killed: bool) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_fill_and_wait, args=(folder, log, theirs))
    child.start()
    assert ours.recv() == 200
    if is_killed:
        os.kill(child.pid or 0, signal.SIGKILL)
    else:
        ours.send("end")
    child.join()
    kept = open_lmdb(folder).stats().entries
    assert kept > 200 - 64 if is_killed else kept == 200  # a group begins anew after 0.2 s
    assert check_cache(str(folder)).damaged == 0
    assert [int(sample["x"][0]) for sample in Birds(log, 500).cache_on_disk(folder)] == list(range(500))
    assert len(loaded(log)) == 500 + 200 - kept


def test_a_group_that_does_not_fit_is_kept_as_far_as_it_fits(tmp_path: Path, warned_once: Callable[[str], Any]) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 18)
    with warned_once("is full"):
        for number in range(60):
            store.put(b"%d" % number, [b"%d" % number + bytes(8000)])
        store.flush()
    assert not store.takes_more()
    kept = [number for number in range(60) if store.contains(b"%d" % number)]
    assert len(kept) >= 10
    assert all(bytes(store.get(b"%d" % number) or b"") == b"%d" % number + bytes(8000) for number in kept)


def test_a_full_cache_neither_encodes_nor_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = Birds(tmp_path / "log", 60).cache_on_disk(tmp_path / "cache", max_bytes=1 << 16)
    with pytest.warns(UserWarning, match="is full"):
        before = [sample["x"] for sample in cached]
    stats = cached.stats()
    monkeypatch.setattr(cache, "encode", None)
    again = [sample["x"] for sample in cached]
    assert [x.tolist() for x in again] == [x.tolist() for x in before]
    assert not any(x.flags.writeable for x in again)
    assert cached.stats().entries == stats.entries
    assert cached.stats().misses > stats.misses


@pytest.mark.parametrize("url", ["{}/cache", "file://{}/cache", "memory://test_cache_on_disk"])
@pytest.mark.parametrize("options", [{}, {"layout": "files"}])
def test_a_complete_cache_opens_without_its_source(tmp_path: Path, url: str, options: dict[str, Any]) -> None:
    photos = kdp.image_folder(write_photo_folder(tmp_path / "photos"))
    place = url.format(tmp_path) + ("1" if options else "0")
    with pytest.raises(FileNotFoundError, match="no cache"):
        len(kdp.open_cache(place))
    cached = photos.permute(seed=4)[:30].cache_on_disk(place, **options)
    expected = [(sample.key, sample["x"], sample["y"]) for sample in cached]
    if url.startswith("memory"):  # of which it would take a request for each entry to know that it is complete
        with pytest.raises(kdp.DataError, match=r"has 30 entries, but is not complete.*warm_up"):
            len(kdp.open_cache(place))
    assert cached.warm_up(progress=False).entries == 32
    shutil.rmtree(tmp_path / "photos")
    opened = kdp.open_cache(place)
    assert [(sample.key, sample["x"], sample["y"]) for sample in opened] == expected
    assert opened.class_names() == photos.class_names()
    assert opened.column("y").tolist() == [y for _, _, y in expected]
    assert opened.column("key").tolist() == [key for key, _, _ in expected]
    chosen = opened.filter_classes(valid=["cat"]).select("x y key")
    assert all(photos.class_names()[y] == "cat" for _, y, _ in chosen)
    with kdp.Loader(opened.select("key").deal(batch_size=7), num_workers=2) as loader:
        assert [key for batch in loader for (key,) in batch] == [key for key, _, _ in expected]


@pytest.mark.parametrize("layout", ["lmdb", "files"])
def test_a_complete_cache_can_be_moved_or_packed(tmp_path: Path, layout: Any) -> None:
    log = tmp_path / "log"
    Birds(log).cache_on_disk(tmp_path / "cache", layout=layout).warm_up(progress=False)
    shutil.copytree(tmp_path / "cache", tmp_path / "moved")
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    for place in [str(tmp_path / "moved"), *([f"zip://::{tmp_path}/packed.zip"] if layout == "files" else [])]:
        opened = kdp.open_cache(place)
        assert [int(sample["x"][0]) for sample in opened] == list(range(40))
        assert opened[39].key == "bird-39"
        assert opened.transform("x", lambda x: x + 1)[3]["x"][0] == 4


def test_warming_up_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    log = tmp_path / "log"

    class Fails:
        is_random = False

        def __call__(self, x: Any) -> Any:
            if len(loaded(log)) >= 10 and not (tmp_path / "mark").exists():
                raise OSError("out of reach")
            return x

    def chain() -> Any:
        return Birds(log).transform("x", Fails()).cache_on_disk(tmp_path / "cache", version=1)

    with pytest.raises(OSError, match="out of reach"):
        chain().warm_up(progress=False, num_threads=1)
    num_loaded = len(loaded(log))
    assert chain().stats().entries == 9
    (tmp_path / "mark").touch()
    assert chain().warm_up(progress=False).entries == 42
    assert len(loaded(log)) == num_loaded + 31
    assert chain().warm_up(progress=False).misses == 0


def _warm_up(log: Path, folder: Path, layout: Any, barrier: Any) -> None:
    cached = Birds(log, 100).cache_on_disk(folder, layout=layout)
    barrier.wait()
    cached.warm_up(progress=False, num_threads=2)


@pytest.mark.parametrize("layout", ["lmdb", "files"])
def test_processes_that_fill_a_cache_share_the_work_exactly(tmp_path: Path, layout: Any) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    children = [context.Process(target=_warm_up, args=(log, folder, layout, barrier)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert sorted(loaded(log)) == list(range(100))
    assert [int(sample["x"][0]) for sample in kdp.open_cache(folder)] == list(range(100))
    assert not list(folder.rglob(".claims"))


WORKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "workers": lambda: {"num_workers": 2},
    "threads": lambda: {"executor": ThreadPoolExecutor(2), "num_threads": 1},
    "processes": lambda: {"executor": ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))},
}


@pytest.mark.parametrize("layout", ["lmdb", "files"])
@pytest.mark.parametrize("kind", WORKERS)
def test_workers_and_executors_fill_a_cache(tmp_path: Path, layout: Any, kind: str) -> None:
    log, folder, options = tmp_path / "log", tmp_path / "cache", WORKERS[kind]()
    cached = Birds(log, 70).cache_on_disk(folder, layout=layout)
    with options.get("executor", nullcontext()):
        assert cached.warm_up(progress=False, **options).entries == 72
    assert sorted(loaded(log)) == list(range(70))
    assert [int(sample["x"][0]) for sample in kdp.open_cache(folder)] == list(range(70))


def test_workers_share_the_samples_of_a_stream(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def load(x: int) -> Any:
        with log.open("ab", buffering=0) as file:
            file.write(b"%d\n" % x)
        return np.full(700, x)

    items = [{"x": number, "__key__": f"bird-{number}"} for number in range(30)]
    cached = IterableWrapper(items).to_samples().transform("x", load).cache_on_disk(tmp_path / "cache")
    assert cached.warm_up(progress=False, num_workers=3).entries == 32
    assert sorted(loaded(log)) == list(range(30))
    assert [int(sample["x"][0]) for sample in kdp.open_cache(tmp_path / "cache")] == list(range(30))


def _claim_and_wait(folder: Path, names: list[bytes], pipe: Any) -> None:
    store = open_lmdb(folder)
    with ExitStack() as held:
        pipe.send([held.enter_context(store.claim(name, waits=False)) for name in names])
        pipe.recv()


def test_the_claims_of_a_killed_process_are_taken_over(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    names = [b"a", b"b"]
    child = context.Process(target=_claim_and_wait, args=(tmp_path / "cache", names, sender))
    child.start()
    assert receiver.recv() == [True, True]
    store = open_lmdb(tmp_path / "cache")
    with store.claim(b"a", waits=False) as is_held:
        assert not is_held
    os.kill(child.pid or 0, signal.SIGKILL)
    for name in names:
        with store.claim(name, waits=True) as is_held:
            assert is_held
    child.join()


def test_a_claim_survives_the_end_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_lmdb(tmp_path / "cache", max_bytes=1 << 20)
    errors = iter([FileExistsError(), FileNotFoundError()])  # of `mkdir` and `open`, if the folder is removed meanwhile

    def locked_late(path: Path, **how: Any) -> Any:
        if error := next(errors, None):
            raise error
        return locked(path, **how)

    monkeypatch.setattr("kdpipes.cache.folder.locked", locked_late)
    with store.claim(b"a", waits=False) as first, store.claim(b"a", waits=False) as second:
        assert (first, second) == (True, False)


def test_a_folder_that_cannot_be_written_grants_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError("Permission denied")

    store = open_lmdb(tmp_path / "cache")
    store.put(b"a", [b"heron"])
    monkeypatch.setattr(Path, "mkdir", forbidden)
    with store.claim(b"a", waits=False) as first, store.claim(b"a", waits=False) as second:
        assert (first, second) == (True, True)


def test_fields_that_only_some_samples_have_are_kept_apart(tmp_path: Path) -> None:
    items = [{"x": 1, "__key__": "a"}, {"x": 2.5, "z": "two", "__key__": "b"}, {"__key__": "c", "z": np.arange(3)}]
    cached = IterableWrapper(items).to_samples().cache_on_disk(tmp_path / "cache", layout="files")
    cached.warm_up(progress=False)
    opened = kdp.open_cache(tmp_path / "cache")
    assert [(sample.key, sorted(sample)) for sample in opened] == [("a", ["x"]), ("b", ["x", "z"]), ("c", ["z"])]
    assert (opened[0]["x"], opened[1]["x"], opened[1]["z"]) == (1, 2.5, "two")
    assert opened[2]["z"].tolist() == [0, 1, 2]
    assert type(opened[0]["x"]) is int


def test_a_failing_sample_is_skipped_where_requested(tmp_path: Path) -> None:
    ones = kdp.from_ids([1, 0, 4], load=lambda number: 1 / number)
    with pytest.raises(ZeroDivisionError):
        ones.cache_on_disk(tmp_path / "raises").warm_up(progress=False)
    ones.on_error("skip").cache_on_disk(tmp_path / "skips").warm_up(progress=False)
    assert [sample["x"] for sample in kdp.open_cache(tmp_path / "skips")] == [1, 0.25]


def test_a_cache_that_is_too_small_cannot_be_complete(tmp_path: Path, warned_once: Callable[[str], Any]) -> None:
    cached = Birds(tmp_path / "log").cache_on_disk(tmp_path / "cache", max_bytes=1 << 16)
    rejected = r"cannot keep all samples: .* is full: it has reached `max_bytes` of [\d,]+\)\. .*Give it more room"
    with warned_once("is full"), pytest.raises(kdp.DataError, match=rejected):
        cached.warm_up(progress=False, num_threads=1)


@pytest.mark.parametrize("layout", ["lmdb", "files"])
def test_warm_up_of_an_unwritable_cache_is_an_error(
    tmp_path: Path, layout: Any, on_small_disk: Callable[..., Any]
) -> None:
    log = tmp_path / "log"
    (tmp_path / "disk").mkdir()

    def work(folder: Path, remount: Callable[[], int]) -> str:
        Birds(log, 2).cache_on_disk(folder / "cache", layout=layout)[0]["x"]
        gc.collect()
        assert remount() == 0
        try:
            Birds(log, 2).cache_on_disk(folder / "cache", layout=layout).warm_up(progress=False)
        except kdp.DataError as error:
            return str(error)
        return ""

    said, warned = on_small_disk(work, 1 << 22, tmp_path / "disk")
    assert re.search(
        r"it has 1 entries of .*(takes no more|cannot be written) \(.+\)\. .*Check that this user can read it", said
    )
    assert len(warned) == 1


def test_a_flipped_byte_is_loaded_again_and_healed(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache"
    cached = Birds(log, 4).cache_on_disk(folder, layout="files")
    cached.warm_up(progress=False)
    path = next(path for path in folder.rglob("*") if path.is_file() and np.full(700, 2).tobytes() in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(kdp.DataError, match=r"'x' of 'bird-2' in .*damaged.*repairs it"):
        kdp.open_cache(folder)[2]["x"]
    for _ in range(2):
        assert [int(sample["x"][-1]) for sample in cached] == [0, 1, 2, 3]
    assert cached.stats().healed == 1
    assert sorted(loaded(log)) == [0, 1, 2, 2, 3]
    path.unlink()
    with pytest.raises(kdp.DataError, match="no longer has field 'x' of sample 'bird-2'"):
        kdp.open_cache(folder)[2]["x"]


def test_the_layout_is_that_of_the_place_unless_one_is_asked_for(tmp_path: Path) -> None:
    def store(place: Any, **options: Any) -> type:
        return type(Birds(tmp_path / "log").cache_on_disk(place, **options).operation.entries.store)

    assert store(tmp_path / "a") is LmdbStore
    assert store("memory://somewhere") is FileStore
    Birds(tmp_path / "log").cache_on_disk(tmp_path / "c", layout="files")[0]["x"]
    assert store(tmp_path / "c") is FileStore
    with pytest.raises(ValueError, match="`max_bytes` must be None"):
        store(tmp_path / "a", layout="files", max_bytes=1 << 20)
    with pytest.raises(ValueError, match="`layout` must be one of"):
        store(tmp_path / "a", layout="zip")
    with pytest.raises(TypeError, match="`url` must be"):
        store(5)
    with pytest.raises(TypeError, match="`is_durable` must be"):
        LmdbStore(tmp_path / "a", is_durable=1)  # type: ignore[arg-type]


def test_a_remote_source_is_not_read_ahead_for_what_is_cached(
    photo_shards: str, tmp_path: Path, monkeypatch: Any
) -> None:
    shards = kdp.open_shards(photo_shards).rename_fields(x="jpg", y="cls")
    source = shards.source
    prefetched: list[int] = []

    def note(_: Any, order: Any) -> None:
        prefetched.extend([-1] if order.is_epoch else order.positions().tolist())

    monkeypatch.setattr(source, "_is_remote", True)
    monkeypatch.setattr(source._members, "prefetch", note)
    chain = shards.cache(LmdbStore(tmp_path / "cache", is_durable=False)).select("x").deal(batch_size=40)
    first = list(chain)
    assert sorted(prefetched) == [-1, *range(160)]
    prefetched.clear()
    assert list(chain) == first
    assert prefetched == []


def test_a_folder_without_a_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="`url` must be the name of a folder, but is '' instead"):
        kdp.from_dataset([(1, 0)]).cache_on_disk("")


def test_a_database_in_a_zip_is_an_error_with_a_hint(tmp_path: Path) -> None:
    for layout in ("lmdb", "files"):
        cached = (
            kdp.from_dataset(["a", "b"], "x").transform("x", str.upper).cache_on_disk(tmp_path / layout, layout=layout)
        )
        cached.warm_up(progress=False)
        packed = shutil.make_archive(str(tmp_path / f"{layout}-packed"), "zip", tmp_path / layout)
        with pytest.raises(FileNotFoundError, match=r"opens as 'zip://::.*-packed\.zip'"):
            len(kdp.open_cache(packed))
    with pytest.raises(ValueError, match=r"one database \(LMDB\).*Unpack it, or make it by .*layout='files'"):
        len(kdp.open_cache(f"zip://::{tmp_path}/lmdb-packed.zip"))
    assert [sample["x"] for sample in kdp.open_cache(f"zip://::{packed}")] == ["A", "B"]


def test_a_cache_moved_while_open_is_not_called_incomplete(tmp_path: Path) -> None:
    cached = kdp.from_dataset(["a", "b"], "x").transform("x", str.upper).cache_on_disk(tmp_path / "before")
    cached.warm_up(progress=False)
    (tmp_path / "before").rename(tmp_path / "after")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(kdp.DataError, match=r"delete that pipe first"),
    ):
        len(kdp.open_cache(tmp_path / "after"))
    del cached
    gc.collect()
    assert len(kdp.open_cache(tmp_path / "after")) == 2


class Cropped(Birds):
    """Says in the ctx what it did."""

    def getitem_x(self, index: int, ctx: Any = None) -> Any:
        ctx["crop"] = {"top": index}
        return super().getitem_x(index)


@pytest.mark.parametrize("layout", ["lmdb", "files"])
def test_a_cache_keeps_what_a_source_writes_into_the_ctx(tmp_path: Path, layout: Any) -> None:
    for _ in range(2):
        cached = Cropped(tmp_path / "log", 3).cache_on_disk(tmp_path / "cache", layout=layout)
        assert cached.select("x", return_ctx=True)[2][1] == {"crop": {"top": 2}}
    assert loaded(tmp_path / "log") == [2]
    cached.warm_up()
    opened = kdp.open_cache(tmp_path / "cache")
    assert opened.select("x", return_ctx=True)[1][1] == {"crop": {"top": 1}}


def test_a_ctx_that_cannot_be_kept_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Holds(Birds):
        def getitem_x(self, index: int, ctx: Any = None) -> Any:
            ctx["place"] = tmp_path
            return index

    with pytest.raises(TypeError, match=r"ctx.*'place'.*'x' cannot be cached"):
        Holds(tmp_path / "log").cache_on_disk(tmp_path / "cache")[0]["x"]


@pytest.mark.parametrize(
    ("url", "hint"), [("gs://b/c", r"kdpipes\[gcs\]"), ("abfs://b/c", "adlfs"), ("oss://b", "ossfs")]
)
def test_a_url_without_its_file_system_fails_when_built(url: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcsfs", "ossfs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"{url}.*{hint}"):
        kdp.from_dataset([1, 2], "x").transform("x", float).cache_on_disk(url)
    with pytest.raises(ValueError, match=r"`url` must be .*no-such-protocol"):
        kdp.from_dataset([1, 2], "x").transform("x", float).cache_on_disk("no-such-protocol://b/c")


def test_a_damaged_file_names_sample_cache_and_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    def chain() -> Any:
        source = kdp.from_ids(["a", "b"], load=lambda name: name * 2000)
        return source.cache_on_disk(folder, layout="files")

    chain().warm_up()
    lists = [Path(path_of(key)).name for key in (b"\0contents", b"\0contents again")]
    for path in folder.rglob("*"):
        if len(path.name) == 40 and path.name not in lists:
            path.write_bytes(path.read_bytes()[:-4] + b"\xff" * 4)
    with pytest.raises(kdp.DataError, match=rf"'x' of 'b' in '{re.escape(str(folder))}'.*chain that fills the cache"):
        kdp.open_cache(folder)[1]["x"]
    assert (chain()[1]["x"], kdp.open_cache(folder)[1]["x"]) == ("b" * 2000,) * 2


def test_a_sparse_tensor_is_rejected_with_the_remedy() -> None:
    sparse = torch.eye(3).to_sparse()
    chain = kdp.from_dataset([(sparse, 0), (sparse * 2, 1)]).transform("x", lambda x: x)
    with pytest.raises(TypeError, match=r"Field 'x' cannot be cached.*`\.to_dense\(\)`"):
        chain.cache_in_memory()[0]["x"]
    assert chain.transform("x", lambda x: x.to_dense()).cache_in_memory()[1]["x"].tolist()[0] == [2, 0, 0]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_cut_database_is_an_error_at_the_next_epoch(tmp_path: Path, num_workers: int, share: float) -> None:
    def work(pipe: Any) -> None:
        chain = Birds(tmp_path / "log").cache_on_disk(tmp_path / "cache").select("x").deal(batch_size=8)
        with kdp.Loader(chain, num_workers=num_workers) as loader:
            for _ in range(2):
                assert len([batch[0][0].copy() for batch in loader]) == 5
            data = tmp_path / "cache" / "data.mdb"
            os.truncate(data, int(data.stat().st_size * share))
            with pytest.raises(kdp.DataError, match=r"data\.mdb' has been truncated"):
                list(loader)
        pipe.send("an error")

    child, pipe = run_in_child(work)
    child.join()
    assert child.exitcode == 0, "ended by a signal, or no error"
    assert pipe.recv() == "an error"
