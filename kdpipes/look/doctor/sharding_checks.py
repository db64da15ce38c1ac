"""How a chain is shared out to workers, where that is not left to `deal`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Mapper, ShardingFilter, Shuffler

from kdpipes._graph import shards, sources_of, walk
from kdpipes._pipe_name import pipe_name
from kdpipes.look.doctor.chain_facts import dealer_in, draws, upstream
from kdpipes.look.doctor.finding import Facts, Finding

__all__ = ["sharded_late", "sharded_twice", "sharded_unseeded", "shuffled_in_parts", "unsharded"]


def unsharded(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A stream that every worker would give whole."""
    if isinstance(chain, IterDataPipe) and facts.num_workers > 1 and not any(map(shards, walk(chain))):
        yield Finding(
            "unsharded",
            "error",
            pipe_name(chain),
            "Nothing in the chain shards.",
            f"Each of {facts.num_workers} workers would give every sample: all come {facts.num_workers} times.",
            "End it with `.deal(batch_size=...)`, or put `.sharding_filter()` behind its source.",
        )


def sharded_twice(chain: Any, facts: Facts) -> Iterator[Finding]:
    """Two pipes on one path that both take a part."""
    for pipe in walk(chain):
        other = next((before for before in upstream(pipe) if shards(before)), None) if shards(pipe) else None
        if other is not None:
            yield Finding(
                "sharded-twice",
                "error",
                pipe_name(pipe),
                f"`.{pipe_name(pipe)}()` shards what `.{pipe_name(other)}()` has sharded.",
                "A worker gets a part of its part: samples are lost, or torch refuses the chain.",
                "Keep one of them.",
            )
            return


def shuffled_in_parts(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A shuffle behind the sharding: it mixes what one worker has."""
    if dealer_in(chain) is not None:
        return
    for pipe in walk(chain):
        if isinstance(pipe, Shuffler) and any(isinstance(before, ShardingFilter) for before in upstream(pipe)):
            yield Finding(
                "shuffled-in-parts",
                "warning",
                "shuffle",
                "`.shuffle()` stands behind `.sharding_filter()`.",
                "Each worker shuffles a part that is the same in every epoch, and the order depends on their number.",
                "Put `.shuffle()` before `.sharding_filter()`; or leave both to `.deal(batch_size=..., seed=0)`.",
            )


def sharded_late(chain: Any, facts: Facts) -> Iterator[Finding]:
    """Work before the sharding: all workers do all of it."""
    for pipe in walk(chain):
        if not isinstance(pipe, ShardingFilter):
            continue
        worker = next((before for before in upstream(pipe) if isinstance(before, Mapper) or draws(before)), None)
        if worker is not None and sources_of(worker):
            yield Finding(
                "sharded-late",
                "warning",
                "sharding_filter",
                f"`.sharding_filter()` stands behind `.{pipe_name(worker)}()`.",
                "Every worker does that for all samples, and throws most of it away: more workers gain nothing.",
                "Put `.sharding_filter()` right behind the source and its `.shuffle()`.",
            )


def sharded_unseeded(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A sharding pipe of one's own behind a shuffle, which torch seeds for `ShardingFilter` alone."""
    for pipe in walk(chain):
        is_own = shards(pipe) and type(pipe) is not ShardingFilter and not hasattr(pipe, "batch_key")
        if is_own and any(isinstance(before, Shuffler) for before in upstream(pipe)):
            yield Finding(
                "sharded-unseeded",
                "error",
                type(pipe).__name__,
                f"`{type(pipe).__name__}` shards what `.shuffle()` gives, and is no `sharding_filter`.",
                "torchdata seeds a shuffle alike in all workers only before exactly that: each worker shuffles "
                "differently, and samples are lost and doubled.",
                "Use `.sharding_filter()`, or `.deal(batch_size=...)`.",
            )
