"""`kdpipes verify`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kdpipes.cli._commands import Answer, Command

__all__ = ["command"]


@click.command("verify", cls=Command)
@click.argument("receipts", nargs=-1, required=True)
def command(receipts: tuple[str, ...]) -> Answer:
    """Check that loaders delivered an epoch exactly once.

    RECEIPTS are JSON files of what `receipt()` of a Loader returned, or of lists of that: of all ranks, and of all
    parts of an epoch that was resumed. If a batch is missing or came twice, the exit status is 1.

    \b
    Examples:
      kdpipes verify receipt-0.json receipt-1.json
      kdpipes verify receipt-0.json receipt-1.json --json

    \b
    JSON:
      {"is_complete": true, "num_samples": 160, "num_skipped": 0, "epochs": [0], "problems": [], "unknown": []}
      problems: one sentence for each gap, and for each batch that came twice.
      unknown: what receipts of a stream cannot show, such as how many samples it has.
    """
    from kdpipes.loader.receipt import verify_receipts

    found = []
    for path in receipts:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            hint = "Write one after each rank's epoch: `json.dump(loader.receipt(), file)`."
            raise FileNotFoundError(f"There is no receipt {path!r}. {hint}") from error
        except ValueError as error:
            raise ValueError(f"{path} does not hold JSON: {error}.") from error
        found += content if isinstance(content, list) else [content]
    verdict = verify_receipts(found)
    return Answer(verdict._asdict(), str(verdict), 0 if verdict.is_complete else 1)
