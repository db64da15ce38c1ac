"""`kdpipes replay`, `copy` and `index`: what is done and written, what is said, and the exit status."""

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
from kdpipes.demo import write_photo_shards
from kdpipes.storage.shard_index import ShardIndex

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
    return kdp.replay_grid(runpy.run_path(str(folder / "users_chains.py"))["chain"](), **arguments).tobytes()


@pytest.mark.parametrize("place", ["users_chains:chain", "users_chains:pipe", "users_chains.py:chain"])
def test_a_chain_is_named_by_module_or_file_as_a_function_or_a_pipe(folder: Path, place: str, capsys: Any) -> None:
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


REFUSED = {
    "users_chains": "The chain must be named as module:name or file.py:name, but is 'users_chains' instead",
    "": "The chain must be named as module:name",
    "users_chains:": "The chain must be named as module:name",
    "users_chains:none": "users_chains has no 'none'",
    "users_chains.py:none": "users_chains.py has no 'none'",
    "no_such_module:chain": "No module named 'no_such_module'",
    "no_such_file.py:chain": "No such file or directory",
    "users_chains:undealt": "The chain has no `deal`, and so no batches",
    "users_chains:broken": "the folder of photos is empty",
    "users_chains:chain --batch 3": "Epoch 0 has no batch 3",
    "users_chains:chain --batch -1": "`batch` must be an integer of at least 0, but is -1",
    "users_chains:chain --epoch -1": "`epoch` must be an integer of at least 0, but is -1",
    "users_chains:chain --seed -1": "`seed` must be an integer of at least 0, but is -1",
    "users_chains:chain --field z": "has no field 'z'; it has 'other', 'x', 'y'",
    "users_chains:chain --out grid.xyz": "unknown file extension: .xyz",
    "users_chains:chain --out missing/grid.png": "No such file or directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_told_in_one_line(folder: Path, words: str, capsys: Any) -> None:
    assert main(["replay", *(words.split() or [""])]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kdpipes replay: ")
    assert REFUSED[words] in err
    assert err.count("\n") == 1
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


def test_what_is_missing_or_unknown_ends_with_the_usage(folder: Path, capsys: Any) -> None:
    for words in ([], ["replay"], ["replays"], ["replay", "users_chains:chain", "--batch", "one"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        assert "usage: kdpipes" in capsys.readouterr().err


def test_it_is_a_command(folder: Path) -> None:
    root = Path(kdp.__file__).parents[1]
    command = [sys.executable, "-m", "kdpipes", "replay", "users_chains:chain", "--batch"]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, "1"], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("Batch 1 of epoch 0: grid.png\n", "")
    assert pixels("grid.png") == expected(folder, batch=1)
    failed = subprocess.run([*command, "9"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == "kdpipes replay: Epoch 0 has no batch 9.\n"


def test_a_data_set_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train/cat/1.jpg", "train/cat/2.jpg", "val/cat/3.jpg"):
        (tmp_path / "global" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "global" / name).write_bytes(b"pixels")
    command = ["copy", str(tmp_path / "global"), str(tmp_path / "local"), "--relative-path", "train"]
    for done in ("2 files, 12 bytes, are copied", "nothing to do"):
        assert main([*command, "--num-workers", "2"]) == 0
        assert capsys.readouterr() == (f"{tmp_path / 'local/train'}: {done}.\n", "")
    assert sorted(path.name for path in (tmp_path / "local").rglob("*.jpg")) == ["1.jpg", "2.jpg"]
    assert main([*command[:-1], "none"]) == 1
    assert "kdpipes copy: There is neither a folder" in capsys.readouterr().err


def test_shards_are_indexed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDPIPES_CACHE_DIR", str(tmp_path / "cache"))
    urls = write_photo_shards(tmp_path / "shards")
    for arguments, has_checksums in (["--no-checksums"], False), ([], True):
        assert main(["index", urls, *arguments]) == 0
        assert "160 samples in 4 shards are indexed." in capsys.readouterr().out
        index = ShardIndex.from_bytes((tmp_path / "shards" / "photos-000.tar.index").read_bytes(), "")
        assert (index.fields["jpg"].checksums is not None) == has_checksums
    assert main(["index", str(tmp_path / "none-*.tar")]) == 1
    assert "No file matches" in capsys.readouterr().err


def test_caches_are_listed_verified_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = kdp.from_ids(["a", "b"], [0, 1], load=lambda name: name.encode() * 5000)
    name = f"test-cli-{os.getpid()}"
    in_memory, files, lmdb = f"name={name}", str(tmp_path / "files"), str(tmp_path / "lmdb")
    named = source.cache_in_memory(name=name)
    source.cache_on_disk(files, layout="files", num_entries=1).warm_up(progress=False)
    source.cache_on_disk(lmdb)[1]["x"]
    named[0]["x"]
    capsys.readouterr()
    assert main(["cache", "ls", in_memory, files, lmdb]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].startswith(f"{in_memory}: 1 entries, ")
    assert listed[1].startswith(f"{files}: 3 entries, ")
    assert listed[1].endswith("bytes, files, complete for 2 samples")
    assert listed[2].endswith("bytes, lmdb")
    assert main(["cache", "ls"]) == 0
    assert listed[0] in capsys.readouterr().out.splitlines()
    assert main(["cache", "verify", in_memory, files, lmdb]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{files}: 3 entries, 0 damaged"
    path = next(path for path in Path(files).iterdir() if path.is_file() and b"bbbb" in path.read_bytes())
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["cache", "verify", files]) == 1
    said = capsys.readouterr()
    assert said.out == f"{files}: 3 entries, 1 damaged\n"
    assert "1 entries are damaged" in said.err
    assert main(["cache", "clear", in_memory, files, lmdb]) == 0
    assert not Path(files).exists()
    assert not Path(lmdb).exists()
    for place in (in_memory, files, str(tmp_path)):
        assert main(["cache", "clear", place]) == 1
    assert tmp_path.exists()
