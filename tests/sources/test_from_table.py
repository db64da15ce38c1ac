"""`kdp.from_table`: files, DataFrames and columns as samples, with files that are loaded when they are read."""

from __future__ import annotations

import gzip
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset

import kdpipes as kdp
from kdpipes.core.chain import Chain
from tests.http_server import serving

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
    kdp.from_table(
        {name: column[:2] for name, column in table.items()}, path="file", label="c"
    )  # imports what it needs

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        pipe = kdp.from_table(table, path="file", label="c")
        len(pipe.filter_classes(valid=["a"]))
    finally:
        sys.setprofile(None)
    assert calls < size / 10


@pytest.mark.parametrize(
    ("table", "arguments", "kind", "words"),
    [
        (COLUMNS, {"path": "fil"}, ValueError, "`path` must be a column of file, bird, width.*mean 'file'"),
        (COLUMNS, {"columns": ["size"]}, ValueError, "`columns` must be a column of"),
        ({"id": ["a", "a"]}, {"key": "id"}, kdp.DataError, "'a' occurs 2 times in 'id'"),
        (COLUMNS, {"path": ["file"]}, TypeError, "`path` must be the name of one column, but is \\['file'\\] instead"),
        ({"x": ["a"], "file": ["b"]}, {"path": "file"}, ValueError, "has a column 'x'"),
        ({"x": ["a"], "file": ["b"]}, {"path": "file", "label": "x"}, ValueError, "has a column 'x'"),
        ({"y": [7], "c": ["b"]}, {"label": "c"}, ValueError, "has a column 'y', but field 'y' is the label.*rename"),
        (COLUMNS, {"path": "{fil}.jpg"}, ValueError, "`path` must be a column of file, .*'fil' .*mean 'file'"),
        (COLUMNS, {"path": "{file!r}.jpg"}, ValueError, "`path` must be a column of file"),
        (COLUMNS, {"path": "{file"}, ValueError, "`path` must be a column of file"),
        ({"id": [[1], [2]]}, {"key": "id"}, kdp.DataError, "`key` must name a column of text or .*'id' has .*list"),
        ({"id": [{"a": 1}]}, {"path": "id"}, kdp.DataError, "`path` must name a column of text or .*'id'"),
        ({"id": [[1], [2]]}, {"path": "{id}.jpg"}, kdp.DataError, "`path` must name a column of text or .*'id'"),
        ({"id": ["a", "a"]}, {"key": "id", "path": "id"}, kdp.DataError, "'a' occurs 2 times in 'id'"),
        (pa.table({"k": pa.array(["a", "a"]).dictionary_encode()}), {"key": "k"}, kdp.DataError, "'a' occurs 2 times"),
        ({"a": [1], "b": [1, 2]}, {}, kdp.DataError, "cannot be read"),
        (3, {}, TypeError, "`table` must be a path, a DataFrame"),
        ("", {}, ValueError, r"`table` must be a file that ends in \.parquet, .*, but is '' instead"),
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


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("path", ["file", "images/{file}.jpg"])
def test_a_row_without_text_for_its_path_is_named(value: str | None, path: str) -> None:
    with pytest.raises(kdp.DataError, match="Row 1 of the table has no key or path"):
        kdp.from_table({"file": ["a", value]}, path=path)[1]


@pytest.mark.parametrize("batch_size", [1, 64])
def test_a_row_without_a_path_can_be_skipped(batch_size: int, folder: Path) -> None:
    pipe = kdp.from_table({"file": ["a.jpg", None, "c.jpg"] * 9}, path="file", root=folder)
    assert delivered(pipe, batch_size) == [(b"a.jpg",), (b"c.jpg",)] * 9


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(["a", "b", "c"]).dictionary_encode(),
        pa.array(["a", "b", "c"], pa.large_string()),
        pa.array([b"a", b"b", b"c"]),
        pd.Categorical(["a", "b", "c"]),
        np.asarray(["a", "b", "c"]),
    ],
)
def test_keys_may_be_text_of_any_type(keys: Any) -> None:
    pipe = kdp.from_table({"k": keys}, key="k")
    assert pipe.column("key").tolist() == ["a", "b", "c"] == [sample.key for sample in pipe]


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("images/{id}.jpg", ["images/007.jpg", "images/8.jpg"]),
        ("{split}/{id}-{number}.npy", ["train/007-1.npy", "test/8-2.npy"]),
        ("{{{id}}}", ["{007}", "{8}"]),
        ("{kind}/{id}", ["small/007", "large/8"]),
    ],
)
def test_a_template_makes_paths_of_columns(path: str, keys: list[str], tmp_path: Path) -> None:
    kinds = pa.array(["small", "large"]).dictionary_encode()
    table = {"id": ["007", "8"], "split": ["train", "test"], "number": [1, 2], "kind": kinds}
    pipe = kdp.from_table(table, path=path, root=tmp_path)
    assert pipe.column("key").tolist() == keys
    target = tmp_path / keys[1]
    target.parent.mkdir(parents=True, exist_ok=True)
    saved = io.BytesIO()
    np.save(saved, np.arange(2))
    target.write_bytes(saved.getvalue())
    assert pipe.field_names() == {"x", *table}
    assert len(pipe[1]["x"]) == (2 if path.endswith(".npy") else target.stat().st_size)


