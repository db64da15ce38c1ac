"""The plan pipes, against what KappaData 1.0.7's wrappers gave on the same labels.

`tools/record_kappadata.py` wrote the record. Where kdpipes differs on purpose, DIFFERENCES says why and what it does
instead; every other case is the same. Orders at random are NumPy's: the record names the release that drew them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp

RECORD = json.loads(Path(__file__).with_name("kappadata-1.0.7.json").read_text(encoding="utf-8"))
Answer = list[Any] | str  # positions, or the name of an exception


class Case(NamedTuple):
    """What was recorded: wrappers, from the left to the right, with the arguments of each."""

    wrappers: str
    name: str
    arguments: list[dict[str, Any]]
    answer: Answer

    @property
    def labels(self) -> list[int]:
        return RECORD["labels"][self.name]

    @property
    def given(self) -> dict[str, Any]:
        return self.arguments[-1]

    def __str__(self) -> str:
        return f"{self.wrappers} of {self.name} with {self.arguments}"


CASES = [Case(*line) for line in RECORD["cases"]]


def class_filter(pipe: Any, **given: list[Any]) -> Any:
    """kdpipes has one argument for numbers and names."""
    chosen: dict[str, Any] = {}
    for key, classes in given.items():
        param = key.partition("_")[0]
        chosen[param] = [*chosen[param], *classes] if param in chosen else classes
    return pipe.filter_classes(**chosen)


def subset(pipe: Any, **given: Any) -> Any:
    """kdpipes has Python's slices for a beginning and an end."""
    is_slice = given and "indices" not in given
    return pipe[given.get("start_index") : given.get("end_index")] if is_slice else pipe.subset(**given)


def oversample(pipe: Any, strategy: str = "multiply", **counts: Any) -> Any:
    return pipe.oversample(mode=strategy, **counts)


CHAINS: dict[str, Callable[..., Any]] = {
    "ClassFilterWrapper": class_filter,
    "OversamplingWrapper": oversample,
    "PercentFilterWrapper": lambda pipe, **given: pipe.take_percent(**given),
    "RepeatWrapper": lambda pipe, **given: pipe.repeat_until(**given),
    "ShuffleWrapper": lambda pipe, **given: pipe.permute(**given),
    "SubsetWrapper": subset,
}


def chain_of(case: Case) -> Any:
    names = [chr(ord("a") + label) for label in range(4)] if any("class_names" in key for key in case.given) else None
    pipe: Any = kdp.from_dataset(range(len(case.labels)), "x", labels=case.labels, class_names=names)
    for wrapper, given in zip(case.wrappers.split(), case.arguments, strict=True):
        pipe = CHAINS[wrapper](pipe, **given)
    return pipe


def answer_of(case: Case) -> Answer:
    try:
        pipe = chain_of(case)
        first, second = ([sample.index for sample in pipe] for _ in range(2))
    except Exception as error:
        return type(error).__name__
    assert first == second == pipe.column("x").tolist(), case
    assert len(pipe) == len(first), case
    return first


# Naive versions, for what kdpipes does instead.


def positions_of(case: Case, classes: set[Any], *, keep: bool = True) -> list[int]:
    return [place for place, label in enumerate(case.labels) if (label in classes) == keep]


