"""How a chain is divided among workers and ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Mapper, ShardingFilter, Shuffler

from kdpipes.core.chain import Chain
from kdpipes.core.stock import shards
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.layout import group_ranks, ranks_now
from kdpipes.look.doctor.facts import Facts, Finding, before

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


def unsharded(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A stream that every worker would give whole."""
    if isinstance(chain.end.pipe, IterDataPipe) and facts.num_workers > 1 and not any(map(shards, chain.pipes)):
        yield Finding(
            "unsharded",
            "error",
            chain.end.name,
            "Nothing in the chain shards.",
            f"Each of {facts.num_workers} workers would give every sample: all come {facts.num_workers} times.",
            "End it with `.deal(batch_size=...)`, or put `.sharding_filter()` behind its source.",
        )


def sharded_twice(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """Two pipes on one path that both take a part."""
    for node in reversed(chain):
        sharded = [other for other in before(node) if shards(other.pipe)] if shards(node.pipe) else []
        other = next(iter(sharded), None)
        if other is not None:
            yield Finding(
                "sharded-twice",
                "error",
                node.name,
                f"`.{node.name}()` shards what `.{other.name}()` has sharded.",
                "A worker gets a part of its part: samples are lost, or torch refuses the chain.",
                "Keep one of them.",
            )
            return


def shuffled_in_parts(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A shuffle behind the sharding: it mixes what one worker has."""
    if chain.deal is not None:
        return
    for node in reversed(chain):
        if isinstance(node.pipe, Shuffler) and any(isinstance(other.pipe, ShardingFilter) for other in before(node)):
            yield Finding(
                "shuffled-in-parts",
                "warning",
                "shuffle",
                "`.shuffle()` stands behind `.sharding_filter()`.",
                "Each worker shuffles a part that is the same in every epoch, and the order depends on their number.",
                "Put `.shuffle()` before `.sharding_filter()`; or leave both to `.deal(batch_size=..., seed=0)`.",
            )


def sharded_late(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """Work before the sharding: all workers do all of it."""
    for node in reversed(chain):
        if not isinstance(node.pipe, ShardingFilter):
            continue
        working = (other for other in before(node) if isinstance(other.pipe, Mapper) or other.traits.random)
        worker = next(working, None)
        if worker is not None and worker.upstream:
            yield Finding(
                "sharded-late",
                "warning",
                "sharding_filter",
                f"`.sharding_filter()` stands behind `.{worker.name}()`.",
                "Every worker does that for all samples, and throws most of it away: more workers gain nothing.",
                "Put `.sharding_filter()` right behind the source and its `.shuffle()`.",
            )


def sharded_unseeded(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A sharding pipe of one's own behind a shuffle, which torch seeds for `ShardingFilter` alone."""
    for node in reversed(chain):
        pipe = node.pipe
        is_own = shards(pipe) and type(pipe) is not ShardingFilter and not isinstance(pipe, Dealer)
        if is_own and any(isinstance(other.pipe, Shuffler) for other in before(node)):
            yield Finding(
                "sharded-unseeded",
                "error",
                type(pipe).__name__,
                f"`{type(pipe).__name__}` shards what `.shuffle()` gives, and is no `sharding_filter`.",
                "torchdata seeds a shuffle alike in all workers only before exactly that: each worker shuffles "
                "differently, and samples are lost and doubled.",
                "Use `.sharding_filter()`, or `.deal(batch_size=...)`.",
            )


def unclear_rank(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """Environment variables that name no rank, so that this process takes itself for the only one."""
    named = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    is_for_all = chain.deal is not None and chain.deal.pipe.is_for_all_ranks
    if named in _ONE_PROCESS or is_for_all or group_ranks() is not None or ranks_now().num_ranks > 1:
        return
    shown = ", ".join(f"{name}={value!r}" if value else f"no {name}" for name, value in zip(_NAMES, named, strict=True))
    yield Finding(
        "unclear-rank",
        "warning",
        chain.end.name,
        f"The environment has {shown}, and there is no process group.",
        "That names no rank, so this process takes itself for the only one: every rank gets all samples.",
        "Set both, RANK from 0 to WORLD_SIZE - 1, as torchrun does, or call "
        "`torch.distributed.init_process_group` before the epoch; of a single process, set neither.",
    )


_NAMES = ("RANK", "WORLD_SIZE")


def all_to_each_rank(chain: Chain, facts: Facts) -> Iterator[Finding]:
    """A `deal(ranks=1)` on several ranks, where no library that hands batches out to ranks is loaded."""
    num_ranks = ranks_now().num_ranks
    if (
        chain.deal is not None
        and chain.deal.pipe.is_for_all_ranks
        and num_ranks > 1
        and "accelerate" not in sys.modules
    ):
        yield Finding(
            "same-batches",
            "warning",
            "deal",
            f"`deal(ranks=1)` gives each of {num_ranks} ranks all batches.",
            "Accelerate and transformers' Trainer hand them out to ranks, but neither is loaded: all ranks train on "
            "the same batches.",
            "Leave `ranks` out: each rank gets its part.",
        )
