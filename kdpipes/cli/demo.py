"""`kdpipes demo`."""

from __future__ import annotations

import click

from kdpipes.cli._commands import Command

__all__ = ["command"]


@click.command("demo", cls=Command)
@click.option("--output", default="kdpipes-demo", show_default=True, help="Folder for photos and picture.")
@click.option("--num-workers", type=int, default=2, show_default=True, help="Worker processes.")
@click.option("--num-epochs", type=int, default=2, show_default=True, help="Epochs.")
def command(output: str, num_workers: int, num_epochs: int) -> None:
    """Run the main job on the shipped photos.

    Writes 160 photos as an image folder and as tar shards, runs one chain on both (a class filter, oversampling,
    recorded random crops, shuffled batches), and draws a batch: each photo with its crop, and the result.

    \b
    Examples:
      kdpipes demo
      kdpipes demo --output try --num-workers 0 --num-epochs 1
    """
    from kdpipes.demo import run_demo

    run_demo(output, num_workers=num_workers, num_epochs=num_epochs)
