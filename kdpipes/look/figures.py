"""Figures as SVG: bar charts, the classes of a chain, and the graph of its pipes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import ChainError, check_count, must_be
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import counted
from kdpipes.core.secrets import printable
from kdpipes.look.batch import chain_in
from kdpipes.look.rendering import class_name
from kdpipes.plan.class_counts import class_counts

Bars = Sequence[tuple[float, str, str]]
_FONT = "font-family:system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
_CHART, _LETTER, _NAME = 640, 6.6, 24  # pixels of a chart and of a letter; letters of a name
_BEFORE, _AFTER = "#b9c4d0", "#e08a1e"  # of the classes


class Figure:
    """A figure in SVG, which notebooks display.

    Args:
        width: The width in pixels.
        height: The height in pixels.
        parts: SVG elements.
        title: A description for screen readers.
    """

    def __init__(self, width: float, height: float, parts: list[str], title: str) -> None:
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
        """Write the figure to an SVG file."""
        if not isinstance(path, str | os.PathLike) or Path(path).suffix != ".svg":
            raise ValueError(must_be("path", "a path that ends with .svg", path))
        Path(path).write_text(self.svg, encoding="utf-8")


def _text(x: float, y: float, text: str, *, size: int = 12, color: str = "#222", more: str = "") -> str:
    shown = escape(printable(text))
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{more}>{shown}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}" rx="2"/>'


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
    parts = _legend(legend, left)[0]
    y = 44.0 if legend else 8.0
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
