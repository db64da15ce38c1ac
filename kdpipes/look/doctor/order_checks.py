"""Pipes in an order that spoils what they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data.datapipes.iter import Shuffler
from torchdata.datapipes.iter import EndOnDiskCacheHolder, InMemoryCacheHolder, UnBatcher

from kdpipes.core.chain import Chain
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import Pipe
from kdpipes.core.registry import pipe_name
from kdpipes.look.doctor.chain_facts import (
    dealer_in,
    draws,
    gives_batches,
    operation_of,
    readable,
    stock_random,
    upstream,
)
from kdpipes.look.doctor.finding import Facts, Finding
from kdpipes.work.fields import Selector

__all__ = ["random_before_cache", "shuffle_after_batch", "sorted_batches", "unrecorded_ctx"]

_STOCK_CACHES = (InMemoryCacheHolder, EndOnDiskCacheHolder)


def random_before_cache(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A cache that keeps what was drawn at random; ours refuse that, torchdata's do not."""
    for cache in Chain.of(chain).pipes:
        if not isinstance(cache, _STOCK_CACHES):
            continue
        found = next((pipe for pipe in upstream(cache) if draws(pipe) or stock_random(pipe)), None)
        if found is not None:
            yield Finding(
                "random-before-cache",
                "error",
                pipe_name(cache),
                f"`{pipe_name(cache)}` keeps what `{draws(found) or pipe_name(found)}` has drawn.",
                "Every epoch gets the random numbers of the first one.",
                "Put the cache before it; `.cache_in_memory()` refuses such an order.",
            )


def shuffle_after_batch(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A shuffle that mixes whole batches."""
    for shuffler in Chain.of(chain).pipes:
        if not isinstance(shuffler, Shuffler):
            continue
        for pipe in upstream(shuffler):
            if isinstance(pipe, UnBatcher):
                break
            if gives_batches(pipe):
                yield Finding(
                    "shuffle-after-batch",
                    "error",
                    "shuffle",
                    f"`.shuffle()` stands behind `.{pipe_name(pipe)}()`.",
                    "It changes the order of batches, whose samples stay together; and the loader cannot resume there.",
                    "Use `deal(shuffle=True)`; on a stream, put `.shuffle()` before `.deal()`.",
                )
                break


def unrecorded_ctx(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A `select` of the ctx where no transform is recorded, for want of a `record_ctx`."""
    for selector in Chain.of(chain).pipes:
        operation = operation_of(selector)
        if not isinstance(operation, Selector) or not (operation.return_ctx or "ctx" in operation.names):
            continue
        recorders = [pipe for pipe in upstream(selector) if isinstance(pipe, Pipe) and pipe.traits.records]
        if not recorders or any(_is_recorded(pipe) for pipe in recorders):
            continue
        first = recorders[-1]
        yield Finding(
            "unrecorded-ctx",
            "warning",
            pipe_name(selector),
            f"`.{pipe_name(selector)}()` gives the ctx, and no `.record_ctx()` stands before `.{pipe_name(first)}()`.",
            f"What `{first.traits.records}` does is recorded nowhere: the ctx lacks it.",
            f"Put `.record_ctx()` right before `.{pipe_name(first)}()`.",
        )


def _is_recorded(pipe: Any) -> bool:
    return any(pipe_name(before) == "record_ctx" for before in upstream(pipe))


def sorted_batches(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A training chain that is not shuffled, of a source that is sorted by class."""
    dealer = dealer_in(chain)
    source = None if dealer is None else dealer.source
    if not isinstance(source, MapPipe) or dealer._shuffle or not any(draws(pipe) for pipe in Chain.of(chain).pipes):
        return
    if any(_mixes(pipe) for pipe in Chain.of(source).pipes):
        return
    size = min(dealer.sizes().get("global_batch_size") or 16, 64)
    if len(source) < 2 * size:
        return
    firsts = set(map(str, readable(source, range(size), "y")))
    last = next(map(str, readable(source, range(len(source) - 1, len(source) - 1 - size, -1), "y")), None)
    if len(firsts) == 1 and last is not None and last not in firsts:
        yield Finding(
            "sorted-batches",
            "warning",
            "deal",
            "The chain augments, so it trains; but it is not shuffled, and its source is sorted by class.",
            "A batch holds one class, and the model forgets the others meanwhile.",
            "Use `deal(..., shuffle=True, seed=0)`.",
        )


def _mixes(pipe: Any) -> bool:
    return pipe_name(pipe) in {"permute", "mix", "sample_weighted", "shuffle"}
