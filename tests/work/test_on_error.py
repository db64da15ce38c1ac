"""Samples that cannot be made, and what becomes of their batches."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

import kdpipes as kdp

BAD = {3, 4, 9}
EXPECTED = [[0, 1, 2], [5], [6, 7, 8], [10, 11]]


def fail(x: int) -> int:
    if x in BAD:
        raise OSError(f"{x} is broken")
    return x


def indexed(action: Any, function: Callable[[int], Any] = fail, **given: Any) -> Any:
    source = kdp.from_dataset([(number, 0) for number in range(12)])
    return source.transform("x", function).on_error(action, **given).select("x").deal(batch_size=3)


def stream(action: Any) -> Any:
    source = IterableWrapper([(number, 0) for number in range(12)]).to_samples(fields="x y")
    return source.transform("x", fail).on_error(action).select("x").deal(batch_size=3)


@kdp.sample_pipe("fail_at_once")
def fail_at_once(sample: kdp.Sample) -> kdp.Sample:
    """A user's pipe that reads a field as the sample passes."""
    sample["x"] = fail(sample["x"])
    return sample


def eager_stream(action: Any) -> Any:
    source = IterableWrapper([(number, 0) for number in range(12)]).to_samples(fields="x y")
    failing = source.fail_at_once().shuffle(buffer_size=1).rename_fields(z="x").on_error(action)
    return failing.transform("z", _same).select("z").deal(batch_size=3)


def _same(item: Any) -> Any:
    return item


def die(x: int) -> int:
    if x == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return fail(x)


def numbers(batches: Any) -> list[list[Any]]:
    return [[x for (x,) in batch] for batch in batches]


