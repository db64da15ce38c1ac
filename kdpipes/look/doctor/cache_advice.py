"""Where a cache would help, or would help more than where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdpipes.core.chain import Chain, upstream_of
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.registry import pipe_name
from kdpipes.look.doctor.bounds import shares_by_kind, times_behind
from kdpipes.look.doctor.chain_facts import callables_of, draws
from kdpipes.look.doctor.finding import Facts
from kdpipes.look.doctor.gain import Advice, gain_without
from kdpipes.look.pipe_kinds import kind_of
from kdpipes.look.profile import PipeTime, Profile

__all__ = ["cache_advice"]

_BETWEEN = ("rename_fields", "record_ctx", "select")  # neither draw nor take time
_PART = 0.5  # of the free shared memory is what a cache takes by default
_BEHIND_DECODING = "behind `.decode_images()`"
_BEHIND_TRANSFORMS = "behind the last `.transform()` that draws no random numbers"


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


def cache_advice(chain: Any, profile: Profile, facts: Facts) -> Iterator[Advice]:
    """Yield where a cache would help; of a chain that has one, where it would help more."""
    cache = next((pipe for pipe in Chain.of(chain).pipes if kind_of(pipe) == "cache"), None)
    spot = _spot(chain, cache, profile, facts)
    if cache is None:
        yield from _new_cache(chain, spot, profile)
    elif spot.decoding + spot.fixed and (spot.has_room or pipe_name(cache) != "cache_in_memory"):
        what = " and ".join([*["decoding"] * bool(spot.decoding), *["transforms that draw nothing"] * bool(spot.fixed)])
        verb = "takes" if what == "decoding" else "take"
        why = f"{what} {verb} {spot.decoding + spot.fixed:.0%} of the work, behind the cache and so in every epoch"
        change = f"move `.{pipe_name(cache)}()` {spot.where}"
        yield Advice(change, gain_without(profile, spot.decoding + spot.fixed), why)


def _new_cache(chain: Any, spot: _Spot, profile: Profile) -> Iterator[Advice]:
    shares = shares_by_kind(profile)
    source, decoding = shares.get("storage", 0.0), shares.get("decoding", 0.0)
    if decoding and spot.has_room:
        share = source + decoding + spot.fixed
        why = f"reading and decoding take {share:.0%} of the work; later epochs read pixels in their place"
        if spot.fixed:
            why = f"reading, decoding and transforms that draw nothing take {share:.0%} of the work"
        yield Advice(f"`.cache_in_memory()` {spot.where}", gain_without(profile, share), why)
    if source:
        place = "before `.decode_images()`" if decoding else f"behind `{pipe_name(Chain.of(chain).pipes[-1])}`"
        why = f"the source takes {source:.0%} of the work; later epochs read from memory"
        yield Advice(f"`.cache_in_memory()` {place}", gain_without(profile, source), why)


def _spot(chain: Any, cache: Any, profile: Profile, facts: Facts) -> _Spot:
    """Return the last place behind the cache and before what draws, or may draw, random numbers."""
    decoding = fixed = 0.0
    last, is_known = None, True
    for pipe, measured in times_behind(cache, chain, profile):
        if draws(pipe):
            break
        if measured.kind == "decoding":
            decoding, last = decoding + measured.share, (pipe, measured)
        elif measured.kind == "transforms" and pipe_name(pipe) not in _BETWEEN:
            is_known = is_known and _is_ours(pipe)
            if is_known and measured.share:
                fixed, last = fixed + measured.share, (pipe, measured)
    has_room = last is None or _has_room(*last, facts)
    return _Spot(_BEHIND_TRANSFORMS if fixed else _BEHIND_DECODING, decoding, fixed, has_room)


def _is_ours(pipe: Any) -> bool:
    """Return whether all callables of a pipe are known: what users' own draw is not seen before they run."""
    functions = [function for _, function in callables_of(pipe)]
    return bool(functions) and all(type(one).__module__.startswith("kdpipes.") for one in functions)


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
