"""Samples load late and once, their views and forks keep apart, and their errors say which sample it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.column import Column
from kdpipes.core.errors import ChainError, FieldError
from kdpipes.core.randomness import SampleKey
from kdpipes.core.sample import Sample, as_sample


class Loads:
    """Fields that count how often they are loaded."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def field(self, name: str, value: Any = None) -> Column:
        return Column(lambda sample: self.seen.append(name) or value, what=f"reading field {name!r}")


def _failing(error: Exception) -> Column:
    def fail(sample: Sample) -> None:
        raise error

    return Column(fail, what="reading field 'x'")


def test_a_field_is_loaded_when_it_is_first_read_and_once() -> None:
    loads = Loads()
    sample = Sample({"x": loads.field("x", 1), "y": loads.field("y", 2)}, key="7")
    assert ("x" in sample, "z" in sample, list(sample), len(sample)) == (True, False, ["x", "y"], 2)
    assert repr(sample) == "Sample('7', x=<not loaded>, y=<not loaded>)"
    assert not sample.lazy("x").is_loaded
    assert loads.seen == []
    assert [sample["y"], sample["y"]] == [2, 2]
    assert loads.seen == ["y"]


def test_what_is_replaced_or_deleted_is_not_loaded() -> None:
    loads = Loads()
    sample = Sample({"x": loads.field("x"), "y": loads.field("y")})
    sample["x"] = 5
    del sample["y"]
    assert dict(sample) == {"x": 5}
    assert loads.seen == []


def test_a_field_computed_from_others_loads_them_once() -> None:
    loads = Loads()
    item = loads.field("item", (1, 2))
    parts = {name: Column(lambda sample, pair, at=at: pair[at], item, what="picking") for at, name in enumerate("xy")}
    assert dict(Sample(parts)) == {"x": 1, "y": 2}
    assert loads.seen == ["item"]


def test_an_error_keeps_its_type_and_names_key_and_ordinal_once() -> None:
    inner = _failing(OSError(5, "disk"))
    outer = Column(lambda sample, value: value, inner, what="applying 'crop'")
    sample = Sample({"x": outer}, key="heron/1.jpg", draw=SampleKey(0, 1, 17))
    for _ in range(2):
        with pytest.raises(OSError, match="disk") as caught:
            sample["x"]
        assert caught.value.args == (5, "disk")
        assert caught.value.__notes__ == ["kdpipes: while reading field 'x' of sample 'heron/1.jpg' (ordinal 17)"]


def test_a_missing_field_is_an_error_that_names_the_others() -> None:
    sample = Sample({"image": 1, "y": 2}, key="7")
    for use in (sample.__getitem__, sample.__delitem__, sample.lazy):
        with pytest.raises(FieldError) as caught:
            use("imgae")
        assert str(caught.value) == "Sample '7' has no field 'imgae'; it has 'image', 'y'. Did you mean 'image'?"
    assert sample.get("imgae", 3) == 3


def test_a_copy_has_everything_loaded() -> None:
    for duplicate in (copy.copy, copy.deepcopy, lambda sample: pickle.loads(pickle.dumps(sample))):
        loads = Loads()
        sample = Sample({"x": loads.field("x", 1), "y": 2}, key="7", index=3, draw=SampleKey(1, 2, 5))
        sample.ctx["crop"] = 4
        twin = duplicate(sample)
        assert loads.seen == ["x"]
        assert dict(twin) == {"x": 1, "y": 2}
        assert (twin.key, twin.index, twin.ordinal, twin.draw, twin.ctx) == ("7", 3, 5, SampleKey(1, 2, 5), {"crop": 4})
        twin.ctx.clear(), twin.pop("y")
        assert (sample.ctx, sample["y"]) == ({"crop": 4}, 2)


def test_a_view_keeps_the_fields_of_its_time_and_shares_the_rest() -> None:
    loads = Loads()
    sample = Sample({"x": loads.field("x", 1)}, key="7")
    scope = sample.scope()
    sample["x"], sample["y"] = 2, 3
    sample.ctx["crop"] = 4
    sample.bind(SampleKey(0, 0, 9))
    view = sample.view(scope)
    assert dict(view) == {"x": 1}
    assert (view.key, view.ordinal, view.ctx, loads.seen) == ("7", 9, {"crop": 4}, ["x"])


