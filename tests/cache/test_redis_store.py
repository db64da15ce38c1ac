"""redis: only its own keys, in few round trips, and a server that comes and goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis

from kdpipes.storage.codec import DamagedError, decode, encode
from tests.cache.entries import open_redis

Server = Any  # of conftest


@pytest.fixture
def client(redis_server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def server(redis_server: Server) -> Iterator[Server]:
    """The server, to be stopped by a test."""
    yield redis_server
    redis_server.stop()
    redis_server.start()


def test_only_keys_of_the_namespace_are_touched(redis_server: Server, namespace: str, client: Any) -> None:
    client.set(f"{namespace}-other:a", b"theirs")
    client.set("a", b"theirs")
    before = redis_server.names()
    store = open_redis(redis_server.url, namespace)
    store.put(b"a", [b"heron"])
    store.put(b"b", [b"gull"])
    store.put(b"\0\xff", [b"stork"])
    assert redis_server.names() - before == {namespace.encode() + name for name in (b":a", b":b", b":\0\xff")}
    assert store.stats()[2:4] == (14, 3)
    assert open_redis(redis_server.url, f"{namespace}-x").get(b"a") is None
    store.close()
    assert redis_server.names() >= before


def test_entries_go_when_their_time_is_over(redis_server: Server, namespace: str, client: Any) -> None:
    open_redis(redis_server.url, namespace, ttl_s=90).put(b"a", [b"heron"])
    open_redis(redis_server.url, namespace, ttl_s=90).put(b"a", [b"heron"], replace=True)
    open_redis(redis_server.url, namespace).put(b"b", [b"heron"])
    assert 60_000 < client.pttl(f"{namespace}:a") <= 90_000
    assert client.pttl(f"{namespace}:b") == -1


def test_a_missing_server_is_a_clear_error_without_the_password(namespace: str) -> None:
    store = open_redis("redis://user:secret@127.0.0.1:1/0", namespace)
    for call in (lambda: store.get(b"a"), lambda: store.put(b"a", [b""]), store.stats, lambda: store.contains(b"a")):
        with pytest.raises(
            ConnectionError, match=r"server at 127\.0\.0\.1:1 cannot be reached.*\"go_on\""
        ) as rejection:
            call()
        assert "secret" not in str(rejection.value)


def test_a_server_that_is_away_is_gone_without_on_request(namespace: str, warned_once: Callable[[str], Any]) -> None:
    store = open_redis("redis://127.0.0.1:1/0", namespace, on_unreachable="go_on")
    with warned_once("cannot be reached.*as if there were no cache, until it is back"):
        for _ in range(2):
            assert store.get(b"a") is None
            assert not store.put(b"a", [b""])
            assert not store.contains(b"a")
            assert store.stats()[2:] == (0, 0, 0)


@pytest.mark.parametrize("on_unreachable", ["raise", "go_on"])
def test_a_server_that_is_restarted_in_an_epoch_is_used_again(
    server: Server, namespace: str, on_unreachable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdpipes.cache.store._PAUSE_S", 0.0)
    store = open_redis(server.url, namespace, on_unreachable=on_unreachable)
    assert store.put(b"a", encode(np.arange(1000)))
    server.stop()
    server.start()
    assert store.get(b"a") is None  # which it has forgotten; that it was away is not noticed
    assert store.put(b"a", encode(np.arange(1000)))
    server.stop()
    if on_unreachable == "raise":
        with pytest.raises(ConnectionError, match="cannot be reached"):
            store.get(b"a")
    else:
        with pytest.warns(UserWarning, match="until it is back"):
            assert store.get(b"a") is None
    server.start()
    assert store.put(b"a", encode(np.arange(1000)))
    assert decode(store.get(b"a")).sum() == 499_500


def test_a_server_that_is_away_is_not_asked_all_the_time(server: Server, namespace: str) -> None:
    store = open_redis(server.url, namespace, on_unreachable="go_on")
    server.stop()
    with pytest.warns(UserWarning, match="until it is back"):
        assert store.get(b"a") is None
    server.start()
    assert not store.put(b"a", [b"x"])
    store.close()
    assert store.put(b"a", [b"x"])


def test_a_full_server_takes_no_more_and_keeps_what_it_has(
    server: Server, namespace: str, warned_once: Callable[[str], Any]
) -> None:
    store = open_redis(server.url, namespace)
    store.put(b"a", [b"heron"])
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
    with warned_once("takes no more.*keeps what it has"):
        assert not store.put(b"b", [b"gull"])
        assert not store.put(b"c", [b"gull"])
    assert bytes(store.get(b"a") or b"") == b"heron"


def test_entries_that_are_too_long_are_neither_kept_nor_read(redis_server: Server, namespace: str, client: Any) -> None:
    store = open_redis(redis_server.url, namespace, max_value_bytes=1000)
    assert store.put(b"a", [bytes(1000)])
    with pytest.raises(ValueError, match=r"has 1,001 bytes, .* keeps at most 1,000 bytes"):
        store.put(b"b", [bytes(1001)])
    client.set(f"{namespace}:b", bytes(1001))
    with pytest.raises(DamagedError, match="longer than `max_value_bytes`, 1,000"):
        store.get(b"b")
    assert bytes(store.get(b"a") or b"") == bytes(1000)
    assert store.put(b"b", [b"short"], replace=True)
    assert bytes(store.get(b"b") or b"") == b"short"


def test_a_wrong_password_is_no_absence(server: Server, namespace: str) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "right")
    for url in (server.url, server.url.replace("//", "//:secret@")):
        store = open_redis(url, namespace, on_unreachable="go_on")
        with pytest.raises(PermissionError, match=r"server at 127\.0\.0\.1:\d+ rejected the login") as rejection:
            store.get(b"a")
        assert "secret" not in str(rejection.value)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("http://host", "a"), {}, "`url` must be a URL that begins with redis://"),
        ((None, "a"), {}, "`url` must be"),
        (("redis://host", ""), {}, "`namespace` must be letters"),
        (("redis://host", "a*"), {}, "`namespace` must be letters"),
        (("redis://host", "a"), {"ttl_s": 0}, "`ttl_s` must be a number of seconds"),
        (("redis://host", "a"), {"max_value_bytes": (512 << 20) + 1}, "`max_value_bytes` must be at most 536,870,912"),
        (("redis://host", "a"), {"timeout_s": None}, "`timeout_s` must be a number of seconds"),
        (("redis://host", "a"), {"on_unreachable": "skip"}, "`on_unreachable` must be one of 'raise', 'go_on'"),
    ],
)
def test_wrong_arguments_are_rejected(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_redis(*arguments, **options)


def test_a_missing_redis_is_said_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r'pip install "kdpipes\[redis\]"'):
        open_redis("redis://host", "a")
