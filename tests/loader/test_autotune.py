"""`Loader(num_workers="auto", prefetch="auto")`: what it finds, within which limits, and that no batch changes."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from kdpipes.loader import loader as loader_module
from kdpipes.loader.autotune import Setting, Tuner, available_cores, available_memory


class Machine:
    """A simulated machine: seconds that pass, and how long a loop waits for the batches of some workers.

    Args:
        make_s: The seconds that a worker takes for a batch.
        step_s: The seconds that the loop takes for a batch.
        cores: How many workers run at once; more of them share the cores.
        late: Every n-th batch takes 40 times as long.
    """

    def __init__(self, make_s: float, step_s: float, cores: int, late: int = 0) -> None:
        self.make_s, self.step_s, self.cores, self.late = make_s, step_s, cores, late
        self.now = self.waited = 0.0

    def run(self, tuner: Tuner, num_batches: int) -> None:
        """Deliver batches, with the workers that the tuner asks for."""
        while num_batches > 0:
            num_batches -= self._run_setting(tuner, num_batches)

    def _run_setting(self, tuner: Tuner, num_batches: int) -> int:
        number, prefetch = tuner.setting
        each = self.make_s * max(1.0, number / self.cores)
        done, taken = [self.now] * number, [self.now] * (num_batches + number * prefetch)
        for batch in range(num_batches):
            worker = batch % number
            may_begin = taken[batch - number * prefetch] if batch >= number * prefetch else self.now * 0
            is_late = self.late and batch % self.late == self.late - 1
            done[worker] = max(done[worker], may_begin) + each * (40 if is_late else 1)
            wait = max(done[worker] - self.now, 0.0)
            self.waited, self.now = self.waited + wait, self.now + wait
            taken[batch] = self.now
            if tuner.note_batch(self.waited) is not None:
                return batch + 1
            self.now += self.step_s
        return num_batches


def tuner_for(machine: Machine, num_workers: int | None = None, prefetch: int | None = None, **limits: Any) -> Tuner:
    limits = {"memory": lambda: None, "child_memory": lambda: 0, **limits}
    return Tuner(num_workers, prefetch, clock=lambda: machine.now, cores=machine.cores, **limits)


@pytest.mark.parametrize(
    ("make_s", "step_s", "cores", "expected"),
    [
        (0.01, 0.1, 8, 1),  # one worker keeps up
        (0.15, 0.1, 8, 2),
        (0.35, 0.1, 8, 4),
        (0.3, 0.001, 2, 2),  # the cores are the limit: four workers are not faster
        (0.3, 0.001, 1, 1),
    ],
)
def test_it_finds_the_fewest_workers_that_keep_up(make_s: float, step_s: float, cores: int, expected: int) -> None:
    machine = Machine(make_s, step_s, cores)
    tuner = tuner_for(machine, prefetch=2)
    machine.run(tuner, 2_000)
    assert tuner.setting == Setting(expected, 2)
    assert tuner.reason


def test_workers_that_wait_may_outnumber_the_cores() -> None:
    machine = Machine(make_s=0.5, step_s=0.001, cores=1_000)  # workers that wait for storage do not share cores
    tuner = Tuner(None, 2, clock=lambda: machine.now, cores=2, memory=lambda: None, child_memory=lambda: 0)
    machine.run(tuner, 3_000)
    assert tuner.setting.num_workers == 8
    assert "limit of 2 cores" in tuner.reason


def test_it_stays_within_memory() -> None:
    machine = Machine(0.5, 0.001, cores=16)
    tuner = tuner_for(machine, prefetch=2, memory=lambda: 1000, child_memory=lambda: 200)
    machine.run(tuner, 2_000)
    assert tuner.setting.num_workers == 4
    assert "too much memory" in tuner.reason


def test_a_few_late_batches_call_for_more_read_ahead() -> None:
    machine = Machine(0.02, 0.1, cores=8, late=10)
    tuner = tuner_for(machine, num_workers=2)
    machine.run(tuner, 3_000)
    assert tuner.setting.num_workers == 2
    assert tuner.setting.prefetch > 2
    steady = Machine(0.5, 0.001, cores=8)
    fixed = tuner_for(steady, num_workers=2)
    steady.run(fixed, 500)
    assert fixed.setting == Setting(2, 2)  # all batches are late: read-ahead does not help
    assert "fixed at 2" in fixed.reason


def test_a_pause_of_the_loop_decides_nothing() -> None:
    machine = Machine(0.3, 0.01, cores=8)
    tuner = tuner_for(machine, prefetch=2)
    for _ in range(200):
        machine.run(tuner, 5)
        machine.now += 60.0  # a validation
    assert tuner.setting.num_workers >= 8


def test_the_limits_of_this_machine_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    cores = available_cores()
    memory = available_memory()
    assert cores >= 1
    assert memory is None or memory > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert available_cores() == 1


class Scripted(Tuner):
    """Changes the setting after given batches."""

    script: dict[int, Setting] = {3: Setting(2, 1), 6: Setting(3, 2), 7: Setting(1, 4), 15: Setting(2, 2)}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = 0

    def note_batch(self, waited_s: float) -> Setting | None:
        self.count += 1
        found = self.script.get(self.count)
        self.setting = self.setting if found is None else found
        return found


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader_module, "Tuner", Scripted)
    yield
    assert not multiprocessing.active_children()


def add_noise(x: int, rng: Any) -> int:
    return x * 1_000 + int(rng.integers(1_000))


def indexed() -> Any:
    pipe = kdp.from_dataset([(number, 0) for number in range(40)]).transform("x", add_noise).select("x")
    return pipe.deal(batch_size=4, shuffle=True, seed=3).collate_samples()


def lists(batches: Any) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


@pytest.mark.usefixtures("scripted")
def test_a_switch_changes_no_batch_and_no_state() -> None:
    with kdp.Loader(indexed()) as loader:
        loader.seed(7)
        expected = [(batch[0].tolist(), loader.state_dict()) for _ in range(2) for batch in loader]
        receipt = loader.receipt()
    with kdp.Loader(indexed(), num_workers="auto") as loader:
        loader.seed(7)
        found = [(batch[0].tolist(), loader.state_dict()) for _ in range(2) for batch in loader]
        assert loader.receipt()["digest"] == receipt["digest"]
        assert loader.stats()["batches"] == 20
        assert "2 workers" in repr(loader)
    assert found == expected


@pytest.mark.usefixtures("scripted")
def test_a_state_from_within_the_search_resumes_anywhere() -> None:
    with kdp.Loader(indexed()) as loader:
        expected = lists(loader)
    for number in range(1, 10):
        with kdp.Loader(indexed(), num_workers="auto") as loader:
            begun = lists(itertools.islice(loader, number))
            state = json.loads(json.dumps(loader.state_dict()))
        with kdp.Loader(indexed(), num_workers="auto") as loader:
            loader.load_state_dict(state)
            assert begun + lists(loader) == expected


@pytest.mark.usefixtures("scripted")
def test_lanes_of_a_stream_go_on_at_their_cursors(tmp_path: Any) -> None:
    pipe = kdp.from_dataset([(number, number) for number in range(60)], fields="x y")
    kdp.write_shards(pipe.rename_fields(json="x", cls="y"), tmp_path / "%02d.tar", max_samples=5)

    def chain() -> Any:
        stream = kdp.stream_shards(str(tmp_path / "*.tar")).shuffle(buffer_size=7)
        return (
            stream.select("json cls").deal(batch_size=4, seed=1, shuffle="shards", split=kdp.lanes(4)).collate_samples()
        )

    with kdp.Loader(chain()) as loader:
        expected = [lists(loader) for _ in range(2)]
    with kdp.Loader(chain(), num_workers="auto") as loader:
        assert [lists(loader) for _ in range(2)] == expected


@pytest.mark.usefixtures("scripted")
def test_batches_that_are_kept_outlive_their_workers() -> None:
    with kdp.Loader(indexed()) as loader:
        expected = lists(loader)
    with kdp.Loader(indexed(), num_workers="auto") as loader:
        kept = list(loader)
    assert lists(kept) == expected
    assert all(isinstance(batch[0], torch.Tensor) for batch in kept)


def test_tuning_reports_plain_data() -> None:
    with kdp.Loader(indexed(), num_workers="auto", prefetch=3) as loader:
        assert "to be found" in repr(loader)
        assert len(list(loader)) == 10
        report = loader.tuning()
    assert json.loads(json.dumps(report)) == report
    assert report["num_workers"] >= 1
    assert report["prefetch"] == 3
    assert set(report) == {"num_workers", "prefetch", "is_settled", "reason", "trials"}


def test_fixed_numbers_are_not_tuned() -> None:
    with kdp.Loader(indexed()) as loader, pytest.raises(ValueError, match='num_workers="auto"'):
        loader.tuning()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_workers": "many"}, TypeError, "`num_workers` must be an integer"),
        ({"num_workers": 2, "prefetch": "max"}, TypeError, "`prefetch` must be an integer"),
        ({"prefetch": "auto"}, ValueError, "`num_workers` is 0"),
        ({"num_workers": "auto", "prefetch": 0}, ValueError, "`prefetch` must be"),
        (
            {"num_workers": "auto", "reading_service": kdp.ThreadReadingService(2)},
            ValueError,
            "cannot be combined with `reading_service`",
        ),
    ],
)
def test_wrong_arguments_are_rejected(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        kdp.Loader(indexed(), **arguments)


def test_batches_that_depend_on_workers_are_rejected() -> None:
    pipe = IterableWrapper(range(8)).to_samples(fields="x").select("x").sharding_filter().batch(2)
    with pytest.raises(kdp.ChainError, match=r"depend on the number of workers.*`\.deal"):
        kdp.Loader(pipe, num_workers="auto")
