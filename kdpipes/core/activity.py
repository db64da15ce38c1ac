"""What a worker is doing, where its parent can read it: also after the worker has been killed."""

from __future__ import annotations

import mmap
from typing import Any

__all__ = ["Record", "current", "read_record", "start_record"]

_SIZE = mmap.PAGESIZE
_WHAT = _SIZE // 2  # where the second text begins
_LENGTH = 2  # bytes that say how long a text is
_NOTHING = slice(_WHAT, _WHAT + _LENGTH), bytes(_LENGTH)


class Record:
    """Two texts in memory that another process holds as well: a sample's key, and what is being done with it.

    It is written for each field that is loaded: what is done is one of a few texts, which are made once, and a key
    stays when its sample is done with.

    Args:
        file: The descriptor of the memory.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _SIZE)
        self._now: tuple[Any, str] = None, ""
        self._key: str | None = None  # that is written there
        self._texts: dict[str, tuple[slice, bytes]] = {"": _NOTHING}

    def enter(self, sample: Any, what: str) -> tuple[Any, str]:
        """Write down what begins; return what was going on, for `leave`."""
        before = self._now
        self.leave((sample, what))
        return before

    def leave(self, now: tuple[Any, str]) -> None:
        """Write down what goes on now."""
        sample, what = now
        if sample is not None and sample is not self._now[0]:
            self._name(sample)
        place, text = self._texts.get(what) or self._noted(what)
        self._memory[place] = text
        self._now = now

    def _name(self, sample: Any) -> None:
        key = sample.key
        if key is not self._key:
            self._memory[_WHAT : _WHAT + _LENGTH] = _NOTHING[1]  # nobody did that with this sample
            text = _encoded(key)
            self._memory[: len(text)] = text
            self._key = key

    def _noted(self, what: str) -> tuple[slice, bytes]:
        text = _encoded(what)
        self._texts[what] = noted = slice(_WHAT, _WHAT + len(text)), text
        return noted


def _encoded(text: str) -> bytes:
    """Return how long a text is, and as much of it as there is room for."""
    content = text.encode(errors="replace")[: _WHAT - _LENGTH]
    return len(content).to_bytes(_LENGTH, "little") + content


current: Record | None = None  # of this process; None where nobody reads it


def start_record(file: int) -> None:
    """Write down from now on what this process does."""
    global current
    current = Record(file)


def read_record(file: int) -> tuple[str, str]:
    """Return the key of the sample that the process that wrote `file` was at, and what it did with it; empty if none.

    A process that has been killed in the middle of writing may have left one of the texts cut.
    """
    with mmap.mmap(file, _SIZE) as memory:
        key, what = _read(memory, 0), _read(memory, _WHAT)
    return (key, f"{what} of sample {key!r}") if what else ("", "")


def _read(memory: mmap.mmap, place: int) -> str:
    start = place + _LENGTH
    size = int.from_bytes(memory[place:start], "little")
    return memory[start : start + size].decode(errors="replace")
