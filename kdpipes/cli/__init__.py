"""The command line, `kdpipes` or `python -m kdpipes`.

`cache`, `chains`, `data` and `write` hold the commands, each of which calls one public function. To begin with, read
one of them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import click

from kdpipes._version import __version__
from kdpipes.cli._commands import INTERRUPTED, Commands
from kdpipes.cli.cache import cache
from kdpipes.cli.chains import demo, doctor, find, replay, verify
from kdpipes.cli.data import copy, index, inspect
from kdpipes.cli.write import pack, records
from kdpipes.core.secrets import safe_text

__all__ = ["COMMANDS", "main"]


@click.group(cls=Commands, commands=[cache, copy, demo, doctor, find, index, inspect, pack, records, replay, verify])
@click.option("--traceback", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, message="kdpipes %(version)s")
def _kdpipes(traceback: bool) -> None:
    """From image folders and tar shards to batches.

    `kdpipes COMMAND --help` shows the options of a command, and examples.
    """


COMMANDS = _kdpipes.commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    0: success. 1: an error, printed in one line. 2: wrong usage. 130: interrupted.

    Args:
        arguments: The words after `kdpipes`; None takes those of this process.
    """
    path = list(sys.path)
    try:
        status = _kdpipes.main(None if arguments is None else list(arguments), "kdpipes", standalone_mode=False)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        click.echo(safe_text(shown.getvalue()), nl=False, err=True)
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    finally:
        sys.path[:] = path  # `_chain_of.py` adds the folder of a chain's module
    return int(status or 0)
