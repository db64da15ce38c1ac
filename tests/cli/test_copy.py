"""`kdpipes copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdpipes.write.copy import copy_to_local


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """A data set of two folders."""
    for name in ("train/cat/1.jpg", "train/cat/2.jpg", "val/cat/3.jpg"):
        (tmp_path / "global" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "global" / name).write_bytes(b"pixels")
    return tmp_path / "global"


def test_a_data_set_is_copied(birds: Path, tmp_path: Path, run: Any) -> None:
    command = ["copy", birds, tmp_path / "local", "--relative-path", "train"]
    for done in ("copied 2 files, 12 bytes", "nothing to do"):
        assert run(*command, "--num-workers", "2") == (0, f"{tmp_path / 'local/train'}: {done}.\n", "")
    assert sorted(path.name for path in (tmp_path / "local").rglob("*.jpg")) == ["1.jpg", "2.jpg"]
    assert run(*command[:-1], "none").mistake().startswith("kdpipes copy: There is neither a folder")


def test_json_is_the_result_of_the_function(birds: Path, tmp_path: Path, run: Any) -> None:
    expected = copy_to_local(birds, tmp_path / "by-function")
    told = run("copy", birds, tmp_path / "local", "--json").json()
    assert told == {**expected._asdict(), "path": str(tmp_path / "local")}
    assert told["num_files"] == 3
    again = run("copy", birds, tmp_path / "local", "--json").json()
    assert (again["was_copied"], again["num_files"], again["num_bytes"]) == (False, 0, 0)


def test_a_wrong_number_of_workers_is_told_in_one_line(birds: Path, tmp_path: Path, run: Any) -> None:
    mistake = run("copy", birds, tmp_path / "local", "--num-workers", "0").wrong_usage()
    assert "Error: `--num-workers` must be an integer of at least 1, but is 0" in mistake
    assert not (tmp_path / "local").exists()
