"""The scripts of docs/trainers.md: on two ranks, stopped and started again, they get the batches of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.run_trainers import NUM_EPOCHS, PAGE, script_of

SECTIONS = ["DDP", "Lightning", "Accelerate", "transformers", "timm"]
WITH_STREAMS = ["Lightning with Streams", "Accelerate with Streams"]
HOST = Path(__file__).with_name("run_trainers.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of each script have seen."""
    folder = tmp_path_factory.mktemp("trainers")
    quiet = {"HF_HUB_OFFLINE": "1", "NO_ALBUMENTATIONS_UPDATE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HOST), str(folder), *SECTIONS, *WITH_STREAMS]
    environment = {**os.environ, **quiet, "PYTHONPATH": str(HOST.parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("section", [*SECTIONS, *WITH_STREAMS])
def test_two_ranks_train_on_each_sample_once_per_epoch(folder: Path, section: str) -> None:
    expected = torch.load(folder / section / "expected.pt")
    ranks = [torch.load(folder / section / f"seen-{rank}.pt") for rank in range(2)]
    assert [len(rank) for rank in ranks] == [len(expected)] * 2
    for first, second, whole in zip(*ranks, expected, strict=True):
        for parts in zip(first, second, whole, strict=True):
            assert torch.equal(torch.cat(parts[:2]), parts[2])


@pytest.mark.parametrize("section", WITH_STREAMS)
def test_streams_give_full_batches_that_differ(folder: Path, section: str) -> None:
    batches = torch.load(folder / section / "expected.pt")
    assert [len(x) for x, _ in batches] == [16] * 10 * NUM_EPOCHS
    assert len({image.numpy().tobytes() for x, _ in batches for image in x}) == 160 * NUM_EPOCHS


@pytest.mark.parametrize("section", ["DDP", "timm"])
def test_the_epochs_are_complete_and_differ(folder: Path, section: str) -> None:
    batches = torch.load(folder / section / "expected.pt")
    size = len(batches) // NUM_EPOCHS
    epochs = [torch.cat([x for x, _ in batches[first : first + size]]) for first in range(0, len(batches), size)]
    images = {image.numpy().tobytes() for epoch in epochs for image in epoch}
    assert [len(epoch) for epoch in epochs] == [160] * NUM_EPOCHS
    assert len(images) == 160 * NUM_EPOCHS


def test_every_section_with_code_is_run() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    assert [text.split("\n")[0] for text in sections if "```python" in text] == [*SECTIONS, "Streams"]
    assert all(re.search(r"kdp\.Loader\(", script_of(section)) for section in SECTIONS)
