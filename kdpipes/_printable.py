"""Texts that come from data, such as the names of folders, made fit for what shows them."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return a text with what would steer a terminal, and is no part of UTF-8 or XML, written out.

    >>> printable("a\\x1b[31m"), printable("a\\udcff")
    ('a\\\\x1b[31m', 'a\\\\udcff')
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
