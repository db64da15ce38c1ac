"""Parameters as plain data: what comes back from JSON is what went in, or nothing goes in."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kdpipes.work.plain_data import as_plain, restored

DTYPES = ["bool", "uint8", "int32", "int64", "uint32", "float16", "float32", "float64"]
NUMBERS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))
)
NATIVE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
LEAVES = NATIVE | NUMBERS.filter(lambda array: array.size < 20 and not np.isnan(array).any())
SCALARS = [np.float32(0.1), np.float64(0.1), np.int64(3), np.uint8(3), np.bool_(True), np.str_("v"), np.float16(0.1)]
VALUES = st.recursive(
    LEAVES | st.sampled_from(SCALARS),
    lambda parts: st.lists(parts, max_size=3) | st.lists(parts, max_size=3).map(tuple),
    max_leaves=5,
)


def assert_same(given: Any, wanted: Any) -> None:
    assert type(given) is type(wanted)
    if isinstance(wanted, list | tuple):
        for one, other in zip(given, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray | torch.Tensor):
        assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape)
        assert bool((given == wanted).all())
    else:
        assert given == wanted


@given(st.dictionaries(st.text(st.characters(exclude_characters="/"), min_size=1), VALUES, max_size=4))
def test_what_comes_back_from_json_has_the_same_types_and_values(params: dict[str, Any]) -> None:
    plain = as_plain(params)
    assert plain is not None
    assert json.loads(json.dumps(plain)) == plain
    read = json.loads(json.dumps(plain))
    back = restored(read["params"], read["kinds"])
    assert list(back) == list(params)
    for name, value in params.items():
        assert_same(back[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (2, 3)])
def test_tensors_come_back_with_their_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    plain = as_plain({"x": [tensor]})
    assert plain is not None
    assert_same(restored(plain["params"], plain["kinds"])["x"][0], tensor)


def test_values_keep_nothing_of_the_callers() -> None:
    params = {"x": [1, [2]], "y": {"z": [3]}}
    plain = as_plain(params)
    assert plain == {"params": params, "kinds": {}}
    params["x"][1].append(3)
    assert plain["params"] == {"x": [1, [2]], "y": {"z": [3]}}


NOT_PLAIN: list[Any] = [
    object(),
    {1, 2},
    len,
    1j,
    np.complex64(1),
    np.longdouble(1),
    np.zeros(2, dtype=complex),
    np.array([None]),
    np.array(["a"]),
    torch.zeros(2, dtype=torch.complex64),
    torch.zeros(2).to_sparse(),
    {1: 2},
    {"a/b": 2},
    np.ma.masked_array([1]),
    torch.Size([2]),
    np.zeros(1001),
    torch.zeros(26, 40),
    [0] * 1001,
    np.random.default_rng(0),
]


@pytest.mark.parametrize("value", NOT_PLAIN, ids=[f"{type(value).__name__}{n}" for n, value in enumerate(NOT_PLAIN)])
def test_what_is_no_plain_data_or_too_much_of_it_is_not_taken(value: Any) -> None:
    assert as_plain({"x": value}) is None
    assert as_plain({"x": [(value,)]}) is None
