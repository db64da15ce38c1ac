"""Texts that are safe to show: without secrets and control characters.

This module imports nothing heavy, because commands and errors need it.
"""

from __future__ import annotations

import re

__all__ = ["HIDDEN", "masked", "printable"]

HIDDEN = "***"
_USER = re.compile(r"(?<=://)(?:[^/\s:]*:\S*|[^/\s]+)@")  # passwords may contain slashes and @
# Users and passwords of misspelt URLs, such as "redis:/u:pw@host".
_LIKE_USER = re.compile(r"(?<![^\s/:'\"])[^\s/:@'\"]*:[^\s/@'\"]+@(?=[\w\[])")
_QUERY = re.compile(r"(?<=\?)[\w.%-]+=[^\s'\"#]*")
_ASSIGNED = re.compile(
    r"\b([\w-]*(?:passw|passphrase|pwd|secret|token|credential|signature|key)[\w-]*|sig)(=|:\s*)[^\s&'\",;]+", re.I
)
_HEADER = re.compile(r"\b(Authorization:\s*)(?:(\w+)\s+)?[^\s'\"]+|\b(Cookie:\s*)[^'\"\n]+", re.I)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[^\s'\"]+", re.I)
_KEY_FILE = re.compile(r"(?<=PRIVATE KEY-----).+?(?=-----END|\Z)", re.S)


def masked(text: str) -> str:
    """Return a text in which the users, passwords and queries of URLs, tokens and keys are masked.

    >>> masked("redis://:hunter2@host/0"), masked("https://host/a.tar?X-Amz-Signature=1f")
    ('redis://***@host/0', 'https://host/a.tar?***')
    """
    text = _LIKE_USER.sub(f"{HIDDEN}@", _USER.sub(f"{HIDDEN}@", text))
    if "://" in text:
        text = _QUERY.sub(HIDDEN, text)
    text = _HEADER.sub(_masked_header, _ASSIGNED.sub(rf"\1\2{HIDDEN}", _KEY_FILE.sub(HIDDEN, text)))
    return _BEARER.sub(rf"\1 {HIDDEN}", text)


def _masked_header(found: re.Match[str]) -> str:
    begins, kind, cookie = found.groups()
    return f"{cookie or begins}{f'{kind} ' if kind else ''}{HIDDEN}"


def printable(text: str) -> str:
    """Return a text with its control characters and invalid UTF-8 escaped, so that it cannot control a terminal.

    >>> printable("a\\x1b[31m"), printable("a\\udcff")
    ('a\\\\x1b[31m', 'a\\\\udcff')
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
