"""`cache_in_redis`: shared by chains and processes, in one namespace, and away without harm."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.cache import RedisStore
from kdpipes.cache.store import CacheStats, bound_to
from kdpipes.storage.codec import encode


def numbers() -> Any:
    return kdp.from_ids(range(10), load=lambda number: np.full(50, number))


def test_chains_and_workers_share_what_one_has_loaded(redis_server: Any, namespace: str) -> None:
    cached = numbers().cache_in_redis(redis_server.url, namespace=namespace)
    chain = cached.select("x key").deal(batch_size=3, shuffle=True, seed=1).collate_samples()
    plain = numbers().select("x key").deal(batch_size=3, shuffle=True, seed=1).collate_samples()
    with kdp.Loader(chain, num_workers=2) as loader, kdp.Loader(plain) as uncached:
        for _ in range(2):
            batches = [(x.tolist(), key) for x, key in loader]
            assert batches == [(x.tolist(), key) for x, key in uncached]
        counted = loader.stats()
    assert (counted["cache_hits"], counted["cache_misses"]) == (10, 10)
    other = numbers().permute(seed=2).cache_in_redis(redis_server.url, namespace=namespace)
    assert sorted(int(sample["x"][0]) for sample in other) == list(range(10))
    assert other.stats()[:2] == (10, 0)
    assert other.stats().entries == 10


def test_damaged_entries_heal_and_evicted_ones_load_again(redis_server: Any, namespace: str) -> None:
    cached = numbers().cache_in_redis(redis_server.url, namespace=namespace)
    expected = [int(sample["x"][0]) for sample in cached]
    with redis.Redis.from_url(redis_server.url) as client:
        damaged, evicted, *_ = sorted(name for name in redis_server.names() if name.startswith(namespace.encode()))
        client.setrange(damaged, 100, b"\xff\xff\xff")
        client.delete(evicted)
    for _ in range(2):
        assert [int(sample["x"][0]) for sample in cached] == expected
    assert cached.stats() == CacheStats(18, 12, cached.stats().bytes, 10, 1)


def test_hostile_entries_are_loaded_again_and_replaced(
    redis_server: Any, namespace: str, warned_once: Callable[[str], Any]
) -> None:
    cached = numbers().cache(RedisStore(redis_server.url, namespace, max_value_bytes=1 << 20))
    expected = [int(sample["x"][0]) for sample in cached]
    with redis.Redis.from_url(redis_server.url) as client:
        long, other, *names = sorted(name for name in redis_server.names() if name.startswith(namespace.encode()))
        client.set(long, bytes((1 << 20) + 1))
        client.set(other, client.get(names[0]) or b"")
        key = names[1].removeprefix(f"{namespace}:".encode())
        client.set(names[1], b"".join(encode(pathlib.Path("a"), allow_pickle=True, key=bound_to(key))))
    with warned_once("holds a pickle"):
        assert [int(sample["x"][0]) for sample in cached] == expected
    assert [int(sample["x"][0]) for sample in cached] == expected
    assert (cached.stats().misses, cached.stats().healed) == (13, 3)


def test_a_server_that_is_away_is_an_error_or_no_matter(warned_once: Callable[[str], Any]) -> None:
    away = "redis://127.0.0.1:1/0"
    with pytest.raises(ConnectionError, match="cannot be reached"):
        numbers().cache_in_redis(away)[0]["x"]
    with warned_once("cannot be reached"):
        cached = numbers().cache_in_redis(away, on_unreachable="go_on")
        assert [int(sample["x"][0]) for sample in cached] == list(range(10))


def test_a_chain_pickles_and_a_stream_is_cached_as_well(redis_server: Any, namespace: str) -> None:
    source: IterDataPipe[Any] = IterableWrapper([(1, "a"), (2, "b")])
    stream = source.to_samples(fields="x y").transform("x", str)
    cached = stream.cache_in_redis(redis_server.url, namespace=namespace, ttl_s=100)
    assert [sample["x"] for sample in cached] == ["1", "2"]
    copied = pickle.loads(pickle.dumps(cached))
    assert [sample["x"] for sample in copied] == ["1", "2"]
    assert cached.stats()[:2] == (2, 2)


def test_arguments_that_make_no_sense_are_rejected() -> None:
    with pytest.raises(ValueError, match="`url` must be"):
        numbers().cache_in_redis("http://localhost")
    with pytest.raises(ValueError, match="`namespace` must be"):
        numbers().cache_in_redis("redis://localhost", namespace="")
