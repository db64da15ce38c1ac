"""The soak runs: `make soak` for a few seconds, and one case of it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "tools" / "soak.py"


@pytest.mark.parametrize("arguments", [("--seconds", "4"), ("--case", "26")], ids=["seconds", "case"])
def test_the_soak_finds_nothing_in_a_few_seconds(arguments: tuple[str, str]) -> None:
    command = [sys.executable, str(SOAK), "--seed", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:])
    assert int(rows["random chains"]) >= 1
    assert int(rows["batches compared"]) >= 8
    assert (rows["differences"], rows["left behind"]) == ("0", "0")
