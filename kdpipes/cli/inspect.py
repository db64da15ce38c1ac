"""`kdpipes inspect`."""

from __future__ import annotations

import click

from kdpipes.cli._chain_of import CHAIN_HELP, chain_of, names_chain
from kdpipes.cli._commands import Command
from kdpipes.cli._contents_lines import contents_lines
from kdpipes.cli._output import json_option, say_json
from kdpipes.core.masked import masked

__all__ = ["command"]


@click.command(
    "inspect",
    cls=Command,
    help=f"""Say what is in shards, in a folder, or in a chain.

    Tells how many samples and bytes there are, the sizes of each field, the samples of each class, whether shards have
    indexes that fit (fresh; stale: of another shard; damaged; missing; impossible: the tar is compressed), whether the
    job that writes shards or records is finished, and the first samples. No member of a shard is decoded, no image is
    opened, and nothing is written.

    PLACES are paths or fsspec URLs of tars, with brace ranges or globs; one folder; or one chain, {CHAIN_HELP}: its
    module is run, and its first samples are made as in training.

    \b
    Examples:
      kdpipes inspect "shards/photos-{{000..003}}.tar"
      kdpipes inspect shards/photos-000.tar --samples 5
      kdpipes inspect photos --json
      kdpipes inspect records
      kdpipes inspect train.py:chain
      kdpipes inspect --no-scan "s3://bucket/birds-*.tar"

    \b
    JSON:
      kind          "shards", "records", "images", "files" or "chain"
      num_samples, num_bytes, num_batches
                    null where that is not known
      fields        [{{"name", "num_samples", "num_bytes", "min_bytes",
                    "median_bytes", "max_bytes", "type"}}]
      classes       [{{"label", "name", "num_samples"}}], or null
      samples       [{{"key", "fields": {{NAME: {{"bytes", "value", "type"}}}}}}]
      shards        [{{"url", "num_samples", "num_bytes", "index"}}]
      parts         of records [{{"path", "num_samples", "num_bytes"}}],
                    with null for those that are missing
      jobs          of shards and records [{{"url", "num_samples", "is_complete"}}]
      pipes         names of a chain's pipes, the source first
    """,
)
@click.argument("places", nargs=-1, required=True)
@click.option("--samples", "num_samples", type=int, default=3, show_default=True, help="First samples to list.")
@click.option("--no-scan", is_flag=True, help="Read no shard that has no fresh index, and no classes of a chain.")
@json_option
def command(places: tuple[str, ...], num_samples: int, no_scan: bool, as_json: bool) -> None:
    """Say what is in shards, in a folder, or in a chain."""
    from kdpipes.core.errors import check_count
    from kdpipes.look.chain_contents import look_at_chain
    from kdpipes.look.inspect_data import inspect_data

    check_count("samples", num_samples, minimum=0)
    if len(places) == 1 and names_chain(places[0]):
        found = look_at_chain(chain_of(places[0]), num_samples=num_samples, scan=not no_scan)
    else:
        found = inspect_data(places, num_samples=num_samples, scan=not no_scan)
    if as_json:
        say_json(found.as_dict())
    else:
        title = places[0] if len(places) == 1 else f"{places[0]} ... {places[-1]}"
        click.echo("\n".join(masked(line) if "://" in line else line for line in contents_lines(title, found)))
