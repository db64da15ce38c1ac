"""`kdpipes pack`."""

from __future__ import annotations

import click

from kdpipes.cli._chain_of import CHAIN_HELP, samples_of
from kdpipes.cli._commands import Command
from kdpipes.cli._output import json_option, say_json

__all__ = ["command"]


@click.command(
    "pack",
    cls=Command,
    help=f"""Write samples as tar shards, each with its index.

    SOURCE is a folder of images, one folder for each class; or a chain of samples, {CHAIN_HELP}, whose module is run.
    SHARDS is a path or fsspec URL with the number's place. A run that was broken off is called again in the same way,
    and goes on.

    \b
    Examples:
      kdpipes pack photos packed/photos-%06d.tar --max-samples 2
      kdpipes pack photos mixed/photos-%06d.tar --max-bytes 1000000 --shuffle 0 --num-workers 2 --json
      kdpipes pack train.py:samples s3://bucket/train-%06d.tar --max-samples 1000

    \b
    JSON:
      {{"urls": ["packed/photos-000000.tar"], "num_samples": 3, "num_bytes": 81920,
       "num_found": 0, "num_left_out": 0, "class_names": ["cat", "rocket"]}}
      num_found: shards that were there from an earlier run.
      class_names: for `kdp.open_shards(class_names=...)`, or null.
    """,
)
@click.argument("source")
@click.argument("shards")
@click.option("--max-samples", type=int, help="How many samples a shard has.")
@click.option("--max-bytes", type=int, help="How large a shard may be.")
@click.option("--shuffle", "seed", type=int, metavar="SEED", help="Mix the samples for good, by a seed.")
@click.option("--num-workers", type=int, default=0, show_default=True, help="Processes; 0 writes in this one.")
@json_option
def command(
    source: str,
    shards: str,
    max_samples: int | None,
    max_bytes: int | None,
    seed: int | None,
    num_workers: int,
    as_json: bool,
) -> None:
    """Write samples as tar shards."""
    from kdpipes.write.write_shards import write_shards

    chain = samples_of(source)
    chain = chain if seed is None else chain.permute(seed)
    result = write_shards(chain, shards, max_samples=max_samples, max_bytes=max_bytes, num_workers=num_workers)
    if as_json:
        say_json(result._asdict())
        return
    found = f", {result.num_found} of them found" if result.num_found else ""
    left_out = f"; {result.num_left_out} samples are left out" if result.num_left_out else ""
    click.echo(
        f"{result.num_samples} samples, {result.num_bytes} bytes, in {len(result.urls)} shards{found}{left_out}."
    )
