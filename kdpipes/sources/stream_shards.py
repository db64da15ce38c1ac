"""Tar shards read front to back, from wherever fsspec reaches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kdpipes._iter_pipe import IterPipe
from kdpipes.errors import DataError, check_names
from kdpipes.sample import Lazy, Sample
from kdpipes.selection import Permutation
from kdpipes.storage.files import expand_urls, relative_names
from kdpipes.storage.shared import Shared
from kdpipes.storage.tar import decode_member, read_groups

__all__ = ["ShardStreamerIterDataPipe"]


class ShardStreamerIterDataPipe(IterPipe):
    """The samples of webdataset tars, front to back (`kdp.stream_shards(urls)`).

    Fields, keys and decoding are those of `kdp.open_shards`; compressed tars (`.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.xz`)
    are read as well. Members are grouped into samples as webdataset groups them: neighbours with the same key.

    Args:
        urls: Paths or fsspec URLs, with brace ranges: `"s3://bucket/birds-{000..127}.tar"`. `pipe:` is refused.
        class_names: The names of the classes 0, 1, ...

    Length: none; a stream ends where its shards end.

    Memory: one sample, and 1 MiB of the shard.

    Raises:
        FileNotFoundError: A shard is missing.
        DataError: A shard is truncated or no tar; it names the shard, the member and the offset.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._urls = Shared(expand_urls(urls))
        self._class_names = check_names("class_names", class_names)
        self._part = (0, 1)
        self._order_key: bytes | None = None
        self._start = (0, 0, 0)
        self.cursor = self._start

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._urls.value)

    def read_part(self, part: int, num_parts: int) -> None:
        """Read every `num_parts`-th shard from `part` on, and no other."""
        self._part = part, num_parts

    def order_by(self, key: bytes | None) -> None:
        """Read the shards in the order that a key stands for, from the next iteration on; None: as they are given."""
        self._order_key = key

    def seek(self, cursor: tuple[int, int, int]) -> None:
        """Let the next iteration begin behind the sample at which `cursor` was taken."""
        self._start = cursor

    def identity(self) -> Any:
        return relative_names(self._urls.value), self._class_names

    def samples(self) -> Iterator[Sample]:
        urls = self._urls.value
        part, num_parts = self._part
        (first, skipped, index), self._start = self._start, (0, 0, 0)
        order = np.arange(len(urls))
        if self._order_key is not None:
            order = Permutation(len(urls), key=self._order_key)[order]
        names = relative_names(urls)
        own = [(urls[shard], names[shard]) for shard in order[part::num_parts].tolist()]
        for shard, (url, name) in enumerate(own[first:], first):
            for place, (key, contents) in enumerate(read_groups(url)):
                if place < skipped:
                    continue
                fields = {field: _member(url, field, content) for field, content in contents.items()}
                sample = Sample(fields, key=f"{name}/{key}", index=index)
                index += 1
                self.cursor = shard, place + 1, index
                yield sample
            skipped = 0

    def class_names(self) -> tuple[str, ...] | None:
        return self._class_names


def _member(url: str, field: str, content: bytes) -> Lazy:
    def load(sample: Sample) -> Any:
        try:
            return decode_member(field, content)
        except ValueError as error:
            raise DataError(
                f"Member {field!r} of sample {sample.key!r} in {url!r} cannot be decoded: {error}."
            ) from error

    return Lazy(load, what=f"decoding member {field!r}")
