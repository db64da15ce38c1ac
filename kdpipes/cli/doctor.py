"""`kdpipes doctor`."""

from __future__ import annotations

import click

from kdpipes.cli._chain_of import CHAIN_HELP, chain_of, chains_in
from kdpipes.cli._commands import Answer, Command

__all__ = ["command"]


@click.command(
    "doctor",
    cls=Command,
    help=f"""Report what is wrong with a chain, what bounds it, and what would help most.

    Inspects the chain, makes its first batch twice, and runs it for some seconds. If something is wrong, the exit
    status is 1; hints do not count.

    CHAIN is {CHAIN_HELP}. The module is run. If only a file or a
    module is named, its chains are listed.

    \b
    Examples:
      kdpipes doctor train.py:chain --seconds 1
      kdpipes doctor train.py
      kdpipes doctor train:chain --no-measure
      kdpipes doctor train:chain --no-measure --json

    \b
    JSON:
      chains        if no chain is named: the names of those in the file; nothing else then
      is_clean      false if something is wrong
      findings      [{{"code", "severity", "pipe", "what", "why", "fix"}}]
      decoders      what decodes JPEGs, and in which version
      bound         "storage", "decoding", "transfer", ..., or null
      shares        of the time, by kind of work, or null
      advice        the changes that would help, the best one first
      shuffle       how well the chain shuffles, or null
      profile       where the time goes, or null
    """,
)
@click.argument("chain")
@click.option("--num-workers", type=int, default=2, show_default=True, help="Workers that the chain is to run with.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="How long to measure.")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Run the chain.")
def command(chain: str, num_workers: int, seconds: float, measure: bool) -> Answer:
    """Report what is wrong with a chain."""
    from kdpipes.look.doctor.examine import doctor

    if ":" not in chain:
        names = [f"{chain}:{name}" for name in chains_in(chain)]
        if not names:
            raise ValueError(f"{chain} has no chain. Bind one to a name, or name a function that returns one.")
        title = f"{chain} has {len(names)} chain{'' if len(names) == 1 else 's'}:"
        return Answer({"chains": names}, [title, *names])
    report = doctor(chain_of(chain), num_workers=num_workers, seconds=seconds, measure=measure)
    return Answer(report.to_dict(), str(report), 0 if report.is_clean else 1)
