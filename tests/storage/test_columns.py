"""The columns that indexes keep: values come back with their types, and damage is an error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpipes.core.column import as_column
from kdpipes.core.errors import DataError, FieldError
from kdpipes.core.shared import PackedStrings
from kdpipes.storage.decoding import MISSING, ColumnBuilder, check_columns, column_of, missing_in, values_of
from kdpipes.storage.readers import Version
from kdpipes.storage.shard_index import Catalog, Places, ShardIndex

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
KINDS = [INTEGERS, st.floats(allow_nan=False), st.booleans(), TEXTS, st.none()]
VALUES = st.one_of(*(st.lists(kind, max_size=6) for kind in KINDS), st.lists(st.one_of(*KINDS), max_size=6))


def index_of(values: list[Any], **columns: list[Any]) -> ShardIndex:
    number = np.arange(len(values), dtype=np.int64)
    known = {name: column_of(column) for name, column in {"json.a": values, **columns}.items()}
    keys = PackedStrings([str(n) for n in range(len(values))])
    return ShardIndex(Version(9, "tag:x"), keys, {"jpg": Places(number, number)}, known)


def same(found: Any, values: list[Any]) -> None:
    expected = as_column(values)
    assert found.tolist() == expected.tolist()
    assert [type(value) for value in found.tolist()] == [type(value) for value in expected.tolist()]
    assert not len(values) or found.dtype == expected.dtype


@given(values=VALUES)
def test_a_column_is_read_as_the_values_themselves_would_be(values: list[Any]) -> None:
    again = ShardIndex.from_bytes(index_of(values).to_bytes(), "a.tar.index")
    same(values_of(again.columns["json.a"]), values)
    assert again.to_bytes() == index_of(values).to_bytes()


@given(parts=st.lists(VALUES, min_size=1, max_size=4))
def test_columns_of_shards_are_joined(parts: list[list[Any]]) -> None:
    joined = Catalog.of(map(index_of, parts))
    if any(parts):
        same(values_of(joined.columns["json.a"]), [value for values in parts for value in values])


def test_a_column_that_a_shard_lacks_is_not_joined() -> None:
    joined = Catalog.of([index_of([1], b=[2]), index_of([]), index_of([3])])
    assert list(joined.columns) == ["json.a"]
    assert values_of(joined.columns["json.a"]).tolist() == [1, 3]


def test_not_a_number_and_what_is_missing_are_told_apart() -> None:
    column = ShardIndex.from_bytes(index_of([math.nan, MISSING, None]).to_bytes(), "").columns["json.a"]
    assert missing_in(column).tolist() == [1]
    assert math.isnan(values_of(column)[0])
    assert values_of(column)[2] is None


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_an_error(place: float, bit: int) -> None:
    content = bytearray(index_of([1, "heron"], b=[0.5, True]).to_bytes())
    content[int(place * len(content))] ^= 1 << bit
    with pytest.raises(DataError, match=r"a\.tar\.index"):
        ShardIndex.from_bytes(bytes(content), "a.tar.index")


def test_columns_whose_arrays_do_not_fit_are_an_error() -> None:
    for values in ([1, 2], ["heron", "stork"]):
        index = index_of([1])
        index.columns["json.a"] = column_of(values)
        with pytest.raises(DataError, match=r"a\.tar\.index.* different lengths"):
            ShardIndex.from_bytes(index.to_bytes(), "a.tar.index")


def test_json_members_are_looked_up_and_odd_values_are_named() -> None:
    builder = ColumnBuilder("a.tar", ["json.size.w", "cls", "seg.json.n"])
    builder.add("k0", {"json": b'{"size": {"w": 3}}', "cls": b"heron", "seg.json": b'{"n": null}'})
    builder.add("k1", {"json": b'{"size": 7}', "jpg": b"pixels"})
    assert builder.needs("json")
    assert not builder.needs("jpg")
    columns = builder.columns()
    assert [list(columns[name]) for name in columns] == [["3", ""], ['"heron"', ""], ["null", ""]]
    for content, words in (
        (b'{"size": {"w": [1]}}', "it is a list"),
        (b'{"size": {"w": 9223372036854775808}}', "the integer does not fit into 64 bits"),
        (b'{"size": {"w": "\\ud800"}}', "surrogates not allowed"),
        (b"no json", "Expecting value"),
    ):
        with pytest.raises(DataError, match=rf"Column 'json.size.w' of sample 'k2' in 'a.tar' cannot .* {words}"):
            builder.add("k2", {"json": content})


def test_a_column_that_no_sample_has_names_what_there_is() -> None:
    builder = ColumnBuilder("a.tar", ["json.width"])
    builder.add("k0", {"json": b'{"w": 3, "h": 4}'})
    with pytest.raises(FieldError, match=r"has a value for the column 'json.width'. It has 'json.h', 'json.w'"):
        builder.columns()


@pytest.mark.parametrize("columns", [3, ["a", 3], [""], "a,,b", {"a": 1}])
def test_columns_are_names(columns: Any) -> None:
    with pytest.raises(TypeError, match="`columns` must be the names of columns"):
        check_columns(columns)


def test_columns_are_one_text_or_a_list() -> None:
    assert check_columns("json.a, json.b,json.a") == check_columns(["json.a", "json.b"]) == ("json.a", "json.b")
    assert check_columns(()) == ()
