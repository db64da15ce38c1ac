"""Every example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import kdpipes as kdp
from kdpipes.core import registry

ROOT = Path(kdp.__file__).parent
GLOBALS = {
    "kdp": kdp,
    "np": np,
    "torch": torch,
    "Image": Image,
    "SequenceWrapper": SequenceWrapper,
    "IterableWrapper": IterableWrapper,
}


def module_name(path: Path) -> str:
    return ".".join(["kdpipes", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


MODULES = sorted(module_name(path) for path in ROOT.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@contextmanager
def registry_restored() -> Iterator[None]:
    """Take back what an example registers."""
    tables: list[dict[Any, Any]] = [registry._ours, MapDataPipe.functions, IterDataPipe.functions]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def run_examples(name: str) -> tuple[doctest.DocTestRunner, int]:
    """Return the runner after all examples of a module, and how many there are."""
    runner, num_examples = doctest.DocTestRunner(), 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), extraglobs=GLOBALS):
        for example in test.examples:
            example.options.pop(doctest.SKIP, None)  # with the folders below, nothing has to be skipped
        num_examples += len(test.examples)
        runner.run(test)
    return runner, num_examples


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders that examples read from, in the working directory."""
    for path in ("photos/birds/1.jpg", "data/birds/train/heron/1.jpg", "data/birds/train/stork/1.jpg"):
        (tmp_path / path).parent.mkdir(parents=True)
        Image.new("RGB", (128, 96)).save(tmp_path / path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with registry_restored():
        runner, num_examples = run_examples(name)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries == num_examples >= 1


def test_the_modules_with_examples_are_found() -> None:
    assert len(MODULES) >= 20
    assert {"kdpipes.core.sample_pipe", "kdpipes.plan.oversample", "kdpipes.work.transform"} <= set(MODULES)


def test_an_example_that_registers_a_pipe_leaves_no_trace() -> None:
    assert "doctest_scale" not in MapDataPipe.functions
    with registry_restored():
        run_examples("kdpipes.core.sample_pipe")
        assert "doctest_scale" in MapDataPipe.functions
    assert ("doctest_scale", "map") not in registry.registered()
    assert "doctest_scale" not in {**MapDataPipe.functions, **IterDataPipe.functions}