def test_a_column_named_like_a_template_is_a_column() -> None:
    assert kdp.from_table({"{id}": ["a"], "id": ["b"]}, path="{id}").column("key").tolist() == ["a"]


TYPED: dict[str, pa.Array] = {
    "int8": pa.array([1, None, 3], pa.int8()),
    "int32": pa.array([1, 2, 3], pa.int32()),
    "int64": pa.array([1, 2, 3], pa.int64()),
    "uint64": pa.array([2**63, 1, 2], pa.uint64()),
    "float16": pa.array(np.asarray([1.5, 2, 3], np.float16)),
    "float32": pa.array([0.1, 0.2, 0.3], pa.float32()),
    "float64": pa.array([0.1, 0.2, 0.3]),
    "bool": pa.array([True, False, True]),
    "vector": pa.array([[1.5, 2], [3, 4], None], pa.list_(pa.float32(), 2)),
    "matrix": pa.array([[[1, 2]], None, [[3, 4]]], pa.list_(pa.list_(pa.int64(), 2), 1)),
    "gap": pa.array([[[1, 2], None], [[1, 2], [3, 4]], None], pa.list_(pa.list_(pa.int64(), 2), 2)),
    "holed": pa.array([[1, None], [2, 3], [4, 5]], pa.list_(pa.float64(), 2)),
    "ragged": pa.array([[1], [], [2, None]], pa.list_(pa.int32())),
    "large": pa.array([[1], [], [2, 3]], pa.large_list(pa.uint8())),
    "plain": pa.array([[1], [], [2, 3]]),
    "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(3, 2, 2)),
    "struct": pa.array([{"a": 1}, {"a": 2}, None]),
    "category": pa.array(["b", None, "a"]).dictionary_encode(),
    "bytes": pa.array([b"a", b"b", None]),
}
DTYPES = {
    **{name: name for name in ("int8", "int32", "uint64", "float16", "float32")},
    "vector": "float32",
    "matrix": "int64",
    "gap": "int64",
    "holed": "float64",
    "ragged": "int32",
    "large": "uint8",
    "tensor": "float32",
}


@pytest.mark.parametrize("name", TYPED)
def test_types_survive(name: str) -> None:
    pipe = kdp.from_table(pa.table({name: TYPED[name]}))
    values = [sample[name] for sample in pipe]
    column = pipe.column(name)
    assert len(column) == 3
    for value, entry, in_column in zip(values, TYPED[name], column, strict=True):
        if name == "tensor":
            assert (value.shape, value.ravel().tolist()) == ((2, 2), entry.as_py())
            assert in_column.tolist() == value.tolist()
        elif name in DTYPES and entry.is_valid and "None" not in str(entry.as_py()):
            assert np.asarray(value).tolist() == entry.as_py() == np.asarray(in_column).tolist()
            assert value.dtype == DTYPES[name]
        else:
            assert value == entry.as_py()
    if name in ("vector", "tensor"):
        values[0][:] = 9  # a user's own copy
        assert np.max(pipe[0][name]) < 9


def test_types_survive_batches() -> None:
    names = ["int32", "uint64", "float32", "tensor"]
    chain = kdp.from_table(pa.table({name: TYPED[name] for name in names})).select(" ".join(names))
    batch = next(iter(chain.deal(batch_size=3).collate_samples()))
    assert [str(part.dtype).removeprefix("torch.") for part in batch] == ["int32", "uint64", "float32", "float32"]
    assert batch[1].tolist() == [2**63, 1, 2]
    assert batch[3].shape == (3, 2, 2)


