"""How much faster a loop gets that waits less."""

from __future__ import annotations

from typing import NamedTuple

from kdpipes.look.profile import Profile

__all__ = ["Advice", "gain", "gain_without"]


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
