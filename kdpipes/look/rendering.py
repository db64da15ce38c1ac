"""Make what notebooks show: HTML from the template beside this module, and figures as SVG."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdpipes.core.errors import must_be, printable

if TYPE_CHECKING:
    import jinja2

__all__ = ["Bars", "Figure", "bar_chart", "render", "svg_text"]

_WIDTH, _LETTER, _NAME = 640, 6.6, 24  # pixels of a chart and of a letter; letters of a name

_FONT = "font-family:system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"


def render(macro: str, *arguments: Any) -> str:
    """Return the text that a macro of `look.html.jinja` makes of its arguments. Values are escaped."""
    return str(getattr(_template().module, macro)(*arguments))


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # takes 50 ms, which only what is shown should pay

    loader = jinja2.PackageLoader("kdpipes", "look")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("look.html.jinja")


class Figure:
    """A figure, as notebooks show it.

    Args:
        width: In pixels.
        height: In pixels.
        parts: SVG elements.
        title: What it shows, for those who cannot see it.
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


Bars = Sequence[tuple[float, str, str]]


def bar_chart(
    groups: Sequence[tuple[str, Bars]],
    title: str,
    *,
    bar: int,
    gap: int,
    legend: Sequence[tuple[str, str]] = (),
    note: str = "",
) -> Figure:
    """Return a figure of horizontal bars below each other.

    Args:
        groups: The name of each group and its bars: their lengths, texts and colours.
        title: See `Figure`.
        bar: The height of a bar in pixels.
        gap: The space between groups.
        legend: Colours with their meanings, for a line above the bars.
        note: A line below them.
    """
    left = 16 + _LETTER * min(max((len(name) for name, _ in groups), default=0), _NAME)
    longest = max((length for _, bars in groups for length, _, _ in bars), default=0) or 1
    parts, x, y = list[str](), left, 44.0 if legend else 8.0
    for color, text in legend:
        parts.append(f'<rect x="{x:.1f}" y="14" width="11" height="11" rx="2" fill="{color}"/>')
        parts.append(svg_text(x + 16, 24, text, color="#444"))
        x += 34 + _LETTER * len(text)
    for name, bars in groups:
        shown = name if len(name) <= _NAME else name[: _NAME - 1] + "…"
        parts.append(svg_text(left - 6, y + bar * len(bars) / 2 + 4, shown, anchor="end"))
        for length, text, color in bars:
            width = (_WIDTH - left - 120) * length / longest
            size = f'width="{width:.1f}" height="{bar - 1}"'
            parts.append(f'<rect x="{left:.1f}" y="{y:.1f}" {size} rx="1.5" fill="{color}"/>')
            parts.append(svg_text(left + width + 5, y + bar * 0.8, text, size=min(bar - 1, 12), color="#444"))
            y += bar
        y += gap
    if note:
        parts.append(svg_text(left, y + 10, note, color="#666"))
        y += 16
    return Figure(_WIDTH, y + 8, parts, title)


def svg_text(
    x: float, y: float, text: str, *, size: int = 12, color: str = "#222", anchor: str = "start", weight: str = "normal"
) -> str:
    """Return one line of text at a place."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(printable(text))}</text>'
    )
