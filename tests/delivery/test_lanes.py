"""Streams that are read in lanes: each shard once, and the same batches for any number of workers and ranks."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import webdataset
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.storage.tar import read_members
from kdpipes.testing import kill_one_worker
from tests.http_server import serving
from tests.resuming import of_rank, travelled, without_seed
from tests.torchdata_parts import DataLoader2, MultiProcessingReadingService

SERVICES: dict[str, Any] = {
    "0": lambda: None,
    "1": lambda: kdp.ProcessReadingService(1),
    "2": lambda: kdp.ProcessReadingService(2),
    "3": lambda: kdp.ProcessReadingService(3),
    "4": lambda: kdp.ProcessReadingService(4),
    "2 threads": lambda: kdp.ThreadReadingService(2),
    "3 threads": lambda: kdp.ThreadReadingService(3),
}


def write(folder: Path, sizes: list[int]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        with webdataset.TarWriter(str(folder / f"{shard:02}.tar")) as writer:
            for sample in range(size):
                writer.write({"__key__": f"{shard:02}-{sample:02}", "txt": "word", "cls": sample % 3})
    return [str(folder / f"{shard:02}.tar") for shard in range(len(sizes))]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """11 shards of 3 to 13 samples."""
    return write(tmp_path_factory.mktemp("lanes") / "a", [*range(3, 14)])


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """6 shards of 5 samples each."""
    return write(tmp_path_factory.mktemp("lanes") / "b", [5] * 6)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """9 shards of 8 samples, two of which end within their third sample."""
    urls = write(tmp_path_factory.mktemp("lanes") / "c", [8] * 9)
    for url in (urls[2], urls[7]):
        os.truncate(url, 4500)
    return urls


def drawn(stream: Any, **cut: Any) -> Any:
    stream = stream.add_field("r", lambda sample: float(sample.rng("r").random()))
    return stream.select("key r ordinal is_padding").deal(seed=3, **cut)


def plain(urls: list[str], others: list[str], damaged: list[str], **cut: Any) -> Any:
    return drawn(kdp.stream_shards(urls).rename_fields(y="cls").filter_classes(invalid=[2]), **cut, shuffle="shards")


def buffered(urls: list[str], others: list[str], damaged: list[str], **cut: Any) -> Any:
    return drawn(kdp.stream_shards(urls).shuffle(buffer_size=6).to_samples(), **cut, shuffle="shards")


def mixed(urls: list[str], others: list[str], damaged: list[str], **cut: Any) -> Any:
    streams = kdp.stream_shards(urls), kdp.stream_shards(others)
    return drawn(streams[0].mix(streams[1], weights=[2, 1], stop="all"), **cut, shuffle="shards")


def repeated(urls: list[str], others: list[str], damaged: list[str], **cut: Any) -> Any:
    stream = kdp.stream_shards(urls).shuffle(buffer_size=4).to_samples().repeat_until(repetitions=2)
    return drawn(stream.rename_fields(y="cls").oversample(class_counts={0: 30, 1: 15, 2: 30}), **cut)


def cached(urls: list[str], others: list[str], damaged: list[str], **cut: Any) -> Any:
    return drawn(kdp.stream_shards(others).cache_in_memory(), **cut, shuffle="shards")


def skipping(urls: list[str], others: list[str], damaged: list[str], **cut: Any) -> Any:
    def reject(sample: Any) -> int:
        if sample.key.endswith("-05"):
            raise ValueError("bad")
        return 0

    return drawn(kdp.stream_shards(damaged).on_error("skip", max_share=1.0).add_field("bad", reject), **cut)


CHAINS = [plain, buffered, mixed, repeated, cached, skipping]
every_chain = pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
Data = tuple[list[str], list[str], list[str]]


@pytest.fixture(scope="module")
def data(urls: list[str], others: list[str], damaged: list[str]) -> Data:
    return urls, others, damaged


def keys(batches: Any) -> list[str]:
    return [item[0] for batch in batches for item in batch]


@every_chain
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.filterwarnings("ignore:.* workers have nothing to do:UserWarning")
def test_batches_are_the_same_for_any_workers(chain: Any, service: str, data: Data) -> None:
    pipe = chain(*data, batch_size=4, split=kdp.lanes(4))
    expected = [list(pipe) for _ in range(2)]
    assert expected[0] != expected[1]
    with kdp.Loader(chain(*data, batch_size=4, split=kdp.lanes(4)), reading_service=SERVICES[service]()) as loader:
        assert [list(loader) for _ in range(2)] == expected


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
@pytest.mark.parametrize("service", ["0", "2", "3 threads"])
@pytest.mark.filterwarnings("ignore:.*makes no batch from:UserWarning")
def test_each_sample_comes_once(urls: list[str], uneven: Any, service: str) -> None:
    pipe = drawn(kdp.stream_shards(urls), batch_size=4, uneven=uneven)
    with kdp.Loader(pipe, reading_service=SERVICES[service]()) as loader:
        batches = list(loader)
    own = Counter(key for batch in batches for key, _, _, is_padding in batch if not is_padding)
    assert set(own.values()) == {1}
    assert len({ordinal for batch in batches for _, _, ordinal, _ in batch}) == sum(map(len, batches))
    if uneven != "keep":
        assert {len(batch) for batch in batches} == {4}
    assert len(own) == 88 if uneven != "drop" else 88 - 3 * 11 <= len(own) < 88


@pytest.mark.parametrize("service", SERVICES)
def test_a_batch_of_more_lanes_than_shards_is_read_whole(urls: list[str], service: str) -> None:
    chain = kdp.stream_shards(urls[:3]).select("key").deal(global_batch_size=4)
    expected = [[key for (key,) in batch] for batch in chain]
    with kdp.Loader(chain, reading_service=SERVICES[service]()) as loader:
        assert [[key for (key,) in batch] for batch in loader] == expected
    assert sum(map(len, expected)) == 3 + 4 + 5


def opened_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []

    def read(url: str, *how: Any) -> Any:
        opened.append(url)
        return read_members(url, *how)

    monkeypatch.setattr("kdpipes.sources.stream_shards.read_members", read)
    return opened


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_shard_is_opened_once(
    urls: list[str], num_workers: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_by(monkeypatch)
    for rank in range(num_ranks):
        pipe = of_rank(
            drawn(kdp.stream_shards(urls), global_batch_size=8, split=kdp.lanes(8, max_ranks=4)), num_ranks, rank
        )
        service = kdp.ThreadReadingService(num_workers)
        with kdp.Loader(pipe, reading_service=service) as loader, pytest.warns() if num_workers > 2 else _nothing():
            list(loader)
    assert Counter(opened) == dict.fromkeys(urls, 1)


def _nothing() -> Any:
    return contextlib.nullcontext()


@every_chain
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("service", ["0", "2", "2 threads"])
@pytest.mark.filterwarnings("ignore:.* workers have nothing to do:UserWarning")
def test_ranks_share_the_same_global_batches(chain: Any, num_ranks: int, service: str, data: Data) -> None:
    cut: dict[str, Any] = {"global_batch_size": 8, "split": kdp.lanes(8, max_ranks=4)}
    expected = list(chain(*data, **cut))
    parts: dict[int, dict[int, list[Any]]] = {}
    for rank in range(num_ranks):
        pipe = of_rank(chain(*data, **cut), num_ranks, rank)
        with kdp.Loader(pipe, reading_service=SERVICES[service]()) as loader:
            for batch in loader:
                parts.setdefault(batch[0][2] // 8, {})[rank] = batch  # by the number of the global batch
    joined = [[item for rank in sorted(parts[number]) for item in parts[number][rank]] for number in sorted(parts)]
    assert joined == expected


@every_chain
@pytest.mark.parametrize("service", ["0", "3", "2 threads"])
def test_a_stream_resumes_at_every_batch(chain: Any, service: str, data: Data) -> None:
    cut: dict[str, Any] = {"batch_size": 4, "split": kdp.lanes(3)}
    with kdp.Loader(chain(*data, **cut), reading_service=SERVICES["2"]()) as loader:
        states, batches = [loader.state_dict()], []
        for batch in loader:
            batches.append(batch)
            states.append(travelled(loader.state_dict()))
        following = list(loader)
    with kdp.Loader(chain(*data, **cut), reading_service=SERVICES[service]()) as loader:
        for done, state in enumerate(states):
            loader.load_state_dict(state)
            assert list(loader) == batches[done:]
        assert list(loader) == following


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
@pytest.mark.parametrize("chain", [plain, buffered], ids=lambda chain: chain.__name__)
@pytest.mark.filterwarnings("ignore:.*makes no batch from:UserWarning")
def test_a_run_resumes_with_other_workers_and_ranks_anywhere(chain: Any, uneven: Any, data: Data) -> None:
    cut: dict[str, Any] = {"global_batch_size": 8, "uneven": uneven, "split": kdp.lanes(4, max_ranks=2)}
    batches = list(chain(*data, **cut))[:7]  # as many have pieces from both lanes
    setups = cycle([("0", 1), ("2", 2), ("2 threads", 1), ("0", 2), ("2", 1)])
    found, state = [], None
    for service, num_ranks in islice(setups, len(batches)):
        states = []
        for rank in range(num_ranks):
            pipe = of_rank(chain(*data, **cut), num_ranks, rank)
            with kdp.Loader(pipe, reading_service=SERVICES[service]()) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                found += next(iter(loader))
                states.append(travelled(loader.state_dict()))
        if num_ranks == 2:  # without a process group, no rank knows the other one's cursors
            states[0]["cursors"] = states[1]["cursors"] = []
        assert without_seed(states[0]) == without_seed(states[-1])
        state = states[-1]
    assert found == [item for batch in batches for item in batch]


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
@pytest.mark.filterwarnings("ignore:.*makes no batch from:UserWarning")
def test_an_epoch_resumes_after_every_batch_up_to_its_end(data: Data, uneven: Any) -> None:
    cut: dict[str, Any] = {"global_batch_size": 4, "uneven": uneven, "split": kdp.lanes(4, max_ranks=2)}
    expected = list(plain(*data, **cut))
    found, state, services = [], None, cycle(["0", "2 threads"])
    for service in islice(services, len(expected)):
        with kdp.Loader(plain(*data, **cut), reading_service=SERVICES[service]()) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found.append(next(iter(loader)))
            state = travelled(loader.state_dict())
    assert found == expected


def test_a_state_of_16_lanes_is_small(tmp_path: Path) -> None:
    pipe = drawn(kdp.stream_shards(write(tmp_path, [3] * 32)), batch_size=2)
    with kdp.Loader(pipe) as loader:
        assert len(list(islice(loader, 30))) == 30
        state = loader.state_dict()
    assert len(state["cursors"]) == 16
    assert len(json.dumps(state)) < 2000


def test_a_resumed_stream_opens_no_shard_that_is_done(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_by(monkeypatch)
    with kdp.Loader(drawn(kdp.stream_shards(urls), batch_size=2, split=kdp.lanes(3))) as loader:
        batches = iter(loader)
        for _ in range(18):
            next(batches)
        state, before = loader.state_dict(), set(opened)
        opened.clear()
        loader.load_state_dict(state)
        list(loader)
    again = before & set(opened)
    assert Counter(opened) == dict.fromkeys(set(urls) - before | again, 1)
    assert len(again) <= 3  # the one that is open in each lane


def test_a_worker_that_dies_resumes_its_lanes(urls: list[str], tmp_path: Path) -> None:
    deadly, log = tmp_path / "deadly", tmp_path / "log"
    expected = []
    for is_deadly in (False, True):

        def note(sample: Any) -> int:
            with log.open("a") as file:
                file.write(f"{sample.key}\n")
            if sample.key == "07.tar/07-04" and deadly.exists():
                deadly.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        if is_deadly:
            deadly.touch()
        log.write_text("")
        pipe = kdp.stream_shards(urls).add_field("d", note).select("key d").deal(batch_size=4, split=kdp.lanes(4))
        service = kdp.ProcessReadingService(2, prefetch=1)
        with kdp.Loader(pipe, reading_service=service) as loader:
            expected.append(list(loader))
            assert loader.stats()["worker_deaths"] == int(is_deadly)
    assert expected[0] == expected[1]
    made = Counter(log.read_text().split())
    assert max(made.values()) == 2
    assert sum(made.values()) - len(made) <= 4 * 2 + 4  # the batches that were lost with the worker


def test_a_replaced_worker_opens_only_its_open_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write(tmp_path / "long", [*range(40, 51)])  # no worker can make its 124 small batches in advance
    log = tmp_path / "log"

    def read(url: str, *how: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{url}\n")
        return read_members(url, *how)

    monkeypatch.setattr("kdpipes.sources.stream_shards.read_members", read)  # forked workers inherit it
    pipe = drawn(kdp.stream_shards(urls), batch_size=2, shuffle="shards", split=kdp.lanes(4))
    expected = list(drawn(kdp.stream_shards(urls), batch_size=2, shuffle="shards", split=kdp.lanes(4)))
    log.write_text("")
    service = kdp.ProcessReadingService(2, prefetch=1, start_method="fork")
    with kdp.Loader(pipe, reading_service=service) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch)
            if number == 17:
                assert kill_one_worker()
        assert loader.stats()["worker_deaths"] == 1
    assert found == expected
    opened = Counter(log.read_text().split())
    assert set(opened) == set(urls)
    again = opened.total() - len(urls)
    assert max(opened.values()) == 2
    assert again <= 2 * 2  # each of the worker's two lanes: the open shard, and the next one if it was made in advance


def test_a_replaced_worker_requests_only_what_it_was_reading(tmp_path: Path) -> None:
    paths = [Path(url) for url in write(tmp_path / "long", [40] * 24)]  # six shards in each of four lanes
    asked = []
    for is_killed in (False, True):
        with serving() as server:
            server.files = {f"/{path.name}": path.read_bytes() for path in paths}
            pipe = drawn(
                kdp.stream_shards([f"{server.url}/{path.name}" for path in paths]), batch_size=2, split=kdp.lanes(4)
            )
            service = kdp.ProcessReadingService(2, prefetch=1, start_method="fork")
            with kdp.Loader(pipe, reading_service=service) as loader:
                for number, _ in enumerate(loader):
                    if is_killed and number == 17:
                        assert kill_one_worker()
                assert loader.stats()["worker_deaths"] == int(is_killed)
            asked.append(Counter(server.asked))
    whole, disturbed = asked
    assert len(whole) == len(paths)
    assert set(whole.values()) == {2}  # its size and version, and its bytes
    again = {int(Path(shard).stem): number for shard, number in (disturbed - whole).items()}
    assert max(again.values()) <= 2
    assert len({shard % 2 for shard in again}) == 1  # lanes 0 and 2 are one worker's, 1 and 3 the other's
    # Of each of its two lanes: the open shard, and those that were begun in advance.
    assert len(again) <= 2 * 3


ENDLESS: dict[str, Any] = {
    "mix": lambda urls: kdp.stream_shards(urls).mix(kdp.stream_shards(urls[:4]), stop="all"),
    "cycle": lambda urls: kdp.stream_shards(urls).cycle().to_samples(),
    "repeat": lambda urls: kdp.stream_shards(urls).repeat_until(repetitions=1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_long_stream_resumes_under_other_workers(urls: list[str], kind: str) -> None:
    def pipe() -> Any:
        return drawn(ENDLESS[kind](urls), batch_size=3, split=kdp.lanes(4))

    expected = list(islice(pipe(), 40))
    with kdp.Loader(pipe(), num_workers=2) as loader:
        found = list(islice(loader, 25))
        state = loader.state_dict()
    assert found == expected[:25]
    with kdp.Loader(pipe(), reading_service=kdp.ThreadReadingService(3)) as loader:
        loader.load_state_dict(state)
        assert list(islice(loader, len(expected) - 25)) == expected[25:]


LOADERS: dict[str, Any] = {
    "DataLoader": lambda pipe, number: DataLoader(pipe, batch_size=None, num_workers=number),
    "DataLoader2": lambda pipe, number: DataLoader2(pipe, reading_service=MultiProcessingReadingService(number)),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("kind", LOADERS)
def test_other_loaders_give_the_same_batches(urls: list[str], others: list[str], kind: str) -> None:
    def pipe(shards: list[str]) -> Any:
        return drawn(kdp.stream_shards(shards), batch_size=2, split=kdp.lanes(6))

    def batches_of(stream: Any, num_workers: int) -> list[Any]:
        loader = LOADERS[kind](stream, num_workers)
        found = [list(map(tuple, batch)) for batch in loader]
        if isinstance(loader, DataLoader2):
            loader.shutdown()
        return found

    expected = list(pipe(others))  # of lanes of equal length
    assert [batches_of(pipe(others), number) for number in (2, 3)] == [expected] * 2
    expected = list(pipe(urls))
    for number in (2, 4):  # 4 does not divide the number of lanes
        found = batches_of(pipe(urls), number)
        assert found == expected or kind == "DataLoader"
        assert sorted(found) == sorted(expected)
    assert kind != "DataLoader" or batches_of(pipe(urls), 2)[:12] == expected[:12]  # until the first lane ends


def test_trainers_skip_batches_by_their_count(urls: list[str]) -> None:
    with kdp.Loader(drawn(kdp.stream_shards(urls), batch_size=2, split=kdp.lanes(4))) as loader:
        batches = list(loader)
        loader.set_epoch(0)
        assert list(loader.from_batch(len(batches) - 3)) == batches[-3:]


def test_one_lane_gives_the_stream_in_order(urls: list[str]) -> None:
    whole = list(kdp.stream_shards(urls).select("key").deal(batch_size=5, split="samples"))
    assert list(kdp.stream_shards(urls).select("key").deal(batch_size=5, split=kdp.lanes(1))) == whole


@pytest.mark.filterwarnings("ignore:.*makes no batch from:UserWarning")
def test_few_shards_work(tmp_path: Path) -> None:
    urls = write(tmp_path, [4, 6, 5])
    pipe = kdp.stream_shards(urls).select("key").deal(batch_size=4)
    expected = list(pipe)
    assert [len(batch) for batch in expected] == [4, 4, 4, 2, 1]
    with kdp.Loader(kdp.stream_shards(urls).select("key").deal(batch_size=4), num_workers=4) as loader:
        with pytest.warns(UserWarning, match=r"1 of 4 workers have nothing to do: .* 3 lanes"):
            assert list(loader) == expected
        list(loader)  # warns once
    parts = []
    for rank in range(4):  # fewer shards than ranks
        cut = kdp.stream_shards(urls).select("key").deal(global_batch_size=4, uneven="drop")
        parts += keys(of_rank(cut, 4, rank))
    assert sorted(parts) == sorted(set(parts))
    assert len(parts) == 12


def test_streams_that_cannot_be_cut_are_read_whole(urls: list[str]) -> None:
    stock = IterableWrapper([1, 2, 3]).to_samples(fields="x")
    counting = kdp.stream_shards(urls).repeat_until(min_size=100)
    assert not stock.deal(batch_size=1).has_lanes
    assert not counting.deal(batch_size=1).has_lanes
    with pytest.raises(kdp.ChainError, match=r"cannot cut this stream: .* is not a stream of shards"):
        stock.deal(batch_size=1, split=kdp.lanes())
    with pytest.raises(kdp.ChainError, match=r"cannot cut this stream: `repeat_until` counts over the whole stream"):
        counting.deal(batch_size=1, split=kdp.lanes())


def test_arguments_that_do_not_fit_are_errors(urls: list[str]) -> None:
    stream = kdp.stream_shards(urls)
    with pytest.raises(ValueError, match=r'`split` must be "auto", "samples" or `kdp.lanes'):
        stream.deal(batch_size=1, split="shards")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_ranks=...\)` needs `deal\(global_batch_size="):
        stream.deal(batch_size=1, split=kdp.lanes(max_ranks=2))
    with pytest.raises(
        ValueError, match="`max_ranks` must be a divisor of `global_batch_size`, 8, and of the number of lanes, 16"
    ):
        stream.deal(global_batch_size=8, split=kdp.lanes(max_ranks=3))
    with pytest.raises(ValueError, match=r"The number of ranks, 3, must divide `max_ranks`, which is 4"):
        list(of_rank(stream.deal(global_batch_size=12), 3, 0))


STEPS: dict[str, dict[str, Any]] = {
    "lanes": {"batch_size": 4, "num_batches": 7, "split": kdp.lanes(3)},
    "few": {"batch_size": 4, "num_batches": 2, "split": kdp.lanes(3)},
    "whole": {"batch_size": 4, "split": "samples", "num_batches": 9},
}


@every_chain
@pytest.mark.parametrize("kind", STEPS)
def test_num_batches_continue_under_any_workers(chain: Any, kind: str, data: Data) -> None:
    cut = STEPS[kind]
    pipe = chain(*data, **cut)
    expected = [list(pipe) for _ in range(6)]
    assert len(pipe) == cut["num_batches"] == len(expected[0])
    later = chain(*data, **cut)
    later.set_epoch(4)
    assert list(later) == expected[4]
    for service in ("0", "2", "3 threads"):
        with kdp.Loader(chain(*data, **cut), reading_service=SERVICES[service]()) as loader:
            assert len(loader) == cut["num_batches"]
            assert [list(loader) for _ in range(6)] == expected


@every_chain
@pytest.mark.parametrize("kind", STEPS)
def test_num_batches_resume_at_any_batch(chain: Any, kind: str, data: Data) -> None:
    cut = STEPS[kind]
    with kdp.Loader(chain(*data, **cut), reading_service=SERVICES["3 threads"]()) as loader:
        states, batches = [travelled(loader.state_dict())], []
        for _ in range(4):
            for batch in loader:
                batches.append(batch)
                states.append(travelled(loader.state_dict()))
            states[-1] = travelled(loader.state_dict())  # of the epoch's end
    with kdp.Loader(chain(*data, **cut), reading_service=SERVICES["2 threads"]()) as loader:
        for done in range(0, len(states), 3):
            loader.load_state_dict(states[done])
            found = [batch for _ in range(2) for batch in loader]
            assert found[: len(batches) - done] == batches[done : done + len(found)]


def test_num_batches_give_each_sample_once_before_any_twice(others: list[str]) -> None:
    pipe = drawn(
        kdp.stream_shards(others), batch_size=5, num_batches=4, shuffle="shards", split=kdp.lanes(3)
    )  # 6 * 5 samples
    found = [key for _ in range(3) for batch in pipe for key, *_ in batch]
    assert len(set(found[:30])) == 30
    assert len(set(found[30:])) == 30


def test_num_batches_read_no_shard_again_after_an_epoch(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_by(monkeypatch)
    pipe = drawn(
        kdp.stream_shards(urls).shuffle(buffer_size=4).to_samples(), batch_size=2, num_batches=4, split=kdp.lanes(2)
    )
    with kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(2)) as loader:
        for _ in range(5):  # less than a pass
            list(loader)
    assert max(Counter(opened).values()) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_a_loader_closes_the_kept_lanes(urls: list[str], num_workers: int) -> None:
    gc.collect()
    gc.disable()  # which would close them, too
    try:
        pipe = drawn(kdp.stream_shards(urls), batch_size=2, num_batches=6, split=kdp.lanes(4))
        service = kdp.ThreadReadingService(num_workers) if num_workers else None
        with kdp.Loader(pipe, reading_service=service) as loader:
            list(loader)
            assert len(open_files(urls)) == 4
        assert open_files(urls) == []
        direct = drawn(kdp.stream_shards(urls), batch_size=2, num_batches=6, split=kdp.lanes(4))
        whole = drawn(kdp.stream_shards(urls), batch_size=2, num_batches=6, split=kdp.lanes(4))
        expected = [list(whole) for _ in range(2)]
        whole.close_kept()
        found = list(direct)
        direct.close_kept()
        assert open_files(urls) == []
        assert [found, list(direct)] == expected
    finally:
        gc.enable()


def open_files(urls: list[str]) -> list[str]:
    """Return which of some files this process has open."""
    paths = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.append(str(descriptor.readlink()))
    return sorted(set(paths) & set(urls))


def test_num_batches_go_on_after_an_epoch_that_was_left_early(urls: list[str]) -> None:
    def pipe() -> Any:
        return drawn(kdp.stream_shards(urls), batch_size=3, num_batches=6, split=kdp.lanes(4))

    expected = pipe()
    expected = [list(expected) for _ in range(3)]
    with kdp.Loader(pipe(), num_workers=2) as loader:
        assert list(islice(loader, 4)) == expected[0][:4]
        assert list(loader) == expected[1]
        state = travelled(loader.state_dict())
        assert state["cursors"]
    direct = pipe()
    assert list(islice(direct, 4)) == expected[0][:4]
    assert [list(direct) for _ in range(2)] == expected[1:]
    direct.load_state_dict(state)
    assert list(direct) == expected[2]
    direct.set_epoch(1)
    assert list(direct) == expected[1]


@pytest.mark.parametrize("split", ["auto", "samples"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_num_batches_are_shared_by_ranks(urls: list[str], split: str, num_ranks: int) -> None:
    cut: dict[str, Any] = {"global_batch_size": 8, "num_batches": 5, "split": split}
    cut |= {"split": kdp.lanes(8, max_ranks=4)} if split == "lanes" else {}
    whole = drawn(kdp.stream_shards(urls), **cut)
    expected = [batch for _ in range(3) for batch in whole]
    parts = []
    for rank in range(num_ranks):
        with kdp.Loader(of_rank(drawn(kdp.stream_shards(urls), **cut), num_ranks, rank), num_workers=2) as loader:
            assert len(loader) == 5
            parts.append([batch for _ in range(3) for batch in loader])
    assert [[item for piece in pieces for item in piece] for pieces in zip(*parts, strict=True)] == expected


@pytest.mark.parametrize("kind", ["mix", "cycle", "repeat", "stock"])
def test_num_batches_of_an_endless_stream(urls: list[str], kind: str) -> None:
    def pipe() -> Any:
        if kind == "stock":
            return (
                IterableWrapper(range(7)).cycle().to_samples(fields="x").select("x").deal(batch_size=3, num_batches=4)
            )
        return drawn(ENDLESS[kind](urls), batch_size=3, num_batches=4, split=kdp.lanes(4))

    batches = pipe()
    expected = [list(batches) for _ in range(4)]
    if kind == "stock":
        assert [x for epoch in expected for batch in epoch for (x,) in batch] == [n % 7 for n in range(48)]
    for num_workers in (0, 2):
        with kdp.Loader(pipe(), num_workers=num_workers) as loader:
            assert [list(loader) for _ in range(4)] == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("kind", LOADERS)
def test_num_batches_in_other_loaders(urls: list[str], kind: str) -> None:
    def pipe() -> Any:
        return drawn(kdp.stream_shards(urls), batch_size=3, num_batches=10, split=kdp.lanes(4))

    batches = pipe()
    expected = [list(batches) for _ in range(2)]
    loader = LOADERS[kind](pipe(), 2)
    assert [[list(map(tuple, batch)) for batch in loader] for _ in range(2)] == expected
    if isinstance(loader, DataLoader2):
        loader.shutdown()


def test_num_batches_of_a_lane_without_samples_are_an_error(urls: list[str]) -> None:
    empty = kdp.stream_shards(urls).rename_fields(y="cls").filter_classes(valid=[7]).select("key")
    with pytest.raises(kdp.DataError, match="A lane of the stream gave no sample"):
        list(empty.deal(batch_size=2, num_batches=3, split=kdp.lanes(2)))
    with pytest.raises(ValueError, match="`uneven` has no effect with `num_batches`"):
        empty.deal(batch_size=2, num_batches=3, uneven="drop")


def test_lanes_that_are_too_short_for_a_batch_warn_once(tmp_path: Path) -> None:
    stream = kdp.stream_shards(write(tmp_path, [6] * 8)).select("key")
    pipe = stream.deal(batch_size=12, uneven="drop", split=kdp.lanes(8))
    with pytest.warns(UserWarning, match=r"no batch from 8 of 8 parts.* only 6.* Use `kdp\.lanes\(4\)`, "):
        assert list(pipe) == []
    assert list(pipe) == []  # warns once
    assert len(list(stream.deal(batch_size=12, uneven="drop", split=kdp.lanes(4)))) == 4
    pipe = stream.deal(global_batch_size=200, uneven="drop", split=kdp.lanes(8, max_ranks=2))
    with kdp.Loader(pipe) as loader, pytest.warns(UserWarning, match=r"Use batches of at most 12 samples"):
        assert list(loader) == []
    assert len(list(stream.deal(global_batch_size=12, uneven="drop", split=kdp.lanes(8, max_ranks=2)))) == 4
    with pytest.warns(UserWarning, match="makes no batch of 48 samples: a global batch has 49"):
        assert list(stream.deal(batch_size=49, uneven="drop", split="samples")) == []


def test_num_batches_follow_ranks_that_change_between_epochs(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe() -> Any:
        return drawn(kdp.stream_shards(urls), batch_size=3, num_batches=6, split=kdp.lanes(3))  # 4 lanes on 2 ranks

    with kdp.Loader(pipe(), num_workers=1) as loader:
        for _ in range(4):
            list(loader)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        found = list(loader)
    other = pipe()
    other.set_epoch(4)
    assert found == list(other)
