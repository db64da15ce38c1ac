"""Code that the doctor's rules share: findings, facts about the machine, and questions about a chain.

A rule is a generator that yields what is wrong: the name of a pipe, what there is, why that is bad, and what to do.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kdpipes.core.callback import Callback
from kdpipes.core.chain import Chain, Node
from kdpipes.core.errors import check_choice, must_be
from kdpipes.core.iter_pipe import IterPipe, Tolerance, with_tolerance
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import logger
from kdpipes.core.sample import Sample
from kdpipes.core.stock import is_of_torchdata, upstream_of
from kdpipes.core.torch_pipes import IterDataPipe, ShardingFilter, Shuffler
from kdpipes.look.show import NodeView, views_of
from kdpipes.work.fields import Selector

Severity = Literal["error", "warning", "hint"]
_FEW = 64  # samples that are looked at
_PASSING = (Shuffler, ShardingFilter)  # stock pipes that pass samples on as they are
_log = logger("kdpipes")
_SMALLER = re.compile("crop|resiz|thumbnail|downsampl|patch|pool|shrink|scale", re.IGNORECASE)


class Finding(NamedTuple):
    """One thing that is wrong with a chain or could be better.

    Args:
        code: The kind of the finding, in a few words: "shuffle-after-batch".
        severity: "error": the data or the run is wrong; "warning": it will be in some set-up, or the chain is slow for
            no gain; "hint": it could be better.
        pipe: The name of the pipe concerned.
        what: What was found.
        why: Why that is bad.
        fix: What to do.
    """

    code: str
    severity: Severity
    pipe: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.code} ({self.pipe}): {self.what} {self.why}\n    {self.fix}"


@dataclass(frozen=True)
class Facts:
    """Facts about the machine, the way in which the chain will run, and its first batch."""

    num_workers: int
    num_cpus: int  # that this process may use
    shm_free: int | None  # bytes; None if the machine has no shared memory
    fast_decoders: tuple[str, ...]  # installed JPEG decoders that are faster than Pillow's
    is_undealt: bool = False  # the doctor has added a `deal`
    batch: Any = None  # the first one
    batch_again: Any = None  # the same one, made a second time
    generators: tuple[Any, Any] = (None, None)  # the states of the global generators after each of them
    probed: dict[int, Any] = field(default_factory=dict)  # what rules have read of a node's samples, by its place


Wrong = tuple[str, str, str, str]  # the pipe's name, the finding, the reason and the fix
Check = Callable[[Chain, Facts], Iterator[Wrong]]
OwnCheck = Callable[["ChainView"], Iterable[Wrong]]


class Rule(NamedTuple):
    """A function that yields what is wrong with a chain; `runs_chain` if it needs one that yields batches."""

    code: str
    severity: Severity
    runs_chain: bool
    check: Check
    is_own: bool = False  # not one of kdpipes

    def findings(self, chain: Chain, facts: Facts) -> Iterator[Finding]:
        """Yield the findings about a chain."""
        return (Finding(self.code, self.severity, *wrong) for wrong in self.check(chain, facts))


RULES: list[Rule] = []


def rule(code: str, severity: Severity, *, runs_chain: bool = False) -> Callable[[Check], Check]:
    """Make a function a rule of the doctor."""

    def registered(check: Check) -> Check:
        RULES.append(Rule(code, severity, runs_chain, check))
        return check

    return registered


class ChainView(NamedTuple):
    """The description of a chain that a rule of your own receives.

    Args:
        pipes: The pipes, each after those upstream of it, with `name`, `arguments` (as text), `stage` ("source",
            "plan", "work", "cache" or "delivery"), `traits` and `length` (None if it is unknown).
        batch: The first batch; None for a rule without `needs_batch`.
        num_workers: The number of workers that the chain will have.
    """

    pipes: tuple[NodeView, ...]
    batch: Any
    num_workers: int


def doctor_rule(code: str, severity: Severity, *, needs_batch: bool = False) -> Callable[[OwnCheck], OwnCheck]:
    """Make a function a rule of `kdp.doctor` and `kdpipes doctor`, in this process.

    The function takes a `ChainView` and yields `(pipe, what, why, fix)`: the name of a pipe, and three sentences that
    say what was found, why that is bad, and what to do. It yields nothing if all is well.

    Args:
        code: The kind of the finding, in a few words, such as "small-batches". A rule of the same code is replaced.
        severity: "error" if the data or the run is wrong, "warning" if they may be, "hint" for an improvement.
        needs_batch: Whether the rule needs the first batch. It is not called if the chain yields none.

    Raises:
        ValueError: A rule of kdpipes has this code.

    Example:
        >>> @kdp.doctor_rule("few-workers", "hint")
        ... def few_workers(chain):
        ...     if chain.num_workers < 2:
        ...         yield chain.pipes[-1].name, "There is one worker.", "It is slow.", "Use two."
        >>> print(kdp.doctor(kdp.from_ids([1]).deal(1), measure=False, num_workers=1))
        hint: few-workers (deal): There is one worker. It is slow.
            Use two.
    """
    check_choice("severity", severity, ("error", "warning", "hint"))
    if any(each.code == code and not each.is_own for each in RULES):
        raise ValueError(must_be("code", "a name that no rule of kdpipes has", code))

    def registered(function: OwnCheck) -> OwnCheck:
        def check(chain: Chain, facts: Facts) -> Iterator[Wrong]:
            views = tuple(views_of(chain.end.pipe, find_out=False))
            for found in function(ChainView(views, facts.batch, facts.num_workers)):
                if not isinstance(found, tuple) or len(found) != 4 or not all(isinstance(text, str) for text in found):
                    raise TypeError(f"The doctor's rule {code!r} must yield (pipe, what, why, fix), not {found!r}.")
                yield found

        RULES[:] = [each for each in RULES if each.code != code]
        RULES.append(Rule(code, severity, needs_batch, check, is_own=True))
        return function

    return registered


def upstream_nodes(node: Node) -> list[Node]:
    """Return the nodes upstream of a node, the nearest first."""
    return list(reversed(Chain.of(node.pipe)))[1:]


def contents(source: Any, name: str, positions: Iterable[int] | None = None) -> Iterator[Any]:
    """Yield a field of the first samples, or of those at some positions, that have it and can be read."""
    for sample in samples_of(source, positions):
        yield from _tried(functools.partial(sample.__getitem__, name)) if name in sample else ()


def samples_of(source: Any, positions: Iterable[int] | None = None) -> Iterator[Sample]:
    """Yield the first samples of a source, or those at some positions, that can be read.

    The others do not matter here: the chain gives batches nevertheless, because `on_error` skips them.
    """
    if isinstance(source, MapPipe):
        for position in range(min(len(source), _FEW)) if positions is None else positions:
            yield from _tried(functools.partial(source.fetch, position))
        return
    while isinstance(source, _PASSING) or is_of_torchdata(source, "Prefetcher"):
        source = upstream_of(source)[0]
    copied: Any = Chain.of(source).copy_streams() if isinstance(source, IterDataPipe) else source
    samples = copied.samples() if isinstance(copied, IterPipe) else iter(())
    yield from with_tolerance(Tolerance(lambda key, index, error: True), itertools.islice(samples, _FEW))


def _tried(make: Callable[[], Any]) -> list[Any]:
    try:
        return [make()]
    except Exception as error:  # a user's code may raise anything
        _log.debug("A sample cannot be read: %s", error)
        return []


def selector_in(chain: Chain) -> Selector | None:
    """Return what `select` does; None if the chain has none."""
    return next(iter(chain.operations(Selector)), None)


def selected_names(chain: Chain) -> tuple[str, ...]:
    """Return the fields that a chain selects, with "ctx" if it gives the ctx as well."""
    selector = selector_in(chain)
    return () if selector is None else (*selector.names, *["ctx"] * selector.return_ctx)


def callables_of(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the name and the function of each callable that a pipe holds; of a partial, what it was made from."""
    seen: set[int] = set()
    held = {} if node.operation is None else vars(node.operation)
    waiting = [*vars(node.pipe).values(), *held.values()]
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Callback):
            value, name = value.function, value.name
        elif isinstance(value, list | tuple) and len(value) <= 100:
            waiting.extend(value)
            continue
        elif callable(value) and hasattr(value, "__module__"):
            name = str(getattr(value, "__name__", type(value).__name__))
        else:
            continue
        while isinstance(value, functools.partial):
            value = value.func
        yield name, value


def shrinks(chain: Chain) -> bool:
    """Return whether something in a chain makes images smaller, going by its name."""
    return any(_SMALLER.search(name) for node in chain for name, _ in callables_of(node))


def num_different(pipe: Any) -> int | None:
    """Return the largest possible number of different samples of a pipe; None for a stream."""
    lengths = []
    while isinstance(pipe, MapPipe):
        lengths.append(len(pipe))
        before = upstream_of(pipe)
        pipe = before[0] if len(before) == 1 else None
    return min(lengths, default=None)
