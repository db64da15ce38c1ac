"""`kdpipes doctor`."""

from __future__ import annotations

import sys
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
    (tmp_path / "two_chains.py").write_text(CHAINS)
    return tmp_path / "two_chains.py"


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


def test_without_a_chain_those_of_the_file_are_listed(file: Path, tmp_path: Path, run: Any) -> None:
    assert run("doctor", file) == (0, f"{file} has 2 chains:\n{file}:good\n{file}:bad\n", "")
    assert run("doctor", "two_chains.py", "--json").json() == {"chains": ["two_chains.py:good", "two_chains.py:bad"]}
    (tmp_path / "empty.py").write_text("x = 1")
    assert "empty.py has no chain" in run("doctor", "empty.py").mistake()


def test_a_wrong_name_is_told_with_the_closest_one(file: Path, run: Any) -> None:
    assert "two_chains does not define 'godo'. Did you mean 'good'?" in run("doctor", "two_chains:godo").mistake()
    assert "Did you mean 'good'?" in run("doctor", "two_chains.py:godo").mistake()


def test_a_script_does_not_see_the_arguments_of_the_command(tmp_path: Path, run: Any) -> None:
    text = "import sys\nimport kdpipes as kdp\nassert sys.argv[1:] == []\nchain = kdp.from_dataset([1], 'x')\n"
    (tmp_path / "reads.py").write_text(text)
    assert "reads.py:chain" in str(run("doctor", tmp_path / "reads.py"))


LATE = """
import kdpipes as kdp

def shifted(x):
    from {helper} import shift
    return shift(x)

def chain():
    from {helper} import data
    return kdp.from_dataset(data).transform("x", shifted).select("x y").deal(batch_size=4)
"""


@pytest.mark.parametrize("place", ["{folder}/late.py:chain", "jobs/late.py:chain"])
def test_what_a_chain_imports_late_is_found_beside_it(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "jobs"
    folder.mkdir()
    helper = f"late_{abs(hash(tmp_path))}"
    (folder / "late.py").write_text(LATE.format(helper=helper))
    (folder / f"{helper}.py").write_text("data = [(n, n % 2) for n in range(8)]\ndef shift(x):\n    return x + 1\n")
    path = list(sys.path)
    try:
        assert run("doctor", place.format(folder=folder), "--seconds", "0.05", "--num-workers", "1").status == 0
    finally:
        sys.modules.pop(helper, None)
    assert sys.path == path


def test_a_folder_is_no_chain(tmp_path: Path, run: Any) -> None:
    said = run("doctor", str(tmp_path))
    assert said.status == 1
    assert "is not a module. Name a chain, like train.py:chain" in said.err


def test_the_folder_of_a_chain_that_fails_is_forgotten(tmp_path: Path, run: Any) -> None:
    (tmp_path / "broken.py").write_text("def chain():\n    raise OSError('broken')\n")
    path = list(sys.path)
    assert run("doctor", f"{tmp_path}/broken.py:chain").status == 1
    assert sys.path == path
