"""The bottleneck of a chain that was measured, and the largest possible gain of single changes."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdpipes.core.chain import Chain, Node
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.messages import logger
from kdpipes.core.randomness import SampleKey, seeded_globals, using_key
from kdpipes.core.sample import Sample
from kdpipes.delivery import meter
from kdpipes.look.doctor.rules import Facts, callables_of, num_different
from kdpipes.look.doctor.work import is_same
from kdpipes.look.profile import SENDING, Kind, PipeTime, Profile
from kdpipes.work.adapters import AlbumentationsAdapter, TorchvisionAdapter
from kdpipes.work.decode import ImageDecoder
from kdpipes.work.image_ops import Drawn
from kdpipes.work.joint import JointTransform
from kdpipes.work.on_error import OnError
from kdpipes.work.transform import Transformer

_NAMES: dict[Kind, str] = {"plan": "the plan", "cache": "the cache", "device": "the device"}  # others as they are
_HARDLY = 0.0005  # the share below which nothing is reported
_FASTER = 2.0  # times as fast as Pillow are the others with the shipped photos, at the least
_WORTH_IT = 1.1
_CALLS = 50
# The traits of these declare whether they draw random numbers.
_OURS = (Transformer, OnError, Drawn, JointTransform, AlbumentationsAdapter, TorchvisionAdapter)
_BETWEEN = ("rename_fields", "record_ctx", "select")  # neither draw nor take time
_PART = 0.5  # of the free shared memory is what a cache takes by default
_LITTLE = 0.05  # the share of the work that a cache must save to be tried
_NUM_TRIED = 16  # samples on which a cache is tried
_TIMES = 2
_SEEDS = 6
_log = logger("kdpipes")


class Advice(NamedTuple):
    """One change, and its largest possible gain.

    Args:
        change: What to do.
        gain: The samples per second, as a multiple of those now.
        why: The figures behind it.
    """

    change: str
    gain: float
    why: str

    def __str__(self) -> str:
        return f"{self.gain:.1f} times as fast: {self.change} ({self.why})"


def _gain(profile: Profile, left: float, *, has_workers: bool) -> float:
    """Return the speedup of the loop if only a share `left` of its waiting remains."""
    wait_s, consumer_s = profile.wait_s * max(left, 0.01), profile.consumer_s
    loop_s = max(wait_s, consumer_s) if has_workers else wait_s + consumer_s
    return profile.loop_s / loop_s if loop_s else 1.0


def _gain_without(profile: Profile, share: float) -> float:
    """Return the speedup of the loop without a share of the work."""
    return _gain(profile, 1 - share, has_workers=profile.num_workers > 0)


def shares_by_kind(profile: Profile) -> dict[Kind, float]:
    """Return the shares of the pipes, summed up by the kind of their work, the largest first."""
    shares: dict[Kind, float] = {}
    for pipe in profile.pipes:
        shares[pipe.kind] = shares.get(pipe.kind, 0.0) + pipe.share
    return dict(sorted(shares.items(), key=lambda entry: -entry[1]))


def _times(chain: Chain, profile: Profile) -> list[tuple[Node, PipeTime]]:
    """Return the pipes with their times, the source first; nothing if the loader has added pipes of its own."""
    times = [one for one in profile.pipes if one.pipe != SENDING]
    return list(zip(chain, times, strict=True)) if len(chain) == len(times) else []


def bound_of(profile: Profile) -> str:
    """Return the bottleneck: the consumer, or the kind of work that takes most of the chain's time."""
    if profile.bound == "consumer":
        return "the consumer"
    kind: Kind = next(iter(shares_by_kind(profile)), "plan")
    return _NAMES.get(kind, kind)


def kinds_text(profile: Profile) -> str:
    """Return the shares of each kind of work in the chain's time, with the pipes that do it."""
    parts = []
    for kind, share in shares_by_kind(profile).items():
        names = [pipe.pipe for pipe in profile.pipes if pipe.kind == kind and pipe.share >= _HARDLY]
        if share >= _HARDLY:
            parts.append(f"{_NAMES.get(kind, kind)} {share:.1%} ({', '.join(dict.fromkeys(names))})")
    busy = profile.consumer_s / profile.loop_s if profile.loop_s else 0.0
    return f"By kind of work: {', '.join(parts) or 'nothing'}. The consumer was busy for {busy:.0%} of the loop."


