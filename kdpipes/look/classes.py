"""Plot the number of samples of each class, before and after the plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import ChainError, check_count
from kdpipes.core.map_pipe import MapPipe
from kdpipes.look.rendering import Bars, Figure, bar_chart
from kdpipes.plan.class_counts import class_counts

__all__ = ["plot_classes"]

_BEFORE, _AFTER = "#b9c4d0", "#e08a1e"


def plot_classes(source_datapipe: Any, *, max_classes: int = 50) -> Figure:
    """Return a bar chart of the number of samples of each class: of the source, and after the plan.

    Only the labels, field `y`, are read.

    Args:
        source_datapipe: An indexed chain, with or without `deal`.
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
    groups: list[tuple[str, Bars]] = []
    for name in shown:
        bars = [(before, _BEFORE)] if after is None else [(before, _BEFORE), (after, _AFTER)]
        groups.append((name, [(counts[name], f"{counts[name]:,}", color) for counts, color in bars]))
    title = f"{before.total():,} samples of {sum(map(bool, before.values())):,} classes"
    title += "" if after is None else f", and {after.total():,} after the plan"
    legend = [(_BEFORE, f"source: {before.total():,} samples")]
    legend += [] if after is None else [(_AFTER, f"after the plan: {after.total():,} samples")]
    note = f"and {others:,} classes more, with fewer samples" if others else ""
    return bar_chart(groups, title, bar=11, gap=9, legend=legend, note=note)
