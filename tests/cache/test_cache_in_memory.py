"""`cache_in_memory`: the same batches as without it, one copy for all workers, and no harm without it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.cache import LmdbStore
from kdpipes.cache.shared_folder import named_folders
from kdpipes.work import DecodedImage


class Loads(kdp.SampleSource):
    """Numbers, each load of which leaves a file behind, whatever process does it."""

    def __init__(self, folder: Path, size: int = 12) -> None:
        self._folder, self._size = folder, size
        folder.mkdir(exist_ok=True)

    def __len__(self) -> int:
        return self._size

    def value_fingerprint(self) -> str:
        return "loads"

    def getitem_x(self, index: int) -> np.ndarray[Any, Any]:
        number = len(list(self._folder.glob(f"{index}-*")))
        (self._folder / f"{index}-{number}-{os.getpid()}-{threading.get_ident()}").touch()
        return np.full(2000, index)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if f"_{os.getpid()}_" in path.name}


def num_loads(folder: Path) -> int:
    return len(list(folder.iterdir()))


def jittered(pipe: Any) -> Any:
    return pipe.transform("x", lambda x, rng: torch.tensor(x + rng.random()))


def batches(pipe: Any) -> Any:
    return jittered(pipe).select("x key").deal(batch_size=5, shuffle=True, seed=3).collate_samples()


def plain(batch: Any) -> Any:
    return batch[0].tolist(), batch[1]


@pytest.mark.parametrize("workers", [0, 1, 2, "forkserver", "threads"])
def test_later_epochs_load_nothing_and_batches_stay_the_same(tmp_path: Path, workers: Any) -> None:
    cached = Loads(tmp_path / "loads").cache_in_memory()
    expected = batches(Loads(tmp_path / "others"))
    if workers == "threads":
        loader = kdp.Loader(batches(cached), reading_service=kdp.ThreadReadingService(2))
    elif workers == "forkserver":
        loader = kdp.Loader(batches(cached), num_workers=2, start_method="forkserver")
    else:
        loader = kdp.Loader(batches(cached), num_workers=workers)
    epochs = []
    with loader, kdp.Loader(expected) as uncached:
        for _ in range(3):
            epochs.append([plain(batch) for batch in loader])
            assert epochs[-1] == [plain(batch) for batch in uncached]
        counted = loader.stats()
    assert epochs[0] != epochs[1]
    assert num_loads(tmp_path / "loads") == 12
    assert (counted["cache_hits"], counted["cache_misses"], counted["cache_entries"]) == (24, 12, 12)
    assert counted["cache_bytes"] > 12 * 2000 * 8
    assert cached.stats()[:2] == (24, 12)


def test_nothing_is_left_when_the_chain_is_gone(tmp_path: Path) -> None:
    before = shared_memory()
    cached = Loads(tmp_path / "loads").cache_in_memory()
    cached[0]["x"]
    assert shared_memory() - before
    del cached
    gc.collect()
    assert not shared_memory() - before


def test_pixels_are_cached_behind_the_decoder(photo_folder: Path) -> None:
    def chain(source: Any) -> Any:
        pipe = source.record_ctx().transform("x", kdp.RandomResizedCrop(32)).select("x y", return_ctx=True)
        return pipe.deal(batch_size=40, shuffle=True, seed=1).collate_samples()

    photos = kdp.image_folder(photo_folder).decode_images("x", backend="pillow")
    cached = photos.cache_in_memory()
    with kdp.Loader(chain(photos)) as uncached, kdp.Loader(chain(cached)) as loader:
        for _ in range(2):
            for ((x, y), ctx), ((other_x, other_y), other_ctx) in zip(uncached, loader, strict=True):
                assert torch.equal(x, other_x)
                assert torch.equal(y, other_y)
                assert str(ctx) == str(other_ctx)
    assert cached.stats()[:2] == (160, 160)
    assert isinstance(cached[0]["x"], DecodedImage)
    assert np.array_equal(np.asarray(cached[0]["x"]), np.asarray(photos[0]["x"]))


def test_entries_of_the_ctx_come_back_with_the_field() -> None:
    class Named:
        is_random = False

        def draw(self, value: Any, rng: Any) -> dict[str, Any]:
            return {"was": value}

        def apply(self, value: Any, params: dict[str, Any]) -> Any:
            return value * 2

    pipe = kdp.from_ids([3, 4], load=int).record_ctx().transform("x", Named())
    pipe = pipe.add_field("z", lambda sample: sample["x"] + 1)
    cached = pipe.cache_in_memory()
    for chain in (pipe, cached, cached):
        assert chain.select("x", return_ctx=True)[1] == ((8,), {"named": {"was": 4}})
        assert chain.select("z", return_ctx=True)[1] == ((9,), {"named": {"was": 4}})
        assert chain.select("ctx.named.was")[0] == (3,)
    assert cached.stats()[:2] == (3, 3)


def test_a_value_has_one_type_when_loaded_and_when_cached() -> None:
    values = [np.arange(3), torch.ones(2), {"a": (1, [2.5])}, "text", b"bytes", Image.new("L", (3, 2), 7), None, b""]
    cached = kdp.from_ids(range(len(values)), load=lambda number: values[number]).cache_in_memory()
    for index, value in enumerate(values):
        first, second = cached[index]["x"], cached[index]["x"]
        assert type(first) is type(second)
        assert str(first) == str(second) or isinstance(value, Image.Image)
        if isinstance(value, np.ndarray):
            assert not first.flags.writeable
            assert not second.flags.writeable
    assert cached.stats()[:2] == (len(values), len(values))


class Thing:
    pass


def test_what_is_no_plain_data_is_rejected_or_pickled() -> None:
    things = kdp.from_ids(["a"], load=lambda name: Thing())
    with pytest.raises(TypeError, match=r"Field 'x' cannot be cached.*allow_pickle=True"):
        things.cache_in_memory()[0]["x"]
    assert isinstance(things.cache_in_memory(allow_pickle=True)[0]["x"], Thing)


def test_a_full_cache_goes_on_with_one_warning(tmp_path: Path, warned_once: Callable[[str], Any]) -> None:
    cached = Loads(tmp_path / "loads").cache_in_memory(max_bytes=1 << 16)
    with warned_once("is full"):
        for _ in range(2):
            assert [int(sample["x"][0]) for sample in cached] == list(range(12))
    stats = cached.stats()
    assert 0 < stats.entries < 12
    assert stats.hits == stats.entries


class Killer:
    """Kills the process that it is called in, once."""

    is_random = False

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __call__(self, x: Any) -> Any:
        if x[0] == 7 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_worker_that_is_killed_leaves_a_sound_cache(tmp_path: Path) -> None:
    def chain(source: Any) -> Any:
        return source.transform("x", Killer(tmp_path / "mark")).select("x key").deal(batch_size=2).collate_samples()

    cached = Loads(tmp_path / "loads").cache_in_memory()
    with kdp.Loader(chain(cached), num_workers=2) as loader:
        epochs = [[plain(batch) for batch in loader] for _ in range(2)]
        counted = loader.stats()
    assert (tmp_path / "mark").exists()
    assert counted["worker_deaths"] == 1
    assert epochs[0] == epochs[1]
    assert [batch[0][0][0] for batch in epochs[0]] == [0, 2, 4, 6, 8, 10]
    assert counted["cache_entries"] == 12
    assert num_loads(tmp_path / "loads") == 12


def test_a_damaged_entry_is_loaded_again_and_healed(tmp_path: Path) -> None:
    cached = Loads(tmp_path / "loads").cache_in_memory()
    assert [int(sample["x"][5]) for sample in cached] == list(range(12))
    file = Path(cached.operation.entries.store.folder, "data.mdb")
    content = np.fromfile(file, dtype=np.uint8)
    place = content.tobytes().index(np.full(2000, 7).tobytes())
    with file.open("r+b") as opened:
        opened.seek(place + 40)
        opened.write(b"\xff")
    assert [int(sample["x"][5]) for sample in cached] == [*range(7), 7, *range(8, 12)]
    assert [int(sample["x"][5]) for sample in cached] == list(range(12))
    stats = cached.stats()
    assert (stats.healed, stats.misses, stats.entries) == (1, 13, 12)
    assert num_loads(tmp_path / "loads") == 13


@pytest.mark.parametrize(("verify", "expected"), [("always", 5), ("once", 255), ("never", 255)])
def test_verify_says_when_checksums_are_compared(verify: Any, expected: int) -> None:
    pipe = kdp.from_ids([5], load=lambda number: np.full(9000, number, dtype=np.uint8))
    pipe = pipe.cache(LmdbStore.in_memory(), verify=verify)
    assert [pipe[0]["x"][4000] for _ in range(2)] == [5, 5]
    file = Path(pipe.operation.entries.store.folder, "data.mdb")
    with file.open("r+b") as opened:
        place = opened.read().index(bytes([5] * 9000))
        opened.seek(place + 4000)
        opened.write(b"\xff")
    assert pipe[0]["x"][4000] == expected


def test_a_broken_off_epoch_leaves_what_it_has_loaded(tmp_path: Path) -> None:
    cached = Loads(tmp_path / "loads").cache_in_memory()
    chain = cached.select("x key").deal(batch_size=3).collate_samples()
    next(iter(chain))
    assert num_loads(tmp_path / "loads") == 3
    assert [batch[0][0][0].item() for batch in chain] == [0, 3, 6, 9]
    assert num_loads(tmp_path / "loads") == 12


def mapped(process: int | str, what: str) -> int:
    """Return how many bytes of caches are mapped in a process; by Pss, each shared by the number of who maps it."""
    is_cache, found = False, 0
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *rest = line.split()
        is_cache = line.endswith("/data.mdb") if "-" in first and not first.endswith(":") else is_cache
        found += int(rest[0]) * 1024 if is_cache and first == f"{what}:" else 0
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells how memory is shared")
def test_all_workers_read_one_copy_of_the_data() -> None:
    size, num_bytes = 32, 1 << 20
    source = kdp.from_ids(range(size), load=lambda index: np.full(num_bytes, index, dtype=np.uint8)).cache_in_memory()
    pipe = source.transform("x", lambda x: int(x.sum())).select("x").deal(batch_size=1, shuffle=True)
    with kdp.Loader(pipe, num_workers=2) as loader:
        for _ in range(8):
            assert len(list(loader)) == size
        workers = [process.pid for process in multiprocessing.active_children()]
        assert len(workers) == 2
        assert all(mapped(worker, "Rss") > 0.8 * size * num_bytes for worker in workers), "both have read nearly all"
        together = sum(mapped(process, "Pss") for process in ["self", *workers])
        assert together < 1.05 * source.stats().bytes < 1.2 * size * num_bytes


def test_a_named_cache_is_shared_and_goes_with_its_last_user(tmp_path: Path) -> None:
    name = f"test-{os.getpid()}"
    one = Loads(tmp_path / "loads").cache_in_memory(name=name)
    other = Loads(tmp_path / "loads").cache_in_memory(name=name)
    assert [int(sample["x"][0]) for sample in one] == [int(sample["x"][0]) for sample in other] == list(range(12))
    assert num_loads(tmp_path / "loads") == 12
    assert name in named_folders()
    del one, other
    gc.collect()
    assert name not in named_folders()


def test_a_stream_is_cached_as_it_passes_and_stays_in_its_order(photo_shards: str) -> None:
    calls = []

    def size_of(content: bytes) -> int:
        calls.append(1)
        return len(content)

    stream = kdp.stream_shards(photo_shards).transform("jpg", size_of)
    cached = stream.cache_in_memory().select("jpg key")
    running = iter(cached)
    first = [next(running) for _ in range(30)]
    del running
    assert len(calls) == 30
    whole = list(cached)
    assert whole[:30] == first
    assert len(calls) == len(whole) == 160
    assert list(cached) == whole == list(stream.select("jpg key"))
    assert len(calls) == 320
    with kdp.Loader(cached.deal(batch_size=40), num_workers=2) as loader:
        assert [item for batch in loader for item in batch] == whole


def test_numbered_samples_are_an_error_where_the_order_changes() -> None:
    stream = IterableWrapper([(number, 0) for number in range(5)]).shuffle()
    unnamed = stream.to_samples(fields="x y").transform("x", str).cache_in_memory()
    with pytest.raises(kdp.ChainError, match=r"to_samples\(key=\.\.\.\)"):
        next(iter(unnamed))["x"]
    named = stream.to_samples(fields="x y", key=lambda item: f"n{item[0]}").transform("x", str).cache_in_memory()
    assert sorted(sample["x"] for sample in named) == sorted(sample["x"] for sample in named) == list("01234")
    straight = IterableWrapper([(number, 0) for number in range(5)]).to_samples(fields="x y")
    assert len({sample["x"] for sample in straight.shuffle().transform("x", str).cache_in_memory()}) == 5


def test_a_field_that_is_loaded_before_the_cache_is_warned_of() -> None:
    def scale(sample: Any) -> Any:
        sample["x"] = np.asarray([sample["x"]])
        return sample

    from kdpipes.core.callback import Callback
    from kdpipes.core.sample_pipe import SampleMapperMapDataPipe, UsersOperation

    source = kdp.from_ids([1, 2], load=int)
    pipe = SampleMapperMapDataPipe(
        source, UsersOperation("scale", Callback("function", scale)), "scale"
    ).cache_in_memory()
    with pytest.warns(UserWarning, match=r"Field 'x' is loaded when it comes to the cache.*`scale`"):
        pipe[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe[1]["x"].tolist() == [2]


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"version": 1.5}, TypeError, "`version` must be a string or an integer"),
        ({"freeze_randomness": 1}, TypeError, "`freeze_randomness` must be True or False"),
        ({"max_bytes": 0}, ValueError, "`max_bytes`"),
        ({"name": "a/b"}, ValueError, "`name`"),
        ({"keep": True}, ValueError, "`keep` must be False without a name"),
    ],
)
def test_arguments_that_make_no_sense_are_rejected(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        kdp.from_ids(["a"]).cache_in_memory(**arguments)


@pytest.mark.parametrize("split", ["samples", "auto"])
def test_shards_that_have_passed_are_not_opened_again(photo_shards: str, split: Any, monkeypatch: Any) -> None:
    from kdpipes.sources import stream_shards

    opened: list[str] = []
    read_members = stream_shards.read_members
    monkeypatch.setattr(stream_shards, "read_members", lambda url, *how: opened.append(url) or read_members(url, *how))

    def chain(cached: bool) -> Any:
        stream = kdp.stream_shards(photo_shards).rename_fields(x="jpg", y="cls").record_ctx().transform("x", identical)
        stream = stream.cache_in_memory() if cached else stream
        stream = stream.filter_classes(invalid=[1]).shuffle(buffer_size=30).transform("x", identical, noise)
        return stream.select("x y key", return_ctx=True).deal(batch_size=20, seed=2, split=split)

    cached = chain(True)
    with kdp.Loader(cached) as loader, kdp.Loader(chain(False)) as plain:
        for epoch in range(3):
            opened.clear()
            batches = list(loader)
            assert (opened == []) == (epoch > 0)
            assert batches == list(plain)
        running = iter(loader)
        head = [next(running) for _ in range(2)]
        state = loader.state_dict()
        rest = list(running)
    with kdp.Loader(chain(True)) as other:
        other.load_state_dict(state)
        assert list(other) == rest
    assert len(head) == 2


def identical(x: bytes) -> bytes:
    return x


def noise(x: bytes, rng: np.random.Generator) -> tuple[bytes, float]:
    return x[:9], rng.random()


def test_a_field_not_read_before_comes_from_its_shard(photo_shards: str) -> None:
    plain = kdp.stream_shards(photo_shards).transform("jpg", identical)
    cached = plain.cache_in_memory()
    assert list(cached.select("cls")) == list(plain.select("cls"))
    assert list(cached.select("jpg key")) == list(plain.select("jpg key"))
    assert list(cached.select("jpg cls key")) == list(plain.select("jpg cls key"))
    assert cached.stats().entries == 321


def test_bytes_come_as_views_on_request_from_the_first_epoch() -> None:
    contents = {"a": b"heron" * 2000, "b": b"gull"}
    source = kdp.from_ids([*contents], load=contents.__getitem__)
    copied, viewed = source.cache_in_memory(), source.cache_in_memory(bytes_as_views=True)
    for _ in range(3):
        assert [type(sample["x"]) for sample in copied] == [bytes, bytes]
        for sample in viewed:
            assert type(sample["x"]) is memoryview
            assert sample["x"].readonly
            assert sample["x"] == contents[sample.key]
    assert viewed.stats()[:2] == (4, 2)
    nested = kdp.from_ids(["a"], load=lambda name: {"k": [b"heron"], b"gull": 1}).cache_in_memory(bytes_as_views=True)
    for _ in range(2):
        found = nested[0]["x"]
        assert (found["k"][0], [type(key) for key in found]) == (memoryview(b"heron"), [str, bytes])
    with pytest.raises(TypeError, match="`bytes_as_views` must be True or False"):
        source.cache_in_memory(bytes_as_views=1)


def test_views_of_encoded_images_are_decoded(photo_folder: Path) -> None:
    photos = kdp.image_folder(photo_folder)[:4]
    expected = [np.asarray(sample["x"]) for sample in photos.decode_images("x")]
    viewed = photos.cache_in_memory(bytes_as_views=True).decode_images("x")
    for _ in range(2):
        assert all((np.asarray(s["x"]) == one).all() for s, one in zip(viewed, expected, strict=True))


TAKEN: dict[str, Callable[[Path], Any]] = {
    "file": Path.touch,
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to("/tmp"),
    "dangling": lambda path: path.symlink_to("/nowhere"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_name_that_something_else_has_taken_is_reported(kind: str) -> None:
    name = f"test-taken-{os.getpid()}"
    path = Path(f"/dev/shm/kdpipes-{os.getuid()}-{name}")
    TAKEN[kind](path)
    try:
        with pytest.raises(PermissionError, match=rf"'{path}' exists, but is not a folder of this user.* another"):
            list(kdp.from_dataset([(1, 0)]).transform("x", str).cache_in_memory(name=name))
        assert name not in named_folders()
    finally:
        path.unlink()


class Shift:
    """Moves an image and its mask by the same random number."""

    def draw(self, value: Any, rng: Any) -> dict[str, int]:
        return {"by": int(rng.integers(1000))}

    def apply(self, value: Any, params: dict[str, int]) -> Any:
        return value + params["by"]

    def apply_to(self, kind: str, value: Any, params: dict[str, int], size: tuple[int, int]) -> Any:
        return value + params["by"]


def test_frozen_fields_of_a_sample_keep_the_same_draw() -> None:
    zeros = torch.zeros(1, 2, 2)
    frozen = (
        kdp.from_dataset([(number, zeros, zeros) for number in range(6)], "x image mask")
        .transform("image mask", Shift())
        .cache_in_memory(freeze_randomness=True)
    )
    list(frozen.select("image").deal(batch_size=3))
    pairs = [pair for batch in frozen.select("image mask").deal(batch_size=3, seed=1) for pair in batch]
    assert all(torch.equal(image, mask) for image, mask in pairs)
    assert len({float(image.mean()) for image, _ in pairs}) == 6


def test_frozen_values_do_not_depend_on_who_reads_first() -> None:
    def values(order: list[int]) -> list[float]:
        pipe = kdp.from_dataset([0.0, 0.0], "x").transform("x", lambda x, rng: x + rng.random())
        frozen = pipe.subset([0, 1, 0, 1]).cache_in_memory(freeze_randomness=True)
        found = {place: frozen[place]["x"] for place in order}
        return [found[place] for place in range(4)]

    assert values([0, 1, 2, 3]) == values([3, 2, 1, 0])


def test_ctrl_c_does_not_cut_short_the_removal_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    before = shared_memory()
    pipe = kdp.from_dataset([(np.zeros(100), 0)]).cache_in_memory().select("x")
    list(pipe)
    assert shared_memory() - before
    remove = shutil.rmtree

    def interrupted(path: Any, **given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(path, **given)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "unraisablehook", lambda _: None)  # KeyboardInterrupt in a finalizer
        del pipe
        gc.collect()
    assert not shared_memory() - before
