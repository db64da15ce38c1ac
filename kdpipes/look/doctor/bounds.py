"""What bounds a chain that was measured: the kind of work that takes most of its time, or the consumer."""

from __future__ import annotations

from typing import Any

from kdpipes.core.chain import Chain
from kdpipes.look.pipe_kinds import Kind
from kdpipes.look.profile import SENDING, PipeTime, Profile

__all__ = ["bound_of", "kinds_text", "shares_by_kind", "times_behind"]

_NAMES: dict[Kind, str] = {"plan": "the plan", "cache": "the cache", "device": "the device"}  # others as they are
_HARDLY = 0.0005  # the share below which nothing is told


def shares_by_kind(profile: Profile) -> dict[Kind, float]:
    """Return the shares of the pipes, summed up by the kind of their work, the largest first."""
    shares: dict[Kind, float] = {}
    for pipe in profile.pipes:
        shares[pipe.kind] = shares.get(pipe.kind, 0.0) + pipe.share
    return dict(sorted(shares.items(), key=lambda entry: -entry[1]))


def times_behind(first: Any, chain: Any, profile: Profile) -> list[tuple[Any, PipeTime]]:
    """Return the pipes behind `first`, or all where that is None, from the source on, with their times."""
    pipes, times = Chain.of(chain).pipes[::-1], [one for one in profile.pipes if one.pipe != SENDING]
    if len(pipes) != len(times):  # the loader has added pipes of its own
        return []
    start = 0 if first is None else next(place for place, pipe in enumerate(pipes) if pipe is first) + 1
    return list(zip(pipes[start:], times[start:], strict=True))


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
