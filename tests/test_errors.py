"""The errors' texts and kinds, and the checks that reject arguments."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from kdpipes.core.errors import (
    ChainError,
    DataError,
    FieldError,
    KdpipesError,
    add_note,
    check_callable,
    check_choice,
    check_count,
    check_one_of,
    check_seed,
    must_be,
    reject_field,
)


def test_an_error_is_caught_as_kdpipes_own_and_as_a_builtin() -> None:
    for kind, builtin in {DataError: ValueError, ChainError: TypeError, FieldError: KeyError}.items():
        copy = pickle.loads(pickle.dumps(kind("Shard 'a.tar' is cut.")))
        assert isinstance(copy, kind)
        assert isinstance(copy, KdpipesError)
        assert isinstance(copy, builtin)
        assert str(copy) == "Shard 'a.tar' is cut."


def test_the_sentence_names_argument_rule_value_and_hint() -> None:
    assert must_be("size", "even", 3) == "`size` must be even, but is 3 instead."
    assert must_be("size", "even", 3, "Add 1.") == "`size` must be even, but is 3 instead. Add 1."


def test_a_long_value_is_cut_short() -> None:
    sentence = must_be("urls", "a path", ["x" * 1000])
    assert sentence.endswith("x... instead.")
    assert len(sentence) < 160


def test_a_count_is_any_integer_and_comes_back_as_an_int() -> None:
    assert [check_count("n", value) for value in (1, np.int32(7), 10**30)] == [1, 7, 10**30]
    assert type(check_count("n", np.int32(7))) is int
    assert check_count("n", 0, minimum=0) == 0


def test_what_is_no_count_is_rejected() -> None:
    rejected: dict[type[Exception], list[Any]] = {
        TypeError: [True, np.True_, 2.0, np.float32(2), "3", None],
        ValueError: [0, -1],
    }
    for kind, values in rejected.items():
        for value in values:
            with pytest.raises(kind, match=r"`n` must be an integer of at least 1, but is .* instead\."):
                check_count("n", value)


def test_a_seed_is_below_two_to_the_64() -> None:
    assert check_seed(2**64 - 1) == 2**64 - 1
    with pytest.raises(ValueError, match=r"`seed` must be below 2\*\*64"):
        check_seed(2**64)
    with pytest.raises(ValueError, match="`seed` must be an integer of at least 0"):
        check_seed(-1)


def test_a_choice_is_one_of_those_named() -> None:
    check_choice("mode", "".join(["ex", "act"]), ("multiply", "exact"))
    check_choice("shuffle", True, (True, "block"))
    for value in ("Exact", 1, None):
        with pytest.raises(ValueError, match=r"`mode` must be one of 'multiply', True, but is .* instead\."):
            check_choice("mode", value, ("multiply", True))


def test_exactly_one_of_several_arguments_is_given() -> None:
    check_one_of(valid=[], invalid=None)
    with pytest.raises(ValueError, match="Exactly one of `valid` or `invalid` must be given, but neither is"):
        check_one_of(valid=None, invalid=None)
    with pytest.raises(ValueError, match="Exactly one of `valid` or `invalid` must be given, but both"):
        check_one_of(valid=[1], invalid=[2])


def test_a_class_in_place_of_a_callable_gets_an_instance_hint() -> None:
    class Flip:
        def __call__(self, x: Any) -> Any:
            return x

    check_callable("load", Flip())
    check_callable("load", str)
    with pytest.raises(TypeError, match=r"`load` must be a callable, .* Write `Flip\(\.\.\.\)` to make one\."):
        check_callable("load", Flip)
    with pytest.raises(TypeError, match=r"`load` must be a callable, but is 3 instead\."):
        check_callable("load", 3)


def test_a_missing_field_is_named_with_those_that_are_there() -> None:
    with pytest.raises(FieldError) as caught:
        reject_field("imgae", "Sample '7'", ["y", "image"], "Rename it.")
    assert str(caught.value) == (
        "Sample '7' has no field 'imgae'; it has 'image', 'y'. Did you mean 'image'? Rename it."
    )
    with pytest.raises(FieldError, match=r"^Sample '7' has no field 'zebra'; it has 'y'\.$"):
        reject_field("zebra", "Sample '7'", ["y"])
    with pytest.raises(FieldError, match=r"'png'\. Name it: `\.rename_fields\(x='jpg;png'\)`\.$"):
        reject_field("x", "Sample '7'", ["jpg", "png", "cls"])
    with pytest.raises(FieldError, match=r"^Sample '7' has no field 'x'; it has no fields\.$"):
        reject_field("x", "Sample '7'", [])


def test_a_note_is_attached_once_and_keeps_the_error_as_it_is() -> None:
    error = OSError(5, "disk")
    for note in ("while reading", "while reading", "in worker 1"):
        add_note(error, note)
    assert error.__notes__ == ["while reading", "in worker 1"]
    assert error.args == (5, "disk")
