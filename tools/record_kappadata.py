"""Record ``tests/plan/kappadata-1.0.7.json``: which samples KappaData's wrappers give, for the test of parity.

KappaData is no dependency of kdpipes' tests: what it answers is kept in the repository instead. Each case is a line,
``[wrappers, name of the labels, arguments of each wrapper, answer]``: wrappers are chained from left to right; the
answer is the list of positions that they ask of the dataset, in order, or the name of the exception. Positions are
recorded as they are asked for, so that a float or a negative one stays visible.

Run it from the repository root, with torch and NumPy installed::

    pip install --no-deps --target /tmp/kappadata kappadata==1.0.7
    python tools/record_kappadata.py /tmp/kappadata

All seeds are fixed: the same releases of KappaData and NumPy give the same bytes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

VERSION = "1.0.7"
SEED = 107
DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "plan" / f"kappadata-{VERSION}.json"

# How many samples each label has, and how many classes the dataset says that there are.
COUNTS: dict[str, tuple[dict[int, int], int]] = {
    "balanced": ({0: 8, 1: 8, 2: 8}, 3),
    "unbalanced": ({0: 3, 1: 17, 2: 1, 3: 8}, 4),
    "one class": ({0: 7}, 1),
    "a class missing": ({0: 2, 1: 9, 3: 4, 4: 5}, 5),
    "many classes": ({label: 1 + label % 4 for label in range(20)}, 20),
    "numbered from one": ({1: 6, 2: 3, 3: 2}, 3),
    "some unlabeled": ({-1: 9, 0: 3, 1: 2, 2: 1}, 3),
    "some unlabeled, no last class": ({-1: 9, 0: 3, 1: 2, 2: 1}, 4),
    "empty": ({}, 2),
}
Case = tuple[str, str, list[dict[str, Any]]]


def labels_of(name: str) -> list[int]:
    """Return the labels of a case, in an order that the seed fixes."""
    labels = [label for label, count in COUNTS[name][0].items() for _ in range(count)]
    random.Random(f"{SEED} {name}").shuffle(labels)
    return labels


def percent_cases() -> Iterator[Case]:
    shares = [None, 0.0, 0.29, 0.5, 1.0]
    for name, flags in (("one class", (0, 1, 2, 3)), ("unbalanced", (0, 3))):
        for begin, end, flag in itertools.product(shares, shares, flags):
            given: dict[str, Any] = {"from_percent": begin, "to_percent": end}
            given |= {"ceil_from_index": flag & 1 == 1 or None, "ceil_to_index": flag & 2 == 2 or None}
            yield "PercentFilterWrapper", name, [{key: value for key, value in given.items() if value is not None}]
    # 0.58 * 50 is below 29 and 0.14 * 50 is above 7: the rounding of floats decides
    for arguments in ({"to_percent": 0.58}, {"from_percent": 0.58}, {"to_percent": 0.14, "ceil_to_index": True}):
        yield "PercentFilterWrapper", "many classes", [arguments]
    for arguments in ({"to_percent": 25}, {"to_percent": -0.5}, {"from_percent": 1.5}, {"from_percent": "a"}):
        yield "PercentFilterWrapper", "balanced", [arguments]
    for arguments in ({}, {"to_percent": 0.5}, {"to_percent": 0.0}, {"from_percent": 0.5, "ceil_from_index": True}):
        yield "PercentFilterWrapper", "empty", [arguments]


def class_cases() -> Iterator[Case]:
    for name, classes in itertools.product(COUNTS, ([], [0], [1, 3, 1], [2, 0], [19, 99], [-1])):
        yield "ClassFilterWrapper", name, [{"valid_classes": classes}]
        if name in ("unbalanced", "a class missing", "some unlabeled", "empty"):
            yield "ClassFilterWrapper", name, [{"invalid_classes": classes}]
    for arguments in (
        {},
        {"valid_classes": [0], "invalid_classes": [1]},
        {"valid_classes": 1},
        {"valid_classes": [1.0]},
        {"invalid_classes": ["1"]},
        {"valid_classes": [True]},
        {"valid_class_names": ["b", "a"]},
        {"invalid_class_names": ["b"]},
        {"valid_classes": [2], "valid_class_names": ["a"]},
    ):
        yield "ClassFilterWrapper", "unbalanced", [arguments]


def oversampling_cases() -> Iterator[Case]:
    for name in COUNTS:
        yield "OversamplingWrapper", name, [{}]
        yield "OversamplingWrapper", name, [{"strategy": "multiply"}]
    for name in ("unbalanced", "a class missing"):
        yield "OversamplingWrapper", name, [{"strategy": "exact"}]
    yield "OversamplingWrapper", "balanced", [{"strategy": "most"}]


def shuffle_cases() -> Iterator[Case]:
    for name, seed in itertools.product(("one class", "balanced", "many classes", "empty"), (0, 5, 1 << 63)):
        yield "ShuffleWrapper", name, [{"seed": seed}]
    for arguments in ({}, {"seed": -1}, {"seed": 1.5}, {"seed": 1 << 64}, {"seed": [1, 2]}, {"seed": (1 << 64) - 1}):
        yield "ShuffleWrapper", "balanced", [arguments]


def subset_cases() -> Iterator[Case]:
    for indices in ([], [3], [6, 0, 0, 2], [-1, 0, -7], [2, 7], [-8], [0.5], [True, False], [[1, 2], [3, 4]], "ab", 3):
        yield "SubsetWrapper", "one class", [{"indices": indices}]
    bounds = [None, 0, 3, 6, 7, 50, -2, -50]
    for name, begin, end in itertools.product(("one class", "empty"), bounds, bounds):
        arguments = {"start_index": begin, "end_index": end}
        yield "SubsetWrapper", name, [{key: value for key, value in arguments.items() if value is not None}]
    for arguments in ({"start_index": 1.5}, {"end_index": "a"}, {"indices": [1], "end_index": 2}):
        yield "SubsetWrapper", "one class", [arguments]


def repeat_cases() -> Iterator[Case]:
    for name, number in itertools.product(("one class", "some unlabeled", "empty"), (1, 2, 3)):
        yield "RepeatWrapper", name, [{"repetitions": number}]
    for name, size in itertools.product(("one class", "balanced", "empty"), (1, 7, 8, 24, 25, 50)):
        yield "RepeatWrapper", name, [{"min_size": size}]
    for key, value in itertools.product(("repetitions", "min_size"), (0, -1, 1.5, "a", True)):
        yield "RepeatWrapper", "one class", [{key: value}]
    yield "RepeatWrapper", "one class", [{}]
    yield "RepeatWrapper", "one class", [{"repetitions": 2, "min_size": 10}]


def chain_cases() -> Iterator[Case]:
    few, ceil = {"from_percent": 0.1, "to_percent": 0.6}, {"to_percent": 0.3, "ceil_to_index": True}
    for name in ("unbalanced", "a class missing", "some unlabeled"):
        yield "ClassFilterWrapper OversamplingWrapper", name, [{"invalid_classes": [1]}, {}]
        yield "OversamplingWrapper ClassFilterWrapper", name, [{}, {"valid_classes": [0, 2, 4]}]
        yield "ShuffleWrapper OversamplingWrapper", name, [{"seed": 2}, {}]
        yield "OversamplingWrapper ShuffleWrapper PercentFilterWrapper", name, [{}, {"seed": 3}, few]
        yield "PercentFilterWrapper OversamplingWrapper", name, [few, {}]
        yield "PercentFilterWrapper RepeatWrapper", name, [few, {"min_size": 25}]
        yield "ShuffleWrapper SubsetWrapper", name, [{"seed": 4}, {"indices": [5, 0, -1, 5]}]
        yield "ShuffleWrapper SubsetWrapper", name, [{"seed": 4}, {"start_index": 3, "end_index": 9}]
        yield "SubsetWrapper SubsetWrapper", name, [{"end_index": 12}, {"start_index": 7}]
        yield (
            "RepeatWrapper ShuffleWrapper ClassFilterWrapper",
            name,
            [{"repetitions": 2}, {"seed": 5}, {"valid_classes": [0]}],
        )
        yield "SubsetWrapper OversamplingWrapper", name, [{"indices": [0]}, {}]
        yield "ClassFilterWrapper PercentFilterWrapper", name, [{"valid_classes": []}, few]
        yield "ClassFilterWrapper OversamplingWrapper", name, [{"valid_classes": []}, {}]
        yield "ClassFilterWrapper RepeatWrapper", name, [{"valid_classes": []}, {"min_size": 9}]
        yield "ShuffleWrapper PercentFilterWrapper", name, [{"seed": 6}, ceil]
        yield "PercentFilterWrapper ClassFilterWrapper", name, [ceil, {"invalid_classes": []}]


def dataset_of(kappadata: ModuleType, name: str) -> Any:
    """Return a dataset of KappaData's, whose `x` is the position that is asked for."""
    labels = labels_of(name)

    class Labelled(kappadata.KDDataset):  # type: ignore[misc, name-defined]
        n_classes = COUNTS[name][1]
        class_names = [chr(ord("a") + label) for label in range(n_classes)]

        def __len__(self) -> int:
            return len(labels)

        def getitem_x(self, idx: Any, ctx: Any = None) -> Any:
            return idx

        def getitem_class(self, idx: Any, ctx: Any = None) -> int:
            return labels[idx]

    return Labelled()


