"""What the doctor has found, for people and for scripts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Any

from kdpipes.look.doctor.bounds import kinds_text, shares_by_kind
from kdpipes.look.doctor.finding import Finding, as_plain
from kdpipes.look.doctor.gain import Advice
from kdpipes.look.profile import Profile

__all__ = ["Report"]

_CELL = '<td style="text-align:left">'  # notebooks set numbers, to the right


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
        rows = "".join(
            f"<tr>{_CELL}{escape(one.severity)}</td>{_CELL}<code>{escape(one.code)}</code></td>{_CELL}{escape(one.pipe)}</td>"
            f"{_CELL}{_as_html(f'{one.what} {one.why}')}<br><b>{_as_html(one.way_out)}</b></td></tr>"
            for one in self.findings
        )
        found = f"<table><tbody>{rows}</tbody></table>" if rows else "<p>Nothing is wrong with the chain.</p>"
        found += f"<p>{escape(self._decoders_text())}</p>" if self.decoders else ""
        if self.profile is None:
            return found
        changes = "".join(f"<li>{_as_html(str(one))}</li>" for one in self.advice)
        told = f"{escape(kinds_text(self.profile))}<br>{escape(self._bound_text())}"
        return f"{found}{self.profile._repr_html_()}<p>{told}</p><ul>{changes}</ul>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, fit for JSON; `shares` are those of the chain's time by kind of work."""
        return {
            "is_clean": self.is_clean,
            "findings": [as_plain(finding) for finding in self.findings],
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


def _as_html(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
