"""Tables of every kind become the same columns: text, JSON lines, Parquet, several files, tables in memory."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

import kdpipes as kdp

ROWS = [("a.jpg", "stork", 640), ("b.jpg", "heron", 480)]
CODES = ["00012", "1e5", "NA", "true", "1.10", "null", "nan", "2020-01-01", "-", "TRUE", "0x1F", " a"]

LATIN = "id,label\na,Kräuter\n"
PACKED = [("csv.gz", gzip.compress), ("csv.bz2", bz2.compress), ("csv", gzip.compress)]


def lines(*rows: tuple[Any, ...], sep: str = ",") -> str:
    return "".join(f"{sep.join(map(str, row))}\n" for row in rows)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("mark", [",", "\t", ";", "|"])
@pytest.mark.parametrize("name", ["birds.csv", "birds.tsv", "birds.txt", "birds.CSV"])
def test_the_delimiter_is_found(mark: str, name: str, tmp_path: Path) -> None:
    url = write(tmp_path / name, lines(("file", "bird", "width"), *ROWS, sep=mark))
    pipe = kdp.from_table(url, label="bird", key="file")
    assert pipe.column("width").tolist() == [640, 480]
    assert pipe.column("y").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("semicolons.csv", "id;width\na;1,5\nb;2,25\n", [["a", "1,5"], ["b", "2,25"]]),
        ("pipes.csv", "id|caption\na|one, two\nb|one, two, three\n", [["a", "one, two"], ["b", "one, two, three"]]),
        ("quoted.csv", 'id,caption\na,"one; two\nthree"\nb,four\n', [["a", "one; two\nthree"], ["b", "four"]]),
        ("single.csv", "caption\none; two\nthree\n", [["one; two"], ["three"]]),
        ("mark.csv", "\ufeffid;v\na;b\n", [["a", "b"]]),
        ("windows.csv", "id;v\r\na;b\r\n", [["a", "b"]]),
    ],
)
def test_the_delimiter_divides_all_lines_evenly(name: str, text: str, rows: list[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode())
    pipe = kdp.from_table(tmp_path / name)
    assert [list(dict(sample).values()) for sample in pipe] == rows


def test_lists_separated_by_blanks_need_no_argument_but_header(tmp_path: Path) -> None:
    images = write(
        tmp_path / "images.txt", "1 001.Albatross/0046.jpg\n2   002.Auk/0018.jpg  \n  3\t002.Auk/0019.jpg\r\n"
    )
    pipe = kdp.from_table(images, path="f1", key="f0", header=False)
    assert pipe.column("key").tolist() == ["1", "2", "3"]
    assert pipe.column("f1").tolist() == ["001.Albatross/0046.jpg", "002.Auk/0018.jpg", "002.Auk/0019.jpg"]


def test_a_given_delimiter_reads_files_with_any_name(tmp_path: Path) -> None:
    url = write(tmp_path / "val.lst", lines(*ROWS, sep=":"))
    assert kdp.from_table(url, sep=":", header=False).column("f2").tolist() == [640, 480]
    url = write(tmp_path / "one.csv", lines(("a;b", "c"), ("1;2", 3)))
    assert kdp.from_table(url, sep=";").field_names() == {"a", "b,c"}
    with pytest.raises(ValueError, match="`sep` must be one character, but is ', ' instead"):
        kdp.from_table(url, sep=", ")


@pytest.mark.parametrize(
    ("suffix", "pack"), [("csv.gz", gzip.compress), ("csv.bz2", bz2.compress), ("csv", gzip.compress)]
)
def test_compressed_text_is_recognized_by_its_bytes(suffix: str, pack: Any, tmp_path: Path) -> None:
    text = lines(("file", "bird", "width"), *ROWS).encode()
    (tmp_path / f"birds.{suffix}").write_bytes(pack(text[:20]) + pack(text[20:]))
    assert kdp.from_table(tmp_path / f"birds.{suffix}").column("width").tolist() == [640, 480]


def test_json_lines_keep_their_types(tmp_path: Path) -> None:
    text = '{"id": "00012", "day": "2020-01-01", "box": [1, 2], "meta": {"at": "2020-01-01T00:00:00", "n": 1.5}}\n'
    for name in ("rows.jsonl", "rows.ndjson"):
        pipe = kdp.from_table(write(tmp_path / name, text), key="day")
        expected = {"id": "00012", "day": "2020-01-01", "box": [1, 2], "meta": {"at": "2020-01-01T00:00:00", "n": 1.5}}
        assert dict(pipe[0]) == expected
        assert pipe[0].key == "2020-01-01"
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert kdp.from_table(tmp_path / "rows.jsonl.gz").column("meta.n").tolist() == [1.5]


def test_rows_of_json_may_be_long(tmp_path: Path) -> None:
    text = '{"caption": "%s"}\n' % ("a" * 3_000_000)
    assert len(kdp.from_table(write(tmp_path / "long.jsonl", text * 2))[1]["caption"]) == 3_000_000


def test_types_are_guessed_from_all_rows_of_text(tmp_path: Path) -> None:
    text = "width,caption\n" + "1,a\n" * 300_000 + f"wide,{'a' * 2_000_000}\n"
    pipe = kdp.from_table(write(tmp_path / "late.csv", text))
    assert (pipe[0]["width"], pipe[300_000]["width"]) == ("1", "wide")


@pytest.mark.parametrize("role", ["key", "path", "label", "template"])
@pytest.mark.parametrize("name", ["codes.csv", "codes.txt"])
def test_text_in_the_columns_that_are_used_stays_the_same(role: str, name: str, tmp_path: Path) -> None:
    codes = [code for code in CODES if name == "codes.csv" or " " not in code]
    url = write(tmp_path / name, lines(("id", "n"), *zip(codes, range(len(codes)), strict=True)))
    if role == "label":
        pipe = kdp.from_table(url, label="id", class_names=codes)
        assert pipe.column("y").tolist() == list(range(len(codes)))
        assert pipe.column("id").tolist() == codes
    elif role == "template":
        pipe = kdp.from_table(url, path="images/{id}.jpg")
        assert pipe.column("key").tolist() == [f"images/{code}.jpg" for code in codes]
    else:
        pipe = kdp.from_table(url, **{role: "id"})
        assert pipe.column("key").tolist() == codes == pipe.column("id").tolist()
    assert pipe.column("n").tolist() == list(range(len(codes)))


def test_only_empty_text_is_missing(tmp_path: Path) -> None:
    url = write(tmp_path / "t.csv", 'label,country,width\nNA,NA,NA\n,,\n"",null,3\n')
    pipe = kdp.from_table(url, label="label")
    assert pipe.column("y").tolist() == [0, -1, -1]
    assert pipe.class_names() == ("NA",)
    assert [sample["country"] for sample in pipe] == ["NA", None, "null"]
    assert [sample["width"] for sample in pipe] == [None, None, 3]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder of two Parquet files, a hidden one, and a mark of success."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for number, row in enumerate(ROWS):
        table = pa.table({"file": [row[0]], "bird": [row[1]], "width": pa.array([row[2]], pa.int32())})
        pyarrow.parquet.write_table(table, folder / f"part-{number}.parquet")
    for name in (".part-0.parquet", "_metadata.parquet", "_SUCCESS"):
        (folder / name).write_bytes(b"")
    for row in ROWS:
        (folder / row[0]).write_text(row[0])
    return folder


@pytest.mark.parametrize("where", ["list", "glob", "folder", "braces", "remote folder", "remote glob", "file"])
def test_several_files_are_one_table(where: str, parts: Path) -> None:
    fsspec.filesystem("memory").put(f"{parts}/", "/several/", recursive=True)
    tables: dict[str, Any] = {
        "list": [parts / "part-0.parquet", f"{parts}/part-1.parquet"],
        "glob": f"{parts}/part-*.parquet",
        "folder": parts,
        "braces": f"{parts}/part-{{0..1}}.parquet",
        "remote folder": "memory://several/",
        "remote glob": "memory://several/part-*.parquet",
        "file": f"file://{parts}/part-*.parquet",
    }
    pipe = kdp.from_table(tables[where], path="file", label="bird")
    assert pipe.column("y").tolist() == [1, 0]
    assert pipe.column("width").dtype == np.int32
    assert [sample["x"] for sample in pipe] == [b"a.jpg", b"b.jpg"]


def test_files_with_more_columns_or_other_numbers_fit(tmp_path: Path) -> None:
    urls = [write(tmp_path / "0.csv", "a\n1\n"), write(tmp_path / "1.csv", "a,b\n1.5,x\n")]
    pipe = kdp.from_table(urls)
    assert [dict(sample) for sample in pipe] == [{"a": 1.0, "b": None}, {"a": 1.5, "b": "x"}]
    urls.append(write(tmp_path / "2.csv", "a\nx\n"))
    with pytest.raises(kdp.DataError, match=r"2\.csv' does not fit '.*0\.csv': .*'?a'?.*same types"):
        kdp.from_table(urls)


def test_paths_need_a_root_if_files_are_in_several_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "t.csv", lines(("file", "n"), (f"{name}.jpg", 1)))
        (tmp_path / f"{name}.jpg").write_text(name)
    with pytest.raises(ValueError, match="`root` must be given, because the files of the table are in several folders"):
        kdp.from_table(tmp_path / "*" / "t.csv", path="file")
    pipe = kdp.from_table(tmp_path / "*" / "t.csv", path="file", root=tmp_path)
    assert [sample["x"] for sample in pipe] == [b"one", b"two"]


def test_a_remote_table_may_lie_at_the_top_of_a_storage() -> None:
    storage = fsspec.filesystem("memory")
    storage.pipe_file("/birds.csv", b"file,n\na.jpg,1\n")
    storage.pipe_file("/a.jpg", b"pixels")
    assert kdp.from_table("memory://birds.csv", path="file")[0]["x"] == b"pixels"


@pytest.mark.parametrize(
    ("name", "content", "kind", "words"),
    [
        (
            "latin.csv",
            "id,label\na,Kräuter\n".encode("latin-1"),
            kdp.DataError,
            r"Column 'label' of .*latin.csv' has text that is not UTF-8.*encoding='latin-1'",
        ),
        (
            "latin2.csv",
            "id,k\na,Kräuter\n".encode("latin-1"),
            kdp.DataError,
            "Column 'k' of .*latin2.csv' has text that is not UTF-8",
        ),
        ("latin3.csv", "id,label,größe\na,b,c\n".encode("latin-1"), kdp.DataError, "names of columns in .*latin3.csv'"),
        ("utf16.txt", "id\tlabel\na\tb\n".encode("utf-16"), kdp.DataError, "utf16.txt' is not a table"),
        ("twice.csv", b"id,label,label\na,cat,dog\n", kdp.DataError, "twice.csv' has several columns named 'label'"),
        ("ragged.csv", b"id,label\na,cat,dog\n", kdp.DataError, "Expected 2 columns, got 3: a,cat,dog"),
        ("empty.csv", b"", kdp.DataError, "empty.csv' is not a table .*Empty CSV file"),
        ("empty.jsonl", b"", kdp.DataError, "empty.jsonl' is not a table"),
        (
            "bad.jsonl",
            b'{"id": 1}\n{"id": "label"}\n',
            kdp.DataError,
            "bad.jsonl' is not .*changed from number",
        ),
        ("list.jsonl", b'[{"id": 1}]\n', kdp.DataError, "list.jsonl' is not a table"),
        (
            "cut.csv.gz",
            gzip.compress(b"id,label\na,b\n" * 99, mtime=0)[:-20],
            kdp.DataError,
            "cut.csv.gz' is not a table",
        ),
        ("bad.parquet", b"PAR1 no table", kdp.DataError, "bad.parquet' is not a table"),
        ("t.xlsx", b"", ValueError, r"`table` must be a file that ends in \.parquet, .*pass the delimiter: `sep=`"),
        ("header.csv", b"id,label\n", None, ""),
    ],
)
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_file_that_is_not_a_table_is_named(
    name: str, content: bytes, kind: type[Exception] | None, words: str, is_remote: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    fsspec.filesystem("memory").pipe_file(f"/odd/{name}", content)
    url = f"memory://odd/{name}" if is_remote else str(tmp_path / name)
    if kind is None:
        pipe = kdp.from_table(url, key="id", label="label")
        assert (len(pipe), pipe.column("key").tolist(), pipe.column("y").tolist()) == (0, [], [])
        return
    with pytest.raises(kind, match=words):
        kdp.from_table(url, key="id", label="label")


def test_missing_files_and_mixed_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No file matches '.*part-\*\.parquet'\.$"):
        kdp.from_table(tmp_path / "part-*.parquet")
    with pytest.raises(FileNotFoundError, match=r"There is no file '.*t\.csv'\.$"):
        kdp.from_table(tmp_path / "t.csv")
    with pytest.raises(FileNotFoundError, match=r"No file in '.*' ends in \.parquet"):
        kdp.from_table(tmp_path)
    write(tmp_path / "a.csv", "a\n1\n")
    write(tmp_path / "_SUCCESS", "")
    for name in ("b.csv.xz", "c.tmp"):
        write(tmp_path / name, "")
    text = r"leaves out 2 files without the suffix of a table \(1 \.xz, 1 \.tmp\): 'b\.csv\.xz', 'c\.tmp'\. .*\*\.csv"
    with pytest.warns(UserWarning, match=text):
        kdp.from_table(tmp_path)
    write(tmp_path / "b.jsonl", '{"a": 1}\n')
    with pytest.raises(ValueError, match=r"files of one kind, not \.csv and \.jsonl, .*Choose: '.*/\*\.csv'"):
        kdp.from_table(tmp_path)
    with pytest.raises(ValueError, match="`table` must be unique"):
        kdp.from_table([tmp_path / "a.csv", tmp_path / "a.csv"])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table([[1], [2]], names=["a", "a"]), "The table has several columns named 'a'"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "The table cannot be read: Duplicate column names"),
        ({"a": [object()]}, "Column 'a' of the table cannot be read: .*Give its entries one type"),
        ({"b": [1, 2], "a": [1, "x"]}, "Column 'a' of the table cannot be read"),
        (pd.DataFrame({"b": [1, 2], "a": [1, "x"]}), "Column 'a' of the table cannot be read"),
        ({"a": [1], "b": [1, 2]}, "The table cannot be read: .*Check its columns"),
        ({"a": [np.datetime64("2020-01-01")]}, "Column 'a' of the table cannot be read"),
    ],
)
def test_a_table_in_memory_that_cannot_be_converted_is_an_error(table: Any, words: str) -> None:
    with pytest.raises(kdp.DataError, match=words):
        kdp.from_table(table)


LARGE: list[Callable[[list[Any]], Any]] = [
    lambda values: {"n": values},
    lambda values: {"n": np.array(values, dtype=object)},
    lambda values: pd.DataFrame({"n": pd.Series(values, dtype=object)}),
]


@pytest.mark.parametrize("make", LARGE)
@pytest.mark.parametrize("values", [[2**64 - 1, 2**63 + 1], [2**63 + 1, None], [-(2**63), 1], [2**60 + 1, None]])
def test_integers_of_64_bits_stay_the_same(values: list[Any], make: Any) -> None:
    pipe = kdp.from_table(make(values), label="n")
    labels = [-1 if value is None else value for value in values]
    assert pipe.column("n").tolist() == [sample["n"] for sample in pipe] == values
    assert pipe.column("y").tolist() == [sample["y"] for sample in pipe] == labels
    assert list(pipe.select("n y").deal(batch_size=2)) == [list(zip(values, labels, strict=True))]


@pytest.mark.parametrize("make", LARGE)
@pytest.mark.parametrize("label", [None, "n"])
@pytest.mark.parametrize("large", [-(2**63) - 1, 2**64, 2**70])
def test_integers_beyond_64_bits_are_an_error_naming_the_column(large: int, label: str | None, make: Any) -> None:
    words = r"Column 'n' of the table cannot be read: .*beyond 64 bits can be text: `list\(map\(str, column\)\)`\.$"
    for other in (1, -1, None):
        with pytest.raises(kdp.DataError, match=words):
            kdp.from_table(make([large, other]), label=label)
    assert kdp.from_table({"n": [str(large)]}, label="n").column("y").tolist() == [large]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "n,f\n9223372036854775809,1e300\n7,0.5\n"),
        ("t.jsonl", '{"n": 9223372036854775809, "f": 1e300}\n{"n": 7, "f": 0.5}\n'),
    ],
)
def test_integers_of_64_bits_in_text_are_not_rounded(name: str, text: str, tmp_path: Path) -> None:
    pipe = kdp.from_table(write(tmp_path / name, text))
    assert [(sample["n"], sample["f"]) for sample in pipe] == [(2**63 + 1, 1e300), (7, 0.5)]


def test_several_tables_are_not_one() -> None:
    from datasets import Dataset, DatasetDict

    for part in (pd.DataFrame({"a": [1]}), pa.table({"a": [1]}), Dataset.from_dict({"a": [1]})):
        with pytest.raises(TypeError, match=r"must be one table, not several.*Choose one: `table\['train'\]`"):
            kdp.from_table({"train": part, "test": part})
    with pytest.raises(TypeError, match=r"Choose one: `table\['train'\]`"):
        kdp.from_table(DatasetDict({"train": Dataset.from_dict({"a": [1]})}))
    with pytest.raises(TypeError, match="`table` must be a path, a DataFrame"):
        kdp.from_table(Dataset.from_dict({"a": [1]}).to_iterable_dataset())


def test_columns_in_a_dictionary_keep_their_types() -> None:
    import torch

    table = {
        "series": pd.Series([1, 2], dtype="int16", index=[7, 3]),
        "missing": pd.Series(["a", None]),
        "size": pd.Categorical(["small", "large"], categories=["small", "medium", "large"], ordered=True),
        "vector": np.arange(4, dtype=np.float32).reshape(2, 2),
        "tensor": torch.arange(2, dtype=torch.uint8),
        "arrow": pa.chunked_array([[1], [2]]),
    }
    pipe = kdp.from_table(table)
    sample = pipe[1]
    assert (sample["series"], sample["series"].dtype) == (2, np.int16)
    assert (sample["missing"], sample["size"], sample["arrow"]) == (None, "large", 2)
    assert sample["vector"].tolist() == [2.0, 3.0]
    assert (sample["vector"].dtype, sample["tensor"].dtype) == (np.float32, np.uint8)
