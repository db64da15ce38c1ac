"""What a check of a chain has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["Finding", "Severity"]

Severity = Literal["error", "warning", "hint"]


class Finding(NamedTuple):
    """One thing that is wrong with a chain, or could be better.

    Args:
        code: Its kind, in a few words: "shuffle-after-batch".
        severity: "error": the data or the run are wrong; "warning": they will be in some set-up, or it is slow for no
            gain; "hint": it could be better.
        pipe: The pipe that it is about.
        what: What there is.
        why: Why that is bad.
        way_out: What to do.
    """

    code: str
    severity: Severity
    pipe: str
    what: str
    why: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.code} ({self.pipe}): {self.what} {self.why}\n    {self.way_out}"


@dataclass(frozen=True)
class Facts:
    """What the checks know of the machine, and of how the chain is to run.

    Args:
        num_workers: How many workers there are to be.
        num_cpus: How many processors this process may use.
        shm_free: How many bytes of shared memory are free; None where there is none.
        fast_decoders: Which decoders of JPEGs are installed that are faster than Pillow's.
    """

    num_workers: int
    num_cpus: int
    shm_free: int | None
    fast_decoders: tuple[str, ...]


def as_plain(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data."""
    return dict(finding._asdict())
