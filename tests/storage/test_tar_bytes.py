"""Bytes by offset, whatever pieces they come in."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.storage.tar_headers import FileBytes, ForwardBytes, StreamBytes

CONTENT = os.urandom(3 << 20)
SPANS = st.lists(st.tuples(st.sampled_from([0, 1, 512, 5_000, 700_000]), st.sampled_from([0, 1, 512, 20_000, 1 << 21])))


class Dribble:
    """A file that gives fewer bytes than it is asked for, and keeps how many that were."""

    def __init__(self, content: bytes, most: int) -> None:
        self._file, self._most = io.BytesIO(content), most
        self.asked: list[int] = []

    def read(self, size: int) -> bytes:
        self.asked.append(size)
        return self._file.read(min(size, self._most))


@contextmanager
def sources(content: bytes, most: int) -> Iterator[list[ForwardBytes]]:
    descriptor = os.memfd_create("content")
    try:
        os.write(descriptor, content)
        streams: list[Any] = [io.BytesIO(content), Dribble(content, most)]
        yield [FileBytes(descriptor), *map(StreamBytes, streams)]
    finally:
        os.close(descriptor)


@given(spans=SPANS, most=st.sampled_from([1_000, 65_536, 1 << 30]))
def test_spans_are_those_of_the_content(spans: list[tuple[int, int]], most: int) -> None:
    with sources(CONTENT, most) as found:
        for source in found:
            offset = 0
            for gap, size in spans:
                assert source.take(offset + gap, size) == CONTENT[offset + gap : offset + gap + size]
                offset += gap + size


def test_a_stream_asks_for_no_more_than_it_can_hold() -> None:
    file = Dribble(CONTENT, 1 << 30)
    source = StreamBytes(cast("IO[bytes]", file))
    assert (source.take(1, 1 << 60), source.size, source.position) == (CONTENT[1:], len(CONTENT), len(CONTENT))
    assert max(file.asked) <= 1 << 24
    assert source.take(1 << 60, 1) == b""


def test_what_a_stream_gave_before_it_broke_can_be_read() -> None:
    class Broken(Dribble):
        def read(self, size: int) -> bytes:
            return super().read(size) if not self.asked else self._fail()

        def _fail(self) -> bytes:
            raise EOFError("cut")

    source = StreamBytes(cast("IO[bytes]", Broken(CONTENT, 1_000)))
    assert source.take(0, 512) == CONTENT[:512]
    assert source.take(512, 488) == CONTENT[512:1_000]
    with pytest.raises(EOFError):
        source.take(900, 200)
