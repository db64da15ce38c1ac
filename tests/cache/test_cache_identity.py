"""Which chains share entries, which do not, and which may not be cached at all."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import kdpipes as kdp
from kdpipes.demo import write_photo_folder, write_photo_shards


def counted(pipe: Any) -> tuple[int, int]:
    """Read all of a chain's x, and return hits and misses."""
    for sample in pipe:
        sample["x"]
    stats: tuple[int, int] = pipe.stats()[:2]
    return stats


@pytest.fixture
def photos(tmp_path: Path) -> kdp.MapPipe:
    """160 photos of 8 classes, of one's own."""
    return kdp.image_folder(write_photo_folder(tmp_path / "photos"))


def test_plans_over_the_same_work_share_entries(photos: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert counted(photos.cache_on_disk(cache)) == (0, 160)
    training = photos.take_percent(to_percent=0.5).oversample(mode="exact").repeat_until(min_size=300)
    assert counted(training.permute(seed=1).cache_on_disk(cache)) == (len(training), 0)
    assert counted(
        photos.filter_classes(valid=["cat"]).map_classes({"cat": "pet"}, unmapped="drop").cache_on_disk(cache)
    ) == (40, 0)
    assert counted(photos[3:9].rename_fields(z="y").cache_on_disk(cache))[1] == 6  # which is work


def shortened(content: bytes, by: int = 2) -> bytes:
    return content[::by]


def test_another_work_or_version_has_other_entries(photos: Any, tmp_path: Path) -> None:
    cache, few = tmp_path / "cache", photos[:4]
    chains = [
        few.transform("x", shortened).cache_on_disk(cache),
        few.transform("x", lambda x: shortened(x, by=3)).cache_on_disk(cache),
        few.transform("x", lambda x: shortened(x, by=4)).cache_on_disk(cache),
        few.transform("x", shortened).cache_on_disk(cache, version=2),
        few.transform("x", shortened).cache_on_disk(cache, version="2"),
        few.record_ctx().transform("x", shortened).cache_on_disk(cache),
        few.decode_images("x", backend="pillow").cache_on_disk(cache),
        few.decode_images("x", backend="pillow").transform("x", kdp.Resize(8)).cache_on_disk(cache),
        few.decode_images("x", backend="pillow").transform("x", kdp.Resize(9)).cache_on_disk(cache),
    ]
    assert [counted(chain) for chain in chains] == [(0, 4)] * len(chains)
    again = few.permute(seed=2).decode_images("x", backend="pillow").transform("x", kdp.Resize(9)).cache_on_disk(cache)
    assert counted(again) == (4, 0)


def test_a_file_that_has_changed_is_loaded_again(photos: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert counted(photos[:4].cache_on_disk(cache)) == (0, 4)
    path = tmp_path / "photos" / photos[1].key
    path.write_bytes(photos[2]["x"])
    changed = photos[:4].cache_on_disk(cache)
    assert counted(changed) == (3, 1)
    assert changed[1]["x"] == photos[2]["x"]
    os.utime(path, ns=(1, 1))
    assert counted(photos[:4].cache_on_disk(cache)) == (3, 1)


def test_a_file_elsewhere_that_has_changed_is_loaded_again(photos: Any, tmp_path: Path) -> None:
    root = "memory://test_cache_identity"
    filesystem, path = fsspec.core.url_to_fs(root)
    for number in range(3):
        filesystem.pipe_file(f"{path}/cat/{number}.jpg", photos[number]["x"])
    assert counted(kdp.image_folder(root).cache_on_disk(tmp_path / "cache")) == (0, 3)
    assert counted(kdp.image_folder(root)[1:].cache_on_disk(tmp_path / "cache")) == (2, 0)
    filesystem.pipe_file(f"{path}/cat/1.jpg", photos[9]["x"])
    changed = kdp.image_folder(root).cache_on_disk(tmp_path / "cache")
    assert counted(changed) == (2, 1)
    assert changed[1]["x"] == photos[9]["x"]


def test_the_shards_of_a_cache_are_told_apart_by_their_versions(tmp_path: Path) -> None:
    urls = write_photo_shards(tmp_path / "shards")
    cache = tmp_path / "cache"
    indexed = kdp.open_shards(urls).rename_fields(x="jpg", y="cls")
    streamed = kdp.stream_shards(urls).rename_fields(x="jpg", y="cls")
    assert counted(indexed.cache_on_disk(cache)) == (0, 160)
    assert counted(indexed.permute(seed=1)[:9].cache_on_disk(cache)) == (9, 0)
    assert counted(streamed.cache_on_disk(cache)) == (0, 160)
    assert counted(streamed.shuffle().cache_on_disk(cache)) == (160, 0)
    first = next(path for path in sorted((tmp_path / "shards").iterdir()) if path.suffix == ".tar")
    os.utime(first, ns=(1, 1))
    assert counted(kdp.stream_shards(urls).rename_fields(x="jpg", y="cls").cache_on_disk(cache)) == (120, 40)


def test_the_values_of_a_dataset_count_however_many_there_are(tmp_path: Path) -> None:
    values = list(range(1500))
    others = [*values[:-1], -1]

    def chain(dataset: list[int]) -> Any:
        return kdp.from_dataset(dataset, "x").transform("x", lambda x: x + 1)[-3:].cache_on_disk(tmp_path / "cache")

    assert [sample["x"] for sample in chain(values)] == [1498, 1499, 1500]
    assert [sample["x"] for sample in chain(others)] == [1498, 1499, 0]


def noisy(x: Any, rng: np.random.Generator) -> Any:
    return x + rng.random()


class Declared:
    is_random = True

    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("transform", "name"),
    [(noisy, "noisy"), (kdp.RandomResizedCrop(4), "random_resized_crop"), (Declared(), "declared")],
)
def test_a_cache_after_a_random_pipe_is_an_error_when_built(transform: Any, name: str) -> None:
    pipe = kdp.from_ids([1.5, 2.5], load=float).transform("x", transform)
    with pytest.raises(kdp.ChainError, match=rf"`{name}` draws random numbers.*freeze_randomness=True"):
        pipe.cache_in_memory()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: __import__("torch").rand(())])
