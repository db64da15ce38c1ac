"""A chain in one line, as it would be written, or in a few."""

from __future__ import annotations

from typing import Any

from kdpipes.look.chain import Node, nodes_of

__all__ = ["chain_text", "shown_call", "shown_length"]

_WIDTH = 110
_SHOWN = 12  # of a longer chain, this many pipes of its begin and of its end
_DEEP = 3


def chain_text(chain: Any) -> str:
    """Return what a chain is: its pipes from the source on, and its length where that is known.

    Example:
        >>> pipe = kdp.from_ids(["a", "b", "c"], [0, 1, 0]).decode_images("x").deal(batch_size=2)
        >>> chain_text(pipe)
        "from_ids(['a', 'b', 'c'], [0, 1, 0]) → decode_images('x') → deal(batch_size=2)  [3 samples, 2 batches]"
    """
    nodes = nodes_of(chain, finds_out=False)
    parts, lengths = _parts(nodes, len(nodes) - 1, 0), _lengths(nodes)
    line = " → ".join(parts)
    return line + lengths if len(line) <= _WIDTH else "\n  → ".join(parts) + lengths


def _parts(nodes: list[Node], number: int, depth: int) -> list[str]:
    """Return the pipes of one chain as text; other sources stand among the arguments of the pipe that joins them."""
    path = [number]
    while nodes[path[-1]].sources and nodes[path[-1]].name != "concat":
        path.append(nodes[path[-1]].sources[0])
    if len(path) > 2 * _SHOWN:
        return [
            *(_call(nodes, place, depth) for place in path[: -_SHOWN - 1 : -1]),
            f"… {len(path) - 2 * _SHOWN:,} more …",
            *(_call(nodes, place, depth) for place in path[_SHOWN - 1 :: -1]),
        ]
    return [_call(nodes, place, depth) for place in path[::-1]]


def _call(nodes: list[Node], number: int, depth: int) -> str:
    node = nodes[number]
    others = node.sources if node.name == "concat" else node.sources[1:]
    branches = ["…" if depth >= _DEEP else " → ".join(_parts(nodes, other, depth + 1)) for other in others]
    return shown_call(node, *branches)


def shown_call(node: Node, *sources: str) -> str:
    """Return a pipe with its arguments.

    Args:
        node: The pipe.
        sources: Its sources, as they are to stand before the other arguments.
    """
    return f"{node.name}({', '.join([*sources, *node.arguments])})"


def _lengths(nodes: list[Node]) -> str:
    """Return how many samples and batches the end of a chain gives, as far as that is known."""
    last = nodes[-1]
    found = [shown_length(last)] if last.length is not None else []
    if last.unit == "batches":
        dealt = next((node for node in nodes[::-1] if node.unit == "samples"), None)
        found = [shown_length(dealt), *found] if dealt is not None and dealt.length is not None else found
    return f"  [{', '.join(found)}]" if found else ""


def shown_length(node: Node) -> str:
    """Return how many items a pipe gives, as text; nothing where that is not known."""
    if node.length is None:
        return ""
    one = {"batches": "batch", "samples": "sample", "items": "item"}[node.unit]
    return f"{node.length:,} {one if node.length == 1 else node.unit}"
