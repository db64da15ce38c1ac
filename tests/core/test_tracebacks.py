"""Tracebacks end with the user's own line; the frames of kdpipes are left out."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.core.tracebacks import shorten

ITEMS = [(number, number % 2) for number in range(8)]


def typo(x: Any) -> Any:
    return x.shpae


def names_of(error: BaseException) -> list[str]:
    """Return the names of the functions in a traceback, without this file's functions that call kdpipes."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][2:]  # behind the test and its lambda


def indexed(function: Callable[..., Any] = typo) -> Any:
    return kdp.from_dataset(ITEMS).transform("x", function)


def stream(function: Callable[..., Any] = typo) -> Any:
    return IterableWrapper(ITEMS).to_samples(fields="x y").transform("x", function)


def first(items: Any) -> Any:
    return next(iter(items))


READ: dict[str, Callable[[], Any]] = {
    "a sample": lambda: indexed().select("x")[0],
    "a field": lambda: indexed()[0]["x"],
    "a mapped item": lambda: kdp.from_dataset(ITEMS).select("x").map(typo)[0],
    "a pipe": lambda: list(indexed().select("x")),
    "batches": lambda: first(indexed().select("x").deal(batch_size=2)),
    "mapped batches": lambda: first(kdp.from_dataset(ITEMS).select("x").deal(batch_size=2).map(typo)),
    "a stream": lambda: first(stream().select("x")),
    "batches of a stream": lambda: first(stream().select("x").deal(batch_size=2)),
    "a loader": lambda: first(kdp.Loader(indexed().select("x").deal(batch_size=2))),
    "threads": lambda: first(
        kdp.Loader(indexed().select("x").deal(batch_size=2), reading_service=kdp.ThreadReadingService(2))
    ),
    "a loader of a stream": lambda: first(kdp.Loader(stream().select("x").deal(batch_size=64))),
}


@pytest.mark.parametrize("name", READ)
def test_the_users_line_is_the_last_one(name: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'shpae'") as caught:
        READ[name]()
    names = names_of(caught.value)
    assert names[-1] == "typo"
    assert len(names) <= 4, names
    assert "mapped" in name or any("kdpipes: while" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", ["a sample", "batches", "a loader"])
def test_all_frames_are_shown_on_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDPIPES_TRACEBACK", "full")
    with pytest.raises(AttributeError) as caught:
        READ[name]()
    assert len(names_of(caught.value)) > 8


def test_workers_send_the_users_line_as_the_last_one() -> None:
    with kdp.Loader(indexed().select("x").deal(batch_size=2), num_workers=1) as loader:
        with pytest.raises(AttributeError) as caught:
            list(loader)
        note = next(note for note in caught.value.__notes__ if "In a worker:" in note)
    assert names_of(caught.value) == []
    assert note.splitlines()[1] == "Traceback (most recent call last):"
    assert "in typo\n    return x.shpae" in note
    assert "kdpipes/core" not in note
    assert "has no attribute" not in note, "the message comes once"


def refused(x: Any) -> Any:
    try:
        return x.shpae
    except AttributeError as error:
        raise ValueError("refused") from error


@pytest.mark.parametrize("num_workers", [0, 1])
def test_causes_are_kept_and_shortened(num_workers: int) -> None:
    loader = kdp.Loader(indexed(refused).select("x").deal(batch_size=2), num_workers=num_workers)
    with loader, pytest.raises(ValueError, match="refused") as caught:
        list(loader)
    shown = "".join(traceback.format_exception(caught.value))
    assert "The above exception was the direct cause" in shown
    assert shown.index("has no attribute 'shpae'") < shown.index('raise ValueError("refused") from error')
    if not num_workers:
        assert isinstance(caught.value.__cause__, AttributeError)


def test_the_cause_of_damaged_data_is_shown_without_kdpipes(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"\x89PNG damaged")
    with pytest.raises(kdp.DataError) as caught:
        kdp.image_folder(tmp_path).decode_images("x").select("x")[0]
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3
    assert not any("kdpipes/core" in line for line in traceback.format_tb(caught.value.__traceback__)[2:])


def test_what_compiled_code_refuses_keeps_one_line_of_kdpipes() -> None:
    with pytest.raises(TypeError) as caught:
        indexed(len).select("x")[0]
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "/kdpipes/" in frames[-1].filename
    assert len(frames) == 3, frames


def test_groups_and_circles_of_errors_are_shortened() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    shorten(one)
    assert one.__traceback__ is other.__traceback__ is None


INTERRUPTED = """
import os, signal, threading
import kdpipes as kdp

def interrupts(x):
    os.kill(main, signal.SIGINT)
    threading.Event().wait(20)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = os.getpid()
    chain = kdp.from_dataset([(n, 0) for n in range(8)]).transform("x", interrupts).select("x").deal(batch_size=2)
    with kdp.Loader(chain, num_workers=1, start_method="fork") as loader:
        next(iter(loader))
"""

OPEN = """
import kdpipes as kdp
from torch.utils.data.datapipes.iter import IterableWrapper
from kdpipes.demo import PHOTO_CLASSES, write_photo_shards

shards = kdp.stream_shards(write_photo_shards("shards"), class_names=PHOTO_CLASSES).select("jpg")
dealt = shards.deal(batch_size=5, shuffle="shards")
indexed = kdp.from_dataset([(n, 0) for n in range(8)]).select("x")
open = [iter(chain) for chain in (shards, dealt, dealt.map(len), indexed, indexed.deal(batch_size=2))]
open += [iter(kdp.Loader(chain)) for chain in (dealt, indexed.deal(batch_size=2))]
open += [iter(kdp.Loader(dealt, reading_service=kdp.ThreadReadingService(2)))]
for iterator in open:
    next(iterator)
"""


def run(code: str, folder: Path) -> tuple[int, str]:
    """Run a script in a process of its own; return its status and what it wrote to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(Path(kdp.__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
    (folder / "script.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_an_interrupt_ends_with_the_users_line(tmp_path: Path) -> None:
    _, error = run(INTERRUPTED, tmp_path)
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert len([line for line in error.splitlines() if line.startswith("  File")]) <= 2, error


def test_a_script_may_end_while_streams_are_open(tmp_path: Path) -> None:
    assert run(OPEN, tmp_path) == (0, "")
