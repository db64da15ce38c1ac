"""The sidecar of a shard: what is written is read, and nothing that is damaged is taken for an index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.core.errors import DataError
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.readers import Version
from kdpipes.storage.shard_index import Places, ShardIndex

KEYS = st.lists(st.text(max_size=6), unique=True, max_size=9)


def index_of(keys: list[str], *, with_checksums: bool, with_values: bool) -> ShardIndex:
    offsets = np.arange(len(keys), dtype=np.int64) * 1024 + (5 << 32)
    checksums = np.arange(len(keys), dtype=np.uint32) if with_checksums else None
    values = -np.arange(len(keys), dtype=np.int64) if with_values else None
    fields = {"jpg": Places(offsets, offsets // 2, checksums), "cls": Places(offsets - 1, offsets, None, values)}
    return ShardIndex(Version(1 << 40, "etag:é"), PackedStrings(keys), fields)


@given(keys=KEYS, with_checksums=st.booleans(), with_values=st.booleans())
def test_what_is_written_is_read(keys: list[str], with_checksums: bool, with_values: bool) -> None:
    index = index_of(keys, with_checksums=with_checksums, with_values=with_values)
    again = ShardIndex.from_bytes(index.to_bytes(), "a.tar.index")
    assert (again.version, list(again.keys), list(again.fields)) == (index.version, keys, ["jpg", "cls"])
    for name, places in index.fields.items():
        for column, values in vars(places).items():
            found = getattr(again.fields[name], column)
            assert (found is None) == (values is None)
            assert values is None or (found.tolist() == values.tolist() and found.dtype == values.dtype)
    assert again.to_bytes() == index.to_bytes(), "the same index is the same bytes"


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_an_error(place: float, bit: int) -> None:
    content = bytearray(index_of(["a", "b"], with_checksums=True, with_values=True).to_bytes())
    content[int(place * len(content))] ^= 1 << bit
    with pytest.raises(DataError, match=r"a\.tar\.index"):
        ShardIndex.from_bytes(bytes(content), "a.tar.index")


def test_a_cut_index_is_an_error() -> None:
    content = index_of(["a", "b"], with_checksums=True, with_values=False).to_bytes()
    for size in range(len(content)):
        with pytest.raises(DataError, match=r"a\.tar\.index"):
            ShardIndex.from_bytes(content[:size], "a.tar.index")


def test_an_index_of_another_format_says_so() -> None:
    content = bytearray(index_of([], with_checksums=False, with_values=False).to_bytes())
    content[3] = 9
    with pytest.raises(DataError, match="The entry is not in format 3, the only one that this"):
        ShardIndex.from_bytes(bytes(content), "a.tar.index")
