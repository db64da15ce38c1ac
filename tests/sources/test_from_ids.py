"""IDs, labels and a loader: the partition/labels pattern."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
import torch

import kdpipes as kdp

IDS = ["id-3", "id-1", "id-2"]


def test_samples_come_in_the_order_of_the_ids() -> None:
    for labels in ({"id-1": 1, "id-2": 2, "id-3": 0}, [0, 1, 2], np.array([0, 1, 2]), torch.tensor([0, 1, 2])):
        pipe = kdp.from_ids(IDS, labels, str.upper, class_names=["a", "b", "c"])
        assert [(sample.key, sample.index, sample["x"], sample["y"]) for sample in pipe] == [
            ("id-3", 0, "ID-3", 0),
            ("id-1", 1, "ID-1", 1),
            ("id-2", 2, "ID-2", 2),
        ]
        assert (pipe.column("y").tolist(), pipe.class_names(), type(pipe[1]["y"])) == ([0, 1, 2], ("a", "b", "c"), int)


def test_without_labels_there_is_no_y() -> None:
    pipe = kdp.from_ids(np.arange(3), load=lambda number: number + 1)
    assert [(sample.key, dict(sample)) for sample in pipe] == [("0", {"x": 1}), ("1", {"x": 2}), ("2", {"x": 3})]
    with pytest.raises(kdp.FieldError, match="has no field 'y'; it has 'x'"):
        pipe.column("y")


def test_the_loader_runs_when_x_is_read_and_names_the_sample() -> None:
    def load(name: str) -> Any:
        raise OSError(5, name)

    pipe = kdp.from_ids(IDS, [0, 1, 0], load)
    chain = pipe.filter_classes(valid=[0]).oversample()
    assert [(sample.key, sample["y"]) for sample in chain] == [("id-3", 0), ("id-2", 0)]
    with pytest.raises(OSError) as caught:
        pipe[2]["x"]
    assert caught.value.args == (5, "id-2")
    assert caught.value.__notes__ == ["kdpipes: while loading field 'x' of sample 'id-2' (ordinal 2)"]


def test_a_path_with_an_id_in_it_is_read_by_its_suffix(tmp_path: Path) -> None:
    memory, array = fsspec.filesystem("memory"), io.BytesIO()
    np.save(array, np.arange(3))
    torch.save({"a": torch.ones(2)}, tmp_path / "id-1.pt")
    (tmp_path / "id-1.jpg").write_bytes(b"jpg")
    memory.pipe("/ids/id-1.npy", array.getvalue())
    try:
        read = [
            kdp.from_ids(["id-1"], load=f"{place}/{{id}}.{suffix}")[0]["x"]
            for place, suffix in ((tmp_path, "jpg"), ("memory://ids", "npy"), (tmp_path, "pt"))
        ]
    finally:
        memory.rm("/ids", recursive=True)
    assert (read[0], read[1].tolist(), read[2]["a"].tolist()) == (b"jpg", [0, 1, 2], [1, 1])


def test_files_that_would_run_code_are_rejected(tmp_path: Path) -> None:
    torch.save(np.datetime64, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    for suffix, reason in (("pt", "UnpicklingError: Weights only load failed"), ("npy", "the array holds objects")):
        with pytest.raises(kdp.DataError, match=rf"a\.{suffix}' cannot be read: {reason}"):
            kdp.from_ids(["a"], load=f"{tmp_path}/{{id}}.{suffix}")[0]["x"]


def test_bad_arguments_are_rejected_at_once() -> None:
    rejected: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (("id-1", None, str), TypeError, "`ids` must be a sequence of IDs, but is 'id-1' instead"),
        (({"id-1": 0}, None, str), TypeError, "`ids` must be a sequence of IDs"),
        ((iter(IDS), None, str), TypeError, "`ids` must be a sequence of IDs"),
        ((IDS, {"id-3": 0, "id-2": 1}, str), ValueError, "a label for every ID, but has none for 'id-1'"),
        ((IDS, [0, 1], str), ValueError, "`labels` must be as long as `ids`, but has 2 entries for 3 IDs"),
        ((IDS, None, "id.jpg"), ValueError, "`load` must be a callable, or a path with '{id}' in it, but is 'id.jpg'"),
        ((IDS, None, 3), TypeError, "`load` must be a callable, but is 3 instead"),
    ]
    for arguments, kind, words in rejected:
        with pytest.raises(kind, match=words):
            kdp.from_ids(*arguments)


SHUFFLED = pd.DataFrame({"id": list("abcdef"), "breed": list("uuvvww")}).sample(frac=1, random_state=3)
BREEDS = dict(zip("abcdef", "uuvvww", strict=True))


def pairs_of(ids: Any, labels: Any) -> dict[str, str]:
    pipe = kdp.from_ids(ids, labels, load=str)
    names = pipe.class_names()
    assert names is not None
    return {sample.key: names[sample["y"]] for sample in pipe}


@pytest.mark.parametrize("table", [SHUFFLED, SHUFFLED[2:], SHUFFLED[SHUFFLED.breed != "u"], SHUFFLED.sort_index()])
def test_columns_of_one_table_belong_together_whatever_its_order(table: pd.DataFrame) -> None:
    wanted = {name: BREEDS[name] for name in table["id"]}
    assert pairs_of(table["id"], table["breed"]) == wanted
    assert list(pairs_of(table["id"], table["breed"])) == table["id"].tolist()
    assert pairs_of(table["id"], table["breed"].to_numpy()) == wanted
    assert pairs_of(table["id"].tolist(), SHUFFLED.set_index("id")["breed"]) == wanted
    assert pairs_of(table["id"], SHUFFLED.set_index("id")["breed"].to_dict()) == wanted


def test_a_series_without_a_matching_index_is_refused() -> None:
    for ids in (list("abcdef"), SHUFFLED["id"].reset_index(drop=True), SHUFFLED.sort_index()["id"]):
        with pytest.raises(ValueError, match=r"`labels\.to_numpy\(\)` .* or `labels\.to_dict\(\)`"):
            kdp.from_ids(ids, SHUFFLED["breed"], load=str)
    with pytest.raises(ValueError, match=r"`labels\.to_numpy\(\)`"):
        kdp.from_ids([2, 0, 1], pd.Series(["a", "b", "c"]), load=str)
    with pytest.raises(TypeError, match="`labels` must be one column"):
        kdp.from_ids(list("abcdef"), SHUFFLED, load=str)
    with pytest.raises(TypeError, match="`ids` must be one column"):
        kdp.from_ids(SHUFFLED[["id"]], None, load=str)


def test_a_series_that_was_not_moved_is_read_by_position() -> None:
    assert pairs_of(list("abcdef"), pd.Series(list("uuvvww"))) == BREEDS
    assert kdp.from_ids([2, 0, 1], pd.Series([5, 6, 7, 8]), load=str).column("y").tolist() == [7, 5, 6]


def test_labels_of_a_dataset_in_a_moved_series_are_refused() -> None:
    labels = pd.Series([5, 6, 7])
    assert kdp.from_dataset(list("abc"), "x", labels=labels).column("y").tolist() == [5, 6, 7]
    assert kdp.from_dataset(list("ab"), "x", labels=labels[1:]).column("y").tolist() == [6, 7]
    with pytest.raises(ValueError, match=r"`labels\.to_numpy\(\)` .* or `labels\.sort_index\(\)`"):
        kdp.from_dataset(list("abc"), "x", labels=labels[[2, 0, 1]])
