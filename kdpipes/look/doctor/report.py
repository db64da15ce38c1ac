"""What the doctor has found, for people and for scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdpipes.look.doctor.advice import Advice, kinds_text, shares_by_kind
from kdpipes.look.doctor.facts import Finding
from kdpipes.look.html import render
from kdpipes.look.profile import Profile

__all__ = ["Report"]


@dataclass(frozen=True, repr=False)
class Report:
    """What is wrong with a chain, what bounds it, and what to change: prints as text, shows as HTML in notebooks.

    Args:
        findings: What is wrong, or could be better, the worst first.
        profile: Where the time goes; None if that was not measured.
        bound: What bounds the chain: "storage", "decoding", "transforms", "transfer", "the consumer", ...
        advice: The changes that would help, the best one first, each alone.
        decoders: What decodes the JPEGs of `decode_images`, and in which version.
    """

    findings: tuple[Finding, ...]
    profile: Profile | None = None
    bound: str | None = None
    advice: tuple[Advice, ...] = ()
    decoders: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong: there may be hints."""
        return all(finding.severity == "hint" for finding in self.findings)

    def __repr__(self) -> str:
        lines = [str(finding) for finding in self.findings] or ["Nothing is wrong with the chain."]
        lines += [self._decoders_text()] if self.decoders else []
        if self.profile is not None:
            lines += ["", str(self.profile), kinds_text(self.profile), self._bound_text()]
            lines += [f"  {one}" for one in self.advice]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        decoders = self._decoders_text() if self.decoders else ""
        if self.profile is None:
            return render("report", self.findings, decoders, "", [], [])
        sentences, advice = [kinds_text(self.profile), self._bound_text()], [str(one) for one in self.advice]
        return render("report", self.findings, decoders, self.profile._repr_html_(), sentences, advice)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, fit for JSON; `shares` are those of the chain's time by kind of work."""
        return {
            "is_clean": self.is_clean,
            "findings": [finding._asdict() for finding in self.findings],
            "decoders": list(self.decoders),
            "bound": self.bound,
            "shares": None if self.profile is None else shares_by_kind(self.profile),
            "advice": [one._asdict() for one in self.advice],
            "profile": None if self.profile is None else self.profile.to_dict(),
        }

    def _decoders_text(self) -> str:
        return f"JPEGs are decoded by {' and '.join(self.decoders)}."

    def _bound_text(self) -> str:
        if self.bound == "the consumer":
            return "What bounds is the consumer: no change of the chain would help."
        best = " What would help, each alone:" if self.advice else ""
        return f"What bounds is {self.bound}.{best}"
