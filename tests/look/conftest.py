"""A clock that only planted work moves."""

from __future__ import annotations

import time

import pytest

from kdpipes.loader import profile as loader_profile
from tests.look.clocks import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that measures, in this process and in those that are forked from it."""
    made = Clock()
    monkeypatch.setattr(loader_profile, "clock", made)
    monkeypatch.setattr(time, "perf_counter", made)
    monkeypatch.setattr(loader_profile, "_CALL_S", 0.0)  # so that every item is measured
    return made
