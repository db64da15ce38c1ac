"""`record_ctx`: what the transforms that follow did, by their names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.work.replaying import Shift

ITEMS = [(10, 100), (20, 200)]


def indexed() -> Any:
    return kdp.from_dataset(list(ITEMS))


def stream() -> Any:
    return IterableWrapper(list(ITEMS)).to_samples(fields="x y")


class HTTPScale(Shift):
    """Another name."""


def test_entries_are_named_by_operation_in_order() -> None:
    for make in (indexed, stream):
        pipe = make().record_ctx().transform("x", Shift(), HTTPScale(), Shift()).transform("y", Shift())
        for _ in range(2):
            for ((x, y), ctx), (first_x, first_y) in zip(pipe.select("x y", return_ctx=True), ITEMS, strict=True):
                assert list(ctx) == ["shift", "http_scale", "shift_2", "shift_3"]
                assert x == first_x + ctx["shift"]["by"] + ctx["http_scale"]["by"] + ctx["shift_2"]["by"]
                assert y == first_y + ctx["shift_3"]["by"]
                assert len({entry["by"] for entry in ctx.values()}) == 4
                assert json.loads(json.dumps(ctx)) == ctx, "plain data"


def test_nothing_is_recorded_without_it_or_before_it() -> None:
    for make in (indexed, stream):
        plain = make().transform("x", Shift())
        assert [ctx for _, ctx in plain.select("x", return_ctx=True)] == [{}, {}]
        late = plain.record_ctx().transform("y", HTTPScale())
        for _ in range(2):
            assert [list(ctx) for _, ctx in late.select("y", return_ctx=True)] == [["http_scale"]] * 2


def test_recording_changes_no_value() -> None:
    for make in (indexed, stream):
        assert list(make().record_ctx().transform("x", Shift()).select("x")) == list(
            make().transform("x", Shift()).select("x")
        )


def test_an_entry_is_written_when_its_field_is_read() -> None:
    for make in (indexed, stream):
        sample = next(iter(make().record_ctx().transform("x", Shift()).transform("y", HTTPScale())))
        assert sample.ctx == {}
        assert sample["y"] == 100 + sample.ctx["http_scale"]["by"]
        assert list(sample.ctx) == ["http_scale"]


def test_each_repetition_has_a_ctx_of_its_own() -> None:
    again = indexed().record_ctx().transform("x", Shift())[[0, 0]]
    streamed = stream().record_ctx().transform("x", Shift()).oversample(class_counts={100: 2, 200: 1})
    for pipe, num_samples in ((again, 2), (streamed, 3)):
        items = list(pipe.select("x index", return_ctx=True))
        assert [x - ITEMS[index][0] for (x, index), _ in items] == [ctx["shift"]["by"] for _, ctx in items]
        assert len({ctx["shift"]["by"] for _, ctx in items}) == num_samples


def test_columns_and_fields_pass_through() -> None:
    pipe = indexed().record_ctx()
    assert pipe.column("y").tolist() == [100, 200]
    assert pipe.field_names() == {"x", "y"}
    with pytest.raises(TypeError, match=r"`\.record_ctx`: too many positional arguments"):
        pipe.record_ctx(True)
