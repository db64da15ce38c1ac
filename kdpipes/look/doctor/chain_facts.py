"""What the checks ask of a chain: what stands before what, and which callables it holds."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher, ShardingFilter, Shuffler
from torchdata.datapipes.iter import Prefetcher

from kdpipes._giving_up import given_up_by
from kdpipes._graph import copy_streams, sources_of, walk
from kdpipes._map_pipe import MapPipe
from kdpipes.callback import Callback
from kdpipes.delivery.behind_deal import DEALERS

__all__ = [
    "callables_of",
    "contents",
    "dealer_in",
    "draws",
    "gives_batches",
    "operation_of",
    "readable",
    "readable_field",
    "records",
    "redraws",
    "samples_of",
    "seeded",
    "selected_names",
    "selector_in",
    "shrinks",
    "stock_random",
    "upstream",
]

_FEW = 64  # samples that are looked at
_PASSING = (Shuffler, ShardingFilter, Prefetcher)  # stock pipes that pass samples on as they are
_log = logging.getLogger("kdpipes")
_SMALLER = re.compile("crop|resiz|thumbnail|downsampl|patch|pool|shrink|scale", re.IGNORECASE)


def upstream(pipe: Any) -> list[Any]:
    """Return what stands before a pipe, nearest first."""
    return list(walk(pipe)[1:])


def dealer_in(chain: Any) -> Any:
    """Return the `deal` of a chain, if there is one."""
    return next((pipe for pipe in walk(chain) if isinstance(pipe, DEALERS)), None)


def gives_batches(pipe: Any) -> bool:
    """Return whether a pipe cuts batches."""
    return isinstance(pipe, (*DEALERS, Batcher))


def operation_of(pipe: Any) -> Any:
    """Return what a sample-wise pipe does to a sample; None of other pipes."""
    return getattr(pipe, "_operation", None)


def readable(source: MapPipe, positions: Iterable[int], field: str) -> Iterator[Any]:
    """Yield a field of those samples that have it, and can be read.

    The chain gives batches all the same: others are none of theirs, or `on_error` leaves them out.
    """
    for position in positions:
        yield from readable_field(functools.partial(source.fetch, position), field)


def readable_field(make: Callable[[], Any], field: str) -> list[Any]:
    """Return the field of a sample, or nothing where it has none, or cannot be made or read."""
    try:
        sample = make()
        return [sample[field]] if field in sample else []
    except Exception as error:  # whatever a user's code raises
        _log.debug("A sample cannot be read: %s", error)
        return []


def contents(source: Any, field: str) -> Iterator[Any]:
    """Yield a field of the first samples that have it, and can be read."""
    for sample in samples_of(source):
        yield from readable_field(sample, field)


def samples_of(source: Any) -> Iterator[Callable[[], Any]]:
    """Yield what returns the first samples of a source, or raises where one cannot be read."""
    if isinstance(source, MapPipe):
        yield from (functools.partial(source.fetch, position) for position in range(min(len(source), _FEW)))
        return
    while isinstance(source, _PASSING):
        source = sources_of(source)[0]
    copied: Any = copy_streams(source) if isinstance(source, IterDataPipe) else source
    samples = copied.samples() if hasattr(copied, "samples") else iter(())
    for sample in given_up_by(_are_passed_over, itertools.islice(samples, _FEW)):
        yield functools.partial(_itself, sample)


def _itself(sample: Any) -> Any:
    return sample


def _are_passed_over(key: str, index: int, error: Exception) -> bool:
    """Say that shards that cannot be read are no matter here: the chain gives a batch all the same."""
    return True


def selector_in(chain: Any) -> Any:
    """Return the `select` of a chain, if there is one."""
    return next((pipe for pipe in walk(chain) if getattr(operation_of(pipe), "is_selector", False)), None)


def selected_names(chain: Any) -> tuple[str, ...]:
    """Return the fields that a chain selects, with "ctx" where it gives the ctx besides."""
    operation = operation_of(selector_in(chain))
    return () if operation is None else (*operation.names, *["ctx"] * operation.return_ctx)


def redraws(chain: Any) -> str | None:
    """Return the name of what draws anew in each epoch, and would draw the same in every pass over an indexed chain."""
    for pipe in walk(chain):
        if getattr(operation_of(pipe), "freezes", False):  # a cache that keeps what was drawn
            break
        name = draws(pipe)
        if name is not None:
            return name
    return next((name for pipe in walk(chain) if isinstance(pipe, MapPipe) and (name := pipe.redrawn_by())), None)


def draws(pipe: Any) -> str | None:
    """Return the name of what draws random numbers in a pipe, as far as that is known before it runs."""
    operation = operation_of(pipe)
    known: Any = getattr(operation, "draws", None)
    name: str | None = known() if known is not None else None
    return name or (str(getattr(pipe, "_name", "")) if getattr(operation, "is_random", False) is True else None)


def seeded(pipe: Any) -> list[str]:
    """Return the names of the callables of a pipe that global generators are seeded for."""
    known: Any = getattr(operation_of(pipe), "seeded", None)
    return known() if known is not None else []


def records(pipe: Any) -> str | None:
    """Return the name of what is recorded of a pipe behind `record_ctx`, as far as that is known before it runs."""
    known: Any = getattr(operation_of(pipe), "records", None)
    return known() if known is not None else None


def stock_random(pipe: Any) -> bool:
    """Return whether a stock pipe changes the order at random."""
    return isinstance(pipe, Shuffler) or (
        isinstance(pipe, IterDataPipe)
        and not type(pipe).__module__.startswith("kdpipes.")
        and callable(getattr(type(pipe), "set_seed", None))
        and not hasattr(pipe, "samples")
    )


def callables_of(pipe: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the function of each callable that a pipe holds."""
    seen: set[int] = set()
    waiting = [*vars(pipe).values(), *vars(operation_of(pipe) or _Nothing()).values()]
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Callback):
            yield value.name, _bare(value.function)
        elif isinstance(value, list | tuple) and len(value) <= 100:
            waiting.extend(value)
        elif callable(value) and not isinstance(value, type) and hasattr(value, "__module__"):
            yield str(getattr(value, "__name__", type(value).__name__)), _bare(value)


class _Nothing:
    """Has no attributes."""


def _bare(function: Any) -> Any:
    """Return the function of a user behind what was made of it with more arguments."""
    while isinstance(function, functools.partial):
        inner = [part for part in function.args if callable(part)]
        function = inner[0] if inner and function.func.__module__.startswith("kdpipes.") else function.func
    return function


def shrinks(chain: Any) -> bool:
    """Return whether something in a chain makes images smaller, going by its name."""
    return any(_SMALLER.search(name) for pipe in walk(chain) for name, _ in callables_of(pipe))
