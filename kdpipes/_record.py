"""What a worker is doing, where its parent can read it: also after the worker has been killed."""

from __future__ import annotations

import mmap

__all__ = ["Record", "current", "read_record", "start_record"]

_SIZE = mmap.PAGESIZE


class Record:
    """A line of text in memory that another process holds as well: a sample's key, a zero, what is done with it.

    Args:
        file: The descriptor of the memory.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _SIZE)
        self._text = ""

    def enter(self, text: str) -> str:
        """Write down what begins; return what was going on."""
        before, self._text = self._text, text
        content = text.encode(errors="replace")[: _SIZE - 3]
        self._memory[2 : 2 + len(content)] = content
        self._memory[:2] = len(content).to_bytes(2, "little")
        return before


current: Record | None = None  # of this process; None where nobody reads it


def start_record(file: int) -> None:
    """Write down from now on what this process does."""
    global current
    current = Record(file)


def read_record(file: int) -> tuple[str, str]:
    """Return the key of the sample that the process that wrote `file` was at last, and what it did with it."""
    with mmap.mmap(file, _SIZE) as memory:
        size = int.from_bytes(memory[:2], "little")
        key, _, doing = memory[2 : 2 + size].decode(errors="replace").partition("\0")
        return key, doing
