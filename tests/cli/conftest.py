"""What tests of commands share: words in, what was said out, and processes that are interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kdpipes as kdp
from kdpipes.cli import main


class Said(NamedTuple):
    """How a command ended, and what it has said."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        assert (self.status, self.err) == (0, "")
        return json.loads(self.out)

    def mistake(self) -> str:
        """Return the one line that says what is wrong."""
        assert (self.status, self.out) == (1, "")
        assert self.err.count("\n") == 1
        return self.err

    def wrong_usage(self) -> str:
        """Return what is said about a wrong use of the command."""
        assert (self.status, self.out) == (2, "")
        assert self.err.startswith("Usage: kdpipes ")
        return self.err


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in this process."""

    def run(*words: Any) -> Said:
        capsys.readouterr()
        status = main([str(word) for word in words])
        return Said(status, *capsys.readouterr())

    return run


@pytest.fixture
def script(tmp_path: Path) -> Run:
    """Run Python code in a process of its own, and wait until nothing that it has started can write any more."""

    def script(code: str) -> Said:
        begin = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it\n"
        environment = {**os.environ, "PYTHONPATH": str(Path(kdp.__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, "-c", begin + code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            start_new_session=True,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    return script
