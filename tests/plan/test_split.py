"""`kdp.split`: parts are disjoint and complete, keep groups together, and stay stable as data grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdpipes as kdp

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def source(labels: list[Any]) -> kdp.MapPipe:
    return kdp.from_dataset(list(range(len(labels))), "x", labels=labels)


def held_by(part: kdp.MapPipe) -> list[int]:
    try:
        size = len(part)
    except ValueError:  # an empty part
        size = 0
    return part.column("x").tolist() if size else []  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", ["key", "y", "x"])
@given(labels=st.lists(st.integers(-1, 3), max_size=40), shares=SHARES, seed=st.integers(0, 9))
def test_parts_are_disjoint_and_complete(by: str, labels: list[int], shares: list[int], seed: int) -> None:
    named = {f"part{number}": share / sum(shares) for number, share in enumerate(shares)}
    parts = kdp.split(source(labels), by=by, seed=seed, **named)
    held = [held_by(part) for part in parts]
    assert sorted(x for part in held for x in part) == list(range(len(labels)))
    assert all(part == sorted(part) for part in held)


def test_each_class_is_divided_in_the_same_shares() -> None:
    parts = kdp.split(source([0] * 50 + [1] * 10 + [-1] * 10), by="y", train=0.8, val=0.2)
    assert parts._fields == ("train", "val")
    assert kdp.class_counts(parts.train) == {-1: 8, 0: 40, 1: 8}
    assert kdp.class_counts(parts.val) == {-1: 2, 0: 10, 1: 2}


def scans() -> kdp.MapPipe:
    """100 patients with 1 to 7 scans each, of which a quarter is of class 1."""
    patients = [number for number in range(100) for _ in range(1 + number % 7)]
    return kdp.from_dataset(
        [(place, f"patient {n}", int(n % 4 == 0)) for place, n in enumerate(patients)], "x patient y"
    )


@pytest.mark.parametrize("how", [{"by": "patient"}, {"groups": "patient"}, {"groups": "patient", "by": "y"}])
def test_a_group_lies_in_one_part(how: Any) -> None:
    parts = kdp.split(scans(), train=0.6, val=0.3, test=0.1, **how)
    patients = [name for part in parts for name in set(part.column("patient"))]
    assert len(patients) == len(set(patients)) == 100


def test_groups_keep_the_shares_of_classes() -> None:
    total = kdp.class_counts(scans())
    shares = {"train": 0.6, "val": 0.3, "test": 0.1}
    for part, share in zip(kdp.split(scans(), by="y", groups="patient", **shares), shares.values(), strict=True):
        counts = kdp.class_counts(part)
        assert all(abs(counts[label] - share * total[label]) <= 4 for label in total)
    several = [
        kdp.split(scans(), groups="patient", a=0.5, b=0.5, seed=seed).a.column("x").tolist() for seed in (0, 1, 0)
    ]
    assert several[0] == several[2] != several[1]


@pytest.mark.parametrize(
    "how", [{}, {"by": "y"}, {"by": "patient"}, {"groups": "patient"}, {"groups": "patient", "by": "y"}]
)
def test_each_sample_validates_in_one_fold(how: Any) -> None:
    folds = kdp.split(scans(), folds=4, **how)
    assert sorted(x for _, val in folds for x in held_by(val)) == list(range(len(scans())))
    assert all(sorted(held_by(train) + held_by(val)) == list(range(len(scans()))) for train, val in folds)
    is_grouped = "patient" in how.values()
    assert all(set(fold.train.column("patient")).isdisjoint(fold.val.column("patient")) for fold in folds) == is_grouped
    if "y" in how.values():
        counts = [kdp.class_counts(val) for _, val in folds]
        assert all(max(c[label] for c in counts) - min(c[label] for c in counts) <= 4 for label in (0, 1))


def test_a_class_with_fewer_samples_than_folds_is_a_warning() -> None:
    pets = kdp.from_dataset(list(range(23)), "x", labels=[0] * 20 + [1] * 3, class_names=["cat", "owl"])
    with pytest.warns(UserWarning, match=r"Some of the 5 folds have no sample of the classes 'owl'\. Use fewer folds"):
        assert len(kdp.split(pets, folds=5, by="y")[0].train) == 18


def test_a_sample_stays_in_its_part_when_the_data_grows() -> None:
    small, large = source([0] * 90), source([0] * 900)
    before, after = (kdp.split(pipe, train=0.7, test=0.3, seed=5) for pipe in (small, large))
    assert set(before.train.column("key")) <= set(after.train.column("key"))
    assert set(before.test.column("key")) <= set(after.test.column("key"))


def test_parts_by_key_have_about_their_shares_by_seed() -> None:
    pipe = source([0] * 10_000)
    for seed in range(3):
        train = kdp.split(pipe, train=0.9, test=0.1, seed=seed).train
        assert abs(len(train) - 9000) < 150
    one, other = (set(kdp.split(pipe, a=0.5, b=0.5, seed=seed).a.column("key")) for seed in (0, 1))
    assert 2000 < len(one & other) < 3000


def test_a_state_tells_parts_apart() -> None:
    (train, val), (other, _) = kdp.split(source([0, 1] * 20), by="y", folds=2)
    with kdp.Loader(train.select("x").deal(batch_size=4)) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    for part in (val, other):
        with kdp.Loader(part.select("x").deal(batch_size=4)) as loader, pytest.raises(ValueError, match="does not fit"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, ValueError, "needs the parts and their shares"),
        ({"train": 0.8}, ValueError, "must sum to 1, but sum to .*Name the rest"),
        ({"train": 0.8, "test": 0.3}, ValueError, "must sum to 1, but sum to"),
        ({"train": 80, "test": 20}, ValueError, "Write 80 % as 0.8"),
        ({"train": "most"}, TypeError, "`train` must be a share"),
        ({"train": 1.0, "folds": 2}, ValueError, "needs the parts and their shares"),
        ({"folds": 1}, ValueError, "`folds` must be"),
        ({"folds": 2, "groups": 3}, TypeError, "`groups` must be the name of a field"),
        ({"folds": 2, "groups": "key", "by": "x"}, ValueError, '`by` must be "y", or left out'),
        ({"train": 1.0, "by": 3}, TypeError, "`by` must be the name of a field"),
        ({"train": 1.0, "seed": -1}, ValueError, "`seed` must be"),
    ],
)
def test_what_it_rejects(arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        kdp.split(source([0, 1]), **arguments)


def test_the_rest_of_a_few_shot_set() -> None:
    pipe = source([0, 0, 0, 1, 1, -1])
    shots, rest = (pipe.few_shot(2, seed=1, rest=rest).column("x") for rest in (False, True))
    assert sorted([*shots, *rest]) == [0, 1, 2, 3, 4]
    assert np.bincount(pipe[shots].column("y")).tolist() == [2, 2]


def of_table(**columns: Any) -> kdp.MapPipe:
    return kdp.from_table({"file": [f"{number}.jpg" for number in range(100)], **columns}, label="label")


def test_the_column_of_the_labels_is_refused() -> None:
    animals = of_table(label=["cat", "dog", "owl", "elk"] * 25)
    for how in ({"by": "label"}, {"groups": "label", "by": "y"}, {"groups": "y"}):
        with pytest.raises(ValueError, match=r'whole classes would move to one part\. Write `by="y"`'):
            kdp.split(animals, train=0.8, val=0.2, **how)
    renamed = kdp.from_dataset([(number, number % 4) for number in range(100)], "x y").add_field(
        "kind", lambda sample: f"class {sample['y']}"
    )
    with pytest.raises(ValueError, match="whole classes"):
        len(kdp.split(renamed, by="kind", train=0.8, val=0.2).train)


def test_a_column_that_only_depends_on_the_labels_is_no_label() -> None:
    owners = of_table(label=["cat", "dog", "owl", "elk"] * 25, owner=[f"owner {n // 4}" for n in range(100)])
    train, val = kdp.split(owners, by="owner", train=0.8, val=0.2)
    assert len(train) + len(val) == 100
    kinds = of_table(label=[f"class {n % 20}" for n in range(100)], kind=[f"kind {n % 10}" for n in range(100)])
    one, other = kdp.split(kinds, by="kind", one=0.5, other=0.5)
    assert len(one) + len(other) == 100


def test_an_empty_part_is_an_error() -> None:
    sites = kdp.from_dataset([(1, "one")] * 9, "x site")
    said = r"`split` by 'site' leaves part 1 \(counting from 0\) empty: 'site' has 1 different value\. "
    with pytest.raises(ValueError, match=said + "Give it a larger share"):
        len(kdp.split(sites, by="site", most=0.9, rest=0.1).rest)
    for train, _ in kdp.split(sites, groups="site", folds=3):
        with pytest.raises(ValueError, match=said + "Use fewer folds"):
            len(train)
