"""`kdpipes demo`."""

from __future__ import annotations

import contextlib
import sys

import click

from kdpipes.cli._commands import Answer, Command, wants_json

__all__ = ["command"]


@click.command("demo", cls=Command)
@click.option("--output", default="kdpipes-demo", show_default=True, help="Folder for photos and picture.")
@click.option("--num-workers", type=int, default=2, show_default=True, help="Worker processes.")
@click.option("--num-epochs", type=int, default=2, show_default=True, help="Epochs.")
def command(output: str, num_workers: int, num_epochs: int) -> Answer:
    """Run the main job on the shipped photos.

    Writes 160 photos as an image folder and as tar shards, runs one chain on both (a class filter, oversampling,
    recorded random crops, shuffled batches), and draws a batch: each photo with its crop, and the result.

    \b
    Examples:
      kdpipes demo
      kdpipes demo --output try --num-workers 0 --num-epochs 1
      kdpipes demo --output try --num-epochs 1 --json

    \b
    JSON:
      {"path": "kdpipes-demo/batch.png"}
      path: the picture. What the demo reports goes to stderr.
    """
    from kdpipes.demo import run_demo

    with contextlib.redirect_stdout(sys.stderr) if wants_json() else contextlib.nullcontext():
        picture = run_demo(output, num_workers=num_workers, num_epochs=num_epochs)
    return Answer({"path": str(picture)}, [])