def test_a_fork_draws_and_records_for_itself() -> None:
    def crop(sample: Sample) -> int:
        sample.ctx["crop"] = int(sample.rng("crop").integers(10**9))
        return sample.ctx["crop"]

    sample = Sample({"x": Column(crop, what="cropping"), "y": 1}, draw=SampleKey(0, 0, 0))
    fork = sample.fork()
    fork.bind(SampleKey(0, 0, 1))
    fork["y"] = 2
    assert sample["x"] != fork["x"]
    assert (sample.ctx, fork.ctx) == ({"crop": sample["x"]}, {"crop": fork["x"]})
    assert (sample["y"], fork["y"]) == (1, 2)


def test_a_fork_loads_nothing_and_keeps_what_is_loaded() -> None:
    loads = Loads()
    sample = Sample({"x": loads.field("x", 1), "y": loads.field("y", 2)})
    sample["y"]
    fork = sample.fork()
    assert loads.seen == ["y"]
    assert dict(fork) == {"x": 1, "y": 2}
    assert loads.seen == ["y", "x"]


def test_operations_get_names_of_their_own_also_after_a_fork() -> None:
    sample = Sample({})
    assert [sample.block.claim_name(name) for name in ("crop", "flip", "crop")] == ["crop", "flip", "crop_2"]
    assert (sample.fork().block.claim_name("crop"), sample.block.claim_name("crop")) == ("crop_3", "crop_3")


def test_reading_a_promised_entry_loads_its_field_alone() -> None:
    loads = Loads()
    sample = Sample({"x": Column(lambda s: s.ctx.update(crop=4), what="cropping"), "y": loads.field("y")})
    sample.block.is_recording = True
    sample.block.promises["crop"] = sample.lazy("x")
    sample.block.promises["blur"] = sample.lazy("y")
    for twin in (sample.fork(), sample):
        assert twin.block.is_recording
        assert twin.recorded("crop") == 4
        assert (twin.ctx, loads.seen) == ({"crop": 4}, [])


def test_an_entry_that_was_not_recorded_is_named_with_a_hint() -> None:
    sample = Sample({}, key="7")
    with pytest.raises(FieldError, match=r"^The ctx of sample '7' has no field 'crop'; .* Put `\.record_ctx"):
        sample.recorded("crop")
    sample.block.is_recording = True
    sample.ctx["crop_2"] = 1
    with pytest.raises(FieldError, match=r"it has 'crop_2'\. Did you mean 'crop_2'\?$"):
        sample.recorded("crop")


def test_dictionaries_pass_for_samples_other_items_fail() -> None:
    sample = Sample({"x": 1}, key="a")
    new = as_sample(sample, 3, "crop")
    new["x"] = 2
    assert (new.key, sample["x"]) == ("a", 1)
    named = as_sample({"__key__": "a/1", "__url__": "u", ".jpg": b"1"}, 3, "crop")
    assert (named.key, named.index, dict(named)) == ("a/1", 3, {"jpg": b"1"})
    assert as_sample({"x": 1}, 3, "crop").key == "3"
    for item in ((1, 2), "x", {1: 2}):
        with pytest.raises(ChainError, match=rf"`crop` takes samples, but its source yields {type(item).__name__}\."):
            as_sample(item, 0, "crop")


def test_a_fork_of_a_loaded_sample_keeps_what_was_recorded() -> None:
    sample = Sample({"x": Column(lambda s: s.ctx.update(crop=4), what="cropping")})
    sample.block.is_recording = True
    sample.block.promises["crop"] = sample.lazy("x")
    sample["x"]
    assert sample.fork().recorded("crop") == 4


def test_a_field_added_before_oversampling_is_new_each_time() -> None:
    stream = IterableWrapper([("a", 0)] * 3).to_samples(fields="x y").add_field("n", lambda sample, rng: rng.random())
    assert len({n for (n,) in stream.oversample(class_counts={0: 1, 1: 3}).select("n")}) == 9


def test_a_sample_that_is_unpacked_names_select() -> None:
    pipe = kdp.from_dataset([(1, 0), (2, 1)])
    with pytest.raises(TypeError, match=r"cannot be unpacked. `.select\('x y'\)` returns tuples"):
        _x, _y = pipe[0]
    with pytest.raises(TypeError, match="cannot be unpacked"):
        _x, *_ = pipe[0]
    with pytest.raises(TypeError, match="cannot be unpacked"):
        for _x, _y in pipe:
            pass
    assert [(x, y) for x, y in pipe.select("x y")] == [(1, 0), (2, 1)]


def test_a_sample_is_iterated_like_any_mapping() -> None:
    sample = kdp.from_dataset([(1, 0)])[0]
    assert list(sample) == [*sample] == sorted(sample) == ["x", "y"]
    assert dict(sample) == {**sample} == dict(sample.items()) == {"x": 1, "y": 0}
    first, second = sample.keys()
    assert (first, second) == ("x", "y")
