"""Errors of workers arrive whatever they are: with their text, and the next epoch runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import kdpipes as kdp
from tests.delivery.faults import numbers, services, while_armed


class Torn(Exception):
    """An error that is made with two arguments, and passes on one."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first} {second}")


class Locked(Exception):
    """An error that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Turncoat(Exception):
    """An error whose pickle is something else."""

    def __reduce__(self) -> Any:
        return str, ("not an error",)


class Mute(Exception):
    """An error without words."""

    def __str__(self) -> str:
        raise ValueError("boom: no words")


def local_error() -> Exception:
    class Local(Exception):
        pass

    return Local("boom")


CUDA = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use 'spawn'"
ERRORS: dict[str, tuple[Callable[[], BaseException], type[BaseException], str]] = {
    "exit": (lambda: SystemExit("boom"), RuntimeError, "A worker raised SystemExit: boom"),
    "interrupt": (lambda: KeyboardInterrupt("boom"), RuntimeError, "A worker raised KeyboardInterrupt: boom"),
    "generator": (lambda: GeneratorExit("boom"), BaseException, "boom"),
    "stop": (lambda: StopIteration("boom"), RuntimeError, "StopIteration"),
    "local": (local_error, Exception, "boom"),
    "two": (lambda: Torn("boom", 2), Exception, "boom 2"),
    "locked": (lambda: Locked("boom"), Exception, "boom"),
    "turncoat": (lambda: Turncoat("boom"), Exception, "boom"),
    "mute": (lambda: Mute("boom"), Exception, "Mute"),
    "key": (lambda: KeyError(7), KeyError, "7"),
    "errno": (lambda: OSError(5, "boom", "file"), OSError, "[Errno 5] boom: 'file'"),
    "cuda": (lambda: RuntimeError(CUDA), RuntimeError, CUDA),
}


@pytest.mark.parametrize("name", ERRORS)
@services()
def test_any_error_arrives_with_its_text_and_epochs_continue(service: Any, name: str, tmp_path: Path) -> None:
    make, kind, text = ERRORS[name]

    def explode() -> None:
        raise make()

    flag = tmp_path / "flag"
    with kdp.Loader(numbers(while_armed(flag, 5, explode)), reading_service=service) as loader:
        with pytest.raises(kind) as caught:
            list(loader)
        told = type(caught.value).__name__ + "\n".join(getattr(caught.value, "__notes__", []))
        with contextlib.suppress(ValueError):
            told += str(caught.value)
        assert text in told
        flag.unlink()
        assert list(loader) == list(numbers())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@services()
def test_a_worker_that_would_end_names_sample_and_operation(service: Any, kind: Any, tmp_path: Path) -> None:
    def leave() -> None:
        raise kind(3)

    with kdp.Loader(numbers(while_armed(tmp_path / "flag", 5, leave)), reading_service=service) as loader:
        told = rf"A worker raised {kind.__name__}: 3, while applying 'step' to field 'x' of sample '5' \(ordinal 5\)"
        with pytest.raises(RuntimeError, match=told) as caught:
            list(loader)
    assert "kdpipes: while making batch 2 of epoch 0 (seed 0)" in caught.value.__notes__


@pytest.mark.parametrize("kind", [ValueError, StopIteration])
def test_errors_while_a_spawned_worker_unpickles_are_reported(kind: type[Exception], tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()

    class Fragile:
        def __setstate__(self, state: Any) -> None:
            if flag.exists() and multiprocessing.parent_process() is not None:
                raise kind("boom")

        def __getstate__(self) -> Any:
            return {"some": "state"}

        def __call__(self, x: int) -> int:
            return x

    service = kdp.ProcessReadingService(1, start_method="forkserver")
    with kdp.Loader(numbers(Fragile()), reading_service=service) as loader:
        with pytest.raises(Exception, match="boom"):
            list(loader)
        flag.unlink()
        assert list(loader) == list(numbers())


def test_an_error_in_the_length_of_a_source_is_told(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()

    class Source(kdp.SampleSource):
        def __len__(self) -> int:
            if flag.exists() and multiprocessing.parent_process() is not None:
                raise ArithmeticError("boom")
            return 3

        def getitem_x(self, index: int) -> int:
            return index

    with kdp.Loader(Source().select("x").deal(batch_size=1), num_workers=2, start_method="fork") as loader:
        with pytest.raises(ArithmeticError, match="boom"):
            list(loader)
        flag.unlink()
        assert list(loader) == [[(0,)], [(1,)], [(2,)]]


def test_unpicklable_chains_are_an_error_under_spawn_each_time() -> None:
    class Source(kdp.SampleSource):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 3

        def getitem_x(self, index: int) -> int:
            return index

    for _ in range(2):
        with (
            pytest.raises(TypeError, match="lock"),
            kdp.Loader(Source().select("x").deal(batch_size=1), num_workers=2, start_method="spawn") as loader,
        ):
            list(loader)


class Unloadable:
    """What can be pickled, and raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_item_that_cannot_be_unpickled_names_its_batch(*, is_stream: bool) -> None:
    source: Any = kdp.from_dataset([(number, 0) for number in range(6)])
    source = IterableWrapper(range(6)).to_samples(fields="x") if is_stream else source
    pipe = source.transform("x", lambda x: Unloadable() if x == 3 else x).select("x").deal(batch_size=2)
    keys = "" if is_stream else r" \(samples '2', '3'\)"
    with kdp.Loader(pipe, num_workers=2, start_method="fork") as loader:
        with pytest.raises(ZeroDivisionError) as caught:
            list(loader)
        note = rf"kdpipes: while unpickling batch 1 of epoch 0{keys}, sent by worker process \d+"
        assert re.fullmatch(note, caught.value.__notes__[-1])