def test_moving_a_global_generator_is_an_error_when_read(draw: Any) -> None:
    pipe = kdp.from_ids([1.5, 2.5], load=float).transform("x", lambda x: x + float(draw())).cache_in_memory()
    with pytest.raises(kdp.ChainError, match="draws random numbers"):
        pipe[0]["x"]
    assert pipe.stats().entries == 0


class RandomDataset:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[float, int]:
        return index + random.random(), 0


def test_a_dataset_that_draws_for_itself_is_rejected() -> None:
    with pytest.raises(kdp.ChainError, match="`dataset` draws random numbers"):
        kdp.from_dataset(RandomDataset()).cache_in_memory()[0]["x"]


def test_randomness_is_frozen_where_that_is_wanted() -> None:
    pipe = kdp.from_ids([1.5, 2.5], load=float).transform("x", noisy)
    frozen = pipe.cache_in_memory(freeze_randomness=True).select("x").deal(batch_size=2)
    first, second = list(frozen), list(frozen)
    assert first == second
    free = pipe.select("x").deal(batch_size=2)
    assert list(free) != list(free)
    with kdp.Loader(frozen) as loader, kdp.Loader(pipe.select("x").deal(batch_size=2)) as other:
        list(loader)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="does not fit the chain"):
            loader.load_state_dict(other.state_dict())
    with pytest.raises(kdp.ChainError, match="noisy"):
        pipe.cache_in_memory(freeze_randomness=True).transform("x", noisy).cache_in_memory()


def test_a_loaders_state_fits_with_and_without_a_cache() -> None:
    pipe = kdp.from_ids(range(8), load=float).transform("x", lambda x: x + 1)
    dealt = [chain.select("x").deal(batch_size=2) for chain in (pipe, pipe.cache_in_memory())]
    with kdp.Loader(dealt[0]) as plain, kdp.Loader(dealt[1], num_workers=1) as cached:
        running = iter(plain)
        first = [next(running) for _ in range(2)]
        cached.load_state_dict(plain.state_dict())
        assert [*first, *cached] == [[(1.0,), (2.0,)], [(3.0,), (4.0,)], [(5.0,), (6.0,)], [(7.0,), (8.0,)]]


def test_a_replay_repeats_records_before_and_after_a_cache() -> None:
    photo = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    from PIL import Image

    pipe = kdp.from_ids(["a"], load=lambda name: Image.fromarray(photo)).record_ctx()
    pipe = pipe.transform("x", kdp.Resize(24)).cache_in_memory().transform("x", kdp.RandomResizedCrop(8))
    pipe = pipe.select("x", return_ctx=True)
    for _ in range(2):
        (x,), ctx = pipe[0]
        assert kdp.replay("a", ctx, pipe)[0][0].tobytes() == x.tobytes()
