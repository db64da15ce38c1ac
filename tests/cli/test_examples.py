"""Every example in the help of a command is run."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

import kdpipes as kdp
from kdpipes import cli
from kdpipes.cache.open_cache import clear_cache, named_caches
from kdpipes.testing.checks import as_rank

CHAIN = """
import kdpipes as kdp

samples = kdp.image_folder("photos")
chain = (
    kdp.image_folder("photos").decode_images("x").record_ctx().transform("x", kdp.RandomResizedCrop(32))
    .select("x y").deal(batch_size=4, shuffle=True).collate_samples()
)
"""


def examples() -> list[str]:
    helps = [[name, "--help"] for name in cli.COMMANDS] + [
        ["cache", sub, "--help"] for sub in ("ls", "verify", "clear")
    ]
    texts = [CliRunner().invoke(cli._kdpipes, words).output for words in helps]
    return sorted({line for text in texts for line in re.findall(r"^    kdpipes (.+)$", text, re.MULTILINE)})


@pytest.fixture
def name_of_a_cache() -> Iterator[str]:
    """The name of a cache in memory."""
    name = f"test-cli-examples-{os.getpid()}"  # another one may be somebody's
    pipe = kdp.from_ids(["a"], [0], load=lambda name: name.encode() * 5000).cache_in_memory(name=name)
    assert pipe[0]["x"]
    yield name
    if f"name={name}" in named_caches():
        clear_cache(f"name={name}")


@pytest.fixture
def place(tmp_path: Path, photo_folder: Path, photo_shards: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the examples need."""
    shutil.copytree(photo_folder, tmp_path / "photos")
    shutil.copytree(Path(photo_shards).parent, tmp_path / "shards")
    kdp.write_records(kdp.image_folder(tmp_path / "photos"), tmp_path / "records")
    captions = kdp.from_ids([1, 2], load=lambda number: {"label": number, "width": 640})
    kdp.write_shards(captions.rename_fields(json="x"), f"{tmp_path}/captions/%d.tar", max_samples=2)
    (tmp_path / "train.py").write_text(CHAIN, encoding="utf-8")
    source = kdp.from_ids(["a", "b"], [0, 1], load=lambda name: name.encode() * 5000)
    source.cache_on_disk(str(tmp_path / "cache" / "birds")).warm_up(progress=False)
    batches = kdp.image_folder(tmp_path / "photos").select("y").deal(batch_size=4, shuffle=True)
    for rank in range(2):
        with as_rank(rank, 2), kdp.Loader(batches) as loader:
            list(loader)
            (tmp_path / f"receipt-{rank}.json").write_text(json.dumps(loader.receipt()))
    monkeypatch.chdir(tmp_path)
    with kdp.Loader(runpy.run_path("train.py")["chain"]) as loader:
        Path("state.json").write_text(json.dumps(loader.state_dict()))
    return tmp_path


@pytest.mark.parametrize("example", examples())
def test_examples_run(example: str, place: Path, name_of_a_cache: str, request: Any, run: Any) -> None:
    words = shlex.split(example.replace("name=birds", f"name={name_of_a_cache}").replace("/scratch", str(place)))
    if "s3://bucket" in example:
        folder = request.getfixturevalue("s3")
        store = fsspec.filesystem("s3")
        store.put(str(place / "shards" / "photos-000.tar"), f"{folder}/birds-000.tar")
        store.put(f"{place}/photos/rocket/", f"{folder}/birds/rocket/", recursive=True)
        words = [word.replace("s3://bucket", folder) for word in words]
    said = run(*words)
    assert said.status == 0, said.err
    assert said.out


def test_there_are_examples_of_every_command() -> None:
    begun = {example.split()[0] for example in examples()}
    assert begun == set(cli.COMMANDS)
    assert len(examples()) >= 15
