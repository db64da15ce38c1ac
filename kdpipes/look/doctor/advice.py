"""What bounds a chain that was measured, and how much one change of it would help at the most."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from kdpipes.core.chain import Chain, Node, upstream_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.randomness import seeded_globals
from kdpipes.look.doctor.facts import Facts, callables_of
from kdpipes.look.profile import SENDING, Kind, PipeTime, Profile
from kdpipes.work.adapters import AlbumentationsAdapter, TorchvisionAdapter
from kdpipes.work.decode import ImageDecoder
from kdpipes.work.image_ops import Drawn
from kdpipes.work.joint import JointTransform
from kdpipes.work.on_error import OnError
from kdpipes.work.transform import Transformer

__all__ = ["Advice", "advice", "bound_of", "kinds_text", "shares_by_kind"]

_NAMES: dict[Kind, str] = {"plan": "the plan", "cache": "the cache", "device": "the device"}  # others as they are
_HARDLY = 0.0005  # the share below which nothing is told
_FASTER = 2.0  # times as fast as Pillow are the others with the shipped photos, at the least
_WORTH_IT = 1.1
_CALLS = 50
_OURS = (Transformer, OnError, Drawn, JointTransform, AlbumentationsAdapter, TorchvisionAdapter)
_BETWEEN = ("rename_fields", "record_ctx", "select")  # neither draw nor take time
_PART = 0.5  # of the free shared memory is what a cache takes by default
_BEHIND_DECODING = "behind `.decode_images()`"
_BEHIND_TRANSFORMS = "behind the last `.transform()` that draws no random numbers"


class Advice(NamedTuple):
    """One change, and what it would gain at the most.

    Args:
        change: What to do.
        gain: How many times as many samples per second, at the most.
        why: What that is reckoned from.
    """

    change: str
    gain: float
    why: str

    def __str__(self) -> str:
        return f"up to {self.gain:.1f} times as fast: {self.change} ({self.why})"


def gain(profile: Profile, left: float, *, has_workers: bool) -> float:
    """Return how many times as fast the loop is when a part `left` of the waiting is left."""
    wait_s, consumer_s = profile.wait_s * max(left, 0.01), profile.consumer_s
    loop_s = max(wait_s, consumer_s) if has_workers else wait_s + consumer_s
    return profile.loop_s / loop_s if loop_s else 1.0


def gain_without(profile: Profile, share: float) -> float:
    """Return how many times as fast the loop is without a share of the work."""
    return gain(profile, 1 - share, has_workers=profile.num_workers > 0)


def shares_by_kind(profile: Profile) -> dict[Kind, float]:
    """Return the shares of the pipes, summed up by the kind of their work, the largest first."""
    shares: dict[Kind, float] = {}
    for pipe in profile.pipes:
        shares[pipe.kind] = shares.get(pipe.kind, 0.0) + pipe.share
    return dict(sorted(shares.items(), key=lambda entry: -entry[1]))


def times_behind(first: Node | None, chain: Chain, profile: Profile) -> list[tuple[Node, PipeTime]]:
    """Return the pipes behind `first`, or all where that is None, from the source on, with their times."""
    nodes, times = list(chain), [one for one in profile.pipes if one.pipe != SENDING]
    if len(nodes) != len(times):  # the loader has added pipes of its own
        return []
    start = 0 if first is None else nodes.index(first) + 1
    return list(zip(nodes[start:], times[start:], strict=True))


def bound_of(profile: Profile) -> str:
    """Return what bounds: the consumer, or the kind of work that takes most of the chain's time."""
    if profile.bound == "consumer":
        return "the consumer"
    kind: Kind = next(iter(shares_by_kind(profile)), "plan")
    return _NAMES.get(kind, kind)


def kinds_text(profile: Profile) -> str:
    """Return how much of the chain's time each kind of work takes, and of which pipes that is the sum."""
    told = [
        f"{_NAMES.get(kind, kind)} {share:.1%} ({_pipes_of(profile, kind)})"
        for kind, share in shares_by_kind(profile).items()
        if share >= _HARDLY
    ]
    busy = profile.consumer_s / profile.loop_s if profile.loop_s else 0.0
    return f"By kind of work: {', '.join(told) or 'nothing'}. The consumer was busy for {busy:.0%} of the loop."


def _pipes_of(profile: Profile, kind: Kind) -> str:
    names = [pipe.pipe for pipe in profile.pipes if pipe.kind == kind and pipe.share >= _HARDLY]
    return ", ".join(dict.fromkeys(names))


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
        *cache_advice(chain, profile, facts),
        *_decoder(chain, profile, facts),
        *_seeding(chain, profile),
    ]
    return sorted((one for one in found if one.gain >= _WORTH_IT), key=lambda one: -one.gain)


def _workers(profile: Profile, facts: Facts) -> Iterator[Advice]:
    now, most = max(profile.num_workers, 1), facts.num_cpus
    if most > now:
        why = f"there are {most} processors, and {profile.num_workers} workers"
        yield Advice(f"`num_workers={most}`", gain(profile, now / most, has_workers=True), why)


