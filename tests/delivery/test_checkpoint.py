"""The state of a loader: what it holds, when it is taken and loaded, and what it rejects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.delivery.states import chain, epochs_of, of_rank
from tests.resuming import travelled

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported:UserWarning")


@runtime_checkable
class Stateful(Protocol):
    """What Lightning and torch.distributed.checkpoint look for."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_trainers_find_a_state() -> None:
    assert isinstance(kdp.Loader(chain()), Stateful)


def test_the_state_of_a_long_chain_over_many_samples_is_small() -> None:
    pipe = kdp.from_ids([f"image-{n:06}" for n in range(100_000)], np.arange(100_000) % 7, load=len)
    plan: Any = pipe.filter_classes(valid=[1, 2, 3]).oversample().repeat_until(min_size=100_000).record_ctx()
    for _ in range(25):
        plan = plan.transform("x", lambda x: x + 1)
    loader = kdp.Loader(plan.select("x y").deal(batch_size=64, shuffle=True).collate_samples())
    next(iter(loader))
    state = loader.state_dict()
    assert len(json.dumps(state)) < 2048
    assert travelled(state) == state


@pytest.mark.parametrize(
    "reading_service", [None, kdp.ProcessReadingService(2, prefetch=5), kdp.ThreadReadingService(3)]
)
def test_where_a_state_says_that_the_loader_stands(reading_service: Any) -> None:
    with kdp.Loader(chain(), reading_service=reading_service) as loader:

        def place() -> tuple[int, int]:
            state = loader.state_dict()
            return state["epoch"], state["batch"]

        assert place() == (0, 0)
        batches = iter(loader)
        assert place() == (0, 0)
        for number in range(1, 7):
            next(batches)
            assert place() == ((0, number) if number < 6 else (1, 0))
        assert next(batches, None) is None
        assert place() == (1, 0)
        for _ in islice(loader, 2):
            pass
        assert place() == (1, 2)  # a break ends nothing: this is where training stood
        iter(loader)
        assert place() == (2, 0)
        loader.set_epoch(7)
        assert place() == (7, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_the_last_batch_comes_the_next_epoch(num_workers: int) -> None:
    first, second, third = epochs_of(chain())
    with kdp.Loader(chain(), num_workers) as loader:
        batches = iter(loader)
        list(islice(batches, len(first)))
        before_the_end = loader.state_dict()
        next(batches, None)
        after_the_end = loader.state_dict()
        for state in (before_the_end, after_the_end):
            resumed = kdp.Loader(chain(), num_workers)
            resumed.load_state_dict(travelled(state))
            assert [list(resumed), list(resumed)] == [second, third]
            resumed.close()
        assert list(loader) == second


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_is_loaded_at_any_time_and_the_last_one_counts(num_workers: int) -> None:
    first, second, third = epochs_of(chain())
    with kdp.Loader(chain(), num_workers) as loader:
        list(islice(loader, 2))
        early = loader.state_dict()
        list(islice(loader, 3))
        late = loader.state_dict()
        loader.load_state_dict(early)
        assert loader.state_dict() == early
        assert list(islice(loader, 1)) == first[2:3]
        loader.load_state_dict(early)
        loader.load_state_dict(late)
        assert loader.state_dict() == late
        iter(loader)
        assert loader.state_dict() == late
        assert list(loader) == second[3:]
        loader.load_state_dict(early)
        loader.set_epoch(2)
        assert list(loader) == third
        loader.set_epoch(2)
        loader.load_state_dict(early)
        loader.warm_up()
        assert loader.state_dict() == early
        assert [list(loader), list(loader)] == [first[2:], second]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_an_error_a_state_stands_at_the_batch_that_failed(num_workers: int, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    def check(x: int) -> int:
        if x == 13 and broken.exists():
            raise ArithmeticError(x)
        return x

    def numbers() -> Any:
        source = kdp.from_dataset([(number, 0) for number in range(20)])
        return source.transform("x", check).select("x").deal(batch_size=4)

    with kdp.Loader(numbers(), num_workers) as loader:
        seen: list[Any] = []
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                seen.extend(loader)
        state = loader.state_dict()
        assert (state["epoch"], state["batch"], len(seen)) == (1, 3, 6)
        broken.unlink()
        loader.load_state_dict(state)
        assert list(loader) == list(numbers())[3:]


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_a_run_resumes_from_a_short_last_batch(uneven: Any) -> None:
    epochs = epochs_of(chain(uneven=uneven))
    for number in range(len(epochs[0])):
        loader = kdp.Loader(chain(uneven=uneven))
        list(islice(loader, number))
        with kdp.Loader(chain(uneven=uneven), reading_service=kdp.ThreadReadingService(2)) as resumed:
            resumed.load_state_dict(loader.state_dict())
            assert [list(resumed), list(resumed)] == [epochs[0][number:], epochs[1]]


def test_the_seed_of_stock_pipes_travels_with_the_state() -> None:
    loader = kdp.Loader(chain(batch_size=1).shuffle())
    loader.seed(9)
    batches = iter(loader)
    list(islice(batches, 5))
    state = loader.state_dict()
    rest = list(batches)
    resumed = kdp.Loader(chain(batch_size=1).shuffle())
    resumed.load_state_dict(travelled(state))
    assert list(resumed) == rest
    assert list(resumed) == list(loader)


def test_numbers_of_numpy_do_not_keep_a_state_from_being_json() -> None:
    loader = kdp.Loader(chain(batch_size=np.int64(4), seed=np.int64(3)))  # type: ignore[arg-type]
    loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
    loader.seed(np.int64(5))  # type: ignore[arg-type]
    assert travelled(loader.state_dict())["epoch"] == 2


def test_changing_a_state_does_not_change_the_loader() -> None:
    loader = kdp.Loader(chain())
    expected = travelled(loader.state_dict())
    state = loader.state_dict()
    state["pipes"].clear()
    assert loader.state_dict() == expected


@pytest.mark.parametrize(
    "make", [lambda: chain(batch_size=2), lambda: IterableWrapper(range(8)).sharding_filter()], ids=["deal", "stock"]
)
def test_all_ranks_have_one_state_but_for_the_seed(make: Callable[[], Any]) -> None:
    states = []
    for rank in range(2):
        loader = kdp.Loader(of_rank(make(), rank))
        next(iter(loader))
        states.append({name: value for name, value in loader.state_dict().items() if name != "seed"})
    assert states[0] == states[1]


@pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted:UserWarning")
def test_a_chain_that_forks_has_a_state() -> None:
    def forked() -> Any:
        one, other = IterableWrapper(range(8)).shuffle().fork(2)
        return one.zip(other).to_samples(fields="x y").select("x y").deal(batch_size=2)

    epochs = epochs_of(forked())
    loader = kdp.Loader(forked())
    assert next(iter(loader)) == epochs[0][0]
    peeked = forked()
    next(iter(peeked))
    resumed = kdp.Loader(peeked)
    resumed.load_state_dict(loader.state_dict())
    assert [list(resumed), list(resumed)] == [epochs[0][1:], epochs[1]]


SCRIPT = """
import json, sys
from pathlib import Path
import kdpipes as kdp

folder, path, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
wanted, offset = {"heron", "stork", "gull"}, 3

def noisy(x, rng):
    return len(x) + offset + rng.random() + (0 if "gull" in {"heron", "gull", "x"} else 1)

class Scale:
    def __init__(self, by):
        self.by, self.names = by, {"b", "a", "c"}
    def __call__(self, x):
        return x * self.by

def main():
    shift = offset + 1
    pipe = kdp.image_folder(folder).filter_classes(valid=["heron", "gull"])
    pipe = pipe.transform("x", noisy, lambda x: (x + shift) if wanted else 0, Scale(2), max if not wanted else abs)
    loader = kdp.Loader(pipe.select("x key").deal(2, shuffle=True).map(lambda batch: batch[::-1]), num_workers=number)
    if path.exists():
        loader.load_state_dict(json.loads(path.read_text()))
        print(json.dumps(list(loader)))
        return
    batches = iter(loader)
    next(batches)
    path.write_text(json.dumps(loader.state_dict()))
    print(json.dumps(list(batches)))

main()
"""


def test_a_script_resumes_in_a_fresh_process_with_moved_images(tmp_path: Path) -> None:
    for number, name in enumerate(["heron", "gull", "stork", "gull", "heron", "gull"]):
        (tmp_path / "here" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name / f"{number}.png").write_bytes(b"x" * number)
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deeper")
    printed = []
    for run, folder in enumerate(["here", "there/deeper"]):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / folder), str(tmp_path / "state"), str(2 * run)]
        environment = {**os.environ, "PYTHONHASHSEED": str(run)}
        done = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(json.loads(done.stdout.splitlines()[-1]))
    assert printed[0] == printed[1]
    assert len(printed[0]) == 2


def test_within_its_epoch_a_state_outlives_set_epoch() -> None:
    with kdp.Loader(chain()) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        state, rest = loader.state_dict(), len(list(batches))
        loader.load_state_dict(state)
        loader.set_epoch(state["epoch"])
        assert len(list(loader)) == rest
        loader.load_state_dict(state)
        loader.set_epoch(3)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (3, 0)
