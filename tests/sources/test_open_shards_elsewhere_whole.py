"""Whole shards from elsewhere: each moved once, when an epoch needs most of it, and kept within limits."""

from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.core.order import Order
from kdpipes.storage.files import HeldFile
from kdpipes.storage.shard_cache import Shard, ShardCache
from tests.faulty_storage import Fault, faulty_storage
from tests.sources.shards_elsewhere import (
    CHAINS,
    CLASSES,
    LARGE,
    NAME,
    SERVICES,
    SHARDS,
    Service,
    bodies,
    body_bytes,
    dealt,
    epochs,
    in_order,
    opened,
    total,
    whole,
)
from tests.threads import threads_left

pytestmark = pytest.mark.usefixtures("cache")
SPAWN = pytest.param(lambda: {"num_workers": 2, "start_method": "spawn"}, id="spawn")


@pytest.mark.parametrize("options", [{}, {"shuffle": kdp.by_shard(window=12), "seed": 1}])
@pytest.mark.parametrize("service", [*SERVICES, SPAWN])
def test_an_epoch_moves_each_shard_once_the_next_none(large: str, service: Service, options: dict[str, Any]) -> None:
    want = epochs(in_order(opened(f"{large}/"), **options))
    assert (want[0] != want[1]) == bool(options)
    with faulty_storage(large) as files:
        chain = in_order(opened("faulty://"), **options)
        assert len(chain) == 8
        before = len(files.requests())
        with kdp.Loader(chain, **service()) as loader:
            assert list(loader) == want[0]
            assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(large))
            before = len(files.requests())
            assert list(loader) == want[1]
        assert list(in_order(opened("faulty://"), **options)) == want[0]
        assert bodies(files, before) == [], "another run neither"


@pytest.mark.parametrize("service", SERVICES)
def test_chains_of_whole_shards_give_what_the_disk_gives(
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


def test_a_shuffled_epoch_reads_members(large: str, cache: Path) -> None:
    with faulty_storage(large) as files:
        pipe = opened("faulty://")
        assert len(pipe) > 0  # the indexes are made
        before = len(files.requests())
        epochs(dealt(pipe), number=1)
        assert whole(files, before) == []
    assert not (cache / "shards").exists()


def test_a_shuffled_epoch_reads_from_whole_shards_that_are_there(large: str) -> None:
    with faulty_storage(large) as files:
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
def test_an_epoch_that_needs_less_than_half_reads_members(large: str, chain: Any) -> None:
    with faulty_storage(large) as files:
        pipe = chain(opened("faulty://"))
        pipe[0]["x"], pipe[0]["y"]
        before = len(files.requests())
        epochs(in_order(pipe), number=1)
        assert whole(files, before) == []
        assert body_bytes(files, before) < (len(pipe) + 1) * LARGE


def test_an_epoch_that_needs_more_than_half_reads_whole_shards(large: str) -> None:
    with faulty_storage(large) as files:
        pipe = opened("faulty://").filter_classes(invalid=[3]).repeat_until(repetitions=2)
        assert len(pipe) == 54
        before = len(files.requests())
        epochs(in_order(pipe), number=2)
        assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(large))


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(lambda one: kdp.concat(one, one.subset(range(9)), one), id="concat"),
        pytest.param(lambda one: one.mix(one.take_percent(to_percent=0.5), weights=[2, 1], stop="all"), id="mix"),
        pytest.param(lambda one: one[3:].add_field("z", len), id="slice"),
    ],
)
def test_the_order_of_an_epoch_goes_through_plans(large: str, chain: Any) -> None:
    with faulty_storage(large) as files:
        pipe = chain(opened("faulty://"))
        assert len(pipe) > 30
        before = len(files.requests())
        epochs(in_order(pipe))
        assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(large))


