"""Orders: computed window by window, and mapped on their way upstream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kdpipes.core.order import WINDOW, Order, in_windows, ranges


def test_an_order_is_computed_when_it_is_iterated() -> None:
    computed: list[int] = []

    def windows() -> Iterator[Any]:
        for start in (0, 3):
            computed.append(start)
            yield np.arange(start, start + 3)

    order = Order(windows, is_epoch=True).through(lambda positions: positions[positions % 2 == 0] * 10)
    assert (order.is_epoch, computed) == (True, [])
    assert [window.tolist() for window in order] == [[0, 20], [40]]
    assert order.positions().tolist() == [0, 20, 40]
    assert computed == [0, 3, 0, 3]


def test_empty_windows_are_left_out() -> None:
    order = Order.of_next(np.arange(5)).through(lambda positions: positions[:0])
    assert not list(order)
    assert not len(order.positions())
    assert not len(order.probe(3))


def test_probes_are_spread_over_the_whole_order() -> None:
    order = Order(lambda: ranges(0, 3 * WINDOW), is_epoch=True)
    probes = order.probe(32)
    assert len(probes) == 32
    assert (probes[0], probes[-1]) == (0, 3 * WINDOW - 1)
    assert np.diff(probes).max() < 2 * 3 * WINDOW / 32


def test_short_parts_become_windows() -> None:
    parts = list(in_windows(np.arange(start, start + 100) for start in range(0, 100_000, 100)))
    assert len(parts) == 2
    assert np.array_equal(np.concatenate(parts), np.arange(100_000))