def test_a_daemonic_process_is_told_what_it_may_use(interpreter: Any) -> None:
    script = """
import multiprocessing
import kdpipes as kdp

def load():
    pipe = kdp.from_dataset([(number, 0) for number in range(4)]).select("x").deal(batch_size=2)
    try:
        list(kdp.Loader(pipe, num_workers=1))
    except RuntimeError as error:
        print(error)
    print(len(list(kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(1)))))

process = multiprocessing.get_context("fork").Process(target=load, name="mine", daemon=True)
process.start()
process.join()
"""
    status, printed, told = interpreter.run(script)
    assert (status, told) == (0, "")
    assert printed == (
        "Process 'mine' is a daemon process, and daemon processes cannot start worker processes. "
        "Start it with `daemon=False`, or use `ThreadReadingService`.\n2\n"
    )


def test_too_few_descriptors_are_reported_with_the_number_needed(interpreter: Any) -> None:
    script = """
import gc, os, resource
import torch
import kdpipes as kdp

pipe = kdp.from_dataset([(torch.zeros(9000), 0) for number in range(90)]).select("x").deal(batch_size=1)
before = len(os.listdir("/proc/self/fd"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for limit in (*range(before + 2, before + 30, 3), before + 100):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    loader = kdp.Loader(pipe, num_workers=4, start_method="fork")
    try:
        print(len(list(loader)))
    except OSError as error:
        assert error.errno == 24
        needed = "4 workers need up to 32 file descriptors in addition to those that are open"
        assert error.strerror.startswith(f"Too many open files. {needed}; `ulimit -n` is {limit}."), error
        print("reported")
        del error
    loader.close()
    del loader
    gc.collect()
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    assert not children, children
"""
    status, printed, told = interpreter.run(script)
    assert status == 0, told
    assert printed.split() == 10 * ["reported"] + ["90"]


WITHOUT_GUARD = """
import sys, kdpipes as kdp
chain = kdp.from_dataset([(n, n) for n in range(9)]).select("x y").deal(batch_size=4).collate_samples()
list(kdp.Loader(chain, num_workers=2, start_method=sys.argv[1]))
"""

# A process of the user's own imports the script as well.
TRAINING_WITHOUT_GUARD = f"""
import multiprocessing
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
{WITHOUT_GUARD}
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("script", [WITHOUT_GUARD, TRAINING_WITHOUT_GUARD], ids=["loader", "training"])
def test_a_script_without_a_guard_gets_one_clear_error(script: str, method: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, tmp_path / "train.py", method]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False).stderr
    assert said.count("Traceback") == said.count("WorkerError: Workers that are not forked import") == 1, said
    assert said.endswith('Make them under `if __name__ == "__main__":`.\n')
