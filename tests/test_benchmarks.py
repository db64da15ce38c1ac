"""Every benchmark runs in its smoke mode, and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("bench_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_runs(script: Path) -> None:
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}
    done = subprocess.run([sys.executable, script, "--smoke"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "vs kdpipes" in done.stdout
    assert {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()} == before
