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
from kdpipes.callback import Callback
from kdpipes.core.chain import Chain, upstream_of
from kdpipes.core.iter_pipe import IterPipe
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import Pipe
from kdpipes.core.stock import redraws as stock_redraws
from kdpipes.delivery.dealer import Dealer

__all__ = [
    "callables_of",
    "contents",
    "dealer_in",
    "draws",
    "gives_batches",
    "operation_of",
    "readable",
    "readable_field",
    "redraws",
    "samples_of",
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
    return list(Chain.of(pipe).pipes[1:])


def dealer_in(chain: Any) -> Any:
    """Return the `deal` of a chain, if there is one."""
    return next(iter(Chain.of(chain).of_type(Dealer)), None)


def gives_batches(pipe: Any) -> bool:
    """Return whether a pipe cuts batches."""
    return isinstance(pipe, Dealer | Batcher)


def operation_of(pipe: Any) -> Any:
    """Return what a sample-wise pipe does to a sample; None of other pipes."""
    return pipe.operation if isinstance(pipe, Pipe) else None


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
        source = upstream_of(source)[0]
    copied: Any = Chain.of(source).copy_streams() if isinstance(source, IterDataPipe) else source
    samples = copied.samples() if isinstance(copied, IterPipe) else iter(())
    for sample in given_up_by(_are_passed_over, itertools.islice(samples, _FEW)):
        yield functools.partial(_itself, sample)


def _itself(sample: Any) -> Any:
    return sample


def _are_passed_over(key: str, index: int, error: Exception) -> bool:
    """Say that shards that cannot be read are no matter here: the chain gives a batch all the same."""
    return True


def selector_in(chain: Any) -> Any:
    """Return the `select` of a chain, if there is one."""
    return next((node.pipe for node in reversed(Chain.of(chain)) if node.traits.gives == "items"), None)


def selected_names(chain: Any) -> tuple[str, ...]:
    """Return the fields that a chain selects, with "ctx" where it gives the ctx besides."""
    operation = operation_of(selector_in(chain))
    return () if operation is None else (*operation.names, *["ctx"] * operation.return_ctx)


def redraws(chain: Any) -> str | None:
    """Return the name of what draws anew in each epoch, and would draw the same in every pass over an indexed chain."""
    named = Chain.of(chain).random_name()
    return named or next((name for pipe in Chain.of(chain).of_type(MapPipe) if (name := pipe.redrawn_by())), None)


def draws(pipe: Any) -> str | None:
    """Return the name of what draws random numbers in a pipe, as far as that is known before it runs."""
    return pipe.traits.random if isinstance(pipe, Pipe) else None


def stock_random(pipe: Any) -> bool:
    """Return whether a stock pipe changes the order at random."""
    return isinstance(pipe, IterDataPipe) and not isinstance(pipe, Pipe) and stock_redraws(pipe)


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
    return any(_SMALLER.search(name) for pipe in Chain.of(chain).pipes for name, _ in callables_of(pipe))
