"""A chain as a list of nodes: what each pipe is called, with which arguments, its stage, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.call_text import arguments_of
from kdpipes.core.chain import upstream_of
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import Pipe
from kdpipes.core.registry import pipe_name
from kdpipes.core.sample_pipe import SampleMapper
from kdpipes.core.stock import redraws, shards
from kdpipes.delivery.batch_pipe import OneToOne
from kdpipes.delivery.dealer import Dealer
from kdpipes.look.known import Knowledge

__all__ = ["STAGES", "Node", "a_chain", "nodes_of"]

STAGES = ("source", "plan", "work", "cache", "delivery")
_FOLDERS = {"sources": "source", "write": "source", "plan": "plan", "work": "work", "cache": "cache"}


@dataclass(frozen=True)
class Node:
    """One pipe of a chain.

    Args:
        pipe: The pipe.
        name: What it is called by: `deal`, `open_shards`, `shuffle`, or its class.
        arguments: As text.
        stage: One of `STAGES`.
        sources: The numbers of the nodes that it reads from.
        length: How many items it gives, where that is known.
        unit: "samples", "batches", or "items" where it is not known which.
        classes: How many samples it gives of each class, by name where there are names, where that is known.
        problem: Why its length cannot be known: the error of its plan.
    """

    pipe: Any
    name: str
    arguments: tuple[str, ...]
    stage: str
    sources: tuple[int, ...]
    length: int | None = None
    unit: str = "items"
    classes: dict[str, int] | None = None
    problem: str = ""


def a_chain(source_datapipe: Any) -> Any:
    """Return a pipe, or refuse what is none."""
    if not isinstance(source_datapipe, IterDataPipe | MapDataPipe):
        raise TypeError(f"`source_datapipe` must be a datapipe, but is {type(source_datapipe).__name__} instead.")
    return source_datapipe


def nodes_of(chain: Any, *, finds_out: bool) -> list[Node]:
    """Return the nodes of a chain, each behind those that it reads from; the chain's own is the last.

    No sample is read, nothing is opened, and no pipe is iterated.

    Args:
        chain: A pipe.
        finds_out: Whether small plans may be made and small folders listed, to tell lengths and classes.
    """
    knowledge, nodes, numbers = Knowledge(finds_out=finds_out), list[Node](), dict[int, int]()
    for pipe in _upstream_first(chain):
        sources = tuple(numbers[id(source)] for source in upstream_of(pipe))
        numbers[id(pipe)] = len(nodes)
        nodes.append(_node(pipe, sources, [nodes[number] for number in sources], knowledge))
    return nodes


def _upstream_first(chain: Any) -> Iterator[Any]:
    """Yield the pipes of a chain, each once, behind its sources."""
    waiting, seen, done = [chain], set[int](), set[int]()
    while waiting:
        pipe = waiting[-1]
        new = [source for source in upstream_of(pipe)[::-1] if id(source) not in seen | done]
        if id(pipe) not in seen and new:
            seen.add(id(pipe))
            waiting += new
            continue
        waiting.pop()
        if id(pipe) not in done:
            done.add(id(pipe))
            yield pipe


def _node(pipe: Any, sources: tuple[int, ...], upstream: list[Node], knowledge: Knowledge) -> Node:
    length, classes, problem = None, None, ""
    stage = _stage_of(pipe, upstream)
    try:
        length = knowledge.length(pipe)
        classes = _named_classes(pipe, knowledge) if stage in {"source", "plan"} else None
    except Exception as error:  # the plan's: it is shown, as the chain is only looked at
        problem = f"{type(error).__name__}: {error}"
    return Node(
        pipe, pipe_name(pipe), _arguments(pipe), stage, sources, length, _unit(pipe, upstream), classes, problem
    )


def _named_classes(pipe: Any, knowledge: Knowledge) -> dict[str, int] | None:
    counts = knowledge.classes(pipe)
    if counts is None:
        return None
    names = pipe.class_names() or ()
    is_named = all(isinstance(label, int) and label < len(names) for label in counts)
    return {names[label] if is_named and label >= 0 else str(label): count for label, count in counts.items()}


def _arguments(pipe: Any) -> tuple[str, ...]:
    if isinstance(pipe, Pipe):
        return pipe.call_arguments
    return tuple(arguments_of(pipe))


def _stage_of(pipe: Any, upstream: list[Node]) -> str:
    if isinstance(pipe, Dealer | OneToOne) or any(node.stage == "delivery" for node in upstream):
        return "delivery"
    if not upstream:
        return "source"
    made_by = type(pipe.operation) if isinstance(pipe, SampleMapper) else type(pipe)
    package, _, rest = made_by.__module__.partition(".")
    if package == "kdpipes" and rest.split(".")[0] in _FOLDERS:
        return _FOLDERS[rest.split(".")[0]]
    if isinstance(pipe, Pipe) and pipe.traits.is_plan:
        return "plan"
    is_stock = package in {"torch", "torchdata"}
    if is_stock and all(node.stage == "source" and not isinstance(node.pipe, MapPipe | IterPipe) for node in upstream):
        return "source"
    chooses = isinstance(pipe, IterDataPipe) and (shards(pipe) or redraws(pipe))
    return "plan" if is_stock and (chooses or len(upstream) > 1) else "work"


def _unit(pipe: Any, upstream: list[Node]) -> str:
    if isinstance(pipe, Dealer):
        return "batches"
    if isinstance(pipe, MapPipe | IterPipe):
        return "samples"
    units = {node.unit for node in upstream}
    return units.pop() if len(units) == 1 and type(pipe).__name__ not in _REGROUPING else "items"


_REGROUPING = {"BatcherIterDataPipe", "BatcherMapDataPipe", "UnBatcherIterDataPipe", "FlatMapperIterDataPipe"}
