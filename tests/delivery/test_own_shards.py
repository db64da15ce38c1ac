"""Streams of which each worker reads shards of its own, and streams that go on where they stood."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

import kdpipes as kdp
from kdpipes.storage.tar import read_members

NUM_SHARDS = 5
SERVICES: dict[str, Any] = {
    "0": lambda: None,
    "1": lambda: kdp.ProcessReadingService(1),
    "3": lambda: kdp.ProcessReadingService(3),
    "7": lambda: kdp.ProcessReadingService(7),
    "2 threads": lambda: kdp.ThreadReadingService(2),
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Shards of 3, 6, 9, 12 and 15 samples."""
    import webdataset

    folder = tmp_path_factory.mktemp("uneven")
    for shard in range(NUM_SHARDS):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for sample in range(3 * shard + 3):
                writer.write({"__key__": f"{shard}-{sample:02}", "txt": "word", "cls": sample % 3})
    return [str(folder / f"{shard}.tar") for shard in range(NUM_SHARDS)]


def chain(urls: list[str], **deal: Any) -> Any:
    stream = kdp.stream_shards(urls).rename_fields(y="cls").filter_classes(invalid=[2])
    stream = stream.add_field("r", lambda sample: float(sample.rng("r").random()))
    return stream.select("key r").deal(batch_size=4, **deal)


def keys(batches: Any) -> list[str]:
    return [item[0] for batch in batches for item in batch]


@pytest.mark.parametrize("service", SERVICES)
def test_each_sample_comes_once_and_each_shard_is_read_by_one_worker(urls: list[str], service: str) -> None:
    expected = Counter(keys(chain(urls)))
    with kdp.Loader(chain(urls, split="shards"), reading_service=SERVICES[service]()) as loader:
        for _ in range(2):
            batches = list(loader)
            assert Counter(keys(batches)) == expected
            if service == "7":
                assert all(len({key.split("/")[0] for key in keys([batch])}) == 1 for batch in batches)


@pytest.mark.parametrize("split", ["samples", "shards"])
@pytest.mark.parametrize("service", ["0", "3", "2 threads"])
def test_a_stream_goes_on_at_every_batch(urls: list[str], service: str, split: Any) -> None:
    with kdp.Loader(chain(urls, split=split), reading_service=SERVICES[service]()) as loader:
        states, batches = [loader.state_dict()], []
        for batch in loader:
            batches.append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
        following = list(loader)
    for done, state in enumerate(states):
        with kdp.Loader(chain(urls, split=split), reading_service=SERVICES[service]()) as loader:
            loader.load_state_dict(state)
            assert list(loader) == batches[done:]
            assert list(loader) == following


VARIANTS: dict[str, Any] = {
    "keep": lambda urls: chain(urls),
    "pad": lambda urls: chain(urls, uneven="pad"),
    "drop": lambda urls: chain(urls, uneven="drop"),
    "shards": lambda urls: chain(urls, split="shards"),
    "repeat": lambda urls: kdp.stream_shards(urls).repeat_until(min_size=100).select("key").deal(batch_size=4),
}