def multiplied(case: Case) -> list[int]:
    counts = Counter(label for label in case.labels if label != -1)
    again = (positions_of(case, {label}) * (max(counts.values()) // counts[label] - 1) for label in sorted(counts))
    return [*range(len(case.labels)), *(place for places in again for place in places)]


def exact(case: Case) -> list[int]:
    groups = [positions_of(case, {label}) for label in sorted(set(case.labels))]
    largest = max(map(len, groups))
    return [place for group in groups for place in (group * largest)[:largest]]


def share_bounds(case: Case) -> tuple[float, float]:
    return case.given.get("from_percent", 0.0), case.given.get("to_percent", 1.0)


def share(case: Case) -> list[int]:
    flags = (case.given.get("ceil_from_index"), case.given.get("ceil_to_index"))
    bounds = zip(flags, share_bounds(case), strict=True)
    return list(range(*((math.ceil if ceil else math.floor)(bound * len(case.labels)) for ceil, bound in bounds)))


def cut(case: Case) -> list[int]:
    return list(range(len(case.labels)))[case.given.get("start_index") : case.given.get("end_index")]


def shuffled_share(case: Case) -> list[int]:
    order = np.arange(len(case.labels))
    np.random.default_rng(case.arguments[0]["seed"]).shuffle(order)
    return order[: math.ceil(case.given["to_percent"] * len(order))].tolist()


def named(case: Case) -> list[int]:
    is_valid = "valid_class_names" in case.given
    numbers = case.given.get("valid_classes", [])
    names = case.given["valid_class_names" if is_valid else "invalid_class_names"]
    return positions_of(case, {*numbers, *(ord(name) - ord("a") for name in names)}, keep=is_valid)


def indices_of(case: Case) -> list[Any]:
    indices = case.given.get("indices")
    return indices if isinstance(indices, list) else []


def is_position(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_one_of_two(given: dict[str, Any], one: str, other: str) -> bool:
    return (one in given) != (other in given)


class Difference(NamedTuple):
    """Where kdpipes is not KappaData, why, and what it does: an answer, or how to find it."""

    wrappers: str
    why: str
    where: Callable[[Case], bool]
    instead: Answer | Callable[[Case], Answer]

    def answer(self, case: Case) -> Answer:
        return self.instead(case) if callable(self.instead) else self.instead


DIFFERENCES = [  # the first that fits a case counts
    Difference(
        "PercentFilterWrapper",
        "A share outside of 0.0 to 1.0 is an assert without words there, and passes under `python -O`.",
        lambda case: any(not isinstance(bound, str) and not 0 <= bound <= 1 for bound in share_bounds(case)),
        "ValueError",
    ),
    Difference(
        "PercentFilterWrapper",
        "`to_percent or 1.0`: a share of 0.0 is taken for none given, and gives everything.",
        lambda case: share_bounds(case) == (0.0, 0.0),
        [],
    ),
    Difference(
        "PercentFilterWrapper",
        "A beginning behind the end is a mistake, but gives nothing there; with an end of 0.0, all the rest.",
        lambda case: "a" not in share_bounds(case) and share_bounds(case)[0] > share_bounds(case)[1],
        "ValueError",
    ),
    Difference(
        "PercentFilterWrapper",
        "`np.ceil` makes positions floats, with which no list and no array can be read.",
        lambda case: "ceil_from_index" in case.given or "ceil_to_index" in case.given,
        share,
    ),
    Difference(
        "ShuffleWrapper PercentFilterWrapper",
        "The floats of `np.ceil` do not index the wrapper before.",
        lambda case: "ceil_to_index" in case.given,
        shuffled_share,
    ),
    Difference(
        "PercentFilterWrapper ClassFilterWrapper",
        "The floats of `np.ceil` do not index the dataset's labels.",
        lambda case: "ceil_to_index" in case.arguments[0],
        lambda case: list(range(math.ceil(case.arguments[0]["to_percent"] * len(case.labels)))),
    ),
    Difference(
        "ClassFilterWrapper",
        "Neither or both of valid and invalid is an assert without words there.",
        lambda case: len({key.partition("_")[0] for key in case.given}) != 1,
        "ValueError",
    ),
    Difference(
        "ClassFilterWrapper",
        "Names are not implemented there, nor names together with numbers.",
        lambda case: any("class_names" in key for key in case.given),
        named,
    ),
    Difference(
        "ClassFilterWrapper",
        "A single class is rejected there unless it is in a list.",
        lambda case: is_position(case.given.get("valid_classes")),
        lambda case: positions_of(case, {case.given["valid_classes"]}),
    ),
    Difference(
        "ClassFilterWrapper",
        "True is an integer to KappaData, and class 1. It is more likely a mask, and a mistake.",
        lambda case: case.given.get("valid_classes", 0) == [True] and case.given["valid_classes"][0] is True,
        "TypeError",
    ),
    Difference(
        "ClassFilterWrapper",
        "A class that is no integer is an assert without words there.",
        lambda case: any(isinstance(entry, float) for entry in case.given.get("valid_classes", [])),
        "TypeError",
    ),
    Difference(
        "ClassFilterWrapper",
        "A name is rejected there with an assert; here, where the source knows no names, and with the way out.",
        lambda case: any(isinstance(entry, str) for entry in case.given.get("invalid_classes", [])),
        "ValueError",
    ),
    Difference(
        "OversamplingWrapper",
        "An empty dataset is an assert without words there. Nothing, balanced, is nothing.",
        lambda case: not case.labels and case.given.get("strategy", "multiply") == "multiply",
        [],
    ),
    Difference(
        "ClassFilterWrapper OversamplingWrapper",
        "A filter that keeps nothing leaves an assert without words there. Nothing, balanced, is nothing.",
        lambda case: case.arguments[0] == {"valid_classes": []},
        [],
    ),
    Difference(
        "OversamplingWrapper",
        "Labels are counted in a table of `n_classes`: classes that do not begin at 0 do not fit in.",
        lambda case: case.name == "numbered from one",
        multiplied,
    ),
    Difference(
        "OversamplingWrapper",
        "The count of label -1 is written to the last class's place, and is the largest where that class is missing.",
        lambda case: case.name == "some unlabeled, no last class",
        multiplied,
    ),
    Difference(
        "OversamplingWrapper",
        'KappaData 1.0.7 has no "exact".',
        lambda case: case.given.get("strategy") == "exact",
        exact,
    ),
    Difference(
        "OversamplingWrapper",
        "An unknown strategy is a bad value, not one that is not implemented yet.",
        lambda case: case.given.get("strategy") == "most",
        "ValueError",
    ),
    Difference(
        "ShuffleWrapper",
        "Without a seed the order is another in every process, and no run can be resumed: here it must be given.",
        lambda case: "seed" not in case.given,
        "TypeError",
    ),
    Difference(
        "ShuffleWrapper",
        "Seeds of kdpipes are one number of 64 bits, in all pipes.",
        lambda case: case.given["seed"] == 1 << 64,
        "ValueError",
    ),
    Difference(
        "ShuffleWrapper",
        "Seeds of kdpipes are one number of 64 bits, in all pipes; not a list, as NumPy takes it.",
        lambda case: isinstance(case.given["seed"], list),
        "TypeError",
    ),
    Difference(
        "SubsetWrapper",
        "What is no position is kept there until a sample is read; True is position 1 then.",
        lambda case: not all(map(is_position, indices_of(case))) or isinstance(case.given.get("indices"), str),
        "TypeError",
    ),
    Difference(
        "SubsetWrapper",
        "A position outside is kept there until a sample is read.",
        lambda case: not all(-len(case.labels) <= index < len(case.labels) for index in indices_of(case)),
        "IndexError",
    ),
    Difference(
        "SubsetWrapper",
        "A negative position is passed on as it is, for the dataset to understand, or not.",
        lambda case: any(index < 0 for index in indices_of(case)),
        lambda case: [index % len(case.labels) for index in indices_of(case)],
    ),
    Difference(
        "SubsetWrapper",
        "No argument, or indices and a bound together, is an assert without words; `subset` has one argument.",
        lambda case: not case.given or len({"indices", "end_index"} & {*case.given}) == 2,
        "TypeError",
    ),
    Difference(
        "SubsetWrapper",
        "A bound that is no integer is an assert without words; here, Python's own error for slices.",
        lambda case: "indices" not in case.given and not all(map(is_position, case.given.values())),
        "TypeError",
    ),
    Difference(
        "SubsetWrapper",
        "`end_index or len(dataset)`: an end of 0 is taken for none given, and gives everything.",
        lambda case: case.given.get("end_index") == 0,
        cut,
    ),
    Difference(
        "SubsetWrapper",
        "Negative bounds do not count from the end: a beginning gives negative positions first, an end nothing.",
        lambda case: "indices" not in case.given and any(bound < 0 for bound in case.given.values()),
        cut,
    ),
    Difference(
        "RepeatWrapper",
        "Neither or both of the arguments is an assert without words there.",
        lambda case: not is_one_of_two(case.given, "repetitions", "min_size"),
        "ValueError",
    ),
    Difference(
        "RepeatWrapper",
        "An empty dataset is an assert without words there. Nothing, twice, is nothing.",
        lambda case: not case.labels and "repetitions" in case.given,
        [],
    ),
    Difference(
        "RepeatWrapper",
        "No number of rounds makes an empty dataset large enough: an assert there, here an error about the data.",
        lambda case: not case.labels and "min_size" in case.given,
        "DataError",
    ),
    Difference(
        "ClassFilterWrapper RepeatWrapper",
        "No number of rounds makes what a filter has emptied large enough: an assert there, here an error.",
        lambda case: case.arguments[0] == {"valid_classes": []},
        "DataError",
    ),
    Difference(
        "RepeatWrapper",
        "True is an integer to KappaData, and once. It is more likely a mistake.",
        lambda case: True in case.given.values() and not any(map(is_position, case.given.values())),
        "TypeError",
    ),
    Difference(
        "RepeatWrapper",
        "A size that is no integer is an assert without words there.",
        lambda case: not is_position(case.given.get("min_size", 1)),
        "TypeError",
    ),
    Difference(
        "RepeatWrapper",
        "A number below 1 is an assert without words there.",
        lambda case: any(is_position(number) and number < 1 for number in case.given.values()),
        "ValueError",
    ),
]


def difference_of(case: Case) -> Difference | None:
    fitting = (entry for entry in DIFFERENCES if entry.wrappers == case.wrappers and entry.where(case))
    return next(fitting, None)


def expected_of(case: Case) -> Answer:
    difference = difference_of(case)
    return case.answer if difference is None else difference.answer(case)


def is_same(one: Answer, other: Answer) -> bool:
    """Return whether answers are the same to the type: 1, 1.0 and True are equal, but not the same."""
    return json.dumps(one) == json.dumps(other)


QUIET = pytest.mark.filterwarnings("ignore:`filter_classes")  # the last test asks for these warnings


@QUIET
@pytest.mark.parametrize("wrappers", sorted({case.wrappers for case in CASES}))
def test_a_chain_gives_kappadatas_samples_or_differs_as_stated(wrappers: str) -> None:
    cases = [case for case in CASES if case.wrappers == wrappers]
    found = {str(case): (answer_of(case), expected_of(case)) for case in cases}
    assert len(found) == len(cases)
    assert {case: answers for case, answers in found.items() if not is_same(*answers)} == {}


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.why)
def test_each_difference_is_one(difference: Difference) -> None:
    cases = [case for case in CASES if difference_of(case) is difference]
    assert any(not is_same(difference.answer(case), case.answer) for case in cases)


def test_the_record_has_every_wrapper_and_mostly_agreement() -> None:
    assert RECORD["kappadata"] == "1.0.7"
    assert {wrapper for case in CASES for wrapper in case.wrappers.split()} == set(CHAINS)
    for wrapper in CHAINS:
        shared = [case for case in CASES if case.wrappers == wrapper and is_same(expected_of(case), case.answer)]
        assert sum(len(case.answer) > 1 for case in shared if isinstance(case.answer, list)) >= 6, wrapper


def streamed(case: Case) -> list[int]:
    stream = IterableWrapper(list(enumerate(case.labels))).to_samples(fields="x y")
    counts = {"class_counts": Counter(label for label in case.labels if label != -1)}
    pipe = CHAINS[case.wrappers](stream, **case.given, **(counts if case.wrappers == "OversamplingWrapper" else {}))
    first, second = ([sample["x"] for sample in pipe] for _ in range(2))
    assert first == second, case
    return first


@pytest.mark.parametrize("wrapper", ["ClassFilterWrapper", "OversamplingWrapper", "RepeatWrapper"])
def test_a_stream_gives_kappadatas_samples_where_it_is_right(wrapper: str) -> None:
    cases = [case for case in CASES if case.wrappers == wrapper and difference_of(case) is None]
    for case in cases:
        if isinstance(case.answer, str):
            continue  # both reject the arguments, and of a stream nothing else is asked
        if wrapper == "OversamplingWrapper":  # a sample's repetitions follow it directly
            assert streamed(case) == sorted(case.answer), case
        else:
            assert streamed(case) == case.answer, case


def test_an_empty_filter_warns_where_kappadata_is_silent() -> None:
    silent = [case for case in CASES if case.wrappers == "ClassFilterWrapper" and case.answer == [] and case.labels]
    chosen = [case for case in silent if case.given.get("valid_classes") != []]
    assert 0 < len(chosen) < len(silent)
    for case in chosen:
        with pytest.warns(UserWarning, match="keeps none of"):
            assert len(chain_of(case)) == 0
