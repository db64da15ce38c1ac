"""The graph of a chain as a figure."""

from __future__ import annotations

from typing import Any

from kdpipes.look.chain import STAGES, Node, a_chain, nodes_of
from kdpipes.look.chain_html import COLORS
from kdpipes.look.chain_layout import Layout, Line, layout_of
from kdpipes.look.chain_text import shown_length
from kdpipes.look.figure import Figure, svg_text

__all__ = ["draw"]

_WIDTH, _HEIGHT = 250, 42  # of a box
_ACROSS, _DOWN = _WIDTH + 24, _HEIGHT + 28
_MARGIN, _LEGEND = 16, 26
_APART = 26  # the ends of lines at one box
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
    layout = layout_of([node.sources for node in nodes])
    taken = [*(column for column, _ in layout.places), *(column for line in layout.lines for column in line.passed)]
    across, down = max(taken) + 1, max(row for _, row in layout.places) + 1
    parts = [_arrow(line, layout) for line in layout.lines]
    for node, place in zip(nodes, layout.places, strict=True):
        parts += _box(node, *_corner(place))
    height = _MARGIN + _LEGEND + down * _DOWN - (_DOWN - _HEIGHT) + _MARGIN
    names = ", ".join(node.name for node in nodes[:20])
    width = max(2 * _MARGIN + across * _ACROSS - (_ACROSS - _WIDTH), 2 * _MARGIN + 78 * len({n.stage for n in nodes}))
    return Figure(width, height, _legend(nodes) + parts, f"chain of {names}{', …' if len(nodes) > 20 else ''}")


def _corner(place: tuple[float, int]) -> tuple[float, float]:
    return _MARGIN + place[0] * _ACROSS, _MARGIN + _LEGEND + place[1] * _DOWN


def _legend(nodes: list[Node]) -> list[str]:
    parts, x = [], float(_MARGIN)
    for stage in (stage for stage in STAGES if any(node.stage == stage for node in nodes)):
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
