"""How many samples there are of each class, before the plan and after it, as bars."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import ChainError, check_count
from kdpipes.core.map_pipe import MapPipe
from kdpipes.look.rendering import Figure, svg_text
from kdpipes.plan.class_counts import class_counts

__all__ = ["plot_classes"]

_BEFORE, _AFTER = "#b9c4d0", "#e08a1e"
_WIDTH, _BAR, _GAP, _TOP = 640, 11, 9, 44
_LETTER = 6.6  # width of one in pixels


def plot_classes(source_datapipe: Any, *, max_classes: int = 50) -> Figure:
    """Return a figure of how many samples there are of each class: of the source, and after the plan.

    Reads the labels, field `y`, and nothing else.

    Args:
        source_datapipe: An indexed chain, or one that is dealt.
        max_classes: Of more classes, those with most samples are shown, and the others counted.

    Returns:
        What notebooks show, with a method `save("classes.svg")`.

    Raises:
        ChainError: The chain is a stream, which does not know what is to come.

    Example:
        >>> birds = kdp.from_dataset(list("abcd"), "x", labels=[0, 0, 0, 1], class_names=["heron", "stork"])
        >>> kdp.plot_classes(birds.oversample(mode="exact"))
        <4 samples of 2 classes, and 6 after the plan, 640x114; `.save('figure.svg')` writes it>
    """
    check_count("max_classes", max_classes)
    chain = next((node for node in reversed(Chain.of(source_datapipe)) if isinstance(node.pipe, MapPipe)), None)
    if chain is None:
        raise ChainError(
            "`plot_classes` needs an indexed chain: a stream does not know its classes before it is read. "
            "`kdp.open_shards` is indexed."
        )
    after, before = _counts([chain]), _counts(_before_plan(chain))
    is_planned = any(node.traits.is_plan for node in Chain.of(chain.pipe))
    return _figure(before, after if is_planned else None, max_classes)


def _before_plan(node: Node) -> list[Node]:
    """Return the nodes that the plan reads from, each once."""
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
            is_named = isinstance(label, int) and 0 <= label < len(names)
            counts[names[label] if is_named else str(label)] += count
        counts.update(dict.fromkeys(names, 0))
    return counts


def _figure(before: Counter[str], after: Counter[str] | None, max_classes: int) -> Figure:
    names = list(dict.fromkeys([*before, *(after or ())]))
    shown, others = names, 0
    if len(names) > max_classes:
        largest = sorted(names, key=lambda name: -max(before[name], (after or before)[name]))[:max_classes]
        shown, others = [name for name in names if name in set(largest)], len(names) - max_classes
    left = 16 + _LETTER * min(max((len(name) for name in shown), default=0), 24)
    most = max([1, *before.values(), *(after or Counter()).values()])
    step = _GAP + _BAR * (1 if after is None else 2)
    parts, y = _legend(before, after, left), float(_TOP)
    for name in shown:
        parts.append(svg_text(left - 6, y + (step - _GAP) / 2 + 4, _cut(name), anchor="end"))
        for counts, color in ((before, _BEFORE), (after, _AFTER)):
            if counts is not None:
                parts += _bar(left, y, counts[name], most, color)
                y += _BAR
        y += _GAP
    if others:
        parts.append(svg_text(left, y + 10, f"and {others:,} classes more, with fewer samples", color="#666"))
        y += 16
    title = f"{before.total():,} samples of {sum(map(bool, before.values())):,} classes"
    title += "" if after is None else f", and {after.total():,} after the plan"
    return Figure(_WIDTH, y + 8, parts, title)


def _cut(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"


def _legend(before: Counter[str], after: Counter[str] | None, left: float) -> list[str]:
    entries = [(_BEFORE, f"source: {before.total():,} samples")]
    entries += [] if after is None else [(_AFTER, f"after the plan: {after.total():,} samples")]
    parts, x = [], left
    for color, text in entries:
        parts.append(f'<rect x="{x:.1f}" y="14" width="11" height="11" rx="2" fill="{color}"/>')
        parts.append(svg_text(x + 16, 24, text, color="#444"))
        x += 34 + _LETTER * len(text)
    return parts


def _bar(left: float, y: float, count: int, most: int, color: str) -> list[str]:
    width = (_WIDTH - left - 70) * count / most
    return [
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR - 1}" rx="1.5" fill="{color}"/>',
        svg_text(left + width + 5, y + _BAR - 2, f"{count:,}", size=10, color="#444"),
    ]
