"""`kdpipes copy`."""

from __future__ import annotations

import click

from kdpipes.cli._commands import Answer, Command

__all__ = ["command"]


@click.command("copy", cls=Command)
@click.argument("global_root", metavar="GLOBAL")
@click.argument("local_root", metavar="LOCAL")
@click.option("--relative-path", metavar="P", help="Copy only this folder of both.")
@click.option("--num-workers", type=int, default=8, show_default=True, help="Files copied at a time.")
def command(global_root: str, local_root: str, relative_path: str | None, num_workers: int) -> Answer:
    """Copy a data set to a local disk, unless it is already there.

    Copies a folder, a zip or a folder of zips. A complete copy is used as it is, even if the source is gone; an
    interrupted copy is resumed.

    GLOBAL is a path or fsspec URL of the data set; train.zip may stand for the folder train. LOCAL is the folder
    of the copy.

    \b
    Examples:
      kdpipes copy photos local
      kdpipes copy photos local-cats --relative-path cat --num-workers 2 --json
      kdpipes copy s3://bucket/birds /scratch/birds

    \b
    JSON:
      {"path": "/scratch/birds", "was_copied": true, "was_deleted": false, "was_zip": false,
       "num_files": 160, "num_bytes": 812345}
      was_deleted: an incomplete copy of an older state was removed first.
    """
    from kdpipes.write.copy import copy_to_local

    result = copy_to_local(global_root, local_root, relative_path=relative_path, num_workers=num_workers)
    done = f"{result.num_files} files, {result.num_bytes} bytes, are copied" if result.was_copied else "nothing to do"
    return Answer({**result._asdict(), "path": str(result.path)}, f"{result.path}: {done}.")
