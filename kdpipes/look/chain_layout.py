"""Where the boxes of a drawn chain stand, and which way lines take between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Layout", "Line", "layout_of"]

_Slot = tuple[
    int, int, int
]  # a row, and the numbers of two nodes whose line passes it; twice that of one which is there


class Line(NamedTuple):
    """The way from one node to another.

    Args:
        source: The number of the node where it begins.
        target: The number of the node where it ends.
        passed: The column in which it passes each row between the two: no box stands there.
        rank: Which of the lines that end there it is, from the left.
        num_ranks: How many end there.
    """

    source: int
    target: int
    passed: tuple[float, ...]
    rank: int
    num_ranks: int


class Layout(NamedTuple):
    """A chain laid out from the top down.

    Args:
        places: The column and the row of each node. Those in one row are at least a column apart.
        lines: The lines between them.
    """

    places: list[tuple[float, int]]
    lines: list[Line]


def layout_of(sources: Sequence[Sequence[int]]) -> Layout:
    """Return where nodes stand: right above those that read from them, and below and between their sources.

    Branches end side by side however long they are. A line that has to pass a row takes a column of it.

    Args:
        sources: The numbers of the nodes that each node reads from, all smaller than its own; the last one is the end.

    Example:
        >>> layout_of([(), (0,), (), (1, 2)]).places
        [(0.0, 0), (0.0, 1), (1.0, 1), (0.5, 2)]
    """
    rows = _rows(sources)
    columns = _columns(sources, rows)
    places = [(columns[row, at, at], row) for at, row in enumerate(rows)]
    lines = []
    for target, read in enumerate(sources):
        ends = sorted(range(len(read)), key=lambda place: columns[_above(rows, rows[target], read[place], target)])
        for rank, place in enumerate(ends):
            source = read[place]
            passed = tuple(columns[row, source, target] for row in range(rows[source] + 1, rows[target]))
            lines.append(Line(source, target, passed, rank, len(read)))
    return Layout(places, lines)


def _rows(sources: Sequence[Sequence[int]]) -> list[int]:
    """Return the row of each node: as far down as those allow that read from it."""
    depths: list[int] = []
    for read in sources:
        depths.append(1 + max((depths[source] for source in read), default=-1))
    rows = [max(depths, default=0)] * len(depths)
    for at in reversed(range(len(rows))):
        for source in sources[at]:
            rows[source] = min(rows[source], rows[at] - 1)
    return rows


def _columns(sources: Sequence[Sequence[int]], rows: list[int]) -> dict[_Slot, float]:
    """Return the column of each slot, row by row: between those above it, or, of a source, beside the one before."""
    slots = defaultdict[int, set[_Slot]](set)
    for target, read in enumerate(sources):
        slots[rows[target]].add((rows[target], target, target))
        for source in read:
            for row in range(rows[source] + 1, rows[target]):
                slots[row].add((row, source, target))
    numbers = {at: number for number, at in enumerate(at for at, read in enumerate(sources) if not read)}
    columns: dict[_Slot, float] = {}
    for row in sorted(slots):
        wanted: dict[_Slot, float] = {}
        for slot in slots[row]:
            _, source, target = slot
            above = [source] if source != target else sources[target]
            found = [columns[_above(rows, row, one, target)] for one in above]
            wanted[slot] = sum(found) / len(found) if found else numbers[target]
        order = sorted(wanted, key=lambda slot: (wanted[slot], slot[2], slot[1]))
        for before, slot in pairwise(order):
            wanted[slot] = max(wanted[slot], wanted[before] + 1)
        columns |= {slot: float(column) for slot, column in wanted.items()}
    return columns


def _above(rows: list[int], row: int, source: int, target: int) -> _Slot:
    """Return the slot in the row above through which the line from `source` to `target` comes."""
    return (row - 1, source, source) if rows[source] == row - 1 else (row - 1, source, target)
