"""`kdpipes inspect`: what it prints, for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from webdataset import TarWriter

import kdpipes as kdp
from kdpipes.cli._chain_of import names_chain
from kdpipes.demo import write_photo_shards
from kdpipes.look.contents import inspect_data
from kdpipes.storage.catalog import make_index

INTERRUPTED = """
import threading, time
from kdpipes.cli import main
from tests.faulty_storage import Fault, faulty_storage

first = threading.Lock()  # of several threads


def interrupt(seconds):
    if first.acquire(blocking=False):
        os.killpg(0, signal.SIGINT)
    time.sleep(seconds)


with faulty_storage({folder!r}, faults=[Fault("latency", seconds=600, paths="*.tar")], sleep=interrupt):
    sys.exit(main(["inspect", "faulty://photos-{{000..003}}.tar"]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with four shards, of which the first has an index."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_photo_shards("shards")
    make_index("shards/photos-000.tar")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "places", "options"),
    [
        ("shards", ["shards"], {}),
        ("shards --samples 5", ["shards"], {"num_samples": 5}),
        ("shards --samples 0 --no-scan", ["shards"], {"num_samples": 0, "scan": False}),
        ("shards/photos-{000..001}.tar shards/photos-003.tar", None, {}),
        ("shards/*.tar", ["shards/*.tar"], {}),
    ],
)
def test_json_is_what_the_function_returns(folder: Path, words: str, places: Any, options: Any, run: Any) -> None:
    expected = inspect_data(places or words.split(), **options)
    assert run("inspect", *words.split(), "--json").json() == asdict(expected)


def test_shards_are_told_in_lines(folder: Path, run: Any) -> None:
    said = run("inspect", "shards/photos-000.tar", "--samples", "1")
    assert (said.status, said.err) == (0, "")
    size = Path("shards/photos-000.tar").stat().st_size
    found = inspect_data(["shards/photos-000.tar"])
    jpg = found.fields[1]
    lines = said.out.splitlines()
    assert lines[:2] == [f"shards/photos-000.tar: 40 samples, {size:,} bytes, 1 shard", "  indexes: 1 fresh"]
    numbers = f"{jpg.num_bytes:,} {jpg.min_bytes:,} {round(jpg.median_bytes or 0):,} {jpg.max_bytes:,}"
    assert lines[4].split() == ["jpg", "40", *numbers.split()]
    assert lines[5].split() == ["class", "samples"]
    assert found.classes is not None
    assert [line.split() for line in lines[6:14]] == [[str(one.label), str(one.num_samples)] for one in found.classes]
    size = found.samples[0].fields["jpg"]["bytes"]
    assert lines[14:] == ["  first samples:", f"    photos-000.tar/000000: cls = 7 (1 byte), jpg ({size:,} bytes)"]


def test_shards_whose_indexes_are_not_fresh_are_named(folder: Path, run: Any) -> None:
    lines = run("inspect", "shards/photos-000.tar", "shards/photos-001.tar", "--no-scan").out.splitlines()
    assert lines[0].startswith("shards/photos-000.tar ... shards/photos-001.tar: 40 samples in 1 shard with fresh ind")
    assert lines[1] == "  indexes: 1 fresh, 1 missing; `kdpipes index` renews those that are not fresh"
    assert lines[2] == "    missing: shards/photos-001.tar"


def test_a_job_that_broke_off_is_told_with_how_to_finish_it(folder: Path, run: Any) -> None:
    kdp.write_shards(kdp.from_dataset([("a", 0)] * 9), "packed/p-%03d.tar", max_samples=3)
    assert "not finished" not in run("inspect", "packed").out
    notes = json.loads(Path("packed/p-shards.json").read_text())
    Path("packed/p-shards.json").write_text(json.dumps({**notes, "shards": None}))
    Path("packed/p-002.tar").unlink()
    lines = run("inspect", "packed").out.splitlines()
    assert lines[0].startswith("packed: 6 samples, ")
    assert lines[2] == (
        "  not finished: the job of 9 samples described in packed/p-shards.json; run the same command "
        "(`kdpipes pack ...`, or the same script) again to resume it"
    )
    jobs = run("inspect", "packed", "--json").json()["jobs"]
    assert jobs == [{"url": "packed/p-shards.json", "num_samples": 9, "is_complete": False}]


