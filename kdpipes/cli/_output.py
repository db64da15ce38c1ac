"""What commands print for scripts: JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from kdpipes.core.masked import masked

__all__ = ["json_option", "say_json"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, of the form above, for scripts.")


def say_json(data: Any) -> None:
    """Print plain data as JSON, with secrets in URLs masked."""
    click.echo(json.dumps(_masked(data), indent=2))  # in ASCII: names in data need not be UTF-8


def _masked(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _masked(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_masked(value) for value in data]
    return masked(data) if isinstance(data, str) and "://" in data else data
