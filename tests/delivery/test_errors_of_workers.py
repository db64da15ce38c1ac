"""Errors of workers arrive whatever they are: with their text, and the next epoch runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
def test_an_error_of_any_kind_arrives_with_its_text_and_the_next_epoch_runs(
    service: Any, name: str, tmp_path: Path
) -> None:
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
def test_an_error_while_a_spawned_worker_unpickles_the_chain_is_told(kind: type[Exception], tmp_path: Path) -> None:
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


def test_what_cannot_be_pickled_is_an_error_under_spawn_each_time() -> None:
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
