"""The bottleneck of a chain that was measured, and the largest possible gain of single changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from kdpipes.core.chain import Chain, Node
from kdpipes.core.randomness import seeded_globals
from kdpipes.look.doctor.rules import Facts, num_different
from kdpipes.look.profile import SENDING, Kind, PipeTime, Profile
from kdpipes.work.decode import ImageDecoder

_NAMES: dict[Kind, str] = {"plan": "the plan", "cache": "the cache", "device": "the device"}  # others as they are
_HARDLY = 0.0005  # the share below which nothing is reported
_FASTER = 2.0  # times as fast as Pillow are the others with the shipped photos, at the least
_WORTH_IT = 1.1
_CALLS = 50
_BETWEEN = ("rename_fields", "record_ctx", "select")  # neither draw nor take time
_PART = 0.5  # of the free shared memory is what a cache takes by default
_LITTLE = 0.05  # the share of the work that a cache must save to be considered


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
    """Yield the place where a cache helps most.

    Reading the cache is taken to cost nothing. A cache may stand after each pipe whose results do not change from
    epoch to epoch, but only the last such place, the one after decoding and the one after the source differ much.
    """
    each = _times(chain, profile)
    caches = [number for number, (node, _) in enumerate(each) if node.traits.role == "cache"]
    cache = each[caches[-1]][0] if caches else None
    is_limited = cache is None or cache.name == "cache_in_memory"
    has_decoder, share = any(one.kind == "decoding" for one in profile.pipes), 0.0
    best: Advice | None = None
    for node, measured in each[caches[-1] + 1 :] if caches else each:
        if node.traits.random or node.traits.role in ("deal", "batch", "device") or node.traits.gives != "samples":
            break
        share += measured.share
        where = ""
        if measured.kind == "transforms" and node.name not in _BETWEEN:
            if node.operation is None or node.operation.drawing():
                break
            where = "after the last `.transform()` that draws no random numbers"
        elif measured.kind == "decoding":
            where = "after `.decode_images()`"
        elif measured.kind == "storage" and cache is None:
            where = "before `.decode_images()`" if has_decoder else f"after `{node.name}`"
        if where and share >= _LITTLE and (not is_limited or _has_room(node.pipe, measured, facts)):
            change = f"`.cache_in_memory()` {where}" if cache is None else f"move `.{cache.name}()` {where}"
            why = f"all up to there takes {share:.0%} of the work, in every epoch"
            best = Advice(change, _gain_without(profile, share), why)  # later places save more
    if best is not None:
        yield best


def _has_room(pipe: Any, measured: PipeTime, facts: Facts) -> bool:
    num_samples = num_different(pipe)
    if facts.shm_free is None or num_samples is None or not measured.calls:
        return True
    return num_samples * measured.num_bytes / measured.calls <= facts.shm_free * _PART
