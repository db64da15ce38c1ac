"""`kdpipes demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COUNTS = {"brick": 24, "cat": 40, "coffee": 30, "galaxies": 12, "grass": 8, "gravel": 6, "retina": 16, "rocket": 24}

INTERRUPTED = """
import tqdm.auto
from kdpipes.cli import main


class Interrupted(tqdm.auto.tqdm):
    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 1:  # two workers run
                os.killpg(0, signal.SIGINT)
            yield batch


tqdm.auto.tqdm = Interrupted
sys.exit(main(["demo"]))
"""


def test_the_command_runs_the_demo_and_shows_the_balance(tmp_path: Path, run: Any) -> None:
    said = run("demo", "--output", tmp_path / "demo", "--num-workers", "0", "--num-epochs", "1")
    assert said.status == 0
    lines = [line.split() for line in said.out.splitlines()]
    for name, count in COUNTS.items():
        after = "80" if name in {"cat", "coffee", "galaxies", "rocket"} else "-"
        assert lines.count([name, str(count), after]) == 2, "once for the folder, once for the shards"
    assert "with 0 workers" in said.out
    assert said.err.count("epoch 0") >= 2
    assert "epoch 1" not in said.err
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["batch.png", "folder", "shards"]


def test_a_wrong_option_says_how_it_is_used(run: Any) -> None:
    said = run("demo", "--num-workers", "two")
    assert (said.status, said.out) == (2, "")
    assert "Usage: kdpipes demo" in said.err
    assert "'--num-workers': 'two' is not a valid integer" in said.err


def test_a_wrong_number_is_told_in_one_line(run: Any, tmp_path: Path) -> None:
    said = run("demo", "--output", tmp_path, "--num-workers", "-1")
    assert said.status == 2
    assert "Error: `--num-workers` must be" in said.err


def test_ctrl_c_ends_the_demo_and_its_workers(script: Any) -> None:
    said = script(INTERRUPTED)
    assert said.status == 130
    assert said.err.splitlines()[-1] == "kdpipes demo: interrupted"
    assert "Traceback" not in said.err
