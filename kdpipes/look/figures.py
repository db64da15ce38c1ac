"""Figures as SVG: bar charts, the classes of a chain, and the graph of its pipes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import ChainError, check_count, must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import counted
from kdpipes.core.secrets import printable
from kdpipes.look.batch import chain_in
from kdpipes.look.rendering import class_name
from kdpipes.look.show import COLORS, NodeView, length_text, views_of
from kdpipes.plan.class_counts import class_counts

Bars = Sequence[tuple[float, str, str]]
_Place = tuple[float, int]  # a column and a row; those in one row are a column apart or more
_FONT = "font-family:system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
_CHART, _LETTER, _NAME = 640, 6.6, 24  # pixels of a chart and of a letter; letters of a name
_BEFORE, _AFTER = "#b9c4d0", "#e08a1e"  # of the classes
_WIDTH, _HEIGHT = 250, 42  # of a box in a graph
_ACROSS, _DOWN = _WIDTH + 24, _HEIGHT + 28
_MARGIN, _LEGEND = 16, 26
_APART = 26  # the ends of lines at one box
_LINE = 40  # letters of a box's second line


class Figure:
    """A figure in SVG, which notebooks display.

    Args:
        width: The width in pixels.
        height: The height in pixels.
        parts: SVG elements.
        title: A description for screen readers.
        dot: The graph that it shows, in Graphviz's language; None if it is not a graph.
    """

    def __init__(self, width: float, height: float, parts: list[str], title: str, *, dot: str | None = None) -> None:
        self.dot = dot
        self._size = round(width), round(height)
        self._parts = parts
        self._title = title

    @property
    def svg(self) -> str:
        """The figure as the text of an SVG file."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" style="max-width:100%;height:auto;{_FONT}">'
            f"<title>{escape(printable(self._title))}</title>"
            f'<rect width="{width}" height="{height}" fill="white"/>{"".join(self._parts)}</svg>'
        )

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<{self._title}, {self._size[0]}x{self._size[1]}; `.save('figure.svg')` writes it>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figure to an SVG file, or, if it is a graph, to a `.dot` file for Graphviz."""
        contents = {".svg": self.svg} if self.dot is None else {".svg": self.svg, ".dot": self.dot}
        suffix = Path(path).suffix if isinstance(path, str | os.PathLike) else None
        if suffix not in contents:
            raise ValueError(must_be("path", f"a path that ends with {' or '.join(contents)}", path))
        Path(path).write_text(contents[suffix], encoding="utf-8")


def _text(x: float, y: float, text: str, *, size: int = 12, color: str = "#222", more: str = "") -> str:
    shown = escape(printable(text))
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{more}>{shown}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = ' rx="2"') -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}"{more}/>'


def _legend(entries: Sequence[tuple[str, str]], x: float) -> tuple[list[str], float]:
    """Return the elements of a line with colors and their meanings, and where it ends."""
    parts = list[str]()
    for color, text in entries:
        parts += [_rect(x, 14, 11, 11, color), _text(x + 16, 24, text, color="#444")]
        x += 34 + _LETTER * len(text)
    return parts, x


def bar_chart(
    groups: Sequence[tuple[str, Bars]],
    title: str,
    *,
    bar: int,
    gap: int,
    legend: Sequence[tuple[str, str]] = (),
    note: str = "",
) -> Figure:
    """Return a figure of horizontal bars, each `bar` pixels high, with `gap` between groups and `note` below them.

    A group is a name and its bars: their lengths, texts and colors. The legend has colors with their meanings.
    """
    left = 16 + _LETTER * min(max((len(name) for name, _ in groups), default=0), _NAME)
    longest = max((length for _, bars in groups for length, _, _ in bars), default=0) or 1
    parts, y = _legend(legend, left)[0], 44.0 if legend else 8.0
    for name, bars in groups:
        shown = name if len(name) <= _NAME else name[: _NAME - 1] + "…"
        parts.append(_text(left - 6, y + bar * len(bars) / 2 + 4, shown, more=' text-anchor="end"'))
        for length, text, color in bars:
            width = (_CHART - left - 120) * length / longest
            parts.append(_rect(left, y, width, bar - 1, color))
            parts.append(_text(left + width + 5, y + bar * 0.8, text, size=min(bar - 1, 12), color="#444"))
            y += bar
        y += gap
    if note:
        parts.append(_text(left, y + 10, note, color="#666"))
        y += 16
    return Figure(_CHART, y + 8, parts, title)


def plot_classes(source_datapipe: Any, *, max_classes: int = 50) -> Figure:
    """Return a bar chart of the number of samples per class, both in the source and after the plan pipes.

    Only the labels, field `y`, are read.

    Args:
        source_datapipe: An indexed chain, with or without `deal`, or a loader of one.
        max_classes: The largest number of classes to show. The classes with the most samples are shown, the others
            counted.

    Returns:
        A figure, which notebooks show, with a method `save("classes.svg")`.

    Raises:
        ChainError: The chain is a stream, whose samples cannot be counted in advance.

    Example:
        >>> birds = kdp.from_dataset(list("abcd"), "x", labels=[0, 0, 0, 1], class_names=["heron", "stork"])
        >>> kdp.plot_classes(birds.oversample(mode="exact"))
        <4 samples of 2 classes, and 6 after the plan, 640x114; `.save('figure.svg')` writes it>
    """
    check_count("max_classes", max_classes)
    end = next(
        (
            node
            for node in reversed(Chain.of(chain_in(source_datapipe, "kdp.plot_classes")))
            if isinstance(node.pipe, MapPipe)
        ),
        None,
    )
    if end is None:
        raise ChainError(
            "`plot_classes` needs an indexed (map-style) chain, because the classes of a stream are unknown until it "
            "has been read. Use `kdp.open_shards`, or another indexed source."
        )
    before = _counts(_before_plan(end))
    title = f"{counted(before.total(), 'sample')} of {counted(sum(map(bool, before.values())), 'class')}"
    shown = [(before, _BEFORE, f"source: {counted(before.total(), 'sample')}")]
    if any(node.traits.is_plan for node in Chain.of(end.pipe)):
        after = _counts([end])
        title += f", and {after.total():,} after the plan"
        shown.append((after, _AFTER, f"after the plan: {counted(after.total(), 'sample')}"))
    names = list(dict.fromkeys(name for counts, _, _ in shown for name in counts))
    largest = set(sorted(names, key=lambda name: -max(counts[name] for counts, _, _ in shown))[:max_classes])
    groups: list[tuple[str, Bars]] = [
        (name, [(counts[name], f"{counts[name]:,}", color) for counts, color, _ in shown])
        for name in names
        if name in largest
    ]
    num_others = len(names) - len(groups)
    note = f"and {num_others:,} classes more, with fewer samples" if num_others else ""
    return bar_chart(groups, title, bar=11, gap=9, legend=[(color, text) for _, color, text in shown], note=note)


def _before_plan(node: Node) -> list[Node]:
    """Return the nodes from which the plan reads, each once."""
    is_planned = any(other.traits.is_plan for other in Chain.of(node.pipe))
    # Upstream of an operation that makes `y`, or renames a field to it, there are no labels to count.
    if not is_planned or (node.operation is not None and node.traits.column_before("y") != "y"):
        return [node]
    found = {other.place: other for source in node.upstream for other in _before_plan(source)}
    return list(found.values())


def _counts(nodes: list[Node]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in nodes:
        names = node.pipe.class_names() or ()
        for label, count in class_counts(node.pipe).items():
            counts[class_name(label, names) or str(label)] += count
        counts.update(dict.fromkeys(names, 0))
    return counts


def draw(source_datapipe: Any) -> Figure:
    """Return a figure of a chain: a box for each pipe, colored by stage, with its length if that is known.

    Nothing remote is opened, no sample is read, and no epoch begins.

    Args:
        source_datapipe: Any pipe, including stock pipes, or a loader.

    Returns:
        A figure, which notebooks show. Its method `save("chain.svg")` writes it; `save("chain.dot")` writes the graph
        for Graphviz.

    Example:
        >>> birds, pets = kdp.from_dataset([("a", 0)]), kdp.from_dataset([("b", 0), ("c", 1)])
        >>> kdp.draw(birds.mix(pets).deal(batch_size=2))
        <chain of from_dataset, from_dataset, mix, deal, 556x240; `.save('figure.svg')` writes it>
    """
    views = views_of(chain_in(source_datapipe, "kdp.draw"), find_out=True)
    numbers = {view: number for number, view in enumerate(views)}
    places, lines = layout_of([[numbers[source] for source in view.sources] for view in views])
    taken = [*places, *(place for ends in lines for line in ends for place in line)]
    across, down = max(column for column, _ in taken) + 1, max(row for _, row in taken) + 1
    stages = {view.stage for view in views}
    parts, right = _legend([(color, stage) for stage, color in COLORS.items() if stage in stages], _MARGIN)
    for ends in lines:
        apart = min(_APART, _WIDTH * 0.8 / max(len(ends), 1))
        parts += [_arrow(line, (rank - (len(ends) - 1) / 2) * apart) for rank, line in enumerate(ends)]
    parts += [_box(view, *_corner(place)) for view, place in zip(views, places, strict=True)]
    dot = ["digraph chain {", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for view, number in numbers.items():
        label = json.dumps("\n".join(filter(None, (f"{view.name}({', '.join(view.arguments)})", length_text(view)))))
        dot.append(f'  n{number} [label={label}, color="{COLORS[view.stage]}", fillcolor="{COLORS[view.stage]}1a"];')
        dot += [f"  n{numbers[source]} -> n{number};" for source in view.sources]
    width = max(2 * _MARGIN + across * _ACROSS - (_ACROSS - _WIDTH), right)
    height = _MARGIN + _LEGEND + down * _DOWN - (_DOWN - _HEIGHT) + _MARGIN
    title = f"chain of {', '.join(view.name for view in views[:20])}{', …' if len(views) > 20 else ''}"
    return Figure(width, height, parts, title, dot="\n".join([*dot, "}", ""]))


def _corner(place: _Place) -> tuple[float, float]:
    return _MARGIN + place[0] * _ACROSS, _MARGIN + _LEGEND + place[1] * _DOWN


def _arrow(line: list[_Place], aside: float) -> str:
    """Return a curve from the lower side of one box to the upper side of another, and its tip."""
    x, y = _corner(line[0])
    x += _WIDTH / 2
    path = f"M{x:.1f} {y + _HEIGHT:.1f}"
    for place in line[1:]:
        is_end, half = place is line[-1], y + _HEIGHT + (_DOWN - _HEIGHT) / 2
        x_before, (x, y) = x, _corner(place)
        x += _WIDTH / 2 + (aside if is_end else 0)
        path += f" C{x_before:.1f} {half:.1f} {x:.1f} {half:.1f} {x:.1f} {y - 5 * is_end:.1f}"
        path += "" if is_end else f" L{x:.1f} {y + _HEIGHT:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="#999" stroke-width="1.4"/>'
        f'<path d="M{x - 4:.1f} {y - 7:.1f} L{x + 4:.1f} {y - 7:.1f} L{x:.1f} {y:.1f} Z" fill="#999"/>'
    )


def _box(view: NodeView, x: float, y: float) -> str:
    color, arguments = COLORS[view.stage], ", ".join(view.arguments)
    shown = arguments if len(arguments) <= _LINE else arguments[: _LINE - 1] + "…"
    line = y + (17 if shown else 26)
    edge = f' rx="5" fill-opacity="0.10" stroke="{"#c0392b" if view.problem else color}"'
    parts = [
        _rect(x, y, _WIDTH, _HEIGHT, "white", ' rx="5"'),
        _rect(x, y, _WIDTH, _HEIGHT, color, edge),
        _rect(x, y, 4, _HEIGHT, color),
        _text(x + 12, line, view.name, size=13, more=' font-weight="600"'),
        _text(x + 12, y + 33, shown, size=11, color="#555") if shown else "",
        _text(x + _WIDTH - 8, line, length_text(view), size=11, color="#333", more=' text-anchor="end"'),
    ]
    return f"<g>{''.join(parts)}</g>"


def layout_of(sources: Sequence[Sequence[int]]) -> tuple[list[_Place], list[list[list[_Place]]]]:
    """Return where nodes stand; and for each node the lines that end there, from the left, as places from the source.

    A node stands directly above the node that reads from it, and centered below its own sources. Branches end side by
    side, however long they are.

    Args:
        sources: The numbers of the nodes that each node reads from, all smaller than its own; the last one is the end.

    Example:
        >>> layout_of([(), (0,), (), (1, 2)])[0]
        [(0.0, 0), (0.0, 1), (1.0, 1), (0.5, 2)]
    """
    depths: list[int] = []
    for read in sources:
        depths.append(1 + max((depths[source] for source in read), default=-1))
    rows = [max(depths)] * len(depths)  # then as far down as the nodes that read from each one allow
    for target in reversed(range(len(rows))):
        for source in sources[target]:
            rows[source] = min(rows[source], rows[target] - 1)
    # A line that passes rows gets a place in each of them, like a node, so that no box stands in its way.
    above: list[list[int]] = [[] for _ in sources]
    ends = list(range(len(sources)))
    for target, read in enumerate(sources):
        for source in read:
            at = source
            for row in range(rows[source] + 1, rows[target]):
                rows.append(row)
                above.append([at])
                ends.append(target)
                at = len(rows) - 1
            above[target].append(at)
    columns = [0.0] * len(rows)
    num_sources = 0
    for at, read in enumerate(above):
        if not read:
            columns[at] = float(num_sources)
            num_sources += 1
    for row in range(max(rows) + 1):
        here = [at for at in range(len(rows)) if rows[at] == row]
        for at in here:
            if above[at]:
                columns[at] = sum(columns[source] for source in above[at]) / len(above[at])
        here.sort(key=lambda at: (columns[at], ends[at]))
        for before, at in pairwise(here):
            columns[at] = max(columns[at], columns[before] + 1)
    places = list(zip(columns, rows, strict=True))
    lines: list[list[list[_Place]]] = [[] for _ in sources]
    for target in range(len(sources)):
        for at in sorted(above[target], key=lambda at: columns[at]):
            line = [places[at], places[target]]
            while at >= len(sources):
                at = above[at][0]
                line.insert(0, places[at])
            lines[target].append(line)
    return places[: len(sources)], lines
