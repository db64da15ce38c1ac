"""Log lines and warnings, in which secrets and control characters of data are masked."""

from __future__ import annotations

import logging
import warnings

from kdpipes.core.secrets import safe_text
from kdpipes.core.tracebacks import calling_line


class _SafeText(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        safe = safe_text(text)
        if safe != text:
            record.msg = safe
            record.args = ()
        return True


_safe_text = _SafeText()


def logger(name: str) -> logging.Logger:
    """Return the logger with a name. All modules get their loggers from here."""
    named = logging.getLogger(name)
    named.addFilter(_safe_text)
    return named


def warn(text: str) -> None:
    """Issue a warning that points to the line of the user's code."""
    frame, line = calling_line()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    file = frame.f_code.co_filename
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(safe_text(text), UserWarning, file, line, module, registry)


def counted(number: float, unit: str) -> str:
    """Return a number with its unit: "1 batch", "2,000 samples", "3 entries"."""
    plural = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}es" if unit.endswith(("ch", "s")) else f"{unit}s"
    return f"{number:,} {unit if number == 1 else plural}"
