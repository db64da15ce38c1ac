"""`select`: tuples of the fields that are wanted, and nothing else is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.fingerprint import fingerprint
from tests.work.replaying import Shift


class Counting(kdp.SampleSource):
    """Three samples that note what is read of them."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __len__(self) -> int:
        return 3

    def key_of(self, index: int) -> str:
        return "abc"[index]

    def getitem_x(self, index: int) -> int:
        self.read.append(f"x{index}")
        return 10 * index

    def getitem_y(self, index: int) -> int:
        self.read.append(f"y{index}")
        return index % 2


def stream() -> Any:
    items = [{"__key__": "abc"[index], "x": 10 * index, "y": index % 2} for index in range(3)]
    return IterableWrapper(items).to_samples()


FLAVOURS = pytest.mark.parametrize("make", [Counting, stream])


TABLE: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("x y", [(0, 0), (10, 1), (20, 0)]),
    (" y\tx  y ", [(0, 0, 0), (1, 10, 1), (0, 20, 0)]),
    ("key index ordinal is_padding", [("a", 0, 0, False), ("b", 1, 1, False), ("c", 2, 2, False)]),
    ("ctx x", [({}, 0), ({}, 10), ({}, 20)]),
]


@FLAVOURS
def test_tuples_follow_the_order_of_the_names(make: Any) -> None:
    for mode, expected in TABLE:
        pipe = make().select(mode)
        assert [list(pipe) for _ in range(2)] == [expected, expected], mode


def test_ctx_is_what_the_operations_on_these_fields_recorded() -> None:
    for make in (Counting, stream):
        pipe = make().record_ctx().transform("x", Shift()).transform("y", Shift())
        for _ in range(2):
            for index, (pair, ctx) in enumerate(pipe.select("x", return_ctx=True)):
                assert pair == (10 * index + ctx["shift"]["by"],)
                assert list(ctx) == ["shift"], "that of y is not there: y was not read"
            for ctx, x, one in pipe.select("ctx x ctx.shift"):
                assert ctx == {"shift": one}, "ctx is complete, whatever its place"
                assert x % 10 == one["by"] % 10


def test_only_what_is_selected_is_loaded() -> None:
    for mode, loaded in (("y", ["y1"]), ("key index", []), ("x", ["x1"]), ("y x", ["x1", "y1"]), ("ctx", [])):
        source: Any = Counting()
        source.select(mode)[1]
        assert sorted(source.read) == loaded, mode


