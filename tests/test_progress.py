"""A progress bar where something takes long, and none where it does not."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core import messages


class Slow(kdp.SampleSource):
    """Labels that are read one by one."""

    def __len__(self) -> int:
        return 50

    def getitem_y(self, index: int) -> int:
        return index % 3


def test_a_bar_shows_what_takes_long(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    Slow().column("y")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(messages, "DELAY_S", 0.0)
    for _ in range(2):
        assert kdp.class_counts(Slow()) == {0: 17, 1: 17, 2: 16}
        assert "reading 'y'" in capfd.readouterr().err


def test_a_bar_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(messages, "DELAY_S", 0.0)
    before = threading.active_count()
    assert list(messages.shown_if_slow(range(3), 3, "counting")) == [0, 1, 2]
    assert threading.active_count() == before
    assert "counting" in capfd.readouterr().err


def test_a_bar_does_not_choose_how_processes_start(interpreter: Any) -> None:
    code = (
        "import multiprocessing, kdpipes as kdp\n"
        "from kdpipes.core.messages import shown_if_slow\n"
        "assert list(shown_if_slow(range(3), 3, 'counting')) == [0, 1, 2]\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
    )
    assert interpreter.run(code) == (0, "", "")


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(messages, "DELAY_S", 0.0)
    monkeypatch.setenv("RANK", "1")
    assert list(messages.shown_if_slow(range(3), 3, "counting")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(sys, "stderr", None)
    assert list(messages.shown_if_slow(range(3), 3, "counting")) == [0, 1, 2]
