"""Draw the graph of a chain: where boxes stand, how lines run, and the figure itself."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kdpipes.core.pipe import a_datapipe
from kdpipes.look.rendering import Figure, svg_text
from kdpipes.look.show import COLORS, NodeView, length_text, views_of

__all__ = ["draw", "layout_of"]

# A row, and the numbers of the two nodes whose line passes it; twice the same number for a node in that row.
_Slot = tuple[int, int, int]
_WIDTH, _HEIGHT = 250, 42  # of a box
_ACROSS, _DOWN = _WIDTH + 24, _HEIGHT + 28
_MARGIN, _LEGEND = 16, 26
_APART = 26  # the ends of lines at one box
_LINE = 40  # letters of a box's second line


def draw(source_datapipe: Any) -> Figure:
    """Return a figure of a chain: a box for each pipe, colored by stage, with its length if that is known.

    Nothing remote is opened, no sample is read, and no epoch begins.

    Args:
        source_datapipe: Any pipe, including stock pipes.

    Returns:
        A figure, which notebooks show. Its method `save("chain.svg")` writes it; `save("chain.dot")` writes the graph
        for Graphviz.

    Example:
        >>> birds, pets = kdp.from_dataset([("a", 0)]), kdp.from_dataset([("b", 0), ("c", 1)])
        >>> kdp.draw(birds.mix(pets).deal(batch_size=2))
        <chain of from_dataset, from_dataset, mix, deal, 556x240; `.save('figure.svg')` writes it>
    """
    views = views_of(a_datapipe(source_datapipe), find_out=True)
    numbers = {view: number for number, view in enumerate(views)}
    layout = layout_of([[numbers[source] for source in view.sources] for view in views])
    taken = [*(column for column, _ in layout.places), *(column for line in layout.lines for column in line.passed)]
    across, down = max(taken) + 1, max(row for _, row in layout.places) + 1
    parts = [_arrow(line, layout) for line in layout.lines]
    for view, place in zip(views, layout.places, strict=True):
        parts += _box(view, *_corner(place))
    height = _MARGIN + _LEGEND + down * _DOWN - (_DOWN - _HEIGHT) + _MARGIN
    names = ", ".join(view.name for view in views[:20])
    width = max(
        2 * _MARGIN + across * _ACROSS - (_ACROSS - _WIDTH), 2 * _MARGIN + 78 * len({view.stage for view in views})
    )
    title = f"chain of {names}{', …' if len(views) > 20 else ''}"
    return Figure(width, height, _legend(views) + parts, title, dot=_dot_of(views, numbers))


def _dot_of(views: list[NodeView], numbers: dict[NodeView, int]) -> str:
    """Return the graph in Graphviz's language."""
    lines = ["digraph chain {", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for view, number in numbers.items():
        label = json.dumps("\n".join(filter(None, (f"{view.name}({', '.join(view.arguments)})", length_text(view)))))
        lines.append(f'  n{number} [label={label}, color="{COLORS[view.stage]}", fillcolor="{COLORS[view.stage]}1a"];')
        lines += [f"  n{numbers[source]} -> n{number};" for source in view.sources]
    return "\n".join([*lines, "}", ""])


def _corner(place: tuple[float, int]) -> tuple[float, float]:
    return _MARGIN + place[0] * _ACROSS, _MARGIN + _LEGEND + place[1] * _DOWN


def _legend(views: list[NodeView]) -> list[str]:
    parts, x = [], float(_MARGIN)
    for stage in (stage for stage in COLORS if any(view.stage == stage for view in views)):
        parts.append(f'<rect x="{x:.1f}" y="{_MARGIN}" width="10" height="10" rx="2" fill="{COLORS[stage]}"/>')
        parts.append(svg_text(x + 14, _MARGIN + 9, stage, size=11, color="#555"))
        x += 78
    return parts


def _arrow(line: Line, layout: Layout) -> str:
    start, end = layout.places[line.source], layout.places[line.target]
    stops = [start, *((column, start[1] + number) for number, column in enumerate(line.passed, 1)), end]
    aside = (line.rank - (line.num_ranks - 1) / 2) * min(_APART, _WIDTH * 0.8 / line.num_ranks)
    x, y = _middle(start)
    path = f"M{x:.1f} {y + _HEIGHT:.1f}"
    for stop in stops[1:]:
        to_x, to_y = _middle(stop)
        is_end = stop is end
        to_x += aside if is_end else 0
        half = (y + _HEIGHT + to_y) / 2
        path += f" C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y - 5 * is_end:.1f}"
        path += "" if is_end else f" L{to_x:.1f} {to_y + _HEIGHT:.1f}"
        x, y = to_x, to_y
    return (
        f'<path d="{path}" fill="none" stroke="#999" stroke-width="1.4"/>'
        f'<path d="M{x - 4:.1f} {y - 7:.1f} L{x + 4:.1f} {y - 7:.1f} L{x:.1f} {y:.1f} Z" fill="#999"/>'
    )


def _middle(place: tuple[float, int]) -> tuple[float, float]:
    """Return the middle of a box's upper side."""
    x, y = _corner(place)
    return x + _WIDTH / 2, y


def _box(view: NodeView, x: float, y: float) -> list[str]:
    color = COLORS[view.stage]
    arguments = ", ".join(view.arguments)
    shown = arguments if len(arguments) <= _LINE else arguments[: _LINE - 1] + "…"
    is_wrong = bool(view.problem)
    line = y + (17 if shown else 26)
    frame = f'<rect x="{x:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"'
    return [
        f'<g>{frame} fill="white"/>{frame} fill="{color}" fill-opacity="0.10" '
        f'stroke="{"#c0392b" if is_wrong else color}"/>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="4" height="{_HEIGHT}" rx="2" fill="{color}"/>',
        svg_text(x + 12, line, view.name, size=13, weight="600"),
        svg_text(x + 12, y + 33, shown, size=11, color="#555") if shown else "",
        svg_text(x + _WIDTH - 8, line, length_text(view), size=11, color="#333", anchor="end"),
        "</g>",
    ]


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
    """Return where nodes stand: each directly above the node that reads from it, and centered below its own sources.

    Branches end side by side, however long they are. A line that passes a row takes a column of it.

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
    """Return the row of each node: as low as the nodes that read from it allow."""
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
