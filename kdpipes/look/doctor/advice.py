"""What bounds a chain that was measured, and what one change would help, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kdpipes._graph import walk
from kdpipes.look.doctor.chain_facts import callables_of, draws, operation_of
from kdpipes.look.doctor.finding import Facts
from kdpipes.look.pipe_names import kind_of, pipe_name
from kdpipes.look.profile import Profile

__all__ = ["Advice", "advice", "bound_of"]

_FASTER = 2.0  # times as fast as Pillow are the others with the shipped photos, at the least
_WORTH_IT = 1.1
_BETWEEN = ("rename_fields", "record_ctx", "select")  # neither draw nor take time
_BOUNDS = {
    "source": "storage",
    "plan": "the plan",
    "decoding": "decoding",
    "transforms": "transforms",
    "cache": "the cache",
    "batching": "transfer",
    "sending": "transfer",
    "device": "the device",
}


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


def bound_of(profile: Profile) -> str:
    """Return what bounds: the consumer, or the kind of work that takes most of the chain's time."""
    if profile.bound == "consumer":
        return "the consumer"
    shares = _shares(profile)
    by_bound: dict[str, float] = {}
    for kind, share in shares.items():
        by_bound[_BOUNDS[kind]] = by_bound.get(_BOUNDS[kind], 0.0) + share
    return max(by_bound, key=lambda name: by_bound[name], default="the plan")


def advice(chain: Any, profile: Profile, facts: Facts) -> list[Advice]:
    """Return the changes that are worth it, the best one first.

    A change that saves a share s of the work makes the chain 1 / (1 - s) times as fast; n workers in place of w make it
    n / w times as fast; and neither makes it faster than the loop takes batches. Without workers, the loop's own time
    comes on top.
    """
    if profile.bound == "consumer":
        return []
    found = [*_workers(profile, facts), *_caches(chain, profile), *_decoder(chain, profile, facts)]
    return sorted((one for one in found if one.gain >= _WORTH_IT), key=lambda one: -one.gain)


def _gain(profile: Profile, left: float, *, has_workers: bool) -> float:
    """Return how many times as fast the loop is when a part `left` of the waiting is left."""
    wait_s, consumer_s = profile.wait_s * max(left, 0.01), profile.consumer_s
    loop_s = max(wait_s, consumer_s) if has_workers else wait_s + consumer_s
    return profile.loop_s / loop_s if loop_s else 1.0


def _shares(profile: Profile) -> dict[str, float]:
    shares: dict[str, float] = {}
    for pipe in profile.pipes:
        shares[pipe.kind] = shares.get(pipe.kind, 0.0) + pipe.share
    return shares


def _saved(profile: Profile, share: float) -> float:
    return _gain(profile, 1 - share, has_workers=profile.num_workers > 0)


def _workers(profile: Profile, facts: Facts) -> Iterator[Advice]:
    now, most = max(profile.num_workers, 1), facts.num_cpus
    if most > now:
        why = f"there are {most} processors, and {profile.num_workers} workers"
        yield Advice(f"`num_workers={most}`", _gain(profile, now / most, has_workers=True), why)


def _caches(chain: Any, profile: Profile) -> Iterator[Advice]:
    kinds, shares = {kind_of(pipe) for pipe in walk(chain)}, _shares(profile)
    source, decoding = shares.get("source", 0.0), shares.get("decoding", 0.0)
    if "cache" in kinds:
        return
    fixed = _fixed_share(chain, profile)
    if decoding and fixed:
        why = f"reading, decoding and transforms that draw nothing take {source + decoding + fixed:.0%} of the work"
        place = "behind the last `.transform()` that draws no random numbers"
        yield Advice(f"`.cache_in_memory()` {place}", _saved(profile, source + decoding + fixed), why)
    elif decoding:
        why = f"reading and decoding take {source + decoding:.0%} of the work; later epochs read pixels in their place"
        yield Advice("`.cache_in_memory()` behind `.decode_images()`", _saved(profile, source + decoding), why)
    if source:
        place = "before `.decode_images()`" if decoding else f"behind `{pipe_name(walk(chain)[-1])}`"
        why = f"the source takes {source:.0%} of the work; later epochs read from memory"
        yield Advice(f"`.cache_in_memory()` {place}", _saved(profile, source), why)


def _fixed_share(chain: Any, profile: Profile) -> float:
    """Return the share of the transforms that come right after decoding, as long as they are known to draw nothing."""
    pipes, times = walk(chain)[::-1], [one for one in profile.pipes if one.kind != "sending"]
    if len(pipes) != len(times):  # the loader has added pipes of its own
        return 0.0
    share = 0.0
    for pipe, measured in zip(pipes, times, strict=True):
        if measured.kind != "transforms" or pipe_name(pipe) in _BETWEEN:
            continue
        functions = [function for _, function in callables_of(pipe)]
        if draws(pipe) or not functions or not all(type(one).__module__.startswith("kdpipes.") for one in functions):
            break
        share += measured.share
    return share


def _decoder(chain: Any, profile: Profile, facts: Facts) -> Iterator[Advice]:
    share = _shares(profile).get("decoding", 0.0)
    is_chosen = any(getattr(operation_of(pipe), "_backend", None) == "pillow" for pipe in walk(chain))
    if share and (is_chosen or not facts.fast_decoders):
        change = '`decode_images(backend="auto")`' if facts.fast_decoders else "`pip install 'kdpipes[fast]'`"
        why = f"Pillow's decoding takes {share:.0%} of the work; a fast decoder of JPEGs, half of that or less"
        yield Advice(change, _saved(profile, share * (1 - 1 / _FASTER)), why)
