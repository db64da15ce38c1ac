"""What commands print: JSON for scripts, and lines for people."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["json_option", "printable", "say_json"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, of the form above, for scripts.")


def say_json(data: Any) -> None:
    """Print plain data as JSON."""
    click.echo(json.dumps(data, indent=2))  # in ASCII: names in data need not be UTF-8


def printable(text: str) -> str:
    """Return a text that comes from data with what would steer a terminal written out.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
