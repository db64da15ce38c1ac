"""What commands print for scripts: JSON."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["json_option", "say_json"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, of the form above, for scripts.")


def say_json(data: Any) -> None:
    """Print plain data as JSON."""
    click.echo(json.dumps(data, indent=2))  # in ASCII: names in data need not be UTF-8
