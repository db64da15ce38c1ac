"""Indexes put one behind the other: what a plain concatenation gives, in no more memory than that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.core.shared import PackedStrings
from kdpipes.storage.readers import Version
from kdpipes.storage.shard_index import UNCHECKED, Catalog, Places, ShardIndex

LARGE = 1 << 33  # more than 32 bits hold


@st.composite
def indexes(draw: Any) -> ShardIndex:
    size = draw(st.integers(0, 4))
    column = st.lists(st.integers(0, LARGE), min_size=size, max_size=size)
    fields = {}
    for name in draw(st.sets(st.sampled_from(["jpg", "cls", "json"]))) if size else ():
        lacks = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        offsets = np.where(lacks, -1, draw(column))
        is_known = not any(lacks) and draw(st.booleans())
        checksums = (np.asarray(draw(column)) % 1000).astype(np.uint32) if draw(st.booleans()) else None
        values = np.asarray(draw(column)) - LARGE // 2 if is_known else None
        fields[name] = Places(offsets, np.asarray(draw(column)), checksums, values)
    keys = draw(st.lists(st.text(max_size=3), min_size=size, max_size=size))
    return ShardIndex(Version(draw(st.integers(0, 9)), ""), PackedStrings(keys), fields)


def told(index: ShardIndex, name: str, place: int) -> Any:
    """What an index says of a field of one sample; None if it has none."""
    places = index.fields.get(name)
    return None if places is None or places.offsets[place] < 0 else (places.offsets[place], places.sizes[place])


@given(st.lists(indexes(), max_size=6))
def test_joined_columns_are_the_indexes_columns_in_sequence(parts: list[ShardIndex]) -> None:
    joined = Catalog.of(parts)
    every = [(part, place) for part in parts for place in range(len(part.keys))]
    assert len(joined) == len(every)
    assert joined.versions == [part.version for part in parts]
    assert list(joined.short_keys) == [part.keys[place] for part, place in every]
    assert joined.shards.tolist() == [n for n, part in enumerate(parts) for _ in range(len(part.keys))]
    fields = joined.fields
    assert set(fields) == {name for part in parts for name in part.fields}
    for name, known in fields.items():
        wanted = [told(part, name, place) for part, place in every]
        values = [part.fields[name].values if name in part.fields else None for part, _ in every]
        if not isinstance(known, Places):
            assert known.tolist() == [column[place] for column, (_, place) in zip(values, every, strict=True)]
            continue
        assert None in wanted or any(column is None for column in values)
        pairs = zip(known.offsets.tolist(), known.sizes.tolist(), strict=True)
        assert [None if offset < 0 else (offset, size) for offset, size in pairs] == wanted
        having = [part.fields[name] for part in parts if name in part.fields]
        assert (known.checksums is None) == all(places.checksums is None for places in having)
        if known.checksums is not None:
            having_it = [(part, place) for part, place in every if told(part, name, place) is not None]
            columns = [(part.fields[name].checksums, place) for part, place in having_it]
            present = known.checksums[known.offsets >= 0].tolist()
            assert present == [UNCHECKED if column is None else column[place] for column, place in columns]


def test_columns_are_as_narrow_as_their_values_allow() -> None:
    def index(size: int) -> ShardIndex:
        return ShardIndex(Version(1, ""), PackedStrings(["a"]), {"x": Places(np.array([5]), np.array([size]))})

    for sizes, dtype in (([7, 8], np.uint32), ([7, LARGE], np.int64)):
        joined = Catalog.of(map(index, sizes))
        found = joined.fields["x"]
        assert isinstance(found, Places)
        assert (found.sizes.dtype, found.sizes.tolist()) == (dtype, sizes)
