"""Mask secrets of URLs and escape control characters in texts. This module has no heavy imports."""

from __future__ import annotations

import re

HIDDEN = "***"
_USER = re.compile(r"(?<=://)(?:[^/\s:]*:\S*|[^/\s]+)@")  # passwords may contain slashes and @
# Users and passwords of misspelled URLs, such as "redis:/u:pw@host".
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


def printable(text: str, *, keep: str = "") -> str:
    """Return a text with control characters, text direction marks and invalid UTF-8 escaped as in `repr`.

    Data therefore cannot control a terminal, forge a line, or show a name in another order.

    Args:
        text: The text.
        keep: Characters to keep.

    >>> printable("é\\x1b[31m"), printable("a\\u202eb"), printable("a\\udcff")
    ('é\\\\x1b[31m', 'a\\\\u202eb', 'a\\\\udcff')
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in text)


def safe_text(text: str) -> str:
    """Return a text of one or more lines with secrets of URLs masked and control characters escaped."""
    return printable(masked(text) if "://" in text else text, keep="\n\t")