def test_records_are_told_in_lines(folder: Path, run: Any) -> None:
    birds = kdp.from_dataset([("a", 0), ("b", 1), ("c", 1)], class_names=["heron", "stork"])
    kdp.write_records(birds, "records", num_parts=2, shuffle=False)
    size = sum(path.stat().st_size for path in Path("records").glob("*.mdb"))
    lines = run("inspect", "records", "--samples", "1").out.splitlines()
    assert lines[0] == f"records: 3 samples, {size:,} bytes, 2 parts"
    assert [line.split() for line in lines[4:7]] == [["class", "samples"], ["0", "heron", "1"], ["1", "stork", "2"]]
    assert lines[7] == "  first samples:"
    Path("records/part-00001.mdb").unlink()
    lines = run("inspect", "records").out.splitlines()
    assert lines[1:3] == ["  parts: 1 complete, 1 missing", "    missing: records/part-00001.mdb"]
    assert "`kdpipes records ...`" in lines[3]
    assert run("inspect", "records", "--json").json()["jobs"][0]["is_complete"] is False


def test_long_lists_are_cut_for_people_and_not_for_scripts(tmp_path: Path, run: Any) -> None:
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(30):
            writer.write({"__key__": f"{number}", "cls": number})
    said = run("inspect", tmp_path / "a.tar").out
    assert "\n    ... and 10 more\n" in said
    assert len(run("inspect", tmp_path / "a.tar", "--json").json()["classes"]) == 30


def test_names_in_data_do_not_steer_the_terminal(tmp_path: Path, run: Any) -> None:
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "\x1b[2Jcleared", "t\x1bxt": b"text", "cls": "\x1b[31mred"})
    said = run("inspect", tmp_path / "a.tar").out
    assert "\x1b" not in said
    assert r"\x1b[2Jcleared" in said
    told = run("inspect", tmp_path / "a.tar", "--json").json()
    assert told["samples"][0]["key"] == "a.tar/\x1b[2Jcleared"


def test_mistakes_are_told_in_one_line(folder: Path, run: Any) -> None:
    rejected = {
        "none.tar": "There is no file 'none.tar'",
        "shards/photos-000.tar.index": "cannot be read as a plain tar",
        "none-*.tar": "No file matches 'none-*.tar'",
    }
    for words, line in rejected.items():
        assert line in run("inspect", *words.split()).mistake()
    said = run("inspect", "shards", "--samples", "-1").wrong_usage()
    assert "`--samples` must be an integer of at least 0, but is -1" in said


@pytest.mark.parametrize("words", ["train:chain", "train.py:chain", "train.py", "shards train.py:chain"])
def test_a_chain_is_rejected_with_what_shows_it(folder: Path, words: str, run: Any) -> None:
    (folder / "train.py").write_text("raise AssertionError('the module of a chain is not run')", encoding="utf-8")
    place = words.split()[-1]
    expected = (
        f"Error: `PLACES` must be shards or a folder, but {place!r} names a chain. In Python, print(chain) "
        "lists its pipes and print(chain.peek()) its first samples; "
        f"`kdpipes doctor {place}` reports what is wrong with it.\n"
    )
    assert run("inspect", *words.split()).wrong_usage().endswith(expected)


def test_what_names_a_chain_is_told_from_what_names_data(folder: Path) -> None:
    for place in ("users_chain:chain", "a.b:c", "../a b/c.py:d", "users_chain.py"):
        assert names_chain(place)
    for place in ("shards", "s3://bucket/a.tar", "zip://a.tar::s3://b/c.zip", "a-{0..3}.tar", "/data:old/a.tar"):
        assert not names_chain(place)
    (folder / "data:old").mkdir()
    assert not names_chain("data:old")


def test_ctrl_c_while_storage_is_slow_ends_it_at_once(folder: Path, script: Any) -> None:
    said = script(INTERRUPTED.format(folder=str(folder / "shards")))
    assert said == (130, "", "kdpipes inspect: interrupted\n")
