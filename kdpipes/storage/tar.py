"""Reading plain webdataset tars: front to back, or by member through an index of their headers."""

from __future__ import annotations

import json
import lzma
import os
import re
import stat
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from webdataset.tariterators import base_plus_ext

from kdpipes.errors import DataError
from kdpipes.storage.files import is_local, open_url
from kdpipes.storage.forward import FileBytes, ForwardBytes, StreamBytes
from kdpipes.storage.shared import PackedStrings
from kdpipes.storage.tar_headers import NoTarError, UnreadableTarError, read_entries, truncated

__all__ = ["Member", "TarIndex", "decode_member", "index_tars", "read_groups"]

_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript"})
_INTEGER = re.compile(r"-?[0-9]+")
_UNREADABLE = (EOFError, OSError, lzma.LZMAError, zlib.error)
_COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}


class Member(NamedTuple):
    """One file in a shard."""

    key: str
    field: str
    name: str
    offset: int
    size: int


def decode_member(field: str, content: bytes) -> Any:
    """Return the content of a member as webdataset's basic decoders do: numbers, text and JSON; bytes for all else.

    A class (`.cls`) that is no number is taken for the name of one.
    """
    kind = field.rsplit(".", 1)[-1].lower()
    if kind in _NUMBERS:
        text = content.decode("utf-8").strip()
        return int(text) if _INTEGER.fullmatch(text) else text
    if kind in _TEXTS:
        return content.decode("utf-8")
    return json.loads(content) if kind in {"json", "jsn"} else content


def _members(url: str, source: ForwardBytes) -> Iterator[Member]:
    """Yield the members that belong to samples."""
    for entry in read_entries(source):
        name, offset, size, kind = entry
        key, field = _split(name)
        if key is None or not field or kind == "other":
            continue
        if kind != "file":
            raise DataError(f"Member {name!r} of shard {url!r} is a link or has holes: it has no content of its own.")
        yield Member(key, field.lower(), name, offset, size)


def _split(name: str) -> tuple[str | None, str | None]:
    """Return key and field as webdataset's `base_plus_ext` does, which takes longer."""
    folder, slash, file = name.rpartition("/")
    stem, dot, field = file.partition(".")
    if stem and dot and "\n" not in name:
        return folder + slash + stem, field
    found: tuple[str | None, str | None] = base_plus_ext(name)
    return found


def _contents(url: str, source: ForwardBytes) -> Iterator[tuple[Member, bytes]]:
    """Yield the members that belong to samples, each with its content."""
    for member in _members(url, source):
        try:
            content = source.take(member.offset, member.size)
        except _UNREADABLE as error:
            raise DataError(
                f"Shard {url!r} is truncated in member {member.name!r} at offset {member.offset}: {error}."
            ) from error
        if len(content) < member.size:
            raise truncated(member.name, member.offset, member.size, len(content))
        yield member, content


@contextmanager
def _naming(url: str, source: ForwardBytes, what: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """Let what cannot be read be an error that names the shard and the place."""
    try:
        yield
    except UnreadableTarError as error:
        raise DataError(f"Shard {url!r} {error}.") from error
    except (NoTarError, *_UNREADABLE) as error:
        if isinstance(error, NoTarError) or source.position == 0:
            raise DataError(f"{url!r} cannot be read as {what}: {error}.{hint()}") from error
        raise DataError(f"Shard {url!r} cannot be read from offset {source.position} on: {error}.") from error


def _grouped(url: str, members: Iterable[tuple[Member, Any]]) -> Iterator[list[tuple[Member, Any]]]:
    """Yield the members of one sample at a time: neighbours with the same key, as webdataset groups them."""
    group: list[tuple[Member, Any]] = []
    fields: set[str] = set()
    seen: set[str] = set()
    current = None
    for member, content in members:
        key, field, name, offset, _ = member
        if key != current:
            if group:
                yield group
            if key in seen:
                raise DataError(
                    f"Shard {url!r} has members of sample {key!r} in two places; they must stand together. "
                    f"The second is {name!r} at offset {offset}."
                )
            seen.add(key)
            group, fields, current = [], set(), key
        if field in fields:
            raise DataError(
                f"Shard {url!r} has two members for field {field!r} of sample {key!r}: "
                f"the second is {name!r} at offset {offset}."
            )
        fields.add(field)
        group.append((member, content))
    if group:
        yield group


def read_groups(url: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, content of each field) of a tar's samples, front to back; compressed tars by their suffix.

    Raises:
        DataError: The tar is truncated, or is none; two members of a sample have the same extension.
    """
    compression = next((name for suffix, name in _COMPRESSIONS.items() if url.endswith(suffix)), None)
    with open_url(url, compression=compression) as file:
        has_positions = is_local(url) and compression is None and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        source: ForwardBytes = FileBytes(file.fileno()) if has_positions else StreamBytes(file)
        with _naming(url, source, "a tar"):
            for group in _grouped(url, _contents(url, source)):
                yield group[0][0].key, {member.field: content for member, content in group}


@dataclass(frozen=True)
class TarIndex:
    """Where each field of each sample lies.

    Args:
        keys: The samples' keys, `[n]`.
        shards: Which shard each sample lies in, `[n]`.
        offsets: Of each field, the offset of its content in the shard, `[n]`; -1 where a sample lacks it.
        sizes: Of each field, the size of its content in bytes, `[n]`.
    """

    keys: PackedStrings
    shards: NDArray[np.int32]
    offsets: dict[str, NDArray[np.int64]]
    sizes: dict[str, NDArray[np.int64]]


def _header_groups(url: str) -> Iterator[list[tuple[Member, Any]]]:
    with open_url(url) as file:
        source = FileBytes(file.fileno())
        with _naming(url, source, "a plain tar", lambda: _hint(file)):
            yield from _grouped(url, ((member, None) for member in _members(url, source)))


def _hint(file: IO[bytes]) -> str:
    is_compressed = file.read(4).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd"))
    return " Compressed tars have no positions: read them with `kdp.stream_shards`." if is_compressed else ""


def index_tars(urls: list[str], names: list[str]) -> TarIndex:
    """Read the headers of all members of the tars, and return where they lie; contents are skipped."""
    keys: list[str] = []
    shards: list[int] = []
    places = defaultdict[str, "array[int]"](lambda: array("q"))  # of each member three numbers: sample, offset, size
    for shard, url in enumerate(urls):
        for group in _header_groups(url):
            key = group[0][0].key
            for member, _ in group:
                places[member.field].extend((len(keys), member.offset, member.size))
            keys.append(f"{names[shard]}/{key}")
            shards.append(shard)
    offsets, sizes = {}, {}
    for field, entries in places.items():
        table = np.frombuffer(entries, dtype=np.int64).reshape(-1, 3)
        offsets[field], sizes[field] = np.full(len(keys), -1, dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
        offsets[field][table[:, 0]], sizes[field][table[:, 0]] = table[:, 1], table[:, 2]
    return TarIndex(PackedStrings(keys), np.array(shards, dtype=np.int32), offsets, sizes)
