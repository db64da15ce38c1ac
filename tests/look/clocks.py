"""A clock for tests of what measures time."""

from __future__ import annotations

from typing import Any


class Clock:
    """A clock that stands still until somebody spends time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float, value: Any = None) -> Any:
        """Let time pass, and return a value."""
        self.now += seconds
        return value