@pytest.mark.parametrize("service", ["0", "3", "2 threads"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_after_its_last_batch_a_resumed_stream_is_over(urls: list[str], variant: str, service: str) -> None:
    def loader() -> Any:
        return kdp.Loader(VARIANTS[variant](urls), reading_service=SERVICES[service]())

    with loader() as whole:
        epochs = [list(whole), list(whole)]
    with loader() as stopped:
        batches = iter(stopped)
        for _ in epochs[0]:
            next(batches)
        state = stopped.state_dict()
    with loader() as resumed:
        resumed.load_state_dict(state)
        found = []
        while resumed.epoch < 1:
            found += list(resumed)
        assert (found, resumed.epoch) == ([], 1)
        resumed.load_state_dict(state)
        found = [list(resumed) for _ in range(resumed.epoch, 2)]
        assert (found, resumed.epoch) == ([[], epochs[1]], 2)


def test_a_stream_that_is_split_by_samples_goes_on_with_other_workers(urls: list[str]) -> None:
    with kdp.Loader(chain(urls), num_workers=2) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state, rest = loader.state_dict(), list(batches)
    with kdp.Loader(chain(urls), num_workers=3) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest
    with kdp.Loader(chain(urls, split="shards"), num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with (
        kdp.Loader(chain(urls, split="shards"), num_workers=3) as loader,
        pytest.raises(ValueError, match="taken with 2 workers, but there are 3"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("split", ["samples", "shards"])
def test_shards_before_the_place_are_not_read_again(
    urls: list[str], split: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def read(url: str, *how: Any) -> Any:
        opened.append(url)
        return read_members(url, *how)

    monkeypatch.setattr("kdpipes.sources.stream_shards.read_members", read)
    with kdp.Loader(chain(urls, split=split)) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
        assert opened == urls[:4]
        opened.clear()
        loader.load_state_dict(state)
        list(loader)
    assert opened == urls[3:]


def test_behind_a_shuffle_a_stream_is_read_again_and_goes_on_all_the_same(urls: list[str]) -> None:
    def shuffled() -> Any:
        return kdp.stream_shards(urls).shuffle(buffer_size=10).to_samples().select("key").deal(batch_size=4)

    with kdp.Loader(shuffled(), num_workers=2) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state, rest = loader.state_dict(), list(batches)
        assert "cursors" not in state
    with kdp.Loader(shuffled(), num_workers=1) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


@pytest.mark.parametrize(("uneven", "sizes"), [("keep", {4, 2, 1, 3}), ("pad", {4}), ("drop", {4})])
def test_the_last_batch_of_each_worker_is_kept_filled_or_dropped(urls: list[str], uneven: Any, sizes: set[int]) -> None:
    pipe = kdp.stream_shards(urls).select("key is_padding").deal(batch_size=4, split="shards", uneven=uneven)
    with kdp.Loader(pipe, num_workers=3) as loader:
        batches = list(loader)
    assert {len(batch) for batch in batches} <= sizes
    own = Counter(key for batch in batches for key, is_padding in batch if not is_padding)
    assert set(own.values()) == {1}
    assert len(own) == 45 if uneven != "drop" else 45 > len(own) > 30


def test_several_ranks_that_would_not_end_together_are_refused(urls: list[str]) -> None:
    for uneven in ("keep", "pad", "drop"):  # nobody here lets the ranks agree
        pipe = chain(urls, split="shards", uneven=uneven)
        apply_sharding(pipe, 2, 1, SHARDING_PRIORITIES.DISTRIBUTED)
        with pytest.raises(ValueError, match=r'`deal\(split="shards", uneven="drop"\)` in a `kdp.Loader`'):
            list(pipe)


def test_what_cannot_be_split_by_shard_is_refused(urls: list[str]) -> None:
    with pytest.raises(kdp.ChainError, match=r"needs `kdp.stream_shards` as the one source"):
        IterableWrapper([1]).to_samples(fields="x").deal(batch_size=1, split="shards")
    with pytest.raises(kdp.ChainError, match="`repeat_until` counts over the whole stream"):
        kdp.stream_shards(urls).repeat_until(min_size=100).deal(batch_size=1, split="shards")
    with pytest.raises(ValueError, match="`split` must be one of 'samples', 'shards'"):
        kdp.stream_shards(urls).deal(batch_size=1, split="files")


def test_a_worker_that_dies_goes_on_in_its_shard(urls: list[str], tmp_path: Path) -> None:
    import os
    import signal

    deadly = tmp_path / "deadly"
    expected = []
    for is_deadly in (False, True):

        def die_once(sample: Any) -> int:
            if sample.key == "3.tar/3-04" and deadly.exists():
                deadly.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        pipe = kdp.stream_shards(urls).add_field("d", die_once).select("key d").deal(batch_size=4, split="shards")
        if is_deadly:
            deadly.touch()
        with kdp.Loader(pipe, num_workers=2) as loader:
            expected.append(list(loader))
            assert loader.stats()["worker_deaths"] == int(is_deadly)
    assert expected[0] == expected[1]
