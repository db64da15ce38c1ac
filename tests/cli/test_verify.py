"""`kdpipes verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kdpipes as kdp
from kdpipes.testing.checks import as_rank


@pytest.fixture
def receipts(tmp_path: Path) -> list[str]:
    """The receipts of two ranks, in files."""
    chain = kdp.from_dataset([(n, 0) for n in range(8)]).select("x").deal(batch_size=2, shuffle=True)
    paths = [tmp_path / f"receipt-{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        with as_rank(rank, 2), kdp.Loader(chain) as loader:
            list(loader)
            path.write_text(json.dumps(loader.receipt()))
    return [str(path) for path in paths]


def test_all_ranks_together_are_complete(receipts: list[str], run: Any) -> None:
    text = "Every sample of epoch 0 was delivered exactly once: 8 samples.\n"
    assert run("verify", *receipts) == (0, text, "")
    told = run("verify", *receipts, "--json").json()
    counts = {"num_samples": 8, "num_skipped": 0, "epochs": [0]}
    assert told == {"is_complete": True, **counts, "problems": [], "unknown": []}


def test_a_rank_that_is_missing_ends_with_an_error(receipts: list[str], run: Any) -> None:
    said = run("verify", receipts[0])
    assert said == (1, "Epoch 0: batches 0 to 1 of rank 1 of 2: not delivered.\n", "")


def test_a_file_may_hold_several_receipts(receipts: list[str], tmp_path: Path, run: Any) -> None:
    both = tmp_path / "both.json"
    both.write_text(json.dumps([json.loads(Path(path).read_text()) for path in receipts]))
    assert run("verify", both).status == 0


def test_files_that_hold_no_receipt_are_errors(tmp_path: Path, run: Any) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("{}")
    assert "a.json' cannot be read: Expecting property name" in run("verify", tmp_path / "a.json").mistake()
    assert "`receipt` must be what `receipt()` of a Loader returns" in run("verify", tmp_path / "b.json").mistake()


def test_a_missing_file_says_how_to_write_one(tmp_path: Path, run: Any) -> None:
    said = run("verify", tmp_path / "c.json").mistake()
    assert "c.json' cannot be read: No such file" in said
    assert "`json.dump(loader.receipt(), file)`" in said