def advice(chain: Chain, profile: Profile, facts: Facts) -> list[Advice]:
    """Return the changes that are worth it, the best one first.

    A change that saves a share s of the work makes the chain 1 / (1 - s) times as fast; n workers in place of w make it
    n / w times as fast; and neither makes it faster than the loop takes batches. Without workers, the loop's own time
    comes on top.
    """
    if profile.bound == "consumer":
        return []
    found = [
        *_workers(profile, facts),
        *_cache(chain, profile, facts),
        *_decoder(chain, profile, facts),
        *_seeding(chain, profile),
    ]
    return sorted((one for one in found if one.gain >= _WORTH_IT), key=lambda one: -one.gain)


def _workers(profile: Profile, facts: Facts) -> Iterator[Advice]:
    now, most = max(profile.num_workers, 1), facts.num_cpus
    if most > now:
        why = f"there are {most} processors, and {profile.num_workers} workers"
        yield Advice(f"`num_workers={most}`", _gain(profile, now / most, has_workers=True), why)


def _decoder(chain: Chain, profile: Profile, facts: Facts) -> Iterator[Advice]:
    share = shares_by_kind(profile).get("decoding", 0.0)
    is_chosen = any(decoder.backend == "pillow" for decoder in chain.operations(ImageDecoder))
    if share and (is_chosen or not facts.fast_decoders):
        change = '`decode_images(backend="auto")`' if facts.fast_decoders else "`pip install 'kdpipes[fast]'`"
        why = f"Pillow's decoding takes {share:.0%} of the work; a fast decoder of JPEGs, half of that or less"
        yield Advice(change, _gain_without(profile, share * (1 - 1 / _FASTER)), why)


def _seeding(chain: Chain, profile: Profile) -> Iterator[Advice]:
    """Yield the change for callables that draw from the global generators, which are seeded for each call."""
    each = _times(chain, profile)
    found = [(node.operation.drawing(), measured) for node, measured in each if node.operation is not None]
    names = [name for names, _ in found for name in names]
    total = sum(one.seconds for one in profile.pipes)
    if names and total:
        begin = time.perf_counter()
        for number in range(_CALLS):
            with seeded_globals(number.to_bytes(8, "little")):
                pass
        each_s = (time.perf_counter() - begin) / _CALLS
        share = sum(min(each_s * len(names) * one.calls, one.seconds) for names, one in found) / total
        parts = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        change = f"a parameter `rng` for {parts}, to draw from it"
        why = f"the global generators are seeded for each call, which takes {share:.0%} of the work"
        yield Advice(change, _gain_without(profile, share), why)


def _cache(chain: Chain, profile: Profile, facts: Facts) -> Iterator[Advice]:
    """Yield the place where a cache helps most, with the gain that was measured there.

    A cache may stand after each pipe whose results do not change from epoch to epoch, but only the last such place, the
    one after decoding and the one after the source differ much.
    """
    each = _times(chain, profile)
    caches = [number for number, (node, _) in enumerate(each) if node.traits.role == "cache"]
    cache = each[caches[-1]][0] if caches else None
    is_limited = cache is None or cache.name == "cache_in_memory"
    has_decoder, share = any(one.kind == "decoding" for one in profile.pipes), 0.0
    last: dict[str, tuple[Node, float]] = {}  # by the place in words: the pipe, and the share of the work up to it
    for node, measured in each[caches[-1] + 1 :] if caches else each:
        if node.traits.random or node.traits.role in ("deal", "batch", "device") or node.traits.gives != "samples":
            break
        share += measured.share
        where = ""
        if measured.kind == "transforms" and node.name not in _BETWEEN:
            functions = [function for _, function in callables_of(node)]
            is_ours = bool(functions) and all(isinstance(one, _OURS) for one in functions)
            if not is_ours and not _is_fixed(node.pipe):
                break
            where = "after the last `.transform()` that draws no random numbers"
        elif measured.kind == "decoding":
            where = "after `.decode_images()`"
        elif measured.kind == "storage" and cache is None:
            where = "before `.decode_images()`" if has_decoder else f"after `{node.name}`"
        if where and share >= _LITTLE and (not is_limited or _has_room(node.pipe, measured, facts)):
            last[where] = node, share
    found = []
    for where, (node, share) in last.items():
        change = f"`.cache_in_memory()` {where}" if cache is None else f"move `.{cache.name}()` {where}"
        why = f"all up to there takes {share:.0%} of the work, in every epoch; measured on a few samples"
        found.append(Advice(change, _measured_gain(chain, node, share, profile), why))
    yield from sorted(found, key=lambda one: -one.gain)[:1]


