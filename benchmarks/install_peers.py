"""Install the peers of the throughput benchmark, each line of peers.txt by a call of pip of its own.

A peer that cannot be installed is no error: why is noted in `peers-failed.json` of the environment, for the table.

    .venv-bench/bin/python benchmarks/install_peers.py
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOTE = Path(sys.prefix) / "peers-failed.json"
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def install(arguments: list[str]) -> str | None:
    """Return why pip fails, or None if it does not."""
    constraints = ["--constraint", str(HERE.parent / "constraints.txt")]
    done = subprocess.run([*PIP, *constraints, *arguments], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return reason(done.stderr) or f"pip ended with {done.returncode}"


def reason(said: str) -> str:
    """Return the line of pip's that tells most: what a build has raised, or else pip's own first error."""
    lines = [line.strip() for line in said.splitlines()]
    raised = [line for line in lines if "Error: " in line or "fatal error: " in line]
    return [*raised[-1:], *(line for line in lines if line.lower().startswith("error:")), ""][0][:150]


def main() -> None:
    failed: dict[str, str] = {}
    for line in (HERE / "peers.txt").read_text().splitlines():
        arguments = shlex.split(line, comments=True)
        if arguments and (why := install(arguments)):
            failed[line] = why
            print(f"not installed: {line}: {why}", file=sys.stderr)
    NOTE.write_text(json.dumps(failed, indent=1) + "\n")


if __name__ == "__main__":
    main()
