"""`kdpipes replay`."""

from __future__ import annotations

import click

from kdpipes.cli._chain_of import CHAIN_HELP, chain_of
from kdpipes.cli._commands import Answer, Command

__all__ = ["command"]


@click.command(
    "replay",
    cls=Command,
    help=f"""Draw any batch of any epoch.

    The picture shows the original of each sample, with its recorded crops, beside the result. No other batch is made.

    CHAIN is {CHAIN_HELP}. The module is run.

    \b
    Examples:
      kdpipes replay train.py:chain
      kdpipes replay train:chain --epoch 3 --batch 1 --out third.png
      kdpipes replay train:chain --json

    \b
    JSON:
      {{"path": "grid.png", "epoch": 0, "batch": 0}}
    """,
)
@click.argument("chain")
@click.option("--seed", type=int, help="Seed of the epoch.  [default: that of the chain's deal]")
@click.option("--epoch", type=int, default=0, show_default=True, help="Number of the epoch.")
@click.option("--batch", type=int, default=0, show_default=True, help="Number of the batch.")
@click.option("--field", default="x", show_default=True, help="Field of images.")
@click.option("--out", default="grid.png", show_default=True, help="Picture to write.")
def command(chain: str, seed: int | None, epoch: int, batch: int, field: str, out: str) -> Answer:
    """Draw a batch."""
    from kdpipes.look.batch import replay_grid

    replay_grid(chain_of(chain), seed=seed, epoch=epoch, batch=batch, field=field).save(out)
    return Answer({"path": out, "epoch": epoch, "batch": batch}, f"Batch {batch} of epoch {epoch}: {out}")
