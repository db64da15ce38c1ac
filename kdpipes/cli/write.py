"""Commands that write datasets: `pack` and `records`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from kdpipes.cli._chain_of import chain_of, names_chain
from kdpipes.cli._commands import Answer, command, spoken
from kdpipes.core.errors import must_be, reject_field

_OPTIONS = {"encode": "--encode", "extensions": "--extension"}
_OF_FIELDS = re.compile(r"`(encode|extensions)=\{(['\"])(.+?)\2: (?:'(\w+)'|\.\.\.)\}`")


def _as_options(text: str) -> str:
    """Return an error's text with arguments written as options.

    >>> _as_options("Name it: `extensions={'x': 'npz'}`; `max_bytes` is 3.")
    'Name it: `--extension x=npz`; `max_bytes` is 3.'
    """

    def of_field(found: re.Match[str]) -> str:
        value = found[4] or ("FORMAT" if found[1] == "encode" else "EXT")
        return f"`{_OPTIONS[found[1]]} {found[3]}={value}`"

    text = re.sub(r"`\.decode_images\('\w+'\)\.on_error\(\"skip\"\)`", "`--on-error skip`", text)
    text = text.replace(" takes a function that returns bytes", "").replace(", or a function that returns bytes", "")
    return _OF_FIELDS.sub(of_field, text)


@command
@spoken(_as_options, root="SOURCE", urls="SHARDS", path="--quarantine", seed="--shuffle", extensions="--extension")
def pack(
    source: str,
    shards: str,
    *,
    max_samples: int | None = None,
    max_bytes: int | None = None,
    shuffle: Annotated[int | None, "SEED"] = None,
    num_workers: int = 0,
    on_error: Literal["raise", "skip", "quarantine"] | None = None,
    quarantine: Annotated[str | None, "FILE"] = None,
    encode: Annotated[tuple[str, ...], "FIELD=FORMAT"] = (),
    extension: Annotated[tuple[str, ...], "FIELD=EXT"] = (),
) -> Answer:
    """Write samples as tar shards, each with its index.

    SOURCE is a folder of images, one folder for each class; or a chain of samples, module:name or file.py:name, a pipe
    or a function that makes it, whose module is run. SHARDS is a path or fsspec URL with the number's place. To resume
    an interrupted run, call it again in the same way; --on-error may be added.

    Args:
        max_samples: The number of samples in a shard.
        max_bytes: Largest size of a shard.
        shuffle: Write the samples in a random order, given by a seed.
        num_workers: Processes; 0 writes in this one.
        on_error: raise (the default), skip or quarantine samples that cannot be made, and files that are not images.
        quarantine: File for left out samples, one JSON object in each line.
        encode: Format of a field: png, jpg, webp, npy, json, txt, ... Once for each field.
        extension: Extension of a field's members. Once for each field.

    Examples:
      kdpipes pack photos packed/photos-%06d.tar --max-samples 2
      kdpipes pack photos mixed/%06d.tar --max-bytes 1000000 --shuffle 0 --json
      kdpipes pack photos kept/photos-%06d.tar --max-samples 2 --on-error skip
      kdpipes pack photos named/%06d.tar --max-samples 2 --encode x=webp
      kdpipes pack photos other/%06d.tar --max-samples 2 --extension y=class
      kdpipes pack train.py:samples s3://bucket/train-%06d.tar --max-samples 1000

    JSON:
      {"urls": ["packed/photos-000000.tar"], "num_samples": 3,
       "num_bytes": 81920, "num_found": 0, "num_left_out": 0,
       "class_names": ["cat", "rocket"]}
      num_found: shards that an earlier run has written.
      class_names: those that `kdp.open_shards` finds beside the shards, or null.
    """
    from kdpipes.core.messages import counted
    from kdpipes.core.pipe import fields_of
    from kdpipes.core.sample_pipe import SampleMapperMapDataPipe
    from kdpipes.work.decode import UnchangedImages
    from kdpipes.write.members import check_encoding, check_extension
    from kdpipes.write.shards import write_shards

    if (quarantine is not None) != (on_error == "quarantine"):
        raise ValueError("`--quarantine FILE` must be given with `--on-error quarantine`, and only then.")
    encodings = _by_field("--encode", "FORMAT", encode, check_encoding)
    extensions = _by_field("--extension", "EXT", extension, check_extension)
    is_folder = not names_chain(source)
    chain = _samples_of(source)
    chain = chain if shuffle is None else chain.permute(shuffle)
    if on_error is not None:  # in a folder, files that are not images count as samples that cannot be made
        chain = SampleMapperMapDataPipe(chain, UnchangedImages("x"), "decode_images") if is_folder else chain
        chain = chain.on_error(on_error, path=quarantine)
    known = fields_of(chain)
    for name in () if known is None else sorted({*(encodings or ()), *(extensions or ())} - known):
        reject_field(name, "SOURCE", known or ())
    result = write_shards(
        chain,
        shards,
        max_samples=max_samples,
        max_bytes=max_bytes,
        encode=encodings,
        extensions=extensions,
        num_workers=num_workers,
    )
    found = f", {result.num_found:,} of them found" if result.num_found else ""
    left_out = f"; left out {counted(result.num_left_out, 'sample')}" if result.num_left_out else ""
    size = f"{counted(result.num_samples, 'sample')}, {counted(result.num_bytes, 'byte')}"
    text = f"{size}, in {counted(len(result.urls), 'shard')}{found}{left_out}."
    return Answer(result._asdict(), text)


@command
@spoken(root="SOURCE", path="FOLDER")
def records(
    source: str, folder: str, *, num_parts: int = 4, shuffle: bool = True, seed: int = 0, num_workers: int = 0
) -> Answer:
    """Write samples into LMDB record files.

    SOURCE is a folder of images, one folder for each class; a .txt or .csv list with a path and a label in each line;
    or a chain of samples, module:name or file.py:name, a pipe or a function that makes it, whose module is run. FOLDER
    is a local folder. To resume an interrupted run, call it again in the same way.

    Args:
        num_parts: The number of files.
        shuffle: Shuffle samples over the parts.
        seed: The seed of the shuffle.
        num_workers: Processes; 0 writes in this one.

    Examples:
      kdpipes records photos records
      kdpipes records photos by-two --num-parts 2 --seed 3 --num-workers 2 --json
      kdpipes records train.py:samples in-order --no-shuffle

    JSON:
      {"path": "records", "num_samples": 3, "num_parts": 4,
       "num_written": 4, "num_bytes": 81920}
      num_written: the parts that this run has written.
    """
    from kdpipes.core.messages import counted
    from kdpipes.write.records import write_records

    samples = source if source.endswith((".txt", ".csv")) else _samples_of(source)
    result = write_records(samples, folder, num_parts=num_parts, shuffle=shuffle, seed=seed, num_workers=num_workers)
    more = f", {found:,} of them found" if (found := result.num_parts - result.num_written) else ""
    size = f"{counted(result.num_samples, 'sample')}, {counted(result.num_bytes, 'byte')}"
    text = f"{size}, in {counted(result.num_parts, 'part')}{more}."
    return Answer({**result._asdict(), "path": str(result.path)}, f"{result.path}: {text}")


def _samples_of(place: str) -> Any:
    """Return the samples of a folder of images, or of the chain that a word names."""
    from kdpipes.sources.image_folder import ImageFolderMapDataPipe

    return chain_of(place) if names_chain(place) else ImageFolderMapDataPipe(place)


def _by_field(
    option: str, value: str, given: Sequence[str], check: Callable[[str, str], None]
) -> dict[str, str] | None:
    """Return the values of an option that is given as FIELD=VALUE, once for each field, by field."""
    found: dict[str, str] = {}
    for word in given:
        field, equals, text = word.partition("=")
        if not field or not equals:
            raise ValueError(must_be(option, f"FIELD={value}", word))
        if field in found:
            raise ValueError(must_be(option, "given once for each field", word))
        check(f"{option} {field}=", text)
        found[field] = text
    return found or None