@pytest.mark.parametrize("chain", [indexed, stream, eager_stream])
@pytest.mark.parametrize("service", [None, kdp.ProcessReadingService(2), kdp.ThreadReadingService(3)])
def test_a_bad_sample_shortens_its_batch_and_moves_no_other(
    chain: Any, service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with kdp.Loader(chain("skip"), reading_service=service) as loader:
        for epoch in (1, 2):
            assert numbers(loader) == EXPECTED
            assert loader.stats()["skipped_samples"] == 3 * epoch
        skipped = loader.skipped
    assert [(skip["epoch"], skip["batch"], skip["ordinal"], skip["key"]) for skip in skipped[:3]] == [
        (0, 1, 3, "3"),
        (0, 1, 4, "4"),
        (0, 3, 9, "9"),
    ]
    assert skipped[0]["error"] == "OSError: 3 is broken"
    assert "Sample '3' is left out of batch 1: OSError: 3 is broken" in caplog.text


def test_bad_samples_are_left_out_in_every_loader(caplog: pytest.LogCaptureFixture) -> None:
    assert numbers(indexed("skip")) == EXPECTED
    assert numbers(DataLoader(indexed("skip"), batch_size=None, num_workers=2)) == EXPECTED
    assert "Sample '9' is left out" in caplog.text


def test_samples_that_no_select_loaded_are_tried_before_leaving() -> None:
    source = kdp.from_dataset([(number, 0) for number in range(12)]).transform("x", fail).on_error("skip")
    assert [x["x"].tolist() for x in source.deal(batch_size=3).collate_samples()] == EXPECTED


class Doubler(kdp.IterPipe):
    """A user's pipe that makes new samples."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def samples(self) -> Iterator[kdp.Sample]:
        for sample in self.source.samples():
            yield kdp.Sample({"x": 2 * sample.get("x", -1)}, key=sample.key, index=sample.index)


@pytest.mark.parametrize("between", [Doubler, lambda pipe: pipe.filter_classes(valid=[0])], ids=["own", "filter"])
def test_an_early_error_does_not_pass_pipes_that_may_use_it(between: Any) -> None:
    failing = IterableWrapper([(number, 0) for number in range(12)]).to_samples(fields="x y").fail_at_once()
    with pytest.raises(OSError, match="3 is broken"):
        list(between(failing).on_error("skip").select("x").deal(batch_size=3))


def test_an_early_error_is_raised_where_nothing_is_left_out() -> None:
    with pytest.raises(OSError, match="3 is broken") as raised:
        list(eager_stream("raise"))
    assert "while applying 'fail_at_once' to sample '3'" in "".join(raised.value.__notes__)
    with pytest.raises(OSError, match="3 is broken"):
        list(eager_stream("skip").source)


def test_the_nearest_policy_counts_and_raise_raises() -> None:
    source = kdp.from_dataset([(3, 0)]).transform("x", fail).on_error("skip").on_error("raise")
    for pipe in (source.select("x").deal(batch_size=1), indexed("raise")):
        with pytest.raises(OSError, match="3 is broken"):
            list(pipe)


def test_mistakes_in_the_chain_are_raised_all_the_same() -> None:
    pipe = kdp.from_dataset([(1, 0)]).add_field("z", lambda sample: sample["zz"]).on_error("skip").select("z")
    with pytest.raises(kdp.FieldError, match="has no field 'zz'"):
        list(pipe.deal(batch_size=1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_without_a_good_sample_is_left_out(num_workers: int) -> None:
    def fail_twice(x: int) -> int:
        if 3 <= x < 6 or x > 8:
            raise OSError("broken")
        return x

    for chain in (indexed("skip", fail_twice), indexed("skip", fail_twice).enumerate()):
        with kdp.Loader(chain, num_workers=num_workers) as loader:
            batches = [batch[1] if isinstance(batch, tuple) else batch for batch in loader]
            assert sorted(numbers(batches)) == [[0, 1, 2], [6, 7, 8]]
            assert loader.stats()["skipped_samples"] == 6
            assert loader.stats()["samples"] in (6, 0)  # none where pipes behind `deal` hold batches back


def test_a_batch_without_a_good_sample_is_an_error_with_ranks() -> None:
    def never(x: int) -> int:
        raise OSError("all are broken")

    pipe = indexed("skip", never)
    apply_sharding(pipe, 2, 1, SHARDING_PRIORITIES.DISTRIBUTED)
    with pytest.raises(kdp.DataError, match="All samples of batch 0 failed"):
        list(pipe)


def test_an_unusable_quarantine_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="`path` must be a file in an existing folder"):
        indexed("quarantine", path=tmp_path / "none" / "bad.jsonl")
    path = tmp_path / "bad.jsonl"
    path.write_text('{"key": "3", "error": "was broken"}\n{"key": "4", "er')  # as a killed process leaves it
    assert numbers(indexed("quarantine", path=path)) == EXPECTED
    path.write_text("keys\n" + path.read_text())
    with pytest.raises(kdp.DataError, match=r"Line 1 of the quarantine '.*bad.jsonl' cannot be read"):
        list(indexed("quarantine", path=path))


def test_workers_that_die_where_nothing_can_be_skipped_end_it() -> None:
    source = kdp.from_dataset([(7, 0)] * 3).transform("x", die).on_error("skip").select("x")
    pipe = source.map(_same).deal(batch_size=3)
    with kdp.Loader(pipe, num_workers=1) as loader, pytest.raises(kdp.WorkerError, match="SIGKILL"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_in_quarantine_is_not_tried_again(num_workers: int, tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    tried.touch()

    def fail_and_tell(x: int) -> int:
        with tried.open("a") as file:
            file.write(f"{x}\n")
        return fail(x)

    path = tmp_path / "bad.jsonl"
    for _ in range(2):  # two runs of two epochs
        pipe = indexed("quarantine", fail_and_tell, path=path)
        with kdp.Loader(pipe, num_workers=num_workers) as loader:
            assert [numbers(loader), numbers(loader)] == [EXPECTED] * 2
            assert loader.stats()["skipped_samples"] == 6
    assert [tried.read_text().split().count(str(x)) for x in (3, 8, 9)] == [1, 4, 1]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(entry["key"] for entry in entries) == ["3", "4", "9"]
    assert entries[0]["error"].startswith("OSError: ")


@pytest.mark.parametrize("action", ["skip", "quarantine"])
def test_a_sample_at_which_workers_die_is_left_out(action: Any, tmp_path: Path) -> None:
    path = {"path": tmp_path / "bad.jsonl"} if action == "quarantine" else {}
    with kdp.Loader(indexed(action, die, **path), num_workers=2) as loader:
        for _ in range(2):
            assert numbers(loader) == [[0, 1, 2], [5], [6, 8], [10, 11]]
        assert loader.stats()["worker_deaths"] == 3
        errors = [skip["error"] for skip in loader.skipped if skip["key"] == "7"]
    assert len(errors) == 2
    assert "was ended by signal SIGKILL" in errors[0]
    assert not path or "SIGKILL" in path["path"].read_text()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("ignore",), ValueError),
        (("quarantine",), ValueError),
        (("skip", "bad.jsonl"), TypeError),
    ],
)
def test_bad_arguments_are_rejected(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"`action`|`path`|on_error"):
        kdp.from_dataset([(1, 0)]).on_error(*given)
    with pytest.raises(ValueError, match="`path` must be given with"):
        kdp.from_dataset([(1, 0)]).on_error("skip", path="bad.jsonl")
