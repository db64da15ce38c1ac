"""The command line: `kdpipes demo`, or `python -m kdpipes demo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kdpipes.demo import run_demo

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kdpipes", description="From image folders and tar shards to batches.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run the main job on the shipped photos")
    demo.add_argument("--output", default="kdpipes-demo", help="folder for photos and picture (default: %(default)s)")
    demo.add_argument("--num-workers", type=int, default=2, help="worker processes (default: %(default)s)")
    demo.add_argument("--num-epochs", type=int, default=2, help="epochs (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status."""
    given = _parser().parse_args(arguments)
    run_demo(given.output, num_workers=given.num_workers, num_epochs=given.num_epochs)
    return 0
