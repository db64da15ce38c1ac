"""What one change of a chain that was measured would help, and by how much."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kdpipes.core.chain import Chain
from kdpipes.core.pipe import Pipe
from kdpipes.core.randomness import seeded_globals
from kdpipes.look.doctor.bounds import shares_by_kind, times_behind
from kdpipes.look.doctor.cache_advice import cache_advice
from kdpipes.look.doctor.chain_facts import operation_of
from kdpipes.look.doctor.finding import Facts
from kdpipes.look.doctor.gain import Advice, gain, gain_without
from kdpipes.look.profile import Profile

__all__ = ["advice"]

_FASTER = 2.0  # times as fast as Pillow are the others with the shipped photos, at the least
_WORTH_IT = 1.1
_CALLS = 50


def advice(chain: Any, profile: Profile, facts: Facts) -> list[Advice]:
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


def _decoder(chain: Any, profile: Profile, facts: Facts) -> Iterator[Advice]:
    share = shares_by_kind(profile).get("decoding", 0.0)
    is_chosen = any(getattr(operation_of(pipe), "_backend", None) == "pillow" for pipe in Chain.of(chain).pipes)
    if share and (is_chosen or not facts.fast_decoders):
        change = '`decode_images(backend="auto")`' if facts.fast_decoders else "`pip install 'kdpipes[fast]'`"
        why = f"Pillow's decoding takes {share:.0%} of the work; a fast decoder of JPEGs, half of that or less"
        yield Advice(change, gain_without(profile, share * (1 - 1 / _FASTER)), why)


def _seeding(chain: Any, profile: Profile) -> Iterator[Advice]:
    """Yield the change for callables that take less time than the seeding of global generators for them."""
    found = [
        (pipe.traits.seeds if isinstance(pipe, Pipe) else (), measured)
        for pipe, measured in times_behind(None, chain, profile)
    ]
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