def _decoder(chain: Chain, profile: Profile, facts: Facts) -> Iterator[Advice]:
    share = shares_by_kind(profile).get("decoding", 0.0)
    is_chosen = any(decoder.backend == "pillow" for decoder in chain.operations(ImageDecoder))
    if share and (is_chosen or not facts.fast_decoders):
        change = '`decode_images(backend="auto")`' if facts.fast_decoders else "`pip install 'kdpipes[fast]'`"
        why = f"Pillow's decoding takes {share:.0%} of the work; a fast decoder of JPEGs, half of that or less"
        yield Advice(change, gain_without(profile, share * (1 - 1 / _FASTER)), why)


def _seeding(chain: Chain, profile: Profile) -> Iterator[Advice]:
    """Yield the change for callables that take less time than the seeding of global generators for them."""
    found = [(node.traits.seeds, measured) for node, measured in times_behind(None, chain, profile)]
    names = [name for names, _ in found for name in names]
    total = sum(one.seconds for one in profile.pipes)
    if names and total:
        each = _seconds_of_seeding()
        share = sum(min(each * len(names) * one.calls, one.seconds) for names, one in found) / total
        told = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        change = f"a parameter `rng` for {told}, or `is_random = False`, if nothing is drawn"
        why = f"the global generators are seeded for each call, which takes {share:.0%} of the work"
        yield Advice(change, gain_without(profile, share), why)


def _seconds_of_seeding() -> float:
    begin = time.perf_counter()
    for number in range(_CALLS):
        with seeded_globals(number.to_bytes(8, "little")):
            pass
    return (time.perf_counter() - begin) / _CALLS


class _Spot(NamedTuple):
    """The last place where a cache may stand that keeps more than it does now.

    Args:
        where: Behind which pipe.
        decoding: The share of the decoding before it that no cache saves.
        fixed: The share of the transforms before it.
        has_room: Whether what it would keep fits into memory, as far as that is known.
    """

    where: str
    decoding: float
    fixed: float
    has_room: bool


def cache_advice(chain: Chain, profile: Profile, facts: Facts) -> Iterator[Advice]:
    """Yield where a cache would help; of a chain that has one, where it would help more."""
    cache = next((node for node in reversed(chain) if node.traits.role == "cache"), None)
    spot = _spot(chain, cache, profile, facts)
    if cache is None:
        yield from _new_cache(chain, spot, profile)
    elif spot.decoding + spot.fixed and (spot.has_room or cache.name != "cache_in_memory"):
        what = " and ".join([*["decoding"] * bool(spot.decoding), *["transforms that draw nothing"] * bool(spot.fixed)])
        verb = "takes" if what == "decoding" else "take"
        why = f"{what} {verb} {spot.decoding + spot.fixed:.0%} of the work, behind the cache and so in every epoch"
        change = f"move `.{cache.name}()` {spot.where}"
        yield Advice(change, gain_without(profile, spot.decoding + spot.fixed), why)


def _new_cache(chain: Chain, spot: _Spot, profile: Profile) -> Iterator[Advice]:
    shares = shares_by_kind(profile)
    source, decoding = shares.get("storage", 0.0), shares.get("decoding", 0.0)
    if decoding and spot.has_room:
        share = source + decoding + spot.fixed
        why = f"reading and decoding take {share:.0%} of the work; later epochs read pixels in their place"
        if spot.fixed:
            why = f"reading, decoding and transforms that draw nothing take {share:.0%} of the work"
        yield Advice(f"`.cache_in_memory()` {spot.where}", gain_without(profile, share), why)
    if source:
        place = "before `.decode_images()`" if decoding else f"behind `{next(iter(chain)).name}`"
        why = f"the source takes {source:.0%} of the work; later epochs read from memory"
        yield Advice(f"`.cache_in_memory()` {place}", gain_without(profile, source), why)


def _spot(chain: Chain, cache: Node | None, profile: Profile, facts: Facts) -> _Spot:
    """Return the last place behind the cache and before what draws, or may draw, random numbers."""
    decoding = fixed = 0.0
    last, is_known = None, True
    for node, measured in times_behind(cache, chain, profile):
        if node.traits.random:
            break
        if measured.kind == "decoding":
            decoding, last = decoding + measured.share, (node.pipe, measured)
        elif measured.kind == "transforms" and node.name not in _BETWEEN:
            is_known = is_known and _is_ours(node)
            if is_known and measured.share:
                fixed, last = fixed + measured.share, (node.pipe, measured)
    has_room = last is None or _has_room(*last, facts)
    return _Spot(_BEHIND_TRANSFORMS if fixed else _BEHIND_DECODING, decoding, fixed, has_room)


def _is_ours(node: Node) -> bool:
    """Return whether all callables are kdpipes' own: whether users' callables draw is unknown before they run."""
    functions = [function for _, function in callables_of(node)]
    return bool(functions) and all(isinstance(one, _OURS) for one in functions)


def _has_room(pipe: Any, measured: PipeTime, facts: Facts) -> bool:
    num_samples = _num_different(pipe)
    if facts.shm_free is None or num_samples is None or not measured.calls:
        return True
    return num_samples * measured.num_bytes / measured.calls <= facts.shm_free * _PART


def _num_different(pipe: Any) -> int | None:
    """Return how many samples a pipe gives at the most, each counted once; None where that is not known."""
    lengths = []
    while isinstance(pipe, MapPipe):
        lengths.append(len(pipe))
        before = upstream_of(pipe)
        pipe = before[0] if len(before) == 1 else None
    return min(lengths, default=None)
