"""Pipes in an order that spoils what they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher, Shuffler, UnBatcher

from kdpipes.core.chain import Chain
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import Pipe
from kdpipes.core.stock import is_of_torchdata, redraws
from kdpipes.look.doctor.facts import Facts, Finding, before, readable
from kdpipes.work.fields import Selector

__all__ = ["random_before_cache", "shuffle_after_batch", "sorted_batches", "unrecorded_ctx"]

_MIXING = ("permute", "mix", "sample_weighted", "shuffle")
_STOCK_CACHES = ("InMemoryCacheHolder", "EndOnDiskCacheHolder")  # torchdata's


def random_before_cache(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A cache that keeps what was drawn at random; kdpipes' own caches refuse that, torchdata's do not."""
    for cache in reversed(chain):
        if not is_of_torchdata(cache.pipe, *_STOCK_CACHES):
            continue
        drawing = (node for node in before(cache) if node.traits.random or _shuffles(node.pipe))
        found = next(drawing, None)
        if found is not None:
            yield Finding(
                "random-before-cache",
                "error",
                cache.name,
                f"`{cache.name}` keeps what `{found.traits.random or found.name}` has drawn.",
                "Every epoch gets the random numbers of the first one.",
                "Put the cache before it; `.cache_in_memory()` refuses such an order.",
            )


def _shuffles(pipe: Any) -> bool:
    """Return whether a stock pipe changes the order at random."""
    return isinstance(pipe, IterDataPipe) and not isinstance(pipe, Pipe) and redraws(pipe)


def shuffle_after_batch(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A shuffle that mixes whole batches."""
    for shuffler in reversed(chain):
        if not isinstance(shuffler.pipe, Shuffler):
            continue
        for node in before(shuffler):
            if isinstance(node.pipe, UnBatcher):
                break
            if node.traits.role == "deal" or isinstance(node.pipe, Batcher):
                yield Finding(
                    "shuffle-after-batch",
                    "error",
                    "shuffle",
                    f"`.shuffle()` stands behind `.{node.name}()`.",
                    "It changes the order of batches, whose samples stay together; and the loader cannot resume there.",
                    "Use `deal(shuffle=True)`; on a stream, put `.shuffle()` before `.deal()`.",
                )
                break


def unrecorded_ctx(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A `select` of the ctx although no transform is recorded, because there is no `record_ctx`."""
    for node in reversed(chain):
        operation = node.operation
        if not isinstance(operation, Selector) or not (operation.return_ctx or "ctx" in operation.names):
            continue
        recorders = [recorder for recorder in before(node) if recorder.traits.records]
        recorded = (one for recorder in recorders for one in before(recorder) if one.name == "record_ctx")
        if not recorders or any(recorded):
            continue
        first = recorders[-1]
        yield Finding(
            "unrecorded-ctx",
            "warning",
            node.name,
            f"`.{node.name}()` gives the ctx, and no `.record_ctx()` stands before `.{first.name}()`.",
            f"What `{first.traits.records}` does is recorded nowhere: the ctx lacks it.",
            f"Put `.record_ctx()` right before `.{first.name}()`.",
        )


def sorted_batches(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A training chain that is not shuffled, of a source that is sorted by class."""
    if chain.deal is None or not any(node.traits.random for node in chain):
        return
    dealer, source = chain.deal.pipe, chain.deal.pipe.source
    if not isinstance(source, MapPipe) or dealer.is_shuffled:
        return
    if any(node.name in _MIXING for node in Chain.of(source)):
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
