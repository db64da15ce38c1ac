"""Public behavior that must not change: orders, random numbers, file formats, states and cache keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.work import transforms as provided
from tests.golden.write import FILES, computed, recorded

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("file", "entry"), [(file, entry) for file, entries in FILES.items() for entry in entries])
def test_golden_entry_is_unchanged(file: str, entry: str) -> None:
    expected, actual = recorded(file)[entry], computed(file, entry)
    assert actual == expected, f"{file}.json, {entry!r}:\nexpected {shown(expected)}\nactual   {shown(actual)}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 5000 else f"{text[:5000]}..."


@pytest.mark.parametrize("file", FILES)
def test_golden_file_has_these_entries_and_no_others(file: str) -> None:
    assert list(recorded(file)) == list(FILES[file])


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_golden_files_hold_in_another_process(hash_seed: str, tmp_path: Path) -> None:
    """Also from another working directory, with another folder for temporary files, and with another hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.golden.write", "--check"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_plan_pipe_has_an_order() -> None:
    rows = (ROOT / "README.md").read_text().split("| **plan**")[1].split("| **work**")[0]
    plan_pipes = set(re.findall(r"^\| \[`(\w+)\(", rows, re.MULTILINE))
    assert len(plan_pipes) >= 11
    missing = (plan_pipes | {"concat", "slicing"}) - {entry.partition(",")[0] for entry in FILES["orders"]}
    assert not missing, "Add chains to tests/golden/orders.py, and run `python -m tests.golden.write`."


def test_every_transform_has_random_numbers() -> None:
    transforms = {name for name in kdp.__all__ if getattr(kdp, name).__module__ == provided.__name__}
    assert transforms
    assert transforms | {"mixup", "cutmix"} <= {entry.partition(",")[0] for entry in FILES["draws"]}
