"""`kdpipes doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CHAINS = """
import kdpipes as kdp

good = kdp.from_dataset([(n, n % 2) for n in range(8)]).select("x y").deal(batch_size=4, shuffle=True)
bad = kdp.from_dataset([(n, n % 2) for n in range(8)]).select("x y").deal(batch_size=4).shuffle()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with two chains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CHAINS)
    return tmp_path / "train.py"


def test_a_good_chain_ends_well(file: Path, run: Any) -> None:
    assert run("doctor", f"{file}:good", "--no-measure") == (0, "Nothing is wrong with the chain.\n", "")


def test_a_bad_chain_is_an_error_that_says_what_is_wrong(file: Path, run: Any) -> None:
    said = run("doctor", f"{file}:bad", "--no-measure")
    assert (said.status, said.err) == (1, "")
    assert "shuffle-after-batch" in said.out


def test_json_has_findings_and_what_was_measured(file: Path, run: Any) -> None:
    told = run("doctor", f"{file}:good", "--seconds", "0.05", "--num-workers", "1", "--json").json()
    assert (told["is_clean"], told["findings"]) == (True, [])
    assert told["bound"] is not None
    assert told["profile"] is not None