@pytest.mark.parametrize(
    "labels",
    [
        np.eye(9, 3, dtype=np.float32),
        pa.array([[1, 0]] * 9, pa.list_(pa.uint8(), 2)),
        pa.array([[1, 0], [2], []] * 3, pa.list_(pa.int16())),
    ],
)
def test_labels_that_are_vectors_keep_their_types(labels: Any) -> None:
    pipe = kdp.from_table({"tags": labels}, label="tags")
    assert pipe.class_names() is None
    batches = [next(iter(pipe.select("y tags").deal(batch_size=size))) for size in (1, 9)]
    for y, tags in [pipe.select("y tags")[0], *(item for batch in batches for item in batch)]:
        assert (y.tolist(), y.dtype) == (tags.tolist(), tags.dtype)
    assert [label.tolist() for label in pipe.column("y")] == [sample["tags"].tolist() for sample in pipe]


@pytest.mark.parametrize("kind", ["data set", "parquet"])
def test_class_labels_of_hugging_face_have_names(kind: str, tmp_path: Path) -> None:
    names = ["heron", "stork"]
    features = datasets.Features({"bird": datasets.ClassLabel(names=names), "n": datasets.Value("int32")})
    rows = Dataset.from_dict({"bird": [1, 0], "n": [1, 2]}, features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    table = rows if kind == "data set" else tmp_path / "rows.parquet"
    pipe = kdp.from_table(table, label="bird")
    assert (pipe.class_names(), pipe.column("y").tolist()) == (("heron", "stork"), [1, 0])
    assert kdp.from_table(table, label="n").class_names() is None


def test_arrays_of_hugging_face_keep_shape_and_type() -> None:
    arrays = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    features = datasets.Features({"a": datasets.Array2D((2, 2), "float32")})
    pipe = kdp.from_table(Dataset.from_dict({"a": arrays}, features=features))
    assert (pipe[1]["a"].tolist(), pipe[1]["a"].dtype) == (arrays[1].tolist(), np.float32)
    assert [array.shape for array in pipe.column("a")] == [(2, 2)] * 2


@pytest.mark.parametrize("columns", [None, ["id", "width"], ["index", "key"], []])
@pytest.mark.parametrize("key", ["id", None])
@pytest.mark.parametrize("path", ["file", None])
def test_batches_of_any_size_hold_the_same_samples(
    columns: list[str] | None, key: str | None, path: str | None, tmp_path: Path
) -> None:
    size = 70
    table = {
        "file": [f"{number}.txt" for number in range(size)],
        "id": [f"patient-{number}" for number in range(size)],
        "width": np.arange(size, dtype=np.float32),
        "index": np.arange(size)[::-1],
        "key": [f"own-{number}" for number in range(size)],
        "bird": ["stork", "heron"] * 35,
        "embedding": np.ones((size, 2), np.float32),
    }
    for name in table["file"]:
        (tmp_path / name).write_text(name)
    pipe = kdp.from_table(table, path=path, key=key, columns=columns, label="bird", root=tmp_path)
    names = " ".join([*sorted((pipe.field_names() or frozenset()) | {"key", "index", "ordinal"}), "y"])
    chain = pipe.select(names)
    singles = [chain[number] for number in range(size)]
    for batch_size in (1, 7, 8, 64):
        batches = list(chain.deal(batch_size=batch_size, uneven="keep"))
        items = [item for batch in batches for item in batch]
        assert [list(map(repr, item)) for item in items] == [list(map(repr, item)) for item in singles]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text("local secret")
    return path


@pytest.mark.parametrize(
    ("row", "suffix"),
    [
        *[("{secret}", suffix) for suffix in (".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz")],
        ("file://{secret}", ".csv"),
        ("local://{secret}", ".csv"),
        ("FILE://{secret}", ".csv"),
        ("simplecache::file://{secret}", ".csv"),
        ("a.txt::file://{secret}", ".csv"),
        ("zip://a.txt::{secret}", ".csv"),
        ("reference://a::memory://host/a.json", ".csv"),
        ("dir://{secret}", ".csv"),
    ],
)
def test_rows_of_a_remote_table_name_no_local_file(row: str, suffix: str, secret: Path) -> None:
    text = row.replace("{secret}", str(secret))
    write_remote("memory://lists/t", suffix, ["a.txt", text])
    pipe = kdp.from_table(f"memory://lists/t{suffix}", path="file")
    assert pipe[0]["x"] == b"a.txt"
    with pytest.raises(kdp.DataError, match=rf"Row 1 of the remote table 'memory://lists/t{suffix}' names '.*`root`"):
        pipe[1]["x"]
    assert delivered(pipe, 2) == [(b"a.txt",)]


def delivered(pipe: Any, batch_size: int) -> list[Any]:
    """Return what a chain delivers that skips samples which cannot be made."""
    chain = pipe.on_error("skip", max_share=1.0).select("x")
    return [item for batch in chain.deal(batch_size=batch_size, uneven="keep") for item in batch]


def write_remote(url: str, suffix: str, paths: list[str]) -> None:
    """Write a table of paths, with the file "a.txt" beside it, to the memory of fsspec."""
    storage = fsspec.filesystem("memory")
    frame = pd.DataFrame({"file": paths})
    sink = io.BytesIO()
    if suffix == ".parquet":
        frame.to_parquet(sink)
    elif suffix == ".jsonl":
        frame.to_json(sink, orient="records", lines=True)
    else:
        frame.to_csv(sink, index=False, sep="\t" if suffix == ".tsv" else ",")
    content = sink.getvalue()
    storage.pipe_file(f"{url}{suffix}", gzip.compress(content) if suffix.endswith(".gz") else content)
    storage.pipe_file(f"{url.rpartition('/')[0]}/a.txt", b"a.txt")


def test_a_local_root_is_the_limit_for_rows_of_a_remote_table(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.txt").write_text("mine")
    rows = ["a.txt", f"{tmp_path}/images/a.txt", "../secret.txt", str(secret)]
    write_remote("memory://lists/below", ".csv", rows)
    for root in (tmp_path / "images", f"file://{tmp_path}/images"):
        pipe = kdp.from_table("memory://lists/below.csv", path="file", root=root)
        assert [pipe[0]["x"], pipe[1]["x"]] == [b"mine", b"mine"]
        for row in (2, 3):
            with pytest.raises(kdp.DataError, match=f"Row {row} of the remote table"):
                pipe[row]["x"]


def test_rows_of_the_users_own_tables_may_name_any_file(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"file\n{secret}\nfile://{secret}\n../{tmp_path.name}/secret.txt\n")
    for table in (tmp_path / "t.csv", f"file://{tmp_path}/t.csv", pd.read_csv(tmp_path / "t.csv")):
        pipe = kdp.from_table(table, path="file", root=tmp_path)
        assert [sample["x"] for sample in pipe] == [b"local secret"] * 3


@pytest.mark.parametrize("batch_size", [1, 8])
def test_rows_of_a_remote_table_reach_no_private_host(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served:
        served.files = {"/admin": b"inside"}
        rows = ["a.txt", *[f"{served.url}/admin", served.url.replace("127.0.0.1", "localhost") + "/admin"] * 4]
        write_remote("memory://lists/hosts", ".csv", rows)
        pipe = kdp.from_table("memory://lists/hosts.csv", path="file")
        for row in (1, 2):
            words = "names '(127.0.0.1|localhost)', an address in a private network"
            with pytest.raises(kdp.DataError, match=words) as caught:
                pipe[row]["x"]
            assert f"of sample '{rows[row]}'" in "".join(caught.value.__notes__)
        assert delivered(pipe, batch_size) == [(b"a.txt",)]
        assert served.asked == []
        own = kdp.from_table(pd.DataFrame({"file": rows[1:2]}), path="file")  # the user's
        assert own[0]["x"] == b"inside"
        monkeypatch.setenv("KDPIPES_ALLOW_PRIVATE_HOSTS", "1")
        assert pipe[1]["x"] == b"inside"


def test_a_table_on_a_private_host_names_files_there() -> None:
    with serving() as served:
        served.files = {"/t.csv": f"file\na.txt\n{served.url}/a.txt\n".encode(), "/a.txt": b"pixels"}
        pipe = kdp.from_table(f"{served.url}/t.csv", path="file")
        assert [sample["x"] for sample in pipe] == [b"pixels"] * 2


def test_a_missing_file_leads_to_root() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        kdp.from_table({"file": ["missing.jpg"]}, path="file")[0]["x"]
    assert any("`root=`" in note for note in caught.value.__notes__)
