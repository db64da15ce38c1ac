"""Shards elsewhere: the same samples as from the disk, no byte that is not needed, and faults that are outlasted."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.errors import DataError
from kdpipes.storage import ranges
from kdpipes.storage.catalog import index_url, make_index
from kdpipes.storage.files import matching_urls
from kdpipes.storage.held_files import HeldFile
from kdpipes.storage.ranges import Span
from kdpipes.storage.shard_cache import ShardCache
from kdpipes.testing import Fault, FaultyFileSystem, faulty_storage

NAME = "birds-{0..2}.tar"
PER_SHARD = 12
LARGE = 100_000  # more than lies between members that are read together
CLASSES = ["heron", "stork", "gull", "tern"]
TARS = "*.tar"

Service = Callable[[], dict[str, Any]]
SERVICES = [
    pytest.param(dict, id="inline"),
    pytest.param(lambda: {"num_workers": 2, "start_method": "fork"}, id="fork"),
    pytest.param(lambda: {"reading_service": kdp.ThreadReadingService(2)}, id="threads"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache of its own, and retries without waits."""
    monkeypatch.setattr("kdpipes.storage.retries._FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, size: int = LARGE) -> str:
    """Write three shards of twelve samples, each with an image, a class and a mask that nobody reads."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    for shard in range(3):
        with TarWriter(str(folder / f"birds-{shard}.tar")) as writer:
            for n in range(PER_SHARD):
                row = {"jpg": draws.randbytes(size), "cls": n % len(CLASSES), "mask": draws.randbytes(size + size // 4)}
                writer.write({"__key__": f"{n:02}", **row})
    return str(folder)


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of shards, with large members."""
    return write(tmp_path_factory.mktemp("elsewhere") / "large")


@pytest.fixture(scope="session")
def small_originals(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of shards, with members of which many come in one request."""
    return write(tmp_path_factory.mktemp("elsewhere") / "small", 500)


@pytest.fixture
def folder(originals: str, tmp_path: Path) -> str:
    """A copy of the shards with large members, without indexes."""
    return str(shutil.copytree(originals, tmp_path / "shards", ignore=shutil.ignore_patterns("*.index")))


@pytest.fixture
def small(small_originals: str, tmp_path: Path) -> str:
    """A copy of the shards with small members, without indexes."""
    return str(shutil.copytree(small_originals, tmp_path / "small", ignore=shutil.ignore_patterns("*.index")))


@pytest.fixture(params=["faulty", "memory", "s3"])
def elsewhere(request: pytest.FixtureRequest, small: str, tmp_path: Path) -> Iterator[str]:
    """The URL of the small shards, on several kinds of storage."""
    if request.param == "faulty":
        shutil.copytree(small, tmp_path / "faulty")
        with faulty_storage(str(tmp_path / "faulty")):
            yield "faulty://"
        return
    root = request.getfixturevalue("s3") if request.param == "s3" else f"memory://{secrets.token_hex(8)}"
    files = fsspec.filesystem(request.param)
    for path in Path(small).glob(TARS):
        files.pipe_file(f"{root}/{path.name}", path.read_bytes())
    yield f"{root}/"
    files.rm(root, recursive=True)


def opened(root: str, name: str = NAME, **options: Any) -> Any:
    return kdp.open_shards(f"{root}{name}", class_names=CLASSES, **options).rename_fields(x="jpg", y="cls")


def dealt(chain: Any, **options: Any) -> Any:
    return chain.select("x y key").deal(batch_size=5, shuffle=True, seed=1, **options)


def epochs(chain: Any, service: Service = dict, number: int = 2) -> list[list[Any]]:
    with kdp.Loader(chain, **service()) as loader:
        return [list(loader) for _ in range(number)]


def body_bytes(files: FaultyFileSystem, since: int = 0) -> int:
    """Return how many bytes of tars have come."""
    return sum(request.delivered for request in files.requests()[since:] if request.path.endswith(".tar"))


def bodies(files: FaultyFileSystem, since: int = 0) -> list[Any]:
    """Return the requests for bytes of tars."""
    return [one for one in files.requests()[since:] if one.path.endswith(".tar") and one.kind in ("whole", "range")]


CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "filter": lambda one, _: one.filter_classes(valid=[1, 3]),
    "oversample": lambda one, _: one.filter_classes(valid=[1, 2]).subset(range(11)).oversample(mode="exact"),
    "mix": lambda one, other: one.mix(other.filter_classes(valid=[0]), weights=[2, 1], stop="all"),
    "concat": lambda one, other: kdp.concat(one, other.subset(np.array([40, -1], dtype=np.int64) % 36), one),
    "repeat": lambda one, _: one.filter_classes(valid=[3]).repeat_until(repetitions=3),
    "permute": lambda one, _: one.permute(seed=3)[5:-3:2],
    "map_classes": lambda one, _: one.map_classes({"gull": "sea", "tern": "sea", "stork": "land"}),
    "deep": lambda one, other: (
        kdp.concat(one.permute(seed=1), other.filter_classes(valid=[2])).mix(one[::-2]).repeat_until(min_size=90)
    ),
    "bare": lambda one, _: one,
}


@pytest.mark.parametrize("service", SERVICES)
def test_chains_give_what_they_give_from_the_disk(elsewhere: str, small: str, service: Service) -> None:
    for name, chain in CHAINS.items():
        local, remote = (dealt(chain(opened(root), opened(root))) for root in (f"{small}/", elsewhere))
        assert epochs(remote, service) == epochs(local), name


def test_spawned_workers_give_what_the_disk_gives(elsewhere: str, small: str) -> None:
    if elsewhere.startswith("memory"):
        return  # which another process has not
    local, remote = (dealt(CHAINS["deep"](opened(root), opened(root))) for root in (f"{small}/", elsewhere))
    assert epochs(remote, lambda: {"num_workers": 2, "start_method": "spawn"}) == epochs(local)


def test_what_is_known_of_the_index_opens_no_member(folder: str) -> None:
    with faulty_storage(folder) as files:
        len(kdp.open_shards(f"faulty://{NAME}"))
        before = len(files.requests())
        again = opened("faulty://").filter_classes(valid=[1]).oversample()
        assert again.column("y").tolist() == [1] * 9
        assert again.column("key")[0] == "birds-0.tar/01"
        assert kdp.class_counts(again.column("y")) is not None
        assert {request.kind for request in files.requests()[before:]} == {"info", "whole"}
        assert bodies(files, before) == [], "the sidecars and no shard"


def test_classes_of_samples_come_from_the_index(folder: str) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://")
        assert len(pipe) == 36
        before = len(files.requests())
        assert [pipe[index]["y"] for index in range(12)] == [0, 1, 2, 3] * 3
        assert bodies(files, before) == []


@pytest.mark.parametrize("service", SERVICES)
def test_an_epoch_moves_each_sample_once_and_none_that_is_filtered_out(folder: str, service: Service) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://").filter_classes(valid=[1])
        pipe[0]["x"], pipe[0]["y"]  # which tells what is used
        before = len(files.requests())
        assert sum(map(len, epochs(dealt(pipe), service, 1)[0])) == 9
        moved = body_bytes(files, before)
    assert 9 * LARGE <= moved < 9.1 * LARGE + LARGE, "one of them had been read before"


def test_fields_that_nobody_reads_are_not_moved(folder: str) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://").filter_classes(valid=[1])
        assert len(pipe) == 9
        before = len(files.requests())
        epochs(dealt(pipe), number=1)
        assert body_bytes(files, before) < (9 + 5 * 1.25 + 0.2) * LARGE, "of the first batch, nobody knows"


def test_nothing_that_is_kept_is_moved_twice(small: str) -> None:
    with faulty_storage(small) as files:
        pipe = opened("faulty://").repeat_until(repetitions=3)
        assert len(pipe) == 108
        before = len(files.requests())
        epochs(dealt(pipe), number=2)
        stats = files.stats(before)
        assert stats.bytes_repeated <= 0.02 * stats.bytes_delivered


def test_the_index_is_written_beside_and_a_second_run_reads_no_shard_whole(folder: str) -> None:
    total = sum(path.stat().st_size for path in Path(folder).glob(TARS))
    with faulty_storage(folder) as files:
        assert len(opened("faulty://")) == 36
        first = len(files.requests())
        assert body_bytes(files) >= total * 0.99
        assert sorted(path.name for path in Path(folder).glob("*.index")) == [f"birds-{n}.tar.index" for n in range(3)]
        again = opened("faulty://")
        assert (len(again), again[3]["y"]) == (36, 3)
        assert body_bytes(files, first) < 0.1 * total


@pytest.mark.parametrize("service", SERVICES)
def test_workers_do_not_index(folder: str, service: Service) -> None:
    with faulty_storage(folder) as files:
        epochs(dealt(opened("faulty://")), service, 1)
        assert sum(request.kind == "info" and request.path.endswith(".tar") for request in files.requests()) <= 6
        assert len([one for one in files.requests() if one.path.endswith(".index")]) == 3


class Refusing(Exception):
    """What no base class of the standard library tells, as those of aiohttp and gcsfs."""


@pytest.mark.parametrize(
    "error",
    [
        PermissionError,
        NotImplementedError,
        Refusing,
    ],
)
def test_what_can_only_be_read_has_its_indexes_in_the_cache(
    folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        raise error(path)

    monkeypatch.setattr(FaultyFileSystem, "pipe_file", refuse)
    with faulty_storage(folder) as files:
        for _ in range(2):
            assert opened("faulty://").column("y").tolist() == [0, 1, 2, 3] * 9
        total = sum(path.stat().st_size for path in Path(folder).glob(TARS))
        assert body_bytes(files) < 1.1 * total
    assert len(list((cache / "indexes").iterdir())) == 3
    assert not list(Path(folder).glob("*.index"))


@pytest.mark.parametrize("kind", ["reset", "unavailable", "timeout"])
@pytest.mark.parametrize("on", ["info", "range"])
def test_what_passes_does_not_keep_shards_from_being_opened(folder: str, kind: Any, on: Any) -> None:
    with faulty_storage(folder, faults=[Fault(kind, times=1, on=on)]):
        assert len(opened("faulty://")) == 36


def test_an_index_that_cannot_be_read_at_once_is_read_again(folder: str) -> None:
    with faulty_storage(folder):
        assert len(opened("faulty://")) == 36
    with faulty_storage(folder, faults=[Fault("reset", times=1, paths="*.index")]) as files:
        assert len(opened("faulty://")) == 36
        assert bodies(files) == []


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("kind", ["flip_bit", "wrong_range", "truncate", "reset_midway"])
def test_damage_on_the_way_is_healed(small: str, service: Service, kind: Any) -> None:
    want = epochs(dealt(opened(f"{small}/")))
    for path in Path(small).glob("*.index"):
        path.unlink()
    with faulty_storage(small):
        assert len(opened("faulty://")) == 36
    with faulty_storage(small, faults=[Fault(kind, every=2, times=1, on="range")], seed=2) as files:
        assert epochs(dealt(opened("faulty://")), service) == want
        assert files.stats().faults[kind] > 0


@pytest.mark.parametrize("kind", ["flip_bit", "wrong_range"])
def test_damage_on_the_way_may_come_twice(small: str, kind: Any) -> None:
    with faulty_storage(small):
        want = opened("faulty://")[0]["x"]
    with faulty_storage(small, faults=[Fault(kind, times=2, on="range")]):
        assert opened("faulty://")[0]["x"] == want


def damage(folder: str) -> tuple[str, int]:
    """Flip a bit of a photo at rest; return the shard and the offset of that photo."""
    path = Path(folder) / "birds-1.tar"
    index = make_index(str(path))
    offset = int(index.fields["jpg"].offsets[4])
    Path(index_url(str(path))).unlink()
    content = bytearray(path.read_bytes())
    content[offset + 10] ^= 4
    path.write_bytes(content)
    return path.name, offset


@pytest.mark.parametrize("service", SERVICES)
def test_damage_at_rest_is_named_and_can_be_skipped(small: str, service: Service) -> None:
    with faulty_storage(small):
        assert len(opened("faulty://")) == 36
    damaged = Path(small) / "birds-1.tar"
    status = damaged.stat()
    indexes = {path: path.read_bytes() for path in Path(small).glob("*.index")}
    name, offset = damage(small)
    for path, content in indexes.items():
        path.write_bytes(content)
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    ours = r"Sample 'birds-1\.tar/04' is not what was indexed: 500 bytes at offset {} of 'faulty://{}' have"
    place = ours.format(offset, name)
    with faulty_storage(small, faults=[Fault("latency", seconds=1e-6)]) as files:
        monkey = pytest.MonkeyPatch()
        monkey.setattr(FaultyFileSystem, "info", _as_before(indexes))
        try:
            pipe = opened("faulty://")
            with pytest.raises(DataError, match=place):
                pipe[16]["x"]
            assert pipe[16]["y"] == 0
            with pytest.raises(DataError, match=place):
                epochs(dealt(pipe), service)
            with kdp.Loader(dealt(pipe.on_error("skip")), **service()) as loader:
                got = [[key for batch in loader for _, _, key in batch] for _ in range(2)]
                skipped = loader.skipped
        finally:
            monkey.undo()
    assert [len(set(keys)) for keys in got] == [35, 35]
    assert [(skip["epoch"], skip["key"]) for skip in skipped] == [(0, "birds-1.tar/04"), (1, "birds-1.tar/04")]
    assert all(f"at offset {offset} of" in skip["error"] for skip in skipped)
    assert body_bytes(files) > 0


def _as_before(indexes: dict[Path, bytes]) -> Any:
    """Return an `info` that says of shards what it said when they were indexed."""
    from kdpipes.storage.shard_index import ShardIndex

    versions = {
        path.name.removesuffix(".index"): ShardIndex.from_bytes(content, "").version
        for path, content in indexes.items()
    }
    honest = FaultyFileSystem.info

    def info(self: FaultyFileSystem, path: str, **kwargs: Any) -> dict[str, Any]:
        entry = honest(self, path, **kwargs)
        known = versions.get(path.rsplit("/", 1)[-1])
        return entry if known is None else {**entry, "ETag": known.tag.partition(":")[2]}

    return info


def test_a_shard_that_has_changed_is_indexed_again(elsewhere: str, small: str) -> None:
    assert opened(elsewhere).column("y").tolist() == [0, 1, 2, 3] * 9
    path = Path(small) / "birds-1.tar"
    with TarWriter(str(path)) as writer:
        for n in range(PER_SHARD):
            writer.write({"__key__": f"{n:02}", "jpg": bytes(500), "cls": 3, "mask": bytes(500)})
    filesystem, root = fsspec.core.url_to_fs(elsewhere)
    filesystem.pipe_file(f"{root.rstrip('/')}/{path.name}".lstrip("/"), path.read_bytes())
    again = opened(elsewhere)
    assert again.column("y").tolist() == [0, 1, 2, 3] * 3 + [3] * 12 + [0, 1, 2, 3] * 3
    assert again[12]["x"] == bytes(500)


def test_a_new_etag_alone_makes_a_new_index(folder: str) -> None:
    with faulty_storage(folder) as files:
        assert len(opened("faulty://")) == 36
        assert body_bytes(files) > 0
    with faulty_storage(folder, faults=[Fault("new_etag", paths="*birds-2.tar")]) as files:
        assert len(opened("faulty://")) == 36
        assert {one.path for one in bodies(files)} == {"birds-2.tar"}


def test_a_shard_that_is_missing_is_named(elsewhere: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"^There is no file '.*birds-3\.tar'\.$"):
        len(opened(elsewhere, "birds-{0..3}.tar"))
    with pytest.raises(FileNotFoundError, match=r"^No file matches '.*gulls-\*\.tar'\.$"):
        len(opened(elsewhere, "gulls-*.tar"))


def test_a_shard_that_goes_missing_later_is_named(small: str) -> None:
    with faulty_storage(small) as files:
        pipe = opened("faulty://")
        assert len(pipe) == 36
        (Path(small) / "birds-1.tar").unlink()
        with pytest.raises(DataError, match=r"Shard 'faulty://birds-1\.tar' cannot be read at offset \d+: "):
            pipe[12]["x"]
        assert len(files.requests()) > 0


def test_globs_find_what_brace_ranges_name(elsewhere: str) -> None:
    assert opened(elsewhere, TARS).column("key").tolist() == opened(elsewhere).column("key").tolist()
    assert opened(elsewhere, TARS)[20]["x"] == opened(elsewhere)[20]["x"]


def test_signed_urls_are_no_globs(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    name = f"/{secrets.token_hex(8)}/birds-0.tar?signature=abc"
    files.pipe_file(name, (Path(folder) / "birds-0.tar").read_bytes())
    monkeypatch.setattr(type(files), "glob", lambda *_, **__: [])  # as HTTP has none
    assert len(opened(f"memory:/{name}", "")) == PER_SHARD


def test_a_file_whose_name_looks_like_a_glob_is_that_file(folder: str) -> None:
    Path(folder, "birds-0.tar").rename(Path(folder, "birds [1].tar"))
    assert len(opened(f"{folder}/", "birds [1].tar")) == PER_SHARD


def test_globs_within_another_file_keep_its_url(small: str, tmp_path: Path) -> None:
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", small)
    found = matching_urls([f"zip://birds-*.tar::{packed}"])
    assert found
    assert all(url.endswith(f".tar::{packed}") for url in found)


@pytest.mark.parametrize("service", SERVICES)
def test_leaving_early_leaves_no_thread_and_no_process(small: str, service: Service) -> None:
    before = set(threading.enumerate())
    with faulty_storage(small):
        chain = dealt(opened("faulty://"))
        with kdp.Loader(chain, **service()) as loader:
            for _ in range(2):
                next(iter(loader))
        del loader, chain
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        assert not [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("service", SERVICES)
def test_a_run_that_goes_on_reads_nothing_of_earlier_batches(folder: str, service: Service) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://")
        pipe[0]["x"], pipe[0]["y"]
        with kdp.Loader(dealt(pipe), **service()) as loader:
            batches = iter(loader)
            for _ in range(5):
                next(batches)
            state = loader.state_dict()
            rest = list(batches)
        fresh = opened("faulty://")
        fresh[0]["x"], fresh[0]["y"]
        before = len(files.requests())
        with kdp.Loader(dealt(fresh), **service()) as loader:
            loader.load_state_dict(state)
            assert list(loader) == rest
        moved = body_bytes(files, before)
    num_left = sum(map(len, rest))
    assert moved < (num_left + 0.5) * LARGE


def test_a_chain_that_has_read_pickles_and_reads_on(elsewhere: str) -> None:
    pipe = opened(elsewhere)
    samples = [(pipe[index].key, pipe[index]["x"]) for index in range(0, 36, 5)]
    list(dealt(pipe))
    twin = pickle.loads(pickle.dumps(pipe))
    assert [(twin[index].key, twin[index]["x"]) for index in range(0, 36, 5)] == samples


def test_members_without_content_are_read(s3: str, tmp_path: Path) -> None:
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for n in range(3):
            writer.write({"__key__": str(n), "txt": "", "cls": n})
    fsspec.filesystem("s3").put_file(str(tmp_path / "a.tar"), f"{s3}/a.tar")
    pipe = kdp.open_shards(f"{s3}/a.tar")
    assert [pipe[n]["txt"] for n in range(3)] == ["", "", ""]


def test_a_request_for_many_samples_that_fails_costs_none_of_them(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ranges.read_range

    def refuse_long(span: Span) -> bytes:
        if span.stop - span.start > 500:
            raise DataError("It is too much at once.")
        return alone(span)

    with faulty_storage(small):
        pipe = opened("faulty://")
        assert len(pipe) == 36
        monkeypatch.setattr(ranges, "read_range", refuse_long)
        with kdp.Loader(dealt(pipe.on_error("skip"))) as loader:
            list(loader)
            assert loader.skipped == []


def in_order(chain: Any, **options: Any) -> Any:
    return chain.select("x y key").deal(batch_size=5, **options)


def whole(files: FaultyFileSystem, since: int = 0) -> list[str]:
    """Return the shards that were read from their first byte on, where no member is."""
    return sorted(one.path for one in bodies(files, since) if one.start == 0 < one.stop)


def total(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob(TARS))


SHARDS = [f"birds-{n}.tar" for n in range(3)]
SPAWN = pytest.param(lambda: {"num_workers": 2, "start_method": "spawn"}, id="spawn")


@pytest.mark.parametrize("service", [*SERVICES, SPAWN])
def test_an_epoch_in_order_moves_each_shard_once_and_the_next_nothing(folder: str, service: Service) -> None:
    want = epochs(in_order(opened(f"{folder}/")))
    with faulty_storage(folder) as files:
        chain = in_order(opened("faulty://"))
        assert len(chain) == 8
        before = len(files.requests())
        with kdp.Loader(chain, **service()) as loader:
            assert list(loader) == want[0]
            assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(folder))
            before = len(files.requests())
            assert list(loader) == want[1]
        assert list(in_order(opened("faulty://"))) == want[0]
        assert bodies(files, before) == [], "another run neither"


@pytest.mark.parametrize("service", SERVICES)
def test_an_epoch_shuffled_by_shards_moves_each_shard_once_and_the_next_nothing(folder: str, service: Service) -> None:
    options: dict[str, Any] = {"shuffle": "shards", "window": 12, "seed": 1}
    want = epochs(in_order(opened(f"{folder}/"), **options))
    assert want[0] != want[1]
    with faulty_storage(folder) as files:
        chain = in_order(opened("faulty://"), **options)
        assert len(chain) == 8
        before = len(files.requests())
        with kdp.Loader(chain, **service()) as loader:
            assert list(loader) == want[0]
            assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(folder))
            before = len(files.requests())
            assert list(loader) == want[1]
        assert bodies(files, before) == []


@pytest.mark.parametrize("service", SERVICES)
def test_chains_of_whole_shards_give_what_they_give_from_the_disk(
    elsewhere: str, small: str, tmp_path: Path, service: Service
) -> None:
    options: dict[str, Any] = {
        "fetch": "shards",
        "cache_dir": tmp_path / "kept",
        "max_cache_bytes": 2 * total(small) // 3,
    }
    for name, is_shuffled in (("deep", True), ("bare", False)):
        ones = opened(f"{small}/"), opened(elsewhere, **options)
        local, remote = (in_order(CHAINS[name](one, one), shuffle=is_shuffled) for one in ones)
        assert epochs(remote, service) == epochs(local), name
    assert 0 < total(str(tmp_path / "kept")) <= options["max_cache_bytes"]


def test_a_shuffled_epoch_reads_members(folder: str, cache: Path) -> None:
    with faulty_storage(folder) as files:
        epochs(dealt(opened("faulty://")), number=1)
        assert whole(files, 12) == []
    assert not (cache / "shards").exists()


def test_a_shuffled_epoch_reads_from_whole_shards_that_are_there(folder: str) -> None:
    with faulty_storage(folder) as files:
        epochs(in_order(opened("faulty://")), number=1)
        before = len(files.requests())
        epochs(dealt(opened("faulty://")), number=1)
        assert opened("faulty://")[7]["x"]
        assert bodies(files, before) == []
        epochs(dealt(opened("faulty://", fetch="members")), number=1)
        assert bodies(files, before) != []


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(lambda one: one.filter_classes(valid=[1]), id="few samples"),
        pytest.param(lambda one: one.permute(seed=1), id="no order"),
        pytest.param(lambda one: one.rename_fields(z="mask"), id="few fields"),
    ],
)
def test_an_epoch_that_needs_less_than_half_reads_members(folder: str, chain: Any) -> None:
    with faulty_storage(folder) as files:
        pipe = chain(opened("faulty://"))
        pipe[0]["x"], pipe[0]["y"]
        before = len(files.requests())
        epochs(in_order(pipe), number=1)
        assert whole(files, before) == []
        assert body_bytes(files, before) < (len(pipe) + 1) * LARGE


def test_an_epoch_that_needs_more_than_half_reads_whole_shards(folder: str) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://").filter_classes(invalid=[3]).repeat_until(repetitions=2)
        assert len(pipe) == 54
        before = len(files.requests())
        epochs(in_order(pipe), number=2)
        assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(folder))


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(lambda one: kdp.concat(one, one.subset(range(9)), one), id="concat"),
        pytest.param(lambda one: one.mix(one.take_percent(to_percent=0.5), weights=[2, 1], stop="all"), id="mix"),
        pytest.param(lambda one: one[3:].add_field("z", len), id="slice"),
    ],
)
def test_the_order_of_an_epoch_goes_through_plans(folder: str, chain: Any) -> None:
    with faulty_storage(folder) as files:
        pipe = chain(opened("faulty://"))
        assert len(pipe) > 30
        before = len(files.requests())
        epochs(in_order(pipe))
        assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(folder))


def test_who_looks_at_one_sample_moves_no_more_than_it(folder: str) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://", max_cache_bytes=total(folder) * 2 // 3)
        assert len(pipe) == 36
        before = len(files.requests())
        pipe[3]["x"]
        assert body_bytes(files, before) == LARGE
        pipe = opened("faulty://", max_cache_bytes=total(folder) * 2 // 3)
        next(iter(in_order(pipe)))
        for thread in threading.enumerate():
            if thread.name == "kdpipes-shards":
                thread.join(20)
        assert whole(files, before) == SHARDS[:2], "one ahead, for which there is room"
        before = len(files.requests())
        pipe[35]["x"]
        assert body_bytes(files, before) == LARGE, "also in the middle of an epoch"


def test_epochs_that_follow_each_other_are_read_each_in_its_way(folder: str, tmp_path: Path) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://", cache_dir=tmp_path / "kept")
        list(pipe.select("x mask").deal(batch_size=5))
        shutil.rmtree(tmp_path / "kept")
        before = len(files.requests())
        list(dealt(pipe))
        assert whole(files, before) == []
        list(pipe.select("x mask").deal(batch_size=5))
        assert "birds-0.tar" in whole(files, before)


@pytest.mark.parametrize("service", SERVICES)
def test_whole_shards_can_be_asked_for(folder: str, service: Service) -> None:
    want = epochs(dealt(opened(f"{folder}/")))
    with faulty_storage(folder) as files:
        pipe = opened("faulty://", fetch="shards")
        assert len(pipe) == 36
        before = len(files.requests())
        assert epochs(dealt(pipe), service) == want
        assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(folder))


def test_members_can_be_asked_for(folder: str, cache: Path) -> None:
    with faulty_storage(folder) as files:
        pipe = opened("faulty://", fetch="members")
        assert len(pipe) == 36
        before = len(files.requests())
        assert epochs(in_order(pipe)) == epochs(in_order(opened(f"{folder}/")))
        assert whole(files, before) == []
    assert not (cache / "shards").exists()


@pytest.mark.parametrize("service", SERVICES)
def test_an_epoch_that_goes_on_reads_nothing_of_earlier_shards(folder: str, service: Service) -> None:
    with faulty_storage(folder) as files:
        chain = in_order(opened("faulty://", fetch="members"))
        with kdp.Loader(chain) as loader:
            batches = iter(loader)
            for _ in range(5):
                next(batches)
            state, rest = loader.state_dict(), list(batches)
        before = len(files.requests())
        with kdp.Loader(in_order(opened("faulty://")), **service()) as loader:
            loader.load_state_dict(state)
            assert list(loader) == rest
        assert whole(files, before) == ["birds-2.tar"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_damaged_copy_is_healed(folder: str, cache: Path, service: Service) -> None:
    want = epochs(in_order(opened(f"{folder}/")))
    for path in Path(folder).glob("*.index"):
        path.unlink()
    with faulty_storage(folder) as files:
        pipe = opened("faulty://")
        epochs(in_order(pipe))
        index = make_index("faulty://birds-1.tar")
        intact = (Path(folder) / "birds-1.tar").read_bytes()
        (copy,) = (path for path in (cache / "shards").glob(TARS) if path.read_bytes() == intact)
        with copy.open("r+b") as file:
            file.seek(int(index.fields["jpg"].offsets[4]) + 10)
            file.write(bytes(50))
        before = len(files.requests())
        assert epochs(in_order(opened("faulty://")), service) == want
        assert copy.read_bytes() == intact
        assert body_bytes(files, before) == LARGE


@pytest.mark.parametrize("kind", ["flip_bit", "wrong_range", "truncate", "reset_midway"])
def test_damage_on_the_way_of_whole_shards_is_healed(folder: str, kind: Any) -> None:
    want = epochs(in_order(opened(f"{folder}/")))
    for path in Path(folder).glob("*.index"):
        path.unlink()
    with faulty_storage(folder):
        assert len(opened("faulty://")) == 36
    with faulty_storage(folder, faults=[Fault(kind, times=1, on="range")], seed=2) as files:
        assert epochs(in_order(opened("faulty://"))) == want
        assert files.stats().faults[kind] == 3


def test_a_shard_that_is_replaced_while_it_is_read_is_named(folder: str) -> None:
    with faulty_storage(folder):
        assert len(opened("faulty://")) == 36
    with (
        faulty_storage(folder, faults=[Fault("new_etag", after=1, paths="birds-1.tar")]),
        pytest.raises(DataError, match=r"Shard 'faulty://birds-1\.tar' has been replaced since its index was read: "),
    ):
        epochs(in_order(opened("faulty://")))


@pytest.mark.parametrize("fetch", ["auto", "shards"])
def test_where_no_shard_can_be_kept_members_are_read(folder: str, tmp_path: Path, fetch: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with faulty_storage(folder) as files:
        pipe = opened("faulty://", fetch=fetch, cache_dir=tmp_path / "file" / "kept")
        want = epochs(in_order(opened(f"{folder}/")))
        before = len(files.requests())
        with pytest.warns(UserWarning, match="Members are read alone") as told:
            assert list(in_order(pipe)) == want[0]
        assert len(told) == 1
        assert whole(files, before) == []


def test_shards_for_which_there_is_no_room_are_read_by_members(small: str, cache: Path) -> None:
    size = total(small) // 3
    with faulty_storage(small) as files:
        for fetch in ("auto", "shards"):
            pipe = opened("faulty://", fetch=fetch, max_cache_bytes=size - 1)
            assert len(pipe) == 36
            before = len(files.requests())
            assert epochs(in_order(pipe)) == epochs(in_order(opened(f"{small}/")))
            assert whole(files, before) == []
            assert len(bodies(files, before)) < 36, "ahead, and neighbours together"
    assert not (cache / "shards").exists()


@pytest.mark.parametrize("service", SERVICES)
def test_leaving_an_epoch_of_whole_shards_leaves_nothing_held(folder: str, cache: Path, service: Service) -> None:
    before = set(threading.enumerate())
    with faulty_storage(folder):
        chain = in_order(opened("faulty://"))
        with kdp.Loader(chain, **service()) as loader:
            for _ in range(2):
                next(iter(loader))
        del loader, chain
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        assert not [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    for path in (cache / "shards").iterdir():
        with HeldFile(path) as file:
            assert file.hold_alone()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fetch": "all"}, r"^`fetch` must be one of 'auto', 'members', 'shards', but is 'all' instead\.$"),
        ({"cache_dir": "s3://bucket/cache"}, r"^`cache_dir` must be a folder of this machine, but is 's3://bucket/ca"),
        ({"cache_dir": 3}, "`cache_dir` must be a folder of this machine, but is 3 instead"),
        ({"max_cache_bytes": 0}, "`max_cache_bytes` must be an integer of at least 1, but is 0 instead"),
    ],
)
def test_wrong_arguments_are_refused_where_the_chain_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kdp.open_shards("birds.tar", **options)


@pytest.mark.parametrize("fetch", ["auto", "shards"])
def test_files_of_this_machine_are_not_copied_whatever_they_are_called(small: str, cache: Path, fetch: str) -> None:
    for root in (f"{small}/", f"file://{small}/"):
        assert epochs(in_order(opened(root, fetch=fetch))) == epochs(in_order(opened(f"{small}/")))
    assert not (cache / "shards").exists()


def keep(batch: Any) -> Any:
    return batch


def test_behind_a_stock_pipe_members_are_read(small: str) -> None:
    with faulty_storage(small):
        chain = opened("faulty://").select("key").map(keep).deal(batch_size=5)
        assert [key for batch in chain for (key,) in batch] == opened("faulty://").column("key").tolist()


@pytest.mark.parametrize("fetch", ["auto", "shards"])
def test_a_cache_that_is_too_small_for_a_window_does_not_move_shards_again_and_again(folder: str, fetch: Any) -> None:
    want = epochs(in_order(opened(f"{folder}/"), shuffle="shards", window=36))
    with faulty_storage(folder) as files:
        pipe = opened("faulty://", max_cache_bytes=total(folder) // 2, fetch=fetch)
        assert len(pipe) == 36
        before = body_bytes(files)
        assert epochs(in_order(pipe, shuffle="shards", window=36)) == want
        assert body_bytes(files) - before < 2 * 2 * total(folder)


def test_tars_that_webdataset_would_join_are_all_read(small: str) -> None:
    paths = [str(path) for path in sorted(Path(small).glob(TARS))]
    assert kdp.open_shards("::".join(paths)).column("cls").tolist() == kdp.open_shards(paths).column("cls").tolist()
    assert len(list(kdp.stream_shards("::".join(paths)))) == 36


def test_shards_whose_indexes_have_checksums_are_verified_beside_others_that_have_none(folder: str) -> None:
    make_index(f"{folder}/birds-0.tar")
    with faulty_storage(folder, faults=[Fault("flip_bit", every=3, on="range")], seed=3) as files:
        pipe = opened("faulty://", fetch="members")
        got = [sample["x"] for sample in pipe[12:]]
        assert files.stats().faults["flip_bit"]
    assert got == [sample["x"] for sample in opened(f"{folder}/")[12:]]


def test_workers_wait_until_one_of_them_has_chosen_how_to_read_an_epoch(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_storage(folder) as files:
        source = opened("faulty://")
        assert len(source) == 36
        positions = np.arange(36)
        before = len(files.requests())
        other = threading.Thread(target=lambda: source.announce(positions[12:17]))
        has_room_for = ShardCache.has_room_for

        def slowly(self: ShardCache, num_bytes: int) -> bool:
            other.start()
            other.join(0.3)  # it cannot end before this does
            return has_room_for(self, num_bytes)

        monkeypatch.setattr(ShardCache, "has_room_for", slowly)
        source.expect(positions)
        source.announce(positions[:5])
        other.join()
        assert source[12]["x"] is not None
        assert all(one.start == 0 for one in bodies(files, before)), "no member of theirs alone"


def test_a_worker_that_is_late_does_not_choose_again_how_to_read_an_epoch(folder: str) -> None:
    with faulty_storage(folder) as files:
        source = opened("faulty://")
        positions, before = np.arange(len(source)), len(files.requests())
        for own in (positions[:5], positions[12:17]):
            source.expect(positions)
            source.announce(own)
            assert source[int(own[0])]["x"] is not None  # less than half of a sample's bytes
        assert all(one.start == 0 for one in bodies(files, before)), "no member alone"
