"""Shards elsewhere, read by their members: the same samples as from the disk, and no byte that is not needed."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from webdataset import TarWriter

import kdpipes as kdp
from tests.faulty_storage import faulty_storage
from tests.sources.shards_elsewhere import (
    CHAINS,
    LARGE,
    SERVICES,
    Service,
    body_bytes,
    dealt,
    epochs,
    in_order,
    opened,
    whole,
)
from tests.threads import threads_left

pytestmark = pytest.mark.usefixtures("cache")


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


@pytest.mark.parametrize("service", SERVICES)
def test_an_epoch_moves_each_sample_once_and_no_filtered_one(large: str, service: Service) -> None:
    with faulty_storage(large) as files:
        pipe = opened("faulty://").filter_classes(valid=[1])
        pipe[0]["x"], pipe[0]["y"]  # which tells what is used
        before = len(files.requests())
        assert sum(map(len, epochs(dealt(pipe), service, 1)[0])) == 9
        moved = body_bytes(files, before)
    assert 9 * LARGE <= moved < 9.1 * LARGE + LARGE, "one of them had been read before"


def test_fields_that_nobody_reads_are_not_moved(large: str) -> None:
    with faulty_storage(large) as files:
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
        assert threads_left(before) == []
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("service", SERVICES)
def test_a_run_that_goes_on_reads_nothing_of_earlier_batches(large: str, service: Service) -> None:
    with faulty_storage(large) as files:
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


def test_members_can_be_asked_for(large: str, cache: Path) -> None:
    with faulty_storage(large) as files:
        pipe = opened("faulty://", fetch="members")
        assert len(pipe) == 36
        before = len(files.requests())
        assert epochs(in_order(pipe)) == epochs(in_order(opened(f"{large}/")))
        assert whole(files, before) == []
    assert not (cache / "shards").exists()


def keep(batch: Any) -> Any:
    return batch


def test_behind_a_stock_pipe_members_are_read(small: str) -> None:
    with faulty_storage(small):
        chain = opened("faulty://").select("key").map(keep).deal(batch_size=5)
        assert [key for batch in chain for (key,) in batch] == opened("faulty://").column("key").tolist()
