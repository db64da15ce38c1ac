"""The graph of a chain as a figure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kdpipes.look.chain import STAGES, Node, a_chain, nodes_of
from kdpipes.look.chain_html import COLORS
from kdpipes.look.chain_text import shown_length
from kdpipes.look.figure import Figure, svg_text

__all__ = ["draw"]

_WIDTH, _HEIGHT = 250, 42  # of a box
_ACROSS, _DOWN = _WIDTH + 24, _HEIGHT + 28
_MARGIN, _LEGEND = 16, 26
_LINE = 40  # letters of a box's second line


def draw(source_datapipe: Any) -> Figure:
    """Return a figure of a chain: a box for each pipe, coloured by stage, with lengths where they are known.

    It costs what showing the chain in a notebook does: nothing elsewhere is opened, no sample is read, and no epoch
    begins.

    Args:
        source_datapipe: Any pipe, stock ones included.

    Returns:
        What notebooks show, with a method `save("chain.svg")`.

    Example:
        >>> birds, pets = kdp.from_dataset([("a", 0)]), kdp.from_dataset([("b", 0), ("c", 1)])
        >>> kdp.draw(birds.mix(pets).deal(batch_size=2))
        <chain of from_dataset, from_dataset, mix, deal, 556x240; `.save('figure.svg')` writes it>
    """
    nodes = nodes_of(a_chain(source_datapipe), finds_out=True)
    places = _places(nodes)
    across, down = max(x for x, _ in places) + 1, max(y for _, y in places) + 1
    parts = [_arrow(places[source], places[at]) for at, node in enumerate(nodes) for source in node.sources]
    for node, place in zip(nodes, places, strict=True):
        parts += _box(node, *_corner(place))
    height = _MARGIN + _LEGEND + down * _DOWN - (_DOWN - _HEIGHT) + _MARGIN
    names = ", ".join(node.name for node in nodes[:20])
    width = max(2 * _MARGIN + across * _ACROSS - (_ACROSS - _WIDTH), 2 * _MARGIN + 78 * len({n.stage for n in nodes}))
    return Figure(width, height, _legend(nodes) + parts, f"chain of {names}{', …' if len(nodes) > 20 else ''}")


def _places(nodes: list[Node]) -> list[tuple[float, int]]:
    """Return the column and the row of each node: below its sources, and between them."""
    levels: list[int] = []
    columns: list[float] = []
    num_sources = 0
    for node in nodes:
        levels.append(1 + max((levels[source] for source in node.sources), default=-1))
        if not node.sources:
            num_sources += 1
        middle = sum(columns[source] for source in node.sources) / max(len(node.sources), 1)
        columns.append(middle if node.sources else num_sources - 1)
    return list(zip(_spread(columns, levels), levels, strict=True))


def _spread(columns: list[float], levels: list[int]) -> list[float]:
    """Return the columns with those apart that lie in one row, as the branches of a fork do."""
    spread = list(columns)
    for level in set(levels):
        row = sorted((at for at in range(len(levels)) if levels[at] == level), key=lambda at: columns[at])
        for before, at in pairwise(row):
            spread[at] = max(spread[at], spread[before] + 1)
    return spread


def _corner(place: tuple[float, int]) -> tuple[float, float]:
    return _MARGIN + place[0] * _ACROSS, _MARGIN + _LEGEND + place[1] * _DOWN


def _legend(nodes: list[Node]) -> list[str]:
    parts, x = [], float(_MARGIN)
    for stage in (stage for stage in STAGES if any(node.stage == stage for node in nodes)):
        parts.append(f'<rect x="{x:.1f}" y="{_MARGIN}" width="10" height="10" rx="2" fill="{COLORS[stage]}"/>')
        parts.append(svg_text(x + 14, _MARGIN + 9, stage, size=11, color="#555"))
        x += 78
    return parts


def _arrow(start: tuple[float, int], end: tuple[float, int]) -> str:
    (x1, y1), (x2, y2) = _corner(start), _corner(end)
    x1, y1, x2 = x1 + _WIDTH / 2, y1 + _HEIGHT, x2 + _WIDTH / 2
    middle = (y1 + y2) / 2
    return (
        f'<path d="M{x1:.1f} {y1:.1f} C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2 - 5:.1f}" fill="none" '
        f'stroke="#999" stroke-width="1.4"/>'
        f'<path d="M{x2 - 4:.1f} {y2 - 7:.1f} L{x2 + 4:.1f} {y2 - 7:.1f} L{x2:.1f} {y2:.1f} Z" fill="#999"/>'
    )


def _box(node: Node, x: float, y: float) -> list[str]:
    color = COLORS[node.stage]
    arguments = ", ".join(node.arguments)
    shown = arguments if len(arguments) <= _LINE else arguments[: _LINE - 1] + "…"
    is_wrong = bool(node.problem)
    line = y + (17 if shown else 26)
    frame = f'<rect x="{x:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"'
    return [
        f'<g>{frame} fill="white"/>{frame} fill="{color}" fill-opacity="0.10" '
        f'stroke="{"#c0392b" if is_wrong else color}"/>'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="4" height="{_HEIGHT}" rx="2" fill="{color}"/>',
        svg_text(x + 12, line, node.name, size=13, weight="600"),
        svg_text(x + 12, y + 33, shown, size=11, color="#555") if shown else "",
        svg_text(x + _WIDTH - 8, line, shown_length(node), size=11, color="#333", anchor="end"),
        "</g>",
    ]
