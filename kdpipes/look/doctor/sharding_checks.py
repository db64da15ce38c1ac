"""How a chain is divided among workers and ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Mapper, ShardingFilter, Shuffler

from kdpipes.core.chain import Chain, upstream_of
from kdpipes.core.registry import pipe_name
from kdpipes.core.stock import shards
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.layout import group_ranks, ranks_now
from kdpipes.look.doctor.facts import Facts, Finding, dealer_in, draws, upstream

__all__ = [
    "all_to_each_rank",
    "sharded_late",
    "sharded_twice",
    "sharded_unseeded",
    "shuffled_in_parts",
    "unclear_rank",
    "unsharded",
]

_ONE_PROCESS = (("", ""), ("", "1"), ("0", "1"))


def unsharded(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A stream that every worker would give whole."""
    if isinstance(chain, IterDataPipe) and facts.num_workers > 1 and not any(map(shards, Chain.of(chain).pipes)):
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
    for pipe in Chain.of(chain).pipes:
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
    for pipe in Chain.of(chain).pipes:
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
    for pipe in Chain.of(chain).pipes:
        if not isinstance(pipe, ShardingFilter):
            continue
        worker = next((before for before in upstream(pipe) if isinstance(before, Mapper) or draws(before)), None)
        if worker is not None and upstream_of(worker):
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
    for pipe in Chain.of(chain).pipes:
        is_own = shards(pipe) and type(pipe) is not ShardingFilter and not isinstance(pipe, Dealer)
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


def unclear_rank(chain: Any, facts: Facts) -> Iterator[Finding]:
    """Environment variables that name no rank, so that this process takes itself for the only one."""
    named = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    dealer = dealer_in(chain)
    is_for_all = dealer is not None and dealer.is_for_all_ranks
    if named in _ONE_PROCESS or is_for_all or group_ranks() is not None or ranks_now().num_ranks > 1:
        return
    shown = ", ".join(f"{name}={value!r}" if value else f"no {name}" for name, value in zip(_NAMES, named, strict=True))
    yield Finding(
        "unclear-rank",
        "warning",
        pipe_name(chain),
        f"The environment has {shown}, and there is no process group.",
        "That names no rank, so this process takes itself for the only one: every rank gets all samples.",
        "Set both, RANK from 0 to WORLD_SIZE - 1, as torchrun does, or call "
        "`torch.distributed.init_process_group` before the epoch; of a single process, set neither.",
    )


_NAMES = ("RANK", "WORLD_SIZE")


def all_to_each_rank(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A `deal(ranks=1)` on several ranks, where no library that hands batches out to ranks is loaded."""
    dealer, num_ranks = dealer_in(chain), ranks_now().num_ranks
    if dealer is not None and dealer.is_for_all_ranks and num_ranks > 1 and "accelerate" not in sys.modules:
        yield Finding(
            "same-batches",
            "warning",
            "deal",
            f"`deal(ranks=1)` gives each of {num_ranks} ranks all batches.",
            "Accelerate and transformers' Trainer hand them out to ranks, but neither is loaded: all ranks train on "
            "the same batches.",
            "Leave `ranks` out: each rank gets its part.",
        )
