"""`kdpipes pack`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from kdpipes.cli._as_options import field_options, naming_options
from kdpipes.cli._chain_of import CHAIN_HELP, names_chain, samples_of
from kdpipes.cli._commands import Answer, Command
from kdpipes.core.errors import reject_field

__all__ = ["command"]

_ACTIONS = ("raise", "skip", "quarantine")


@click.command(
    "pack",
    cls=Command,
    help=f"""Write samples as tar shards, each with its index.

    SOURCE is a folder of images, one folder for each class; or a chain of samples, {CHAIN_HELP}, whose module is run.
    SHARDS is a path or fsspec URL with the number's place. To resume an interrupted run, call it again in the same
    way; --on-error may be added.

    \b
    Examples:
      kdpipes pack photos packed/photos-%06d.tar --max-samples 2
      kdpipes pack photos mixed/photos-%06d.tar --max-bytes 1000000 --shuffle 0 --num-workers 2 --json
      kdpipes pack photos kept/photos-%06d.tar --max-samples 2 --on-error skip
      kdpipes pack photos named/photos-%06d.tar --max-samples 2 --encode x=webp --extension y=class
      kdpipes pack train.py:samples s3://bucket/train-%06d.tar --max-samples 1000

    \b
    JSON:
      {{"urls": ["packed/photos-000000.tar"], "num_samples": 3, "num_bytes": 81920,
       "num_found": 0, "num_left_out": 0, "class_names": ["cat", "rocket"]}}
      num_found: shards that an earlier run has written.
      class_names: those that `kdp.open_shards` finds beside the shards, or null.
    """,
)
@click.argument("source")
@click.argument("shards")
@click.option("--max-samples", type=int, help="Number of samples in a shard.")
@click.option("--max-bytes", type=int, help="Largest size of a shard.")
@click.option(
    "--shuffle", "seed", type=int, metavar="SEED", help="Write the samples in a random order, given by a seed."
)
@click.option("--num-workers", type=int, default=0, show_default=True, help="Processes; 0 writes in this one.")
@click.option(
    "--on-error",
    type=click.Choice(_ACTIONS),
    help="What to do with a sample that cannot be made, or a file in a folder that is not an image: end with an error "
    "(the default), leave it out and log it, or leave it out and list it in --quarantine.",
)
@click.option("--quarantine", metavar="FILE", help="File for left out samples, one JSON object in each line.")
@click.option(
    "--encode",
    multiple=True,
    metavar="FIELD=FORMAT",
    help="Format of a field: png, jpg, webp, npy, json, txt, ... Once for each field.",
)
@click.option(
    "--extension",
    multiple=True,
    metavar="FIELD=EXT",
    help="Extension of a field's members. Once for each field.",
)
def command(
    source: str,
    shards: str,
    max_samples: int | None,
    max_bytes: int | None,
    seed: int | None,
    num_workers: int,
    on_error: str | None,
    quarantine: str | None,
    encode: Sequence[str],
    extension: Sequence[str],
) -> Answer:
    """Write samples as tar shards."""
    from kdpipes.write.members import check_encoding, check_extension
    from kdpipes.write.shards import write_shards

    if (quarantine is not None) != (on_error == "quarantine"):
        raise ValueError("`--quarantine FILE` must be given with `--on-error quarantine`, and only then.")
    encodings = field_options("--encode", "FORMAT", encode, check_encoding)
    extensions = field_options("--extension", "EXT", extension, check_extension)
    is_folder = not names_chain(source)
    chain = samples_of(source)
    with naming_options(is_folder=is_folder):
        chain = chain if seed is None else chain.permute(seed)
        chain = chain if on_error is None else _tolerant(chain, on_error, quarantine, is_folder=is_folder)
        _reject_strangers(chain, {**(encodings or {}), **(extensions or {})})
        result = write_shards(
            chain,
            shards,
            max_samples=max_samples,
            max_bytes=max_bytes,
            encode=encodings,
            extensions=extensions,
            num_workers=num_workers,
        )
    found = f", {result.num_found} of them found" if result.num_found else ""
    left_out = f"; {result.num_left_out} samples are left out" if result.num_left_out else ""
    text = f"{result.num_samples} samples, {result.num_bytes} bytes, in {len(result.urls)} shards{found}{left_out}."
    return Answer(result._asdict(), text)


def _tolerant(chain: Any, action: str, quarantine: str | None, *, is_folder: bool) -> Any:
    """Return a chain with `on_error`; for a folder, files that are not images count as samples that cannot be made."""
    from kdpipes.core.sample_pipe import SampleMapperMapDataPipe
    from kdpipes.work.decode import UnchangedImages

    seen: Any = SampleMapperMapDataPipe(chain, UnchangedImages("x"), "decode_images") if is_folder else chain
    return seen.on_error(action, path=quarantine)


def _reject_strangers(chain: Any, named: Iterable[str]) -> None:
    """Raise for fields that no sample has, if the chain knows its fields."""
    from kdpipes.core.pipe import fields_of

    known = fields_of(chain)
    if known is None:
        return
    stranger = next((name for name in named if name not in known), None)
    if stranger is not None:
        reject_field(stranger, "SOURCE", known)
