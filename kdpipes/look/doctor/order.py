"""Rules about the order of pipes, and about how a chain is divided among workers and ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

from kdpipes.core.chain import Chain
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.plan_pipe import PlanPipe
from kdpipes.core.torch_pipes import Mapper, ShardingFilter, Shuffler, UnBatcher
from kdpipes.delivery.layout import ranks_now, unknown_rank
from kdpipes.look.doctor.rules import Facts, Wrong, contents, rule, upstream_nodes
from kdpipes.look.shuffle_quality import shuffle_quality
from kdpipes.work.fields import FieldAdder, Selector

__all__: list[str] = []

_MIXING = ("permute", "mix", "sample_weighted", "shuffle")
_FEW = 256  # samples of an epoch below which its shuffle is not measured
_MANY = 50_000  # of a larger epoch, as many samples are compared


@rule("unseeded-plan", "error")
def unseeded_plan(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A plan that is made again chooses other samples, as in another process."""
    for node in reversed(chain):
        is_cheap = isinstance(node.pipe, PlanPipe) and not any(each.traits.is_remote for each in upstream_nodes(node))
        if is_cheap and len(node.pipe) <= _MANY and not node.pipe.plans_alike():
            yield (
                node.name,
                f"`plan` of `{node.name}` returns other positions when it is called again.",
                "Each process makes the plan for itself: workers, ranks and resumed runs would choose different "
                "samples, so that some are lost and others come twice.",
                "Draw from a generator that is made of a seed and the epoch: `np.random.default_rng([seed, epoch])`.",
            )


