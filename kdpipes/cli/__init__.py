"""The command line, `kdpipes` or `python -m kdpipes`: each command is a module here, and a line below.

Modules of commands import the library inside their functions, so that help appears at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kdpipes._version import __version__
from kdpipes.cli._commands import INTERRUPTED, Commands

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "cache": "kdpipes.cli.cache",
    "copy": "kdpipes.cli.copy",
    "demo": "kdpipes.cli.demo",
    "doctor": "kdpipes.cli.doctor",
    "index": "kdpipes.cli.index",
    "inspect": "kdpipes.cli.inspect",
    "pack": "kdpipes.cli.pack",
    "records": "kdpipes.cli.records",
    "replay": "kdpipes.cli.replay",
    "verify": "kdpipes.cli.verify",
}


@click.group(cls=Commands, modules=COMMANDS)
@click.option("--traceback", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, message="kdpipes %(version)s")
def _kdpipes(traceback: bool) -> None:
    """From image folders and tar shards to batches.

    `kdpipes COMMAND --help` shows the options of a command, and examples.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    0: success. 1: an error, printed in one line. 2: wrong usage. 130: interrupted.

    Args:
        arguments: The words after `kdpipes`; None takes those of this process.
    """
    words = None if arguments is None else list(arguments)
    path = list(sys.path)
    try:
        status = _kdpipes.main(words, prog_name="kdpipes", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    finally:
        sys.path[:] = path  # `_chain_of.py` adds the folder of a chain's module
    return int(status or 0)
