"""`kdp.from_table`: files, DataFrames and columns as samples, with files that are loaded when they are read."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset

import kdpipes as kdp
from kdpipes.core.chain import Chain

COLUMNS = {"file": ["a.jpg", "b.jpg", "c.jpg"], "bird": ["stork", "heron", None], "width": [640, 480, 320]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in COLUMNS["file"]:
        (tmp_path / str(name)).write_bytes(str(name).encode())
    return tmp_path


def as_file(folder: Path, suffix: str) -> Path:
    frame, path = pd.DataFrame(COLUMNS), folder / f"birds{suffix}"
    frame.to_parquet(path) if suffix == ".parquet" else frame.to_csv(
        path, index=False, sep="," if suffix == ".csv" else "\t"
    )
    return path


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".parquet", "dict", "pandas", "arrow", "hugging face"])
def test_every_kind_of_table_gives_the_same_samples(kind: str, folder: Path) -> None:
    tables: dict[str, Any] = {
        "dict": lambda: COLUMNS,
        "pandas": lambda: pd.DataFrame(COLUMNS),
        "arrow": lambda: pa.table(COLUMNS),
        "hugging face": lambda: Dataset.from_dict(COLUMNS),
    }
    table = tables[kind]() if kind in tables else as_file(folder, kind)
    pipe = kdp.from_table(table, path="file", label="bird", root=None if kind[0] == "." else folder)
    assert pipe.column("y").tolist() == [1, 0, -1]
    assert pipe.class_names() == ("heron", "stork")
    assert pipe.column("key").tolist() == COLUMNS["file"] == [sample.key for sample in pipe]
    assert pipe.column("width").tolist() == COLUMNS["width"]
    assert [sample["x"] for sample in pipe] == [b"a.jpg", b"b.jpg", b"c.jpg"]
    assert pipe.field_names() == {"x", "y", "file", "bird", "width"}


def test_no_file_is_opened_for_a_plan() -> None:
    pipe = kdp.from_table(COLUMNS, path="file", label="bird", root="/missing")
    assert len(pipe.filter_samples(columns="width", keep=lambda width: width > 400).oversample()) == 2
    with pytest.raises(FileNotFoundError):
        pipe[0]["x"]


def test_without_paths_columns_are_all_that_there_is() -> None:
    pipe = kdp.from_table(COLUMNS, columns=["width"], key="file")
    assert dict(pipe[1]) == {"width": 480}
    assert (pipe[1].key, kdp.from_table(COLUMNS)[2].key) == ("b.jpg", "2")


def test_a_file_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("a.jpg,1\nb.jpg,0\n")
    assert kdp.from_table(path, label="f1", header=False).column("y").tolist() == [1, 0]


def test_class_names_number_labels_and_unknown_ones_fail() -> None:
    names = ["stork", "gull", "heron"]
    assert kdp.from_table(COLUMNS, label="bird", class_names=names).column("y").tolist() == [0, 2, -1]
    with pytest.raises(ValueError, match="`label` has 'heron', which is not among the classes stork, gull"):
        kdp.from_table(COLUMNS, label="bird", class_names=["stork", "gull"])


def test_batches_with_workers_and_a_copy_of_the_source(folder: Path) -> None:
    pipe = kdp.from_table(COLUMNS, path="file", label="bird", root=folder)
    chain = pipe.select("x y width").deal(batch_size=2)
    with kdp.Loader(chain, num_workers=1, start_method="spawn") as loader:
        assert list(loader) == list(chain)
    copied = pickle.loads(pickle.dumps(pipe))
    assert Chain.of(copied).fingerprints() == Chain.of(pipe).fingerprints()


def test_the_fingerprint_is_that_of_the_values() -> None:
    def fingerprints(table: Any) -> list[str]:
        return Chain.of(kdp.from_table(table, label="bird")).fingerprints()

    sliced = pa.concat_tables([pa.table(COLUMNS), pa.table(COLUMNS)]).slice(3, 3)
    assert fingerprints(COLUMNS) == fingerprints(sliced)
    assert fingerprints(COLUMNS) != fingerprints({**COLUMNS, "width": [640, 480, 321]})


def test_it_stays_linear_without_a_python_loop() -> None:
    size = 200_000
    table = {
        "file": np.char.add("photos/", np.arange(size).astype(str)),
        "c": np.asarray(["a", "b"])[np.arange(size) % 2],
    }
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        pipe = kdp.from_table(table, path="file", label="c")
        len(pipe.filter_classes(valid=["a"]))
    finally:
        sys.setprofile(None)
    assert calls < 2_000


@pytest.mark.parametrize(
    ("table", "arguments", "kind", "words"),
    [
        (COLUMNS, {"path": "fil"}, ValueError, "`path` must be a column of file, bird, width.*mean 'file'"),
        (COLUMNS, {"columns": ["size"]}, ValueError, "`columns` must be a column of"),
        ({"id": ["a", "a"]}, {"key": "id"}, kdp.DataError, "'a' occurs 2 times in 'id'"),
        ({"x": ["a"], "file": ["b"]}, {"path": "file"}, ValueError, "has a column 'x'"),
        ({"a": [1], "b": [1, 2]}, {}, kdp.DataError, "cannot be read"),
        (3, {}, TypeError, "`table` must be a path, a DataFrame"),
        ("labels.xlsx", {}, ValueError, r"must be a file that ends in \.parquet, \.csv, \.tsv"),
    ],
)
def test_what_it_rejects(table: Any, arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        kdp.from_table(table, **arguments)


def test_a_damaged_file_and_a_missing_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(kdp.DataError, match=r"bad\.parquet' is not a table"):
        kdp.from_table(tmp_path / "bad.parquet")
    monkeypatch.setattr("kdpipes.sources.from_table.pa", None)
    with pytest.raises(ImportError, match=r"pip install 'kdpipes\[table\]'"):
        kdp.from_table(COLUMNS)


def test_a_row_without_a_path_is_named() -> None:
    with pytest.raises(kdp.DataError, match="Row 1 of the table has no key or path"):
        kdp.from_table({"file": ["a", None]}, path="file")[1]
