"""A profile as a table: of text, and of HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdpipes.look.profile import Profile

__all__ = ["as_html", "as_text", "bytes_text", "seconds_text"]

_HEAD = ("pipe", "share", "time", "made", "per s", "size", "cached")
_FEW = 0.02  # the share from which on the parts of a pipe are shown
_LEFT, _RIGHT = (
    ' style="text-align:left"',
    ' style="text-align:right"',
)  # notebooks set all to the right, others to the left
Line = tuple[str, ...]


def as_text(profile: Profile) -> str:
    """Return a profile as lines of text."""
    lines = [_HEAD, *_lines(profile)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEAD))]
    return "\n".join([*(_aligned(line, widths) for line in lines), *sentences(profile)])


def as_html(profile: Profile) -> str:
    """Return a profile as a table of HTML."""
    head = f"<th{_LEFT}>{_HEAD[0]}</th>" + "".join(f"<th{_RIGHT}>{escape(text)}</th>" for text in _HEAD[1:])
    rows = "".join(f"<tr>{_name(line[0])}{''.join(map(_cell, line[1:]))}</tr>" for line in _lines(profile))
    told = "<br>".join(map(escape, sentences(profile)))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{told}</p>"


def sentences(profile: Profile) -> list[str]:
    """Return who waits for whom."""
    told = f"{profile.num_batches} batch{'' if profile.num_batches == 1 else 'es'} in {seconds_text(profile.loop_s)}"
    told += f", {profile.num_samples / profile.loop_s:,.0f} samples/s." if profile.loop_s else "."
    if not profile.num_workers:
        share = profile.wait_share
        return [told, f"No workers: {share:.0%} of the loop made batches, the rest was the consumer's."]
    busy_s = profile.work_s + profile.idle_s or 1.0
    workers = "the worker" if profile.num_workers == 1 else f"the {profile.num_workers} workers"
    return [
        told,
        f"The loop waited for {profile.wait_share:.0%} of its time, {workers} for {profile.idle_s / busy_s:.0%} of "
        f"theirs: the {profile.bound} bounds.",
    ]


def seconds_text(seconds: float) -> str:
    """Return a time as people write it."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def bytes_text(size: float) -> str:
    """Return a size as people write it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _lines(profile: Profile) -> Iterator[Line]:
    for pipe in profile.pipes:
        rate = f"{pipe.calls / pipe.seconds:,.0f}" if pipe.seconds and pipe.calls else ""
        cached = "" if pipe.hits is None else f"{pipe.hits} of {pipe.hits + (pipe.misses or 0)}"
        size = bytes_text(pipe.num_bytes) if pipe.num_bytes else ""
        name = pipe.pipe + (" (main process)" if pipe.is_main else "")
        yield name, f"{pipe.share:.1%}", seconds_text(pipe.seconds), f"{pipe.calls:,.0f}", rate, size, cached
        for step in pipe.steps if len(pipe.steps) > 1 else ():
            share = pipe.share * step.seconds / pipe.seconds if pipe.seconds else 0.0
            if share >= _FEW:
                yield f"  {step.what}", f"{share:.1%}", seconds_text(step.seconds), "", "", "", ""


def _aligned(line: Line, widths: list[int]) -> str:
    numbers = (text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))
    return "  ".join([line[0].ljust(widths[0]), *numbers]).rstrip()


def _name(text: str) -> str:
    indent = _LEFT.replace("left", "left;padding-left:2em") if text.startswith("  ") else _LEFT
    return f"<td{indent}>{escape(text.strip())}</td>"


def _cell(text: str) -> str:
    return f"<td{_RIGHT}>{escape(text)}</td>"
