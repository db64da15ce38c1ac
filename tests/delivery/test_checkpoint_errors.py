"""A state of another chain is an error that names the pipe that differs; an equal chain takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.delivery.states import chain, of_rank

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


def one_more(x: int) -> int:
    return x + 1


def two_more(x: int) -> int:
    return x + 2


def adding(number: int) -> Callable[[int], int]:
    return lambda x: x + number


def with_default(number: int) -> Callable[[int], int]:
    def add(x: int, number: int = number) -> int:
        return x + number

    return add


def transformed(function: Any) -> Any:
    return kdp.from_dataset([(n, n % 2) for n in range(12)]).transform("x", function).select("x").deal(2)


def filtered(*valid: int) -> Any:
    return kdp.from_dataset([(n, n % 3) for n in range(12)]).filter_classes(valid=valid).select("x").deal(2)


def labeled(*labels: int) -> Any:
    return kdp.from_dataset(list(range(4)), "x", labels=labels).filter_classes(valid=[0]).select("x").deal(1)


def looked_up(*labels: int) -> Any:
    return kdp.from_ids(list("abcd"), labels, load=len).filter_classes(valid=[0]).select("x").deal(1)


REJECTIONS: dict[str, tuple[str, Any, Any]] = {
    "seed": ("of `deal` have changed", chain(seed=1), chain(seed=2)),
    "uneven": ("of `deal` have changed", chain(uneven="pad"), chain(uneven="drop")),
    "filter": ("of `filter_classes` have changed", filtered(0, 1), filtered(0, 2)),
    "code": ("of `transform` have changed", transformed(one_more), transformed(two_more)),
    "closure": ("of `transform` have changed", transformed(adding(1)), transformed(adding(2))),
    "default": ("of `transform` have changed", transformed(with_default(1)), transformed(with_default(2))),
    "builtin_method": (
        "of `from_ids` have changed",
        kdp.from_ids(["a", "b"], load=str.upper).deal(1),
        kdp.from_ids(["a", "b"], load=str.lower).deal(1),
    ),
    "labels": ("of `from_dataset` have changed", labeled(0, 0, 1, 1), labeled(0, 1, 0, 1)),
    "labels_by_id": ("of `from_ids` have changed", looked_up(0, 0, 1, 1), looked_up(0, 1, 0, 1)),
    "stock_function": ("of `map` have changed", chain().map(len), chain().map(list)),
    "stock_source": (
        "IterableWrapper",
        IterableWrapper([1, 2]).to_samples(fields="x").deal(1),
        IterableWrapper([1, 3]).to_samples(fields="x").deal(1),
    ),
    "another_pipe": (
        "→ transform → select → deal, but this chain is from_dataset → transform → select → deal → map",
        chain(),
        chain().map(list),
    ),
}


@pytest.mark.parametrize("what", REJECTIONS)
def test_the_state_of_another_chain_is_an_error_unless_forced(what: str) -> None:
    words, then, now = REJECTIONS[what]
    state = kdp.Loader(then).state_dict()
    kdp.Loader(then).load_state_dict(state)
    loader = kdp.Loader(now)
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict(state)
    with pytest.warns(UserWarning, match=words):
        loader.load_state_dict({**state, "epoch": 1, "batch": 1}, strict=False)
    assert len(list(loader)) == len(now) - 1


def test_renamed_files_or_other_classes_are_an_error(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def make() -> Any:
        return kdp.Loader(kdp.image_folder(tmp_path).select("key").deal(1))

    state = make().state_dict()
    make().load_state_dict(state)
    (tmp_path / "a/2.png").rename(tmp_path / "a/4.png")
    with pytest.raises(ValueError, match="of `image_folder` have changed"):
        make().load_state_dict(state)
    (tmp_path / "a/4.png").rename(tmp_path / "b/2.png")
    with pytest.raises(ValueError, match="of `image_folder` have changed"):
        make().load_state_dict(state)


def test_another_global_batch_is_wrong_with_the_size_that_fits() -> None:
    state = kdp.Loader(chain(batch_size=4)).state_dict()
    with pytest.raises(ValueError, match=r"batches of 4 samples.*have 8.*deal\(global_batch_size=4\)"):
        kdp.Loader(chain(batch_size=8)).load_state_dict(state)
    kdp.Loader(of_rank(chain(batch_size=2), 1)).load_state_dict(state)


GARBAGE: list[Any] = [
    None,
    [],
    {},
    "state",
    {"serialized_datapipe": b"", "reading_service_state": None, "randomness_state": ()},
    {"version": 0},
    {"version": 3},
    {"pipes": 5},
    {"pipes": [1]},
    {"pipes": None},
    {"pipes": ["nonsense"]},
    {"batch": -1},
]


ENTRIES: dict[str, list[Any]] = {
    "epoch": [None, "1", 1.0, True, -1, 10**9, [0]],
    "batch": [None, "1", 1.0, True, -1, 9, 10**18, {}],
    "offset": [None, "1", 0.5, False, -1, 10**18],
    "cursors": [5, "word", [5], [[0, 1, 2]], [[1, 0, 0, 0]], [[0, 0, 0, -1]], [[0, 2**32, 0, 0]], [[0, 0, True, 0]]],
    "seed": [None, "1", 1.0, True, -1, 1 << 64],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ENTRIES.items() for value in values])
def test_a_wrong_entry_of_a_state_is_named(name: str, value: Any) -> None:
    loader = kdp.Loader(chain())
    state = loader.state_dict()
    with pytest.raises(ValueError, match=rf"`state_dict\['{name}'\]` must be .* instead\. Load a state that"):
        loader.load_state_dict({**state, name: value})
    assert loader.state_dict() == state


@pytest.mark.parametrize("name", ["epoch", "batch", "seed", "pipes", "version"])
def test_a_state_that_lacks_an_entry_is_rejected(name: str) -> None:
    loader = kdp.Loader(chain())
    state = loader.state_dict()
    with pytest.raises(ValueError, match="`state_dict"):
        loader.load_state_dict({entry: value for entry, value in state.items() if entry != name})
    assert loader.state_dict() == state


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_garbage_is_rejected_and_changes_nothing(garbage: Any) -> None:
    loader = kdp.Loader(chain())
    state = loader.state_dict()
    if isinstance(garbage, dict) and set(garbage) & set(state):
        garbage = {**state, **garbage}
    with pytest.raises(ValueError, match=r"The state|`state_dict"):
        loader.load_state_dict(garbage)
    assert loader.state_dict() == state


def test_a_callable_that_remembers_changes_no_state() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: int) -> int:
            self.calls += 1
            return x

    def counted() -> Any:
        pipe = kdp.from_dataset([(number, 0) for number in range(9)]).transform("x", Counting())
        return pipe.select("x").deal(batch_size=2)

    with kdp.Loader(counted()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with kdp.Loader(counted(), num_workers=1) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 4


def test_on_error_may_be_added_to_a_state_without_it() -> None:
    def pipe(*, is_tolerant: bool) -> Any:
        source = kdp.from_dataset([(number, 0) for number in range(9)])
        return (source.on_error("skip") if is_tolerant else source).select("x").deal(batch_size=2)

    with kdp.Loader(pipe(is_tolerant=False)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with kdp.Loader(pipe(is_tolerant=True)) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 4
