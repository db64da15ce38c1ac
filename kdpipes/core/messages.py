"""Log lines and warnings, in which secrets and control characters of data are masked."""

from __future__ import annotations

import logging
import warnings

from kdpipes.core.secrets import safe_text


class _SafeText(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        safe = safe_text(text)
        if safe != text:
            record.msg, record.args = safe, ()
        return True


_safe_text = _SafeText()


def logger(name: str) -> logging.Logger:
    """Return the logger with a name. All modules get theirs here."""
    named = logging.getLogger(name)
    named.addFilter(_safe_text)
    return named


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Issue a warning, like `warnings.warn`."""
    warnings.warn(safe_text(text), category, stacklevel=stacklevel + 1)
