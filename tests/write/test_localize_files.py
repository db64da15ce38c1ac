"""Paths and URLs as local files: copied once, when they are needed, whole, and nothing outside of the folder."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import FileLister, IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.write import copy_to_local
from kdpipes.write.localize import FileLocalizer
from tests.faulty_storage import Fault, FaultyFileSystem, faulty_storage
from tests.processes import exit_status, fork, in_child
from tests.torchdata_parts import FSSpecFileLister

pytestmark = pytest.mark.usefixtures("no_waits")

NAMES = ["heron/1.jpg", "heron/2.jpg", "stork/größe ☃.jpg"]


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A folder with files that contain their names, many times."""
    folder = tmp_path / "origin"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name * 100, encoding="utf-8")
    return folder


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Where to; it is not there."""
    return tmp_path / "local"


def num_bodies(storage: FaultyFileSystem) -> int:
    return sum(request.kind in ("whole", "range") for request in storage.requests())


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_file_is_copied_when_it_is_needed_and_only_once(origin: Path, local: Path) -> None:
    with faulty_storage(str(origin)) as storage:
        pipe = SequenceWrapper([f"faulty://{name}" for name in NAMES]).localize_files(local, global_root="faulty://")
        assert (len(pipe), num_bodies(storage), local.exists()) == (3, 0, False)
        assert pipe[1] == str(local / NAMES[1])
        assert Path(pipe[1]).read_text() == NAMES[1] * 100
        assert num_bodies(storage) == 1
        assert [list(pipe) for _ in range(2)] == [[str(local / name) for name in NAMES]] * 2
        assert num_bodies(storage) == 3
    (origin / NAMES[0]).write_text("changed")
    assert Path(pipe[0]).read_text() == NAMES[0] * 100
    assert files_in(local) == ["autocopy_partial.txt", *NAMES]


def test_stock_listers_are_sources(origin: Path, local: Path) -> None:
    listers = [FileLister(str(origin), recursive=True), FSSpecFileLister(f"file://{origin}/heron")]
    for number, lister in enumerate(listers):
        stream = lister.localize_files(local / str(number), global_root=origin)
        expected = [str(local / str(number) / name) for name in NAMES]
        assert sorted(pickle.loads(pickle.dumps(stream))) == sorted(stream) == expected[: 3 - number]


def test_samples_are_made_of_local_files_in_workers(origin: Path, local: Path) -> None:
    paths = IterableWrapper([str(origin / name) for name in NAMES])
    chain = paths.localize_files(local, global_root=origin).to_samples(label=lambda path: Path(path).parent.name)
    with kdp.Loader(chain.select("x y").deal(batch_size=1), num_workers=2) as loader:
        found = [item for batch in loader for item in batch]
    assert found == [((name * 100).encode(), name.split("/")[0]) for name in NAMES]
    assert files_in(local) == ["autocopy_partial.txt", *NAMES]


def test_as_a_field_it_copies_nothing_for_labels(origin: Path, local: Path) -> None:
    paths = SequenceWrapper([str(origin / name) for name in NAMES])
    fields = {"x": FileLocalizer(local, origin)}
    pipe = paths.to_samples(label=lambda path: Path(path).parent.name, fields=fields).filter_classes(valid=["stork"])
    assert list(pipe.column("y")) == ["stork"]
    assert not local.exists()
    assert pipe[0]["x"] == str(local / NAMES[2])


def test_without_a_root_the_whole_path_is_kept(origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = origin / NAMES[0]
    assert FileLocalizer(local)(path) == str(local / path.relative_to("/"))
    monkeypatch.chdir(origin)
    assert FileLocalizer("new")(f"./{NAMES[0]}") == f"new/{NAMES[0]}"
    with faulty_storage(str(origin)):
        assert FileLocalizer(local)(f"faulty://{NAMES[1]}") == str(local / NAMES[1])


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("s3://a/../../etc/passwd", None),
        ("s3://birds/../x", "s3://birds"),
        ("s3://other/x", "s3://birds"),
        ("s3://birds-2/x", "s3://birds"),
        ("s3://birds", "s3://birds"),
        ("s3://birds/folder/", "s3://birds"),
        ("../x", None),
        ("/elsewhere/x", "/data"),
        ("zip://x::s3://birds.zip", None),
        ("zip://x::s3://birds.zip", "zip://::s3://other.zip"),
    ],
)
def test_a_path_that_would_lie_elsewhere_is_rejected(local: Path, path: str, root: str | None) -> None:
    with pytest.raises(ValueError, match=r"is not a file below `global_root`|Pass `global_root=`"):
        FileLocalizer(local, root)(path)
    assert not local.exists()


def test_mistakes_are_rejected(origin: Path, local: Path) -> None:
    with pytest.raises(TypeError, match="`local_root` must be a local folder"):
        SequenceWrapper([]).localize_files("s3://birds")
    with pytest.raises(TypeError, match="`global_root` must be"):
        SequenceWrapper([]).localize_files(local, global_root=3)
    for item in (b"a", 3, {"x": "a"}):
        with pytest.raises(kdp.ChainError, match=r"takes paths and URLs, but got (bytes|int|dict)"):
            SequenceWrapper([item]).localize_files(local)[0]
    with pytest.raises(FileNotFoundError, match=r"none\.jpg"):
        FileLocalizer(local, origin)(origin / "none.jpg")
    assert not local.exists()


@pytest.mark.parametrize("kind", ["reset", "reset_midway", "truncate"])
def test_passing_faults_go_unnoticed_lasting_ones_leave_no_file(origin: Path, local: Path, kind: Any) -> None:
    with faulty_storage(str(origin), faults=[Fault(kind, every=2)]):
        for name in NAMES:
            assert Path(FileLocalizer(local, "faulty://")(f"faulty://{name}")).read_text() == name * 100
    with faulty_storage(str(origin), faults=[Fault(kind, on="whole")]):
        with pytest.raises(kdp.DataError, match=f"'faulty://{NAMES[0]}' cannot be read"):
            FileLocalizer(local / "new", "faulty://")(f"faulty://{NAMES[0]}")
        assert files_in(local / "new") == ["autocopy_partial.txt"]


def test_several_processes_copy_a_file_once(origin: Path, local: Path) -> None:
    def work() -> None:
        for name in NAMES:
            assert Path(FileLocalizer(local, "faulty://")(f"faulty://{name}")).read_text() == name * 100

    with faulty_storage(str(origin), faults=[Fault("latency", seconds=0.02, on="whole")]) as storage:
        assert [exit_status(child) for child in [fork(work) for _ in range(3)]] == [0, 0, 0]
        assert num_bodies(storage) == len(NAMES)
    assert files_in(local) == ["autocopy_partial.txt", *NAMES]


def test_what_was_broken_off_by_a_kill_is_copied_again(
    origin: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    localizer = FileLocalizer(local, origin)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert in_child(lambda: localizer(origin / NAMES[0])) == -signal.SIGKILL
    assert not (local / NAMES[0]).exists()
    assert Path(localizer(origin / NAMES[0])).read_text() == NAMES[0] * 100
    assert files_in(local) == ["autocopy_partial.txt", NAMES[0]]


def test_a_folder_filled_file_by_file_is_no_complete_copy(origin: Path, local: Path) -> None:
    FileLocalizer(local, origin)(origin / NAMES[0])
    assert copy_to_local(origin, local, relative_path="stork").num_files == 1
    part = copy_to_local(origin, local, relative_path="heron")
    assert part.num_files == 1, "one of two is there"
    result = copy_to_local(origin, local)
    assert (result.was_copied, result.was_deleted, result.num_files) == (True, False, 0)
    assert not (local / "autocopy_partial.txt").exists()
    assert [name for name in files_in(local) if "autocopy" not in name] == NAMES
    assert FileLocalizer(local, origin)(origin / NAMES[1]) == str(local / NAMES[1])
