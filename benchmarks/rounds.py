"""What the benchmarks share: ways that take turns, the machine they ran on, the command, the file of results."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

__all__ = ["load", "machine", "main", "medians", "parser", "publish", "spread", "turns"]

Measured = TypeVar("Measured")


def turns(ways: Mapping[str, Callable[[], Measured]], rounds: int, *, warm_up: bool) -> dict[str, list[Measured]]:
    """Return what each way gives in each round; the rounds are interleaved, so that a busy minute meets all of them.

    Args:
        ways: What to measure, by name.
        rounds: How many of them count.
        warm_up: Whether a round that does not count goes before.
    """
    for way in ways.values() if warm_up else ():
        way()
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each way."""
    return {name: statistics.median(values) for name, values in found.items()}


def spread(values: list[float], width: int = 9) -> str:
    """Return three cells of a table: the median, of ten characters, the least and the most."""
    return f"{statistics.median(values):>10.0f}{min(values):>{width}.0f}{max(values):>{width}.0f}"


def machine(how_busy: str = "", **versions: str) -> str:
    """Return where it was measured: architecture, cores, `how_busy` it was, Python, and other versions as named."""
    cells = [platform.machine(), f"{os.cpu_count()} cores", how_busy, f"Python {platform.python_version()}"]
    return ", ".join([*filter(None, cells), *(f"{name} {version}" for name, version in versions.items())])


def load() -> str:
    """Return how busy the machine has been in the last minute."""
    return f"load {os.getloadavg()[0]:.1f}"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command, which says the first line of its docstring, and takes `--smoke`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="next to nothing, one round; writes nothing")
    return parser


def publish(text: str, name: str, *, is_smoke: bool) -> None:
    """Print a report, and write it to results/NAME.txt unless it is that of a smoke run."""
    print(text)
    if not is_smoke:
        (Path(__file__).parent / "results" / f"{name}.txt").write_text(text + "\n")


def main(name: str, doc: str | None, report: Callable[..., str]) -> None:
    """Run a benchmark whose command takes nothing but `--smoke`.

    Args:
        name: What its results are called.
        doc: The docstring of its script.
        report: Called with `is_smoke`; returns what to print and to write.
    """
    given = parser(doc).parse_args()
    publish(report(is_smoke=given.smoke), name, is_smoke=given.smoke)
