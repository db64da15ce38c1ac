"""The sidecar of one tar shard, `NAME.tar.index`: which samples it has and where their members lie. Plain data."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError
from kdpipes.storage.files import Version
from kdpipes.storage.shared import PackedStrings

__all__ = ["Places", "ShardIndex"]

_MAGIC = b"kdpindex"
_FORMAT = 1
_ALIGNMENT = 8


@dataclass(frozen=True)
class Places:
    """Where one field of each sample lies, and what it holds, as far as that is known without reading it.

    Args:
        offsets: Of the contents in the shard, `[n] int64`; -1 where a sample lacks the field.
        sizes: Of the contents in bytes, `[n] int64`.
        checksums: CRC-32 of the contents, `[n] uint32`; None where they were not computed. Of several shards `int64`,
            with -1 for each that was not.
        values: The values themselves, where all samples have one and all are integers: labels, `[n] int64`.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[Any] | None = None
    values: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard.

    Args:
        version: Of the tar that it describes.
        keys: The samples' keys, `[n]`.
        fields: The places of each field.
    """

    version: Version
    keys: PackedStrings
    fields: dict[str, Places] = field(default_factory=dict)

    def checksums(self) -> dict[int, int] | None:
        """Return the CRC-32 of each member by the offset of its content; None if they were not computed."""
        found: dict[int, int] = {}
        for places in self.fields.values():
            if places.checksums is None:
                return None
            is_there = places.offsets >= 0
            found.update(zip(places.offsets[is_there].tolist(), places.checksums[is_there].tolist(), strict=True))
        return found

    def to_bytes(self) -> bytes:
        """Return the content of the sidecar: a mark, a header in JSON, arrays (little-endian), a CRC-32 of it all."""
        arrays = [(name, np.ascontiguousarray(values)) for name, values in self._arrays()]
        header = {
            "size": self.version.size,
            "tag": self.version.tag,
            "num_samples": len(self.keys),
            "fields": list(self.fields),
            "arrays": [[name, values.dtype.newbyteorder("<").str, len(values)] for name, values in arrays],
        }
        text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogateescape")
        parts = [_MAGIC, np.array([_FORMAT, len(text)], dtype="<u4").tobytes(), text]
        for _, values in arrays:
            parts += [bytes(-sum(map(len, parts)) % _ALIGNMENT)]
            parts += [values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()]
        content = b"".join(parts)
        return content + np.array([zlib.crc32(content)], dtype="<u4").tobytes()

    def _arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        ends, letters = self.keys.arrays()
        yield from (("ends", ends), ("keys", letters))
        for number, places in enumerate(self.fields.values()):
            for name in ("offsets", "sizes", "checksums", "values"):
                values = getattr(places, name)
                if values is not None:
                    yield f"{number}.{name}", values

    @classmethod
    def from_bytes(cls, content: bytes, url: str) -> ShardIndex:
        """Return the index that a sidecar holds.

        Args:
            content: Of the sidecar. The index holds views of it.
            url: Of the sidecar, for errors.

        Raises:
            DataError: It is no index, damaged, or of another format.
        """
        head = len(_MAGIC) + 8
        if content[: len(_MAGIC)] != _MAGIC or len(content) < head + 4:
            raise DataError(f"{url!r} is no index of a shard.")
        number, length = np.frombuffer(content, dtype="<u4", count=2, offset=len(_MAGIC)).tolist()
        if number != _FORMAT:
            raise DataError(f"Index {url!r} is of format {number}, but this kdpipes reads format {_FORMAT}.")
        if zlib.crc32(content[:-4]) != int(np.frombuffer(content[-4:], dtype="<u4")[0]):
            raise DataError(f"Index {url!r} is damaged: its checksum does not fit.")
        try:
            header = json.loads(content[head : head + length].decode("utf-8", "surrogateescape"))
            arrays = dict(_read_arrays(content, head + length, header["arrays"]))
            return cls._of(header, arrays)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"Index {url!r} cannot be read: {type(error).__name__}: {error}.") from error

    @classmethod
    def _of(cls, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> ShardIndex:
        fields = {
            str(name): Places(
                arrays[f"{number}.offsets"],
                arrays[f"{number}.sizes"],
                arrays.get(f"{number}.checksums"),
                arrays.get(f"{number}.values"),
            )
            for number, name in enumerate(header["fields"])
        }
        keys = PackedStrings.of_arrays(arrays["ends"], arrays["keys"])
        columns = [values for places in fields.values() for values in vars(places).values() if values is not None]
        if any(len(values) != len(keys) for values in columns) or len(keys) != header["num_samples"]:
            raise ValueError("its columns are of different lengths")
        return cls(Version(int(header["size"]), str(header["tag"])), keys, fields)


def _read_arrays(content: bytes, start: int, arrays: Iterable[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, kind, count in arrays:
        dtype = np.dtype(kind)
        if dtype.kind not in "iu":
            raise ValueError(f"array {name!r} is of {dtype}")
        start += -start % _ALIGNMENT
        yield name, np.frombuffer(content, dtype=dtype, count=count, offset=start)
        start += count * dtype.itemsize
