"""`kdpipes records`."""

from __future__ import annotations

import click

from kdpipes.cli._chain_of import CHAIN_HELP, samples_of
from kdpipes.cli._commands import Answer, Command

__all__ = ["command"]

_LISTS = (".txt", ".csv")


@click.command(
    "records",
    cls=Command,
    help=f"""Write samples into LMDB record files.

    SOURCE is a folder of images, one folder for each class; a .txt or .csv list with a path and a label in each line;
    or a chain of samples, {CHAIN_HELP}, whose module is run. FOLDER is a local folder. To resume an interrupted run,
    call it again in the same way.

    \b
    Examples:
      kdpipes records photos records
      kdpipes records photos by-two --num-parts 2 --seed 3 --num-workers 2 --json
      kdpipes records train.py:samples in-order --no-shuffle

    \b
    JSON:
      {{"path": "records", "num_samples": 3, "num_parts": 4, "num_written": 4, "num_bytes": 81920}}
      num_written: the parts that this run has written.
    """,
)
@click.argument("source")
@click.argument("folder")
@click.option("--num-parts", type=int, default=4, show_default=True, help="Number of files.")
@click.option("--shuffle/--no-shuffle", default=True, show_default=True, help="Shuffle samples over the parts.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the shuffle.")
@click.option("--num-workers", type=int, default=0, show_default=True, help="Processes; 0 writes in this one.")
def command(source: str, folder: str, num_parts: int, shuffle: bool, seed: int, num_workers: int) -> Answer:
    """Write samples into record files."""
    from kdpipes.write.records import write_records

    samples = source if source.endswith(_LISTS) else samples_of(source)
    result = write_records(samples, folder, num_parts=num_parts, shuffle=shuffle, seed=seed, num_workers=num_workers)
    found = result.num_parts - result.num_written
    more = f", {found} of them found" if found else ""
    text = f"{result.num_samples} samples, {result.num_bytes} bytes, in {result.num_parts} parts{more}."
    return Answer({**result._asdict(), "path": str(result.path)}, f"{result.path}: {text}")
