"""A profile as a picture: a bar for each pipe, in SVG, which needs no library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdpipes.look.figure import Figure, svg_text

if TYPE_CHECKING:
    from kdpipes.look.profile import PipeTime, Profile

__all__ = ["as_chart"]

_COLORS = {
    "storage": "#4ea8de",
    "plan": "#a3a3a3",
    "decoding": "#e4572e",
    "transforms": "#76b041",
    "cache": "#c77dff",
    "transfer": "#17bebb",
    "device": "#7a6ff0",
}
_ROW, _NAMES, _BARS, _NUMBERS = 24, 190, 380, 130  # pixels


def as_chart(profile: Profile) -> Figure:
    """Return a bar for each pipe of a profile, from the source down, as long as its share."""
    longest = max((pipe.share for pipe in profile.pipes), default=0.0) or 1.0
    parts = [part for place, pipe in enumerate(profile.pipes) for part in _bar(pipe, place, pipe.share / longest)]
    width, height = _NAMES + _BARS + _NUMBERS, _ROW * len(profile.pipes) + 8
    return Figure(width, height, parts, f"the time of {len(profile.pipes)} pipes")


def _bar(pipe: PipeTime, place: int, length: float) -> list[str]:
    top, width = place * _ROW + 6, max(length * _BARS, 1)
    return [
        svg_text(_NAMES - 8, top + 14, pipe.pipe, size=13, anchor="end"),
        f'<rect x="{_NAMES}" y="{top}" width="{width:.1f}" height="{_ROW - 6}" fill="{_COLORS[pipe.kind]}"/>',
        svg_text(_NAMES + width + 6, top + 14, f"{pipe.share:.1%} {pipe.kind}", size=13),
    ]
