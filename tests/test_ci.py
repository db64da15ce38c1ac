"""The workflows run what the package declares: each Python, and the oldest and the newest torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


PYPROJECT = text_of("pyproject.toml")
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS: dict[str, dict[str, Any]] = {name: yaml.safe_load(text)["jobs"] for name, text in WORKFLOWS.items()}
MATRIX = JOBS["tests"]["tests"]["strategy"]["matrix"]
PINNED = MATRIX["torch"][0]


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_each_python_runs_on_each_system_with_the_pinned_torch() -> None:
    assert text_of("constraints.txt").endswith(f"\ntorch=={PINNED}\n")
    assert MATRIX["python"] == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"\n' in PYPROJECT
    assert MATRIX["os"] == ["ubuntu-latest", "macos-latest", "windows-latest"]


def test_each_python_runs_with_the_oldest_and_newest_torch() -> None:
    [oldest] = re.findall(r'^    "torch>=([\d.]+)"', PYPROJECT, re.MULTILINE)
    old, new = ([row for row in MATRIX["include"] if (row["torch"] == "2.15.0") == is_new] for is_new in (False, True))
    assert [row["python"] for row in old] == PYTHONS
    assert [row["python"] for row in new] == PYTHONS[1:], "torch 2.15 has no wheels for Python 3.10"
    torches = [version(row["torch"]) for row in old]
    assert min(torches)[:2] == version(oldest)
    assert max(torches) < version(PINNED)


def test_the_workflows_call_targets_that_the_makefile_has() -> None:
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    called = set(" ".join(re.findall(r"run: make ([a-z -]+)", "".join(WORKFLOWS.values()))).split())
    assert {"lint", "docs", "demo", "test", "test-all", "publish-docs"} <= called <= set(targets)


def test_workflows_pin_actions_and_write_to_pages_alone() -> None:
    for name, text in WORKFLOWS.items():
        assert len(re.findall(r"uses: [\w./-]+@[0-9a-f]{40}  # v[\d.]+\n", text)) == text.count("uses: ")
        assert "\npermissions:\n  contents: read\n" in text
        for job in JOBS[name].values():
            assert ("contents" in job.get("permissions", {})) == ("publish-docs" in str(job["steps"]))


def test_the_documentation_has_one_address() -> None:
    [site] = re.findall(r"^site_url: (\S+)", text_of("mkdocs.yml"), re.MULTILINE)
    assert f'Documentation = "{site}latest/"\n' in PYPROJECT
    assert f"]({site}$HFPR_VERSION/" in PYPROJECT
