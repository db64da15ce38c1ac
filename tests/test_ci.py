"""The workflow for CI runs what the package declares: each Python, and the oldest and the newest torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def jobs() -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["jobs"]
    return found


def matrix() -> dict[str, Any]:
    found: dict[str, Any] = jobs()["tests"]["strategy"]["matrix"]
    return found


def declared_pythons() -> list[str]:
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_each_python_runs_on_each_system_with_the_pinned_torch() -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert matrix()["python"] == declared_pythons()
    assert [f"torch=={torch}" for torch in matrix()["torch"]] == [pinned]
    assert {name.partition("-")[0] for name in matrix()["os"]} == {"ubuntu", "macos", "windows"}


def test_each_python_runs_with_an_old_torch_down_to_the_oldest() -> None:
    [oldest] = re.findall(r'^    "torch>=([\d.]+)"', PYPROJECT, re.MULTILINE)
    old = {row["python"]: version(row["torch"]) for row in matrix()["include"]}
    assert list(old) == declared_pythons()
    assert min(old.values())[:2] == version(oldest)
    assert max(old.values()) < version(matrix()["torch"][0])


def test_the_oldest_python_is_the_first_that_is_declared() -> None:
    assert f'requires-python = ">={declared_pythons()[0]}"\n' in PYPROJECT


def test_the_workflow_calls_targets_that_the_makefile_has() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]
    lines = [line.partition(" #")[0].split()[1:] for line in commands if line.startswith("make ")]
    called = {word for line in lines for word in line if "=" not in word}
    assert called == {"lint", "docs", "demo", "test", "test-all"}
    assert called <= set(targets)
