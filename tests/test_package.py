"""The package: what `python -m build` makes is complete, runs without the repository, and describes itself truly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import kdpipes as kdp

ROOT = Path(__file__).parent.parent


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_archives_are_complete_and_run_alone(tmp_path: Path) -> None:
    run("build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    wheel, archive = tmp_path / "dist/kdpipes-0.2.0-py3-none-any.whl", tmp_path / "dist/kdpipes-0.2.0.tar.gz"
    run("twine", "check", "--strict", wheel, archive, cwd=tmp_path)
    assert wheel.stat().st_size < 1.2e6
    assert archive.stat().st_size < 3e6
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "wheel")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(tmp_path, filter="data")
    check_metadata(tmp_path / "wheel/kdpipes-0.2.0.dist-info")
    (tmp_path / "empty").mkdir()
    wheel = tmp_path / "wheel"
    said = run("kdpipes", "demo", "--num-workers=0", "--num-epochs=1", cwd=tmp_path / "empty", PYTHONPATH=str(wheel))
    assert "kdpipes-demo" in said
    tests = ["tests/test_ci.py", "tests/test_words.py", "tests/test_readme.py"]
    root = tmp_path / "kdpipes-0.2.0"
    run("pytest", "-q", "-mnot slow and not full", *tests, cwd=root, PYTHONPATH=str(root))


def check_metadata(folder: Path) -> None:
    """Check what a package page shows, and what installers and type checkers look for."""
    wheel = PathDistribution(folder)
    assert wheel.version == kdp.__version__
    assert {path.name for path in folder.parent.iterdir()} == {"kdpipes", "kdpipes_command.py", folder.name}
    assert (folder.parent / "kdpipes/py.typed").is_file()
    assert (folder / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    links = re.findall(r"\]\(([^)]+)\)", str(wheel.metadata["Description"] or wheel.metadata.get_payload()))
    assert len(links) >= 50
    assert [link for link in links if not link.startswith("https://")] == []
    assert {link.split("/")[4] for link in links} <= {kdp.__version__, "source"}
