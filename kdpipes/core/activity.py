"""Record what a worker process is doing in shared memory, so that the main process can report it after a crash."""

from __future__ import annotations

import mmap
from typing import Any

_SIZE = mmap.PAGESIZE
_WHAT = _SIZE // 2  # offset of the description of the work, in the second half of the page
_LENGTH = 2  # bytes of the length field before a text
_NOTHING = slice(_WHAT, _WHAT + _LENGTH), bytes(_LENGTH)


class Record:
    """The current sample, by position and key, and the current activity, as texts in memory shared with a process.

    A record is updated for each field that is loaded, so it must be fast: activities are few and encoded once, and the
    key is written only when another sample begins.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _SIZE)
        # The row of the sample whose key is in shared memory.
        self._row: Any = None
        self.now: tuple[Any, str] = None, ""  # the current activity, for `leave`
        self._texts: dict[str, tuple[slice, bytes]] = {"": _NOTHING}

    def begin(self, sample: Any, what: str) -> None:
        """Record the start of work on a sample."""
        row = sample.row
        if row is not self._row:
            # The position comes first, because a long key is truncated.
            position = " ".join(map(str, (*sample.block.route, sample.position)))
            name = row.name = row.name or _encoded(f"{position}\0{sample.key}")
            self._memory[_WHAT : _WHAT + _LENGTH] = _NOTHING[1]  # the activity belongs to the previous sample
            self._memory[: len(name)] = name
            self._row = row
        place, text = self._texts.get(what) or self._encode(what)
        self._memory[place] = text
        self.now = sample, what

    def leave(self, now: tuple[Any, str]) -> None:
        """Resume an earlier activity, which `now` held before another one began."""
        sample, what = now
        if sample is not None:
            self.begin(sample, what)
        else:
            self._memory[_NOTHING[0]] = _NOTHING[1]
            self.now = now

    def _encode(self, what: str) -> tuple[slice, bytes]:
        text = _encoded(what)
        self._texts[what] = slice(_WHAT, _WHAT + len(text)), text
        return self._texts[what]


def _encoded(text: str) -> bytes:
    """Return the length field and the text, truncated if there is not enough room."""
    content = text.encode(errors="replace")[: _WHAT - _LENGTH]
    return len(content).to_bytes(_LENGTH, "little") + content


current: Record | None = None  # the record of this process; None if no other process reads it


def read_record(file: int) -> tuple[str, tuple[int, ...], str]:
    """Return the key and `position_of` of the sample that a process was working on, and a description of the work.

    All are empty if there was none. A text may be incomplete if the process was killed while it was writing.
    """
    with mmap.mmap(file, _SIZE) as memory:
        name = _read(memory, 0)
        what = _read(memory, _WHAT)
    position, _, key = name.partition("\0")
    return (key, tuple(map(int, position.split())), f"{what} of sample {key!r}") if what else ("", (), "")


def _read(memory: mmap.mmap, place: int) -> str:
    start = place + _LENGTH
    size = int.from_bytes(memory[place:start], "little")
    return memory[start : start + size].decode(errors="replace")
