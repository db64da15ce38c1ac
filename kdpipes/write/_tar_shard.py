"""One tar as it is written: the bytes of its members, in order, and its index, which needs no second reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from tarfile import PAX_FORMAT, TarInfo
from typing import NamedTuple

from kdpipes.storage.files import Version
from kdpipes.storage.shard_index import IndexBuilder, ShardIndex
from kdpipes.storage.tar import Member, add_sample
from kdpipes.write._keys import twice_error

__all__ = ["END_MARK", "TarSample", "TarShard", "as_tar_sample"]

_BLOCK = 512
_MODE = 0o644
_LONGEST, _LARGEST = 100, 8**11 - 1  # what fields of a plain header hold
END_MARK = bytes(2 * _BLOCK)


class TarSample(NamedTuple):
    """A sample as it stands in a tar.

    Args:
        key: What its members are called, without their extensions.
        members: Of each: extension, header, content.
    """

    key: str
    members: list[tuple[str, bytes, bytes]]

    @property
    def num_bytes(self) -> int:
        """How many bytes of a tar it takes."""
        return sum(len(header) + len(content) + -len(content) % _BLOCK for _, header, content in self.members)


def as_tar_sample(key: str, members: Iterable[tuple[str, bytes]]) -> TarSample:
    """Return a sample as it stands in a tar: the same bytes for the same content, whoever writes it, and when."""
    return TarSample(key, [(name, _header(f"{key}.{name}", len(content)), content) for name, content in members])


def _header(name: str, size: int) -> bytes:
    """Return what tarfile makes of a name and a size, which takes it 20 times as long where both are plain."""
    if size > _LARGEST or len(name) > _LONGEST or not name.isascii():
        return _by_tarfile(name, size)
    letters, digits = name.encode(), b"%011o" % size
    total = b"%06o\0 " % (_PLAIN_SUM + sum(letters) + sum(digits))
    return b"".join((letters.ljust(100, b"\0"), _PLAIN[100:124], digits, _PLAIN[135:148], total, _PLAIN[156:]))


def _by_tarfile(name: str, size: int) -> bytes:
    info = TarInfo(name)
    info.size, info.mode = size, _MODE
    return info.tobuf(PAX_FORMAT, "utf-8", "surrogateescape")


_PLAIN = _by_tarfile("", 0)
_PLAIN_SUM = sum(_PLAIN[:124]) + sum(_PLAIN[135:148]) + 8 * ord(" ") + sum(_PLAIN[156:])


class TarShard:
    """A tar that grows by samples.

    Args:
        url: Where it is to be, for errors.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._index = IndexBuilder()
        self.keys: dict[str, None] = {}
        self.num_bytes = 0

    def chunks(self, samples: Iterable[TarSample]) -> Iterator[bytes]:
        """Yield the bytes of the tar, end mark included.

        Raises:
            DataError: Two samples have the same key.
        """
        for sample in samples:
            if sample.key in self.keys:
                raise twice_error(sample.key, f"shard {self._url!r}")
            self.keys[sample.key] = None
            yield from self._added(sample)
        self.num_bytes += len(END_MARK)
        yield END_MARK

    def _added(self, sample: TarSample) -> Iterator[bytes]:
        group: list[tuple[Member, bytes | None]] = []
        for extension, header, content in sample.members:
            offset, size = self.num_bytes + len(header), len(content)
            group.append((Member(sample.key, extension, f"{sample.key}.{extension}", offset, size), content))
            self.num_bytes = offset + size + -size % _BLOCK
            yield header
            yield content
            yield bytes(-size % _BLOCK)
        add_sample(self._index, group)

    def index(self, version: Version) -> ShardIndex:
        """Return its index, now that it has been written.

        Args:
            version: Of the tar, where it lies.
        """
        return self._index.index(version)
