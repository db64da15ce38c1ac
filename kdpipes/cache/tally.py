"""What a store counts in this process."""

from __future__ import annotations

import threading
import warnings

from kdpipes._forks import forget_after_fork
from kdpipes.core.masked import masked

__all__ = ["Tally"]


class Tally:
    """Counts of this process, and whether it has been warned: a forked one begins anew, and so does one by pickling."""

    def __init__(self) -> None:
        self.forget()
        forget_after_fork(self)

    def forget(self) -> None:
        """Start from nothing."""
        self._counting = threading.Lock()
        self.hits = self.misses = self.healed = 0
        self._has_warned = False

    def __reduce__(self) -> tuple[type[Tally], tuple[()]]:
        return Tally, ()

    def count(self, *, hits: int = 0, misses: int = 0, healed: int = 0) -> None:
        """Add to what has been counted."""
        with self._counting:
            self.hits += hits
            self.misses += misses
            self.healed += healed

    def warn_once(self, text: str) -> None:
        """Warn, unless this has been done."""
        with self._counting:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            warnings.warn(masked(text), stacklevel=5)