def answer_of(kappadata: ModuleType, case: Case) -> Any:
    """Return the positions that a chain of wrappers asks for, or the name of the exception that it raises."""
    wrappers, name, arguments = case
    np.random.seed(SEED)  # ShuffleWrapper without a seed draws from NumPy's global generator
    try:
        dataset = dataset_of(kappadata, name)
        for wrapper, given in zip(wrappers.split(), arguments, strict=True):
            dataset = getattr(kappadata, wrapper)(dataset, **given)
        return np.asarray([dataset.getitem_x(place) for place in range(len(dataset))]).tolist()
    except Exception as error:
        return type(error).__name__


def load_kappadata(folder: str) -> ModuleType:
    """Import KappaData from a folder, and mend what has nothing to do with positions.

    Redis, which only its caches use, need not be installed. Newer releases of torch (2.13) reject a `Subset` that
    overrides `__getitem__` alone, as all wrappers do; with a `__getitems__` they are made, and it is never called.
    """
    sys.path.insert(0, folder)
    try:
        importlib.import_module("redis")
    except ModuleNotFoundError:
        sys.modules["redis"] = ModuleType("redis")
    kappadata = importlib.import_module("kappadata")
    if kappadata.__version__ != VERSION:
        raise SystemExit(f"KappaData must be {VERSION}, but is {kappadata.__version__} instead.")
    kappadata.KDSubset.__getitems__ = lambda self, indices: [self[index] for index in indices]
    return kappadata


def main() -> None:
    """Record all cases and print how many there are."""
    parser = argparse.ArgumentParser(description="Record what KappaData's wrappers give.")
    parser.add_argument("folder", help=f"where KappaData {VERSION} is installed")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    args = parser.parse_args()
    kappadata = load_kappadata(args.folder)
    groups = (percent_cases, class_cases, oversampling_cases, shuffle_cases, subset_cases, repeat_cases, chain_cases)
    cases = [case for group in groups for case in group()]
    labels = ",\n".join(f"{json.dumps(name)}: {json.dumps(labels_of(name))}" for name in COUNTS)
    lines = ",\n".join(json.dumps([*case, answer_of(kappadata, case)], separators=(",", ":")) for case in cases)
    versions = f'"kappadata": "{VERSION}", "numpy": "{np.__version__}"'
    args.output.write_text(f'{{{versions},\n"labels": {{\n{labels}\n}},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(cases)} cases, {args.output.stat().st_size} bytes: {args.output}")


if __name__ == "__main__":
    main()
