"""`kdpipes replay`: chains that are named, the picture, and mistakes in one line."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kdpipes as kdp
from kdpipes.cli import main
from kdpipes.look import replay_grid

CHAINS = """
import numpy as np
from PIL import Image

import kdpipes as kdp


def photo(number):
    return Image.fromarray(np.random.default_rng(number).integers(0, 200, (32, 32, 3), dtype=np.uint8))


def chain(seed=3):
    pipe = kdp.from_dataset([(photo(n), photo(n + 50), n) for n in range(5)], "x other y").record_ctx()
    pipe = pipe.transform("x", kdp.RandomResizedCrop(32)).transform("other", kdp.HorizontalFlip())
    return pipe.select("x y").deal(batch_size=2, shuffle=True, seed=seed).collate_samples()


pipe = chain()
number = 5


def needs(argument):
    return pipe


def nothing():
    return None


def undealt():
    return kdp.from_dataset([1], "x")


def floats():
    pipe = kdp.from_dataset([(photo(n), n) for n in range(5)]).transform("x", kdp.ToTensor())
    return pipe.select("x y").deal(batch_size=2).collate_samples()


def broken():
    raise ValueError("the folder of photos is empty")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, from which the command is called."""
    (tmp_path / "users_chains.py").write_text(CHAINS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("users_chains", None)


def pixels(path: str | Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def expected(folder: Path, **arguments: Any) -> bytes:
    return replay_grid(runpy.run_path(str(folder / "users_chains.py"))["chain"](), **arguments).tobytes()


@pytest.mark.parametrize("place", ["users_chains:chain", "users_chains:pipe", "users_chains.py:chain"])
def test_a_chain_is_named_by_module_or_file_or_pipe(folder: Path, place: str, capsys: Any) -> None:
    assert main(["replay", place]) == 0
    assert capsys.readouterr() == ("Batch 0 of epoch 0: grid.png\n", "")
    assert pixels("grid.png") == expected(folder)
    assert main(["replay", place, "--epoch", "1", "--batch", "2", "--out", "other.png"]) == 0
    assert pixels("other.png") == expected(folder, epoch=1, batch=2) != expected(folder)


def test_a_file_of_another_folder_is_named_by_its_path(folder: Path, tmp_path_factory: Any) -> None:
    out = tmp_path_factory.mktemp("elsewhere")
    os.chdir(out)
    assert main(["replay", f"{folder / 'users_chains.py'}:pipe", "--out", str(out / "a.png")]) == 0
    assert pixels(out / "a.png") == expected(folder)


def test_seed_and_field_are_passed_on(folder: Path) -> None:
    for number, arguments in enumerate(({"seed": 4}, {"seed": 3}, {"field": "other"}, {"seed": 4, "field": "other"})):
        options = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
        assert main(["replay", "users_chains:chain", *options, "--out", f"{number}.png"]) == 0
        assert pixels(f"{number}.png") == expected(folder, **arguments)
    assert len({pixels(f"{number}.png") for number in range(4)}) == 4
    assert pixels("1.png") == expected(folder), "the chain's own seed is 3"


REJECTED = {
    "users_chains": "CHAIN must be module:name or file.py:name, as in train.py:chain, but is 'users_chains' instead",
    "": "CHAIN must be module:name",
    "users_chains:": "CHAIN must be module:name",
    "users_chains:none": "users_chains does not define 'none'",
    "users_chains.py:none": "users_chains.py does not define 'none'",
    "no_such_module:chain": "No module named 'no_such_module'",
    "no_such_file.py:chain": "There is no file 'no_such_file.py'",
    "users_chains:undealt": "The chain has no batches",
    "users_chains:broken": "the folder of photos is empty",
    "users_chains:chain --batch 3": "Epoch 0 has no batch 3",
    "users_chains:chain --batch -1": "`--batch` must be an integer of at least 0, but is -1",
    "users_chains:chain --epoch -1": "`--epoch` must be an integer of at least 0, but is -1",
    "users_chains:chain --seed -1": "`--seed` must be an integer of at least 0, but is -1",
    "users_chains:chain --field z": "has no field 'z'; it has 'other', 'x', 'y'",
    "users_chains:chain --out grid.xyz": "unknown file extension: .xyz",
    "users_chains:chain --out missing/grid.png": "No such file or directory",
}


@pytest.mark.parametrize("words", REJECTED)
def test_mistakes_are_told_in_one_line(folder: Path, words: str, capsys: Any) -> None:
    is_usage = REJECTED[words].startswith("`--")
    assert main(["replay", *(words.split() or [""])]) == (2 if is_usage else 1)
    out, err = capsys.readouterr()
    assert out == ""
    assert REJECTED[words] in err
    assert is_usage or (err.startswith("kdpipes replay: ") and err.count("\n") == 1)
    assert not (folder / "grid.png").exists()


TRACEBACKS = ["users_chains:needs", "users_chains:number", "users_chains:nothing", "users_chains:chain --field y"]


@pytest.mark.parametrize("words", TRACEBACKS)
def test_other_mistakes_are_told_in_one_line_as_well(folder: Path, words: str, capsys: Any) -> None:
    assert main(["replay", *words.split()]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kdpipes replay: ")


def test_a_chain_that_ends_in_floats_is_drawn(folder: Path) -> None:
    assert main(["replay", "users_chains:floats"]) == 0


def test_the_path_of_imports_stays_what_it_was(folder: Path) -> None:
    before = list(sys.path)
    main(["replay", "users_chains:chain"])
    assert sys.path == before


def test_it_is_a_command(folder: Path) -> None:
    root = Path(kdp.__file__).parents[1]
    command = [sys.executable, "-m", "kdpipes", "replay", "users_chains:chain", "--batch"]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, "1"], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("Batch 1 of epoch 0: grid.png\n", "")
    assert pixels("grid.png") == expected(folder, batch=1)
    failed = subprocess.run([*command, "9"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert (
        failed.stderr == "kdpipes replay: Epoch 0 has no batch 9. Pass a smaller number; batches are numbered from 0.\n"
    )
