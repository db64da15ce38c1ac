"""A profile as a picture: a bar for each pipe, in SVG, which needs no library."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdpipes.look.profile import PipeTime, Profile

__all__ = ["Chart", "as_chart"]

_COLORS = {
    "source": "#4ea8de",
    "plan": "#a3a3a3",
    "decoding": "#e4572e",
    "transforms": "#76b041",
    "cache": "#c77dff",
    "batching": "#17bebb",
    "sending": "#ffc914",
    "device": "#7a6ff0",
}
_ROW, _NAMES, _BARS, _NUMBERS = 24, 190, 380, 130  # pixels


class Chart:
    """A picture in SVG, which notebooks show.

    Args:
        svg: The picture as text.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file; what is there is replaced."""
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)


def as_chart(profile: Profile) -> Chart:
    """Return a bar for each pipe of a profile, from the source down, as long as its share."""
    longest = max((pipe.share for pipe in profile.pipes), default=0.0) or 1.0
    bars = "".join(_bar(pipe, place, pipe.share / longest) for place, pipe in enumerate(profile.pipes))
    width, height = _NAMES + _BARS + _NUMBERS, _ROW * len(profile.pipes) + 8
    style = 'font-family="sans-serif" font-size="13"'
    return Chart(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>'
        f'<rect width="100%" height="100%" fill="white"/>{bars}</svg>'
    )


def _bar(pipe: PipeTime, place: int, length: float) -> str:
    top, width = place * _ROW + 6, max(length * _BARS, 1)
    color = _COLORS[pipe.kind]
    return (
        f'<text x="{_NAMES - 8}" y="{top + 14}" text-anchor="end" fill="#222">{escape(pipe.pipe)}</text>'
        f'<rect x="{_NAMES}" y="{top}" width="{width:.1f}" height="{_ROW - 6}" fill="{color}"/>'
        f'<text x="{_NAMES + width + 6:.1f}" y="{top + 14}" fill="#222">{pipe.share:.1%} {pipe.kind}</text>'
    )
