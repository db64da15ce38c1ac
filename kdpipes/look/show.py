"""Show a chain as text, for `repr`, and as HTML in notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kdpipes.core.call_text import arguments_of, call_arguments
from kdpipes.core.chain import Chain, Node
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.labels import are_classes, as_classes
from kdpipes.core.map_pipe import MapPipe, has_column
from kdpipes.core.messages import counted
from kdpipes.core.pipe import Pipe
from kdpipes.core.secrets import printable, safe_text
from kdpipes.core.stock import Seeded, is_of_torchdata, shards
from kdpipes.core.torch_pipes import Batcher, IndexedBatcher, IterableWrapper, IterDataPipe, SequenceWrapper, UnBatcher
from kdpipes.core.traits import Traits
from kdpipes.look.rendering import class_name, render
from kdpipes.plan.class_counts import class_counts

COLORS = {"source": "#4e79a7", "plan": "#e08a1e", "work": "#59a14f", "cache": "#2a9d9d", "delivery": "#8e5ea2"}
_FEW = 200_000  # a plan over at most so many samples is made to show its length and classes
_WIDTH = 110  # a longer text is broken into lines
_DEEP = 3  # levels of branches that are written: pipes that several branches share are written in each of them
_BARS = 24  # if there are more classes, only their number is shown
_COUNTED = (IterableWrapper, SequenceWrapper)  # stock sources whose length is in memory
_REGROUPING = (Batcher, IndexedBatcher, UnBatcher)


@dataclass(frozen=True, eq=False)
class NodeView:
    """The text that is shown for one pipe of a chain."""

    node: Node
    sources: tuple[NodeView, ...]  # the views of the pipes upstream
    stage: str  # a key of `COLORS`
    unit: str  # "sample", "batch", or "item" if that is unknown
    length: int | None = None  # None if it is unknown
    classes: dict[str, int] | None = None  # the number of samples of each class; None if that is unknown
    problem: str = ""  # the error that the plan raised

    @property
    def name(self) -> str:
        """The name of the pipe."""
        return self.node.name

    @property
    def traits(self) -> Traits:
        """The declared traits of the pipe."""
        return self.node.traits

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that the pipe was made with, as text."""
        pipe = self.node.pipe
        return call_arguments(pipe) if isinstance(pipe, Pipe) else tuple(arguments_of(pipe))


def views_of(chain: Any, *, find_out: bool) -> list[NodeView]:
    """Return the views of a chain's pipes, each after those upstream of it; the end of the chain is the last.

    No sample is read, nothing remote is opened, and no epoch begins. With `find_out`, plans over few samples are made
    and small local folders are listed, for lengths and classes.
    """
    views: dict[int, NodeView] = {}
    for node in Chain.of(chain):
        sources = tuple(views[source.place] for source in node.upstream)
        stage = _stage(node, sources)
        length = None
        classes = None
        problem = ""
        try:
            length = _length(node, sources, find_out)
            if find_out and length and length <= _FEW and stage in ("source", "plan"):
                classes = _classes(node.pipe)
        except Exception as error:  # the plan's own: it is shown, because the chain is only looked at
            problem = f"{type(error).__name__}: {error}"
        views[node.place] = NodeView(node, sources, stage, _unit(node, sources), length, classes, problem)
    return list(views.values())


def _stage(node: Node, sources: tuple[NodeView, ...]) -> str:
    traits = node.traits
    if traits.role in ("deal", "batch", "device") or any(source.stage == "delivery" for source in sources):
        return "delivery"
    if not sources or traits.role == "source":
        return "source"
    if traits.role == "cache":
        return "cache"
    if traits.is_plan or isinstance(node.pipe, Pipe):
        return "plan" if traits.is_plan else "work"
    if all(source.stage == "source" and not isinstance(source.node.pipe, MapPipe | IterPipe) for source in sources):
        return "source"  # a stock pipe that helps to list or to read files
    chooses = isinstance(node.pipe, IterDataPipe) and (shards(node.pipe) or isinstance(node.pipe, Seeded))
    return "plan" if chooses or len(sources) > 1 else "work"


def _unit(node: Node, sources: tuple[NodeView, ...]) -> str:
    if node.traits.role == "deal":
        return "batch"
    if isinstance(node.pipe, MapPipe | IterPipe):
        return "sample"
    units = {source.unit for source in sources}
    regroups = isinstance(node.pipe, _REGROUPING) or is_of_torchdata(node.pipe, "FlatMapper")
    return units.pop() if len(units) == 1 and not regroups else "item"


@runtime_checkable
class _Slow(Protocol):
    """A pipe whose length may take long to find out, although the lengths upstream are known."""

    def has_quick_length(self, *, may_plan: bool) -> bool:
        """Return whether `len(pipe)` is fast.

        With `may_plan`, making a plan from data in memory counts as fast.
        """