def _measured_gain(chain: Chain, place: Node, share: float, profile: Profile) -> float:
    """Return the speedup of the loop by a cache after a pipe, as measured on a few samples.

    If the samples cannot be made one by one, as in a stream, reading the cache is taken to cost nothing.
    """
    end = chain.deal.upstream[0] if chain.deal is not None else chain.end
    path = Chain.of(end.pipe).path()
    made = {id(node.pipe): measured for node, measured in _times(chain, profile)}
    whole = sum(made[id(node.pipe)].share for node in path if id(node.pipe) in made)
    if not isinstance(end.pipe, MapPipe) or not any(node.pipe is place.pipe for node in path):
        return _gain_without(profile, share)
    cached = place.pipe.cache_in_memory()
    changed = _replaced(end.pipe, place.pipe, cached)
    places = np.linspace(0, len(end.pipe) - 1, min(len(end.pipe), _NUM_TRIED)).astype(int).tolist()
    try:
        _seconds(changed, places)  # fills the cache
        before, after = (min(_seconds(pipe, places) for _ in range(_TIMES)) for pipe in (end.pipe, changed))
    except Exception as error:  # a user's code may raise anything, and a cache may reject what they return
        _log.debug("A cache after %s cannot be tried: %s", place.name, error)
        return 0.0
    # On a few samples, a cache may save more than those pipes take in the loop, where sending comes on top.
    return _gain_without(profile, min(whole * (1 - after / before), share)) if before else 1.0


def _replaced(end: Any, old: Any, new: Any) -> Any:
    """Return a copy of the pipes downstream of `old` that reads from `new` in its place."""
    if end is old:
        return new
    made = copy.copy(end)
    for name, value in vars(end).items():
        if value is old or (isinstance(value, MapPipe) and old in Chain.of(value)):
            vars(made)[name] = _replaced(value, old, new)
        elif isinstance(value, tuple) and any(isinstance(part, MapPipe) for part in value):
            vars(made)[name] = tuple(_replaced(part, old, new) if old in Chain.of(part) else part for part in value)
    return made


def _seconds(pipe: MapPipe, positions: Sequence[int]) -> float:
    """Return how long it takes to make some samples."""
    begin = meter.clock()
    for position in positions:
        with using_key(SampleKey(position=position)):
            _load(pipe[position])
    return meter.clock() - begin


def _load(item: Any) -> Any:
    return dict(item) if isinstance(item, Sample) else item


def _is_fixed(pipe: Any) -> bool:
    """Return whether a sample is the same for other seeds: whether users' functions draw shows only when they run."""
    if not isinstance(pipe, MapPipe) or not len(pipe):
        return False
    made = []
    try:
        for seed in range(_SEEDS):
            with using_key(SampleKey(seed=seed)):
                made.append(_load(pipe[0]))
    except Exception as error:  # a user's code may raise anything
        _log.debug("The first sample cannot be made: %s", error)
        return False
    return all(is_same(made[0], other) for other in made[1:])


def _has_room(pipe: Any, measured: PipeTime, facts: Facts) -> bool:
    num_samples = num_different(pipe)
    if facts.shm_free is None or num_samples is None or not measured.calls:
        return True
    return num_samples * measured.num_bytes / measured.calls <= facts.shm_free * _PART
