"""Class names that `write_shards` has noted beside its shards: taken where they are those of these shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.core.fingerprint import fingerprint
from kdpipes.storage.index_home import notes_places
from tests.faulty_storage import faulty_storage

NAMES = ("heron", "stork", "gull")


@pytest.fixture
def birds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three shards of a job, of two samples each but for the last one, and its notes."""
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    source = kdp.from_dataset([(bytes(5), n % 3) for n in range(5)], "x y", class_names=NAMES)
    source = source.transform("x", lambda x: x.decode())
    kdp.write_shards(source, tmp_path / "birds" / "b-%03d.tar", max_samples=2)
    return tmp_path / "birds"


SOURCES: list[Callable[..., Any]] = [kdp.open_shards, kdp.stream_shards]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("pattern", ["b-*.tar", "b-{000..002}.tar", "b-001.tar"])
def test_the_names_of_the_job_are_those_of_its_shards(birds: Path, source: Any, pattern: str) -> None:
    pipe = source(str(birds / pattern))
    assert pipe.class_names() == NAMES
    assert source(str(birds / pattern), class_names=["a", "b", "c"]).class_names() == ("a", "b", "c")
    kept = pipe.rename_fields(y="cls").filter_classes(valid=["gull"])
    assert kept.class_names() == NAMES
    assert {sample["y"] for sample in kept} == {2}


def _cut(folder: Path) -> None:
    (folder / "b-shards.json").write_text("{", encoding="utf-8")


def _of_other_kind(folder: Path) -> None:
    _change(folder, class_names="abc")


def _of_another_version(folder: Path) -> None:
    _change(folder, format=2)


def _unfinished(folder: Path) -> None:
    _change(folder, shards=None)


def _too_short(folder: Path) -> None:
    _change(folder, shards=json.loads((folder / "b-shards.json").read_text())["shards"][:2])


def _replaced(folder: Path) -> None:
    other = kdp.from_dataset([("a longer text" * 99, 1)], "x y")
    kdp.write_shards(other, folder / "other" / "b-%03d.tar", max_samples=2)
    shutil.copy(folder / "other" / "b-000.tar", folder / "b-001.tar")
    (folder / "b-001.tar.index").unlink()


def _gone(folder: Path) -> None:
    (folder / "b-shards.json").unlink()


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "b-shards.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "spoil", [_gone, _cut, _of_other_kind, _of_another_version, _unfinished, _too_short, _replaced]
)
def test_missing_damaged_or_foreign_notes_name_no_class(birds: Path, source: Any, spoil: Any) -> None:
    spoil(birds)
    pipe = source(str(birds / "b-*.tar"))
    assert pipe.class_names() is None
    assert len(list(pipe)) >= 4


def test_shards_of_several_jobs_have_no_names(birds: Path) -> None:
    shutil.copytree(birds, birds / "again")
    for source in SOURCES:
        assert source([str(birds / "b-*.tar"), str(birds / "again" / "b-*.tar")]).class_names() is None


def test_a_pipe_is_identified_by_its_class_names_from_anywhere(birds: Path) -> None:
    for source in SOURCES:
        asked, other = (source(str(birds / "b-*.tar")) for _ in range(2))
        assert asked.class_names() == NAMES
        given = source(str(birds / "b-*.tar"), class_names=NAMES)
        assert fingerprint(asked) == fingerprint(other) == fingerprint(given)
        assert fingerprint(source(str(birds / "b-*.tar"), class_names=NAMES[::-1])) != fingerprint(given)


def test_workers_have_the_names_as_well(birds: Path) -> None:
    pipe = (
        kdp.open_shards(str(birds / "b-*.tar"))
        .rename_fields(y="cls")
        .map_classes({"heron": "wader", "gull": "gull"}, unmapped="drop")
    )
    loader = kdp.Loader(pipe.select("y").deal(batch_size=2), num_workers=1)
    with loader:
        assert [y for batch in loader for (y,) in batch] == [0, 1, 0]


def test_remote_class_names_cost_one_file_and_only_on_use(birds: Path) -> None:
    with faulty_storage(str(birds)) as files:
        pipe = kdp.open_shards("faulty://b-{000..002}.tar")
        assert len(pipe) == 5
        assert not [request for request in files.requests() if "shards" in request.path]
        before = len(files.requests())
        assert pipe.class_names() == NAMES == pipe.rename_fields(y="cls").class_names()
        assert [request.path.rpartition("/")[2] for request in files.requests()[before:]] == ["b-shards.json"]
        assert kdp.stream_shards("faulty://b-{000..002}.tar").class_names() is None


def test_remote_shards_without_notes_are_not_opened_for_names(birds: Path) -> None:
    _gone(birds)
    with faulty_storage(str(birds)) as files:
        assert kdp.open_shards("faulty://b-{000..002}.tar").class_names() is None
        assert {request.path.rpartition("/")[2] for request in files.requests()} <= {"b-shards.json"}


@pytest.mark.parametrize(
    ("urls", "places"),
    [
        (["a/p-000.tar"], ["a/p-shards.json"]),
        (["s3://b/v2-000.tar", "s3://b/v2-001.tar"], ["s3://b/v2-shards.json"]),
        (["p-0-of-128.tar", "p-1-of-128.tar"], ["p-shards-of-128.json"]),
        (["a/train-0.tar", "a/train-1.tar", "a/val-0.tar"], ["a/train-shards.json", "a/val-shards.json"]),
        (["birds.tar", "a/p-000.tar.gz", "http://b/p-0.tar?key=1"], []),
    ],
)
def test_notes_lie_where_the_writer_puts_them(urls: list[str], places: list[str]) -> None:
    assert [place.url for place in notes_places(urls)] == places
