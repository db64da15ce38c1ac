"""Every benchmark runs in its smoke mode, and writes nothing; the throughput's corpus and runner do what they say."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.torchdata_parts import needs_torchdata

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("bench_*.py"))


RUN = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def compares_torchdata(script: Path) -> bool:
    return "import torchdata\n" in (code := script.read_text()) or "from torchdata" in code


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[needs_torchdata] if compares_torchdata(script) else []) for script in SCRIPTS],
    ids=[script.stem for script in SCRIPTS],
)
def test_a_benchmark_runs(script: Path, interpreter: Any) -> None:
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}
    status, printed, told = interpreter.run(RUN, str(BENCHMARKS), str(script), "--smoke", timeout=300)
    assert status == 0, told
    assert "vs kdpipes" in printed
    assert {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()} == before


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("bench_throughput")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 256, (120, 160, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((640, 480)).save(folder / f"{number}.png")
    return folder


def make(bench: Any, folder: Path, photos: Path, *, seed: int = 0, number: int = 20) -> Any:
    return bench.make_corpus(folder, number=number, seed=seed, photos=bench.photographs(photos), processes=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))}


def test_a_corpus_is_a_function_of_photographs_and_seed(bench: Any, photos: Path, tmp_path: Path) -> None:
    told = [make(bench, tmp_path / str(n), photos, seed=seed) for n, seed in enumerate([0, 0, 1])]
    first, again, other = (contents(tmp_path / str(n)) for n in range(3))
    assert first == again
    assert len(set(first.values()) | set(other.values())) == 40
    assert told[0]["distinct"] == 20


def test_a_folder_of_somebody_elses_is_not_emptied(bench: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="holds something else"):
        make(bench, tmp_path, photos)
    assert (tmp_path / "thesis.txt").exists()


def run(bench: Any, opener: str, folder: Path, number: int) -> Any:
    contender = bench.Contender("it", opener, ("torch",))
    return bench.run([contender], bench.Job(folder, number, 1, 4), 1)[0]


def test_a_contender_that_gives_too_little_or_breaks_has_failed(bench: Any, photos: Path, tmp_path: Path) -> None:
    make(bench, tmp_path / "corpus", photos)
    row = run(bench, "with_torch:by_pillow", tmp_path / "corpus", 24)
    assert row.failed == "RuntimeError: 20 of 24 images have come."
    assert run(bench, "with_torch:nothing", tmp_path / "corpus", 20).failed.startswith("AttributeError")
    row = run(bench, "with_torch:by_pillow", tmp_path / "corpus", 20)
    assert not row.failed
    assert len(row.rates) == 1


def test_a_peer_that_is_not_installed_is_a_row_that_says_why(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = run(bench, "with_nothing:loader", tmp_path, 20)
    assert row.missing == "No module named 'peers.with_nothing'"
    (tmp_path / "peers-failed.json").write_text(json.dumps({"--no-deps torch==9": "ERROR: no such torch"}))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    row = run(bench, "with_nothing:loader", tmp_path, 20)
    assert row.missing == "not installed: ERROR: no such torch"
    assert any("missing: not installed" in line for line in bench.table([row]))


def test_a_contender_that_dies_has_failed_and_leaves_no_process(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "left"

    def die(contender: Any, job: Any) -> Any:
        note.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        os._exit(3)

    monkeypatch.setattr(bench, "contend", die)
    row = run(bench, "with_torch:by_pillow", tmp_path, 20)
    assert row.failed == "its process ended with 3"
    with contextlib.suppress(ProcessLookupError):
        left = os.pidfd_open(int(note.read_text()))
        assert select.select([left], [], [], 20)[0], "it is told to end"
        os.close(left)