def test_who_looks_at_one_sample_moves_no_more_than_it(large: str) -> None:
    with faulty_storage(large) as files:
        pipe = opened("faulty://", max_cache_bytes=total(large) * 2 // 3)
        assert len(pipe) == 36
        before = len(files.requests())
        pipe[3]["x"]
        assert body_bytes(files, before) == LARGE
        pipe = opened("faulty://", max_cache_bytes=total(large) * 2 // 3)
        next(iter(in_order(pipe)))
        assert threads_left(name="kdpipes-shards") == []
        assert whole(files, before) == SHARDS[:2], "one ahead, for which there is room"
        before = len(files.requests())
        pipe[35]["x"]
        assert body_bytes(files, before) == LARGE, "also in the middle of an epoch"


def test_epochs_that_follow_each_other_are_read_each_in_its_way(large: str, tmp_path: Path) -> None:
    with faulty_storage(large) as files:
        pipe = opened("faulty://", cache_dir=tmp_path / "kept")
        list(pipe.select("x mask").deal(batch_size=5))
        shutil.rmtree(tmp_path / "kept")
        before = len(files.requests())
        list(dealt(pipe))
        assert whole(files, before) == []
        list(pipe.select("x mask").deal(batch_size=5))
        assert "birds-0.tar" in whole(files, before)


@pytest.mark.parametrize("service", SERVICES)
def test_whole_shards_can_be_asked_for(large: str, service: Service) -> None:
    want = epochs(dealt(opened(f"{large}/")))
    with faulty_storage(large) as files:
        pipe = opened("faulty://", fetch="shards")
        assert len(pipe) == 36
        before = len(files.requests())
        assert epochs(dealt(pipe), service) == want
        assert (whole(files, before), body_bytes(files, before)) == (SHARDS, total(large))


@pytest.mark.parametrize("service", SERVICES)
def test_an_epoch_that_goes_on_reads_nothing_of_earlier_shards(large: str, service: Service) -> None:
    with faulty_storage(large) as files:
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


@pytest.mark.parametrize("fetch", ["auto", "shards"])
def test_where_no_shard_can_be_kept_members_are_read(large: str, tmp_path: Path, fetch: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with faulty_storage(large) as files:
        pipe = opened("faulty://", fetch=fetch, cache_dir=tmp_path / "file" / "kept")
        want = epochs(in_order(opened(f"{large}/")))
        before = len(files.requests())
        with pytest.warns(UserWarning, match="Members are read individually") as told:
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
            assert len(bodies(files, before)) < 36, "ahead, and neighbors together"
    assert not (cache / "shards").exists()


@pytest.mark.parametrize("service", SERVICES)
def test_leaving_an_epoch_of_whole_shards_leaves_nothing_held(large: str, cache: Path, service: Service) -> None:
    before = set(threading.enumerate())
    with faulty_storage(large):
        chain = in_order(opened("faulty://"))
        with kdp.Loader(chain, **service()) as loader:
            for _ in range(2):
                next(iter(loader))
        del loader, chain
        gc.collect()
        assert threads_left(before) == []
    for path in (cache / "shards").iterdir():
        with HeldFile(path) as file:
            assert file.hold(is_alone=True)


@pytest.mark.parametrize("fetch", ["auto", "shards"])
def test_local_files_are_not_copied_by_any_name(small: str, cache: Path, fetch: str) -> None:
    for root in (f"{small}/", f"file://{small}/"):
        assert epochs(in_order(opened(root, fetch=fetch))) == epochs(in_order(opened(f"{small}/")))
    assert not (cache / "shards").exists()


@pytest.mark.parametrize("fetch", ["auto", "shards"])
def test_a_cache_too_small_for_a_window_moves_no_shard_twice(large: str, fetch: Any) -> None:
    want = epochs(in_order(opened(f"{large}/"), shuffle=kdp.by_shard(window=36)))
    with faulty_storage(large) as files:
        pipe = opened("faulty://", max_cache_bytes=total(large) // 2, fetch=fetch)
        assert len(pipe) == 36
        before = body_bytes(files)
        assert epochs(in_order(pipe, shuffle=kdp.by_shard(window=36))) == want
        assert body_bytes(files) - before < 2 * 2 * total(large)


def test_workers_wait_until_one_has_chosen_how_to_read(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_storage(large) as files:
        source = opened("faulty://")
        assert len(source) == 36
        positions = np.arange(36)
        before = len(files.requests())
        other = threading.Thread(target=lambda: source.prefetch(Order.of_next(positions[12:17])))
        takes = ShardCache.takes

        def slowly(self: ShardCache, shard: Shard, num_bytes: int | None = None) -> bool:
            if num_bytes is not None:  # the question of an epoch that begins
                other.start()
                other.join(0.3)  # it cannot end before this does
            return takes(self, shard, num_bytes)

        monkeypatch.setattr(ShardCache, "takes", slowly)
        source.prefetch(Order(lambda: [positions[:20], positions[20:]], is_epoch=True))
        source.prefetch(Order.of_next(positions[:5]))
        other.join()
        assert source[12]["x"] is not None
        assert all(one.start == 0 for one in bodies(files, before)), "no member of theirs alone"


def test_a_late_worker_does_not_choose_again_how_to_read(large: str) -> None:
    with faulty_storage(large) as files:
        source = opened("faulty://")
        positions, before = np.arange(len(source)), len(files.requests())
        for own in (positions[:5], positions[12:17]):
            source.prefetch(Order(lambda: [positions[:20], positions[20:]], is_epoch=True))
            source.prefetch(Order.of_next(own))
            assert source[int(own[0])]["x"] is not None  # less than half of a sample's bytes
        assert all(one.start == 0 for one in bodies(files, before)), "no member alone"


@pytest.mark.parametrize("options", [{"fetch": "shards"}, {}], ids=["shards", "auto"])
@pytest.mark.parametrize("kind", ["reset", "unavailable", "timeout"])
def test_a_dead_server_does_not_matter_when_all_shards_are_here(
    large: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, options: dict[str, Any]
) -> None:
    noted = tmp_path / "noted"
    local = kdp.open_shards(f"{large}/{NAME}", class_names=CLASSES)
    kdp.write_shards(local, str(noted / "gulls-%d.tar"), max_samples=12)
    with faulty_storage(str(noted)) as files:
        shards = kdp.open_shards("faulty://gulls-{0..2}.tar", **options)
        assert shards.class_names() == tuple(CLASSES)
        chain = in_order(shards.rename_fields(x="jpg", y="cls"))
        want = epochs(chain)
        with kdp.Loader(chain) as loader:
            next(iter(loader))
            state = loader.state_dict()
    with faulty_storage(str(noted), faults=[Fault(kind)]) as files:
        shards = kdp.open_shards("faulty://gulls-{0..2}.tar", **options)
        assert shards.class_names() == tuple(CLASSES)
        with kdp.Loader(in_order(shards.rename_fields(x="jpg", y="cls"))) as loader:
            assert [list(loader) for _ in range(2)] == want
            loader.load_state_dict(state)
            assert list(loader) == want[0][1:]
        assert [one for one in bodies(files) if "gulls" in one.path] == []
        assert any("The local copies are used" in text for text in caplog.messages)
        other = kdp.open_shards("faulty://gulls-{0..2}.tar", cache_dir=tmp_path / "empty")
        with pytest.raises(kdp.DataError):
            len(other)


@pytest.mark.parametrize(
    ("how", "options", "reason"),
    [
        ({"shuffle": True, "seed": 1}, {}, "the epoch does not go shard by shard"),
        ({}, {"max_cache_bytes": 1_000}, "it has no room for"),
    ],
)
def test_why_a_cache_folder_is_not_used_is_logged(
    large: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: Any, options: Any, reason: str
) -> None:
    caplog.set_level("INFO", "kdpipes")
    with faulty_storage(large):
        epochs(in_order(opened("faulty://", cache_dir=tmp_path / "kept", **options), **how), number=1)
        assert any(f"`cache_dir` is not used for new shards, because {reason}" in text for text in caplog.messages)
        caplog.clear()
        epochs(in_order(opened("faulty://", **options), **how), number=1)
        assert not [text for text in caplog.messages if "`cache_dir`" in text]