def _length(node: Node, sources: tuple[NodeView, ...], find_out: bool) -> int | None:
    """Return the length of a pipe if that costs nothing; None if it is unknown, or the pipe has none."""
    lengths = [source.length for source in sources if source.length is not None]
    if len(lengths) < len(sources):
        return None
    if isinstance(node.pipe, Pipe):
        may_plan = find_out and sum(lengths) <= _FEW
        is_quick = not isinstance(node.pipe, _Slow) or node.pipe.has_quick_length(may_plan=may_plan)
    else:
        is_quick = bool(sources) or isinstance(node.pipe, _COUNTED)
    try:
        return len(node.pipe) if is_quick else None
    except TypeError:  # the pipe has no length
        return None


def _classes(pipe: Any) -> dict[str, int] | None:
    if not isinstance(pipe, MapPipe) or not has_column(pipe, "y"):
        return None
    labels = as_classes(pipe.column("y"))
    if not are_classes(labels):
        return None
    counts = class_counts(labels)
    names = pipe.class_names()
    if any(isinstance(label, int) and label >= len(names or ()) for label in counts):
        names = None
    return {class_name(label, names) or str(label): count for label, count in counts.items()}


def chain_text(chain: Any) -> str:
    """Return a chain as it would be written, with its length if that is known.

    Example:
        >>> pipe = kdp.from_ids(["a", "b", "c"], [0, 1, 0]).decode_images("x").deal(batch_size=2)
        >>> chain_text(pipe)
        "from_ids(['a', 'b', 'c'], [0, 1, 0]) → decode_images('x') → deal(batch_size=2)  [3 samples, 2 batches]"
    """
    views = views_of(chain, find_out=False)
    end = views[-1]
    parts = _calls(views[-1], 0)
    samples = [view for view in views[::-1] if view.unit == "sample"][:1] if end.unit == "batch" else []
    lengths = ", ".join(length_text(view) for view in [*samples, end] if view.length is not None)
    line = " → ".join(parts)
    return (line if len(line) <= _WIDTH else "\n  → ".join(parts)) + (f"  [{lengths}]" if lengths else "")


def _calls(end: NodeView, depth: int) -> list[str]:
    """Return the pipes of one branch as text; other sources are arguments of the pipe that joins them."""
    path = [end]
    while path[-1].sources and path[-1].name != "concat":
        path.append(path[-1].sources[0])
    calls = []
    for view in reversed(path):
        others = view.sources if view.name == "concat" else view.sources[1:]
        branches = ["…" if depth >= _DEEP else " → ".join(_calls(other, depth + 1)) for other in others]
        calls.append(f"{view.name}({', '.join([*branches, *view.arguments])})")
    return calls


def length_text(view: NodeView) -> str:
    """Return the length with its unit; nothing if it is unknown."""
    return "" if view.length is None else counted(view.length, view.unit)


def chain_html(chain: Any) -> str:
    """Return a chain as a piece of HTML with inline styles and without scripts.

    It shows lengths and classes that are known or quick to find out; see `views_of`.
    """
    views = views_of(chain, find_out=True)
    is_unknown = all(view.length is None for view in views if view.unit == "sample")
    rows = _rows(views[-1], set())
    if is_unknown and any(isinstance(view.node.pipe, MapPipe) for view in views):
        rows.append({"note": "Lengths are not known yet: len(pipe) finds them out."})
    return render("chain", rows)


def _rows(end: NodeView, drawn: set[NodeView]) -> list[dict[str, Any]]:
    """Return the rows up to a pipe; pipes that another branch has shown already are only named."""
    path = [end]
    while path[-1] not in drawn and len(path[-1].sources) == 1:
        path.append(path[-1].sources[0])
    rows: list[dict[str, Any]] = []
    if path[-1] in drawn:
        rows.append({"note": f"{path.pop().name}, as drawn before"})
    elif path[-1].sources:
        rows.append({"branches": [_rows(source, drawn) for source in path[-1].sources]})
    drawn.update(path)
    stage = ""
    for view in reversed(path):
        rows.append(_row(view, "" if view.stage == stage else view.stage))
        stage = view.stage
    return rows


def _row(view: NodeView, stage: str) -> dict[str, Any]:
    """Return one pipe; its length and classes only if they differ from those upstream."""
    classes = view.classes if [view.classes] != [source.classes for source in view.sources] else None
    is_new = [(view.length, view.unit)] != [(source.length, source.unit) for source in view.sources]
    is_drawn = classes is not None and len(classes) <= _BARS
    return {
        "stage": stage,
        "color": COLORS[view.stage],
        "name": view.name,
        "arguments": ", ".join(view.arguments),
        "num_classes": len(classes or ()),
        "bars": {printable(name): count for name, count in (classes or {}).items()} if is_drawn else {},
        "length": length_text(view) if is_new or classes else "",
        "problem": safe_text(view.problem),
    }
