"""Storage that fails: each fault, on the schedule that was asked for, and counted over threads and processes."""

from __future__ import annotations

import errno
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import kdpipes as kdp
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage

CONTENT = bytes(range(200))
BODIES: list[Any] = [
    lambda storage: storage.cat_file("a.bin"),
    lambda storage: storage.cat_file("a.bin", 0, 200),
    lambda storage: storage.open("a.bin").read(),
    lambda storage: storage.cat_ranges(["a.bin"], [0], [200], on_error="raise")[0],
]

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2, "start_method": "fork"},
]


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with `a.bin` and `birds/b.bin`, on this machine and in memory."""
    url = str(tmp_path) if request.param == "local" else "memory://test_testing"
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(f"{path}/birds", exist_ok=True)
    filesystem.pipe({f"{path}/a.bin": CONTENT, f"{path}/birds/b.bin": CONTENT})
    yield url
    filesystem.rm(path, recursive=True)


def outcomes(storage: FaultyFileSystem, number: int, path: str = "a.bin") -> list[bool]:
    """Read a body `number` times; return which reads came right."""
    came = []
    for _ in range(number):
        try:
            came.append(storage.cat_file(path) == CONTENT)
        except ConnectionResetError:
            came.append(False)
    return came


def test_without_faults_everything_is_as_it_is_below(root: str, tmp_path: Path) -> None:
    storage = FaultyFileSystem(root)
    assert [read(storage) for read in BODIES] == [CONTENT] * 4
    assert storage.ls("", detail=False) == ["a.bin", "birds"]
    assert storage.find("") == storage.glob("**/*.bin") == ["a.bin", "birds/b.bin"]
    assert storage.ls("faulty://birds")[0]["name"] == "birds/b.bin"
    assert storage.info("a.bin")["size"] == 200
    assert storage.info("a.bin")["ETag"] == storage.info("faulty://a.bin")["ETag"] != storage.info("birds")["ETag"]
    assert (storage.exists("a.bin"), storage.exists("b.bin"), storage.isdir("birds")) == (True, False, True)
    with storage.open("a.bin") as file:
        assert (file.read(3), file.seek(100), file.read(2), file.size) == (CONTENT[:3], 100, CONTENT[100:102], 200)
    storage.get_file("a.bin", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    with pytest.raises(FileNotFoundError):
        storage.cat_file("missing")


@pytest.mark.parametrize("read", BODIES, ids=["whole", "range", "open", "ranges"])
@pytest.mark.parametrize(
    ("kind", "error", "number"),
    [
        ("reset", ConnectionResetError, errno.ECONNRESET),
        ("reset_midway", ConnectionResetError, errno.ECONNRESET),
        ("timeout", TimeoutError, errno.ETIMEDOUT),
        ("unavailable", OSError, errno.EBUSY),
        ("too_many_requests", OSError, errno.EIO),
        ("missing", FileNotFoundError, errno.ENOENT),
    ],
)
def test_errors_come_with_every_kind_of_read(root: str, read: Any, kind: Any, error: Any, number: int) -> None:
    storage = FaultyFileSystem(root, faults=[Fault(kind, paths="*.bin", on="range"), Fault(kind, on="whole")])
    with pytest.raises(error) as caught:
        read(storage)
    assert caught.type is error
    assert caught.value.errno == number
    assert storage.stats().faults == {kind: 1}
    assert storage.stats().bytes_delivered == (100 if kind == "reset_midway" else 0)


@pytest.mark.parametrize("read", BODIES, ids=["whole", "range", "open", "ranges"])
def test_wrong_bytes_come_without_an_error(root: str, read: Any) -> None:
    def read_with(kind: Any) -> Any:
        return read(FaultyFileSystem(root, faults=[Fault(kind)]))

    assert read_with("truncate") == CONTENT[:100]
    flipped = int.from_bytes(read_with("flip_bit"), "big") ^ int.from_bytes(CONTENT, "big")
    assert flipped.bit_count() == 1
    moved = read_with("wrong_range")
    assert moved != CONTENT
    assert moved in CONTENT + CONTENT
    assert len(moved) == 200


def test_errors_are_those_of_s3fs_where_that_is_asked_for(root: str) -> None:
    names = {"reset": "EndpointConnectionError", "reset_midway": "ClientPayloadError", "timeout": "ReadTimeoutError"}
    for kind, name in {**names, "unavailable": "OSError", "missing": "FileNotFoundError"}.items():
        with pytest.raises(Exception) as caught:
            FaultyFileSystem(root, faults=[{"kind": kind}], errors="s3fs").cat_file("a.bin")
        assert caught.type.__name__ == name
        assert isinstance(caught.value, OSError) == (kind not in ("reset", "reset_midway"))


def test_a_process_forked_in_a_request_does_not_block_others(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    storage = FaultyFileSystem(str(tmp_path))
    context, children = multiprocessing.get_context("fork"), list[Any]()
    gate = context.Event()
    with storage._ledger._locked():
        children.append(context.Process(target=gate.wait))
        children[0].start()
    assert storage.cat_file("a.bin") == CONTENT
    gate.set()
    children[0].join()


def test_a_file_that_is_fetched_keeps_what_came_before_the_error(root: str, tmp_path: Path) -> None:
    storage = FaultyFileSystem(root, faults=[Fault("reset_midway", times=1)])
    with pytest.raises(ConnectionResetError):
        storage.get_file("a.bin", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT[:100]
    storage.get_file("a.bin", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT


def test_an_object_is_replaced_between_requests(root: str) -> None:
    storage = FaultyFileSystem(root, faults=[Fault("new_etag", after=2), Fault("new_size", after=3)])
    seen = [storage.info("a.bin") for _ in range(4)]
    assert [entry["size"] for entry in seen] == [200, 200, 200, 201]
    tags = [entry["ETag"] for entry in seen]
    assert tags[0] == tags[1] != tags[2] == tags[3]


def test_a_schedule_says_which_requests_of_a_path_are_hit(root: str) -> None:
    def schedule(*paths: str, **when: Any) -> list[list[bool]]:
        storage = FaultyFileSystem(root, faults=[Fault("reset", **when)])
        return [outcomes(storage, 6, path) for path in paths]

    no, yes = False, True
    assert schedule("a.bin", every=3) == [[yes, yes, no, yes, yes, no]]
    assert schedule("a.bin", every=2, after=1, times=2) == [[yes, yes, no, yes, no, yes]]
    assert schedule("a.bin", times=1) == [[no, yes, yes, yes, yes, yes]]
    assert schedule("a.bin", on="range") == schedule("a.bin", paths="birds/*") == [[yes] * 6]
    assert schedule("a.bin", "birds/b.bin", paths="*b.bin") == [[yes] * 6, [no] * 6]


def test_requests_and_bytes_are_counted(root: str) -> None:
    storage = FaultyFileSystem(root, faults=[Fault("truncate", every=4)])
    for start, stop in ((0, 100), (50, 150), (150, 200), (0, 100)):
        storage.cat_file("a.bin", start, stop)
    storage.cat_file("birds/b.bin", -10)
    storage.info("a.bin")
    assert storage.stats() == (6, 360, 310, 100, {"truncate": 1})
    assert storage.stats(since=4) == (2, 10, 10, 0, {})
    assert [(request.kind, request.start, request.stop) for request in storage.requests()[3:]] == [
        ("range", 0, 100),
        ("range", 190, 200),
        ("info", 0, 0),
    ]


def _read_by_url(_: int) -> list[bool]:
    filesystem, path = fsspec.core.url_to_fs("faulty://a.bin")
    return outcomes(filesystem, 10, path)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_processes_count_together(tmp_path: Path, start_method: str) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with faulty_storage(tmp_path.as_posix(), faults=[Fault("reset", every=5)]) as storage:
        with multiprocessing.get_context(start_method).Pool(2) as pool:
            came = [good for reads in pool.map(_read_by_url, range(2), chunksize=1) for good in reads]
            pool.close()
            pool.join()
        came += outcomes(storage, 5)
        assert pickle.loads(pickle.dumps(storage)).cat_file("a.bin") == CONTENT
    assert came.count(False) == 5
    assert storage.stats().requests == 26
    assert storage.stats().faults == {"reset": 5}


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_pipes_read_through_it_by_url(photo_shards: str, photo_folder: Path, workers: dict[str, Any]) -> None:
    folder, name = photo_shards.rsplit("/", 1)
    with faulty_storage(folder, faults=[Fault("latency", every=9, seconds=0.001)]) as storage:
        stream = kdp.stream_shards(f"faulty://{name}").select("jpg cls").deal(batch_size=16)
        with kdp.Loader(stream, **workers) as loader:
            samples = [sample for batch in loader for sample in batch]
    assert sorted(samples) == sorted(kdp.stream_shards(photo_shards).select("jpg cls"))
    stats, pids = storage.stats(), {request.pid for request in storage.requests()}
    assert stats.bytes_delivered == sum(path.stat().st_size for path in Path(folder).glob("*.tar"))
    assert stats.bytes_repeated == 0
    assert len(pids) == max(workers["num_workers"], 1)
    with faulty_storage(photo_folder.as_posix(), faults=[Fault("missing", paths="*/cat_003.jpg", on="whole")]):
        images = kdp.image_folder("faulty://")
        assert len(images) == 160
        assert images.class_names() == kdp.image_folder(photo_folder).class_names()


def test_a_url_means_nothing_outside_and_no_file_is_left(root: str) -> None:
    with faulty_storage(root) as outer:
        with faulty_storage(f"{root}/birds"):
            assert fsspec.open("faulty://b.bin").open().read() == CONTENT
        assert fsspec.open("faulty://a.bin").open().read() == CONTENT
        ledger = Path(outer.options()["ledger"])
        assert ledger.exists()
    with pytest.raises(TypeError, match=r"^`target` must be a URL or an fsspec file system, but is '' instead\.$"):
        fsspec.open("faulty://a.bin").open()
    del outer
    assert not ledger.exists()


def test_a_file_system_is_wrapped_with_its_own_paths(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    storage = FaultyFileSystem(fsspec.filesystem("file"))
    assert storage.cat_file(f"{tmp_path}/a.bin") == CONTENT
    assert storage.find(str(tmp_path)) == [f"{tmp_path}/a.bin"]