@rule("frozen-augmentation", "hint")
def frozen_augmentation(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A cache with `freeze_randomness=True` keeps random results."""
    for node in reversed(chain):
        random = next((other.traits.random for other in upstream_nodes(node) if other.traits.random), None)
        if node.traits.freezes and random is not None:
            yield (
                node.name,
                f"`.{node.name}(freeze_randomness=True)` keeps what `{random}` has drawn.",
                "Every epoch gets the same augmentation.",
                f"For new augmentation in each epoch, put the cache before `{random}`.",
            )


@rule("shuffle-after-batch", "error")
def shuffle_after_batch(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A shuffle mixes whole batches."""
    for shuffler in (node for node in reversed(chain) if isinstance(node.pipe, Shuffler)):
        above = itertools.takewhile(lambda node: not isinstance(node.pipe, UnBatcher), upstream_nodes(shuffler))
        if any(node.traits.role == "deal" for node in above):
            yield (
                "shuffle",
                "`.shuffle()` comes after `.deal()`.",
                "It changes the order of batches, whose samples stay together; and the loader cannot resume there.",
                "Use `deal(shuffle=True)`; on a stream, put `.shuffle()` before `.deal()`.",
            )


@rule("unrecorded-ctx", "warning")
def unrecorded_ctx(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A `select` returns the ctx, but no `record_ctx` comes before the transforms."""
    for node in reversed(chain):
        operation = node.operation
        if not isinstance(operation, Selector) or not (operation.return_ctx or "ctx" in operation.names):
            continue
        recorders = [recorder for recorder in upstream_nodes(node) if recorder.traits.records]
        recorded = (one.name == "record_ctx" for recorder in recorders for one in upstream_nodes(recorder))
        if recorders and not any(recorded):
            first = recorders[-1]
            yield (
                node.name,
                f"`.{node.name}()` returns the ctx, but no `.record_ctx()` comes before `.{first.name}()`.",
                f"What `{first.traits.records}` does is recorded nowhere: the ctx lacks it.",
                f"Put `.record_ctx()` right before `.{first.name}()`.",
            )


@rule("sorted-batches", "warning", runs_chain=True)
def sorted_batches(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A chain that augments, and so trains, is not shuffled, although its source is sorted by class."""
    if chain.deal is None or facts.is_undealt or not any(node.traits.random for node in chain):
        return
    dealer = chain.deal.pipe
    source = chain.deal.pipe.source
    if not isinstance(source, MapPipe) or dealer.is_shuffled or any(node.name in _MIXING for node in Chain.of(source)):
        return
    size = min(dealer.sizes().get("global_batch_size") or 16, 64)
    if len(source) < 2 * size:
        return
    firsts = set(map(str, contents(source, "y", range(size))))
    last = next(map(str, contents(source, "y", range(len(source) - 1, len(source) - 1 - size, -1))), None)
    if len(firsts) == 1 and last is not None and last not in firsts:
        yield (
            "deal",
            "The chain augments, so it trains; but it is not shuffled, and its source is sorted by class.",
            "A batch holds one class, and the model forgets the others meanwhile.",
            "Use `deal(..., shuffle=True, seed=0)`.",
        )


@rule("weak-shuffle", "warning", runs_chain=True)
def weak_shuffle(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A shuffled chain delivers neighbors of the source close to each other."""
    if chain.deal is None or not chain.deal.pipe.is_shuffled or not isinstance(chain.deal.pipe.source, MapPipe):
        return
    if len(chain.deal.pipe.source) < _FEW or "batching" in chain.deal.pipe.sizes():
        return  # batches of like length are meant to keep samples together
    found = shuffle_quality(chain.end.pipe, max_samples=_MANY)
    if not found.is_good:
        yield (
            "deal",
            f"The shuffle is weak: neighbors of the source end up {found.spread:.0%} as far apart as in a full one.",
            "Batches hold samples that lie together in the source, which are often of one class.",
            "Use `shuffle=True`, or a larger `kdp.by_shard(window=...)`; `kdpipes.testing.shuffle_quality(chain)` "
            "measures it.",
        )


@rule("computed-labels", "warning")
def computed_labels(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A plan reads labels that a function computes from samples of a remote source, one request after the other."""
    for node in reversed(chain):
        if not isinstance(node.pipe, PlanPipe) or node.pipe.goes_by == "number":
            continue
        above = upstream_nodes(node)
        makers = [other for other in above if isinstance(other.operation, FieldAdder) and other.operation.name == "y"]
        if makers and any(other.traits.is_remote for other in upstream_nodes(makers[0])):
            yield (
                node.name,
                f"`.{node.name}()` needs the labels of all samples, which `.add_field('y', ...)` computes one by one.",
                "The source is remote: that takes a request for each sample, again whenever the chain is made.",
                "Write the labels into the shards, as members `cls`: those of all samples are read at once.",
            )


@rule("shuffled-in-parts", "warning")
def shuffled_in_parts(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A shuffle after the sharding mixes only what one worker has."""
    for node in reversed(chain) if chain.deal is None else ():
        is_late = isinstance(node.pipe, Shuffler)
        if is_late and any(isinstance(other.pipe, ShardingFilter) for other in upstream_nodes(node)):
            yield (
                "shuffle",
                "`.shuffle()` comes after `.sharding_filter()`.",
                "Each worker shuffles a part that is the same in every epoch, and the order depends on their number.",
                "Put `.shuffle()` before `.sharding_filter()`; or leave both to `.deal(batch_size=..., seed=0)`.",
            )


@rule("sharded-late", "warning")
def sharded_late(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """All workers do the work that comes before the sharding."""
    for node in (node for node in reversed(chain) if isinstance(node.pipe, ShardingFilter)):
        above = upstream_nodes(node)
        worker = next((other for other in above if isinstance(other.pipe, Mapper) or other.traits.random), None)
        if worker is not None and worker.upstream:
            yield (
                "sharding_filter",
                f"`.sharding_filter()` comes after `.{worker.name}()`.",
                "Every worker does that for all samples, and throws most of it away: more workers gain nothing.",
                "Put `.sharding_filter()` right after the source and its `.shuffle()`.",
            )


@rule("unclear-rank", "warning")
def unclear_rank(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """A launcher has started several processes, but their ranks are unknown, so each takes itself for the only one."""
    is_for_all = chain.deal is not None and chain.deal.pipe.is_for_all_ranks
    problem = unknown_rank()
    if problem is not None and not is_for_all:
        yield chain.end.name, *problem


@rule("same-batches", "warning")
def all_to_each_rank(chain: Chain, facts: Facts) -> Iterator[Wrong]:
    """`deal(ranks=1)` on several ranks, but no library is loaded that splits batches between ranks."""
    num_ranks = ranks_now().num_ranks
    is_for_all = chain.deal is not None and chain.deal.pipe.is_for_all_ranks
    if is_for_all and num_ranks > 1 and "accelerate" not in sys.modules:
        yield (
            "deal",
            f"`deal(ranks=1)` gives each of {num_ranks} ranks all batches.",
            "Accelerate and transformers' Trainer split them between ranks, but neither is loaded: all ranks train on "
            "the same batches.",
            "Leave `ranks` out: each rank gets its part.",
        )