def test_an_entry_of_the_ctx_loads_just_what_it_needs() -> None:
    source: Any = Counting()
    pipe = source.record_ctx().transform("y", Shift()).transform("x", Shift(), Shift())
    with_failure = pipe.transform("x", lambda x: 1 // 0)
    (entry,) = with_failure.select("ctx.shift")[2]
    assert source.read == ["y2"]
    (later,) = with_failure.select("ctx.shift_2")[2]
    assert source.read == ["y2", "x2"]
    assert {"by"} == set(entry) == set(later)
    assert entry != later


def test_an_entry_that_nothing_records_is_an_error_with_hint() -> None:
    for make in (Counting, stream):
        recorded = make().record_ctx().transform("x", Shift()).select("ctx.shfit")
        with pytest.raises(kdp.FieldError, match=r"The ctx of sample 'a' has no field 'shfit'.*Did you mean 'shift'\?"):
            next(iter(recorded))
        with pytest.raises(kdp.FieldError, match=r"Put `.record_ctx\(\)` before the operations"):
            next(iter(make().transform("x", Shift()).select("ctx.shift")))


def test_ordinals_and_padding_are_those_of_the_dealt_epoch() -> None:
    for source in (Counting(), stream()):
        dealt = source.select("ordinal key is_padding").deal(batch_size=2, uneven="pad")
        for _ in range(2):
            assert list(dealt) == [[(0, "a", False), (1, "b", False)], [(2, "c", False), (3, "a", True)]]


def test_a_field_of_a_special_name_comes_first() -> None:
    pipe: Any = kdp.from_dataset([("mine", 7)], "key ctx")
    assert pipe.select("key ctx index")[0] == ("mine", 7, 0)


def test_an_unknown_field_is_an_error_when_built_if_known() -> None:
    with pytest.raises(kdp.FieldError, match=r"The source has no field 'yy'; it has 'x', 'y'\. Did you mean 'y'\?"):
        Counting().select("x yy")
    pipe = stream().select("x yy")
    with pytest.raises(kdp.FieldError, match=r"Sample 'a' has no field 'yy'; it has 'x', 'y'\. Did you mean 'y'\?"):
        next(iter(pipe))
    added: Any = Counting()
    assert added.add_field("z", lambda sample: sample.key).rename_fields(w="x").select("z w")[1] == ("b", 10)


def test_bad_arguments_are_rejected_when_the_chain_is_built() -> None:
    for make in (Counting, stream):
        for mode, error, words in (
            (("x", "y"), TypeError, r"got \('x', 'y'\). Write `\.select\('x y'\)`"),
            (3, TypeError, "`select` takes names in one string, like .* but got 3"),
            ("x, y", ValueError, r"Write `\.select\('x y'\)`"),
            (" ", ValueError, '`mode` must be at least one name, like "x y"'),
        ):
            with pytest.raises(error, match=words):
                make().select(mode)
        with pytest.raises(TypeError, match="`return_ctx` must be True or False, but is 'ctx' instead"):
            make().select("x", return_ctx="ctx")
        with pytest.raises(kdp.ChainError, match=r"Put `.transform\(\)` before `.select\(\)`"):
            make().select("x").transform("x", Shift())


@FLAVOURS
def test_dictionaries_have_the_names_of_the_fields(make: Any) -> None:
    pipe = make().select("y key", as_dict=True)
    assert [list(pipe) for _ in range(2)] == [[{"y": 0, "key": "a"}, {"y": 1, "key": "b"}, {"y": 0, "key": "c"}]] * 2
    assert list(next(iter(pipe))) == ["y", "key"], "in the order of the names"


@FLAVOURS
def test_parts_of_dictionaries_can_be_renamed(make: Any) -> None:
    assert next(iter(make().select("pixel_values=x labels=y", as_dict=True))) == {"pixel_values": 0, "labels": 0}
    pipe = make().record_ctx().transform("x", Shift()).select("by=ctx.shift.by x", return_ctx=True, as_dict=True)
    for item, ctx in pipe:
        assert item["by"] == ctx["shift"]["by"]


@FLAVOURS
def test_one_field_can_come_bare(make: Any) -> None:
    assert list(make().select("x", bare=True)) == [0, 10, 20]
    for x, ctx in make().record_ctx().transform("x", Shift()).select("x", return_ctx=True, bare=True):
        assert x % 10 == ctx["shift"]["by"] % 10


def test_dictionaries_load_only_what_is_selected() -> None:
    source: Any = Counting()
    assert source.select("labels=y", as_dict=True)[1] == {"labels": 1}
    assert source.read == ["y1"]


@pytest.mark.parametrize(
    ("mode", "options", "rule"),
    [
        ("x y", {"bare": True}, "`mode` must be a single name if `bare` is True"),
        ("x", {"bare": True, "as_dict": True}, "`bare` must be False if"),
        ("a=x y", {}, "add `as_dict=True`"),
        ("a=x a=y", {"as_dict": True}, "`mode` must be different names"),
        ("x x", {"as_dict": True}, "`mode` must be different names"),
        ("=x", {"as_dict": True}, "`mode` must be different names"),
        ("x=", {"as_dict": True}, "`mode` must be different names"),
    ],
)
def test_contradicting_forms_are_errors(mode: str, options: dict[str, Any], rule: str) -> None:
    for make in (Counting, stream):
        with pytest.raises(ValueError, match=rule):
            make().select(mode, **options)


def test_forms_must_be_booleans() -> None:
    source: Any = Counting()
    for option in ("as_dict", "bare"):
        with pytest.raises(TypeError, match=f"`{option}` must be True or False, but is 1 instead"):
            source.select("x", **{option: 1})
    with pytest.raises(kdp.FieldError, match=r"The source has no field 'z'"):
        source.select("labels=z", as_dict=True)


def test_states_know_the_form_of_the_items() -> None:
    source: Any = Counting()
    forms = [source.select("x"), source.select("x", as_dict=True), source.select("x", bare=True)]
    assert len({fingerprint(pipe) for pipe in [*forms, source.select("z=x", as_dict=True)]}) == 4
    assert fingerprint(source.select("x y", return_ctx=True)) == "5a601a33", "as in states of version 2"
