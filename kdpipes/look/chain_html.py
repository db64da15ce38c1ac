"""A chain as HTML, for notebooks: stage by stage, with arguments, lengths and classes."""

from __future__ import annotations

from html import escape
from typing import Any

from kdpipes.core.masked import masked, printable
from kdpipes.look.chain import Node, nodes_of
from kdpipes.look.chain_text import shown_length

__all__ = ["COLORS", "chain_html"]

COLORS = {"source": "#4e79a7", "plan": "#e08a1e", "work": "#59a14f", "cache": "#2a9d9d", "delivery": "#8e5ea2"}
_FRAME = (
    "display:inline-block;box-sizing:border-box;max-width:100%;overflow-x:auto;padding:8px;"
    "border:1px solid rgba(128,128,128,.35);border-radius:6px;font:13px/1.5 system-ui,sans-serif;text-align:left"
)
_ROW = (
    "display:flex;flex-wrap:wrap;gap:0 12px;align-items:baseline;padding:1px 8px;"
    "border-left:4px solid {0};background:{0}14"
)
_STAGE = "flex:0 0 58px;font-size:11px;color:{0};font-weight:600"
_CALL = (
    "flex:1 1 210px;min-width:0;font:12px/1.5 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;"
    "overflow-wrap:anywhere"
)
_LENGTH = "flex:0 0 auto;white-space:nowrap;opacity:.85"
_NOTE = "padding:2px 8px;opacity:.7;font-size:12px"
_BARS = 24  # of more classes only the number is shown
_MANY = 60


def chain_html(chain: Any) -> str:
    """Return a chain as a piece of HTML, with inline styles and no scripts.

    Lengths and classes are shown where they are known, or are found out in no time: plans of few samples, folders of
    this machine with few files. Nothing elsewhere is opened, no sample is read, and no epoch begins.
    """
    nodes = nodes_of(chain, finds_out=True)
    unknown = all(node.length is None for node in nodes if node.unit == "samples")
    note = "Lengths are not known yet: len(pipe) finds them out." if unknown and _is_indexed(nodes) else ""
    rows = _branch(nodes, len(nodes) - 1, set())
    return f'<div style="{_FRAME}">{rows}{_note(note)}</div>'


def _is_indexed(nodes: list[Node]) -> bool:
    return any(hasattr(node.pipe, "read_column") for node in nodes)


def _note(text: str) -> str:
    return f'<div style="{_NOTE}">{escape(text)}</div>' if text else ""


def _branch(nodes: list[Node], number: int, drawn: set[int]) -> str:
    """Return the rows of a chain up to a node; what has been drawn in another branch is only named."""
    path = [number]
    while path[-1] not in drawn and len(nodes[path[-1]].sources) == 1:
        path.append(nodes[path[-1]].sources[0])
    rows = []
    if path[-1] in drawn:
        rows.append(_note(f"{nodes[path.pop()].name}, as drawn before"))
    elif nodes[path[-1]].sources:
        rows.append(_side_by_side([_branch(nodes, source, drawn) for source in nodes[path[-1]].sources]))
    shown = path[::-1]
    for place, at in enumerate(shown):
        if _MANY <= place < len(shown) - _MANY // 2:
            rows += [_note(f"… {len(shown) - 3 * _MANY // 2:,} more …")] if place == _MANY else []
            continue
        rows.append(_row(nodes, at, is_first=not place or nodes[at].stage != nodes[shown[place - 1]].stage))
    drawn.update(path)
    return "".join(rows)


def _side_by_side(branches: list[str]) -> str:
    style = (
        "flex:1 1 0;min-width:200px;box-sizing:border-box;border:1px solid rgba(128,128,128,.25);"
        "border-radius:4px;padding:3px"
    )
    parts = "".join(f'<div style="{style}">{branch}</div>' for branch in branches)
    return f'<div style="display:flex;flex-wrap:wrap;gap:6px;align-items:flex-end;margin-bottom:3px">{parts}</div>'


def _row(nodes: list[Node], number: int, *, is_first: bool) -> str:
    node, color = nodes[number], COLORS[nodes[number].stage]
    stage = node.stage if is_first else ""
    call = f"<b>{escape(node.name)}</b>({escape(', '.join(node.arguments))})"
    cells = [
        f'<span style="{_STAGE.format(color)}">{stage}</span>',
        f'<span style="{_CALL}">{call}</span>',
        f'<span style="{_LENGTH}">{_known(nodes, node, color)}</span>',
    ]
    return f'<div style="{_ROW.format(color)}">{"".join(cells)}</div>' + _problem(node)


def _problem(node: Node) -> str:
    style = "padding:2px 8px 2px 78px;color:#c0392b;font-size:12px"
    return f'<div style="{style}">{escape(masked(node.problem))}</div>' if node.problem else ""


def _known(nodes: list[Node], node: Node, color: str) -> str:
    """Return a node's length and classes, where they are not those of its source."""
    before = [nodes[source] for source in node.sources]
    classes = node.classes if [node.classes] != [source.classes for source in before] else None
    is_new = [(node.length, node.unit)] != [(source.length, source.unit) for source in before]
    length = escape(shown_length(node)) if is_new or classes else ""
    return f"{_bars(classes, color)} {length}" if classes else length


def _bars(classes: dict[str, int], color: str) -> str:
    """Return a bar for each class; only their number where there are many."""
    if len(classes) > _BARS:
        return f"{len(classes):,} classes,"
    classes = {printable(name): count for name, count in classes.items()}
    largest = max(classes.values())
    width, height = 6, 14
    bars = "".join(
        f'<rect x="{place * (width + 1)}" y="{height - round(height * count / largest, 1)}" width="{width}" '
        f'height="{round(height * count / largest, 1)}" fill="{color}"><title>{escape(name)}: {count:,}</title></rect>'
        for place, (name, count) in enumerate(classes.items())
    )
    title = escape(", ".join(f"{name}: {count:,}" for name, count in classes.items()), quote=True)
    return (
        f'<svg width="{len(classes) * (width + 1)}" height="{height}" style="vertical-align:-2px" role="img" '
        f'aria-label="{title}">{bars}</svg>'
    )
