"""Jobs done one after the other, by processes of their own, or by any executor: results in order, errors at once."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import torch

from kdpipes.core.errors import WorkerError, add_note, check_count, must_be
from kdpipes.core.progress import shown_if_slow
from kdpipes.storage.shared import sharing

__all__ = ["check_workers", "run_jobs"]

Job = TypeVar("Job")
Result = TypeVar("Result")
_AHEAD = 2  # jobs a worker: one that it does, one that waits
_LARGE = 16 << 20  # bytes that an executor is told with each job
_NUM_UNKNOWN = 32  # workers of an executor that does not say how many it has


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    executor: Executor | None,
    num_workers: int,
    what: str,
) -> Iterator[Result]:
    """Yield what a function returns for each job, in the jobs' order, as soon as it is there.

    Function, jobs and results travel by cloudpickle: lambdas and classes of a notebook may be among them. An executor
    gets the function with each job, with a warning where that is large; processes of their own get it once. No more
    than two jobs a worker are under way.

    The first error ends it all: jobs that wait are cancelled, processes of its own are ended at once, whatever they
    were doing, and the error is raised, with a note that names the job (`str(job)`) and the worker's traceback. So does
    leaving early, by an interrupt or otherwise; with `contextlib.closing`, at once. What an executor has begun it will
    end.

    Args:
        function: Called with a job.
        jobs: What is to be done.
        executor: Who does it: of `concurrent.futures`, Dask (`client.get_executor()`), mpi4py, ...
        num_workers: Without an executor, the number of processes; 0 does the jobs in this one. With one, how many jobs
            it does at a time, where it does not say so itself.
        what: What goes on, for the progress bar and errors: "writing shards".

    Raises:
        WorkerError: A process has died, or an error cannot be sent.
    """
    check_workers(executor, num_workers)
    if executor is not None:
        results = _by(executor, function, jobs, num_workers, what)
    elif num_workers:
        results = _by_processes(function, jobs, min(num_workers, len(jobs)), what)
    else:
        results = _here(function, jobs, what)
    return _shown(results, len(jobs), what)


def check_workers(executor: object, num_workers: int) -> None:
    """Refuse arguments that say who does jobs, but cannot."""
    check_count("num_workers", num_workers, minimum=0)
    if executor is not None and not isinstance(executor, Executor):
        way_out = "Dask has one: `client.get_executor()`."
        raise TypeError(must_be("executor", "a concurrent.futures.Executor", executor, way_out))


def _shown(results: Iterator[Any], total: int, what: str) -> Iterator[Any]:
    with contextlib.closing(results):  # type: ignore[type-var]  # generators, all of them
        yield from shown_if_slow(results, total, what, "jobs")


def _here(function: Callable[[Any], Any], jobs: Sequence[Any], what: str) -> Iterator[Any]:
    for job in jobs:
        try:
            result = function(job)
        except Exception as error:
            add_note(error, _note(what, job))
            raise
        yield result


def _note(what: str, job: Any) -> str:
    return f"kdpipes: while {what}: {job}"


class _Order(NamedTuple):
    """What an executor is told.

    Args:
        name: Of the function.
        function: It, by cloudpickle; None where the process has it.
        job: By cloudpickle.
    """

    name: bytes
    function: bytes | None
    job: bytes


class _Answer(NamedTuple):
    """What comes back: a result, or an error, by cloudpickle."""

    is_error: bool
    payload: bytes


def _by(
    executor: Executor, function: Callable[[Any], Any], jobs: Sequence[Any], num_workers: int, what: str
) -> Iterator[Any]:
    payload = cloudpickle.dumps(function)
    if len(payload) > _LARGE:
        warnings.warn(_large_text(what, len(payload)), stacklevel=2)
    order = _Order(hashlib.blake2b(payload, digest_size=16).digest(), payload, b"")
    num_at_once = num_workers or getattr(executor, "_max_workers", None) or _NUM_UNKNOWN
    yield from _submitted(executor, order, jobs, _AHEAD * num_at_once, what)


def _large_text(what: str, num_bytes: int) -> str:
    return (
        f"While {what}, {num_bytes / 1e6:.0f} MB of the chain and its functions go with each job. Keep what is large "
        "in files that workers open by themselves; or use `num_workers=`, whose processes get it once."
    )


def _by_processes(function: Callable[[Any], Any], jobs: Sequence[Any], num_workers: int, what: str) -> Iterator[Any]:
    if not jobs:
        return
    with sharing(), contextlib.suppress(Exception):  # what does not travel says so when it does
        cloudpickle.dumps(function)  # names classes of a notebook, so that what comes back is of the same ones
    with _own_pool(function, num_workers) as pool:
        yield from _submitted(pool, _Order(_OWN, None, b""), jobs, _AHEAD * num_workers, what)


def _submitted(executor: Executor, order: _Order, jobs: Sequence[Any], num_ahead: int, what: str) -> Iterator[Any]:
    rest, pending = iter(jobs), deque[tuple[Any, "Future[_Answer]"]]()
    try:
        while True:
            for job in islice(rest, num_ahead - len(pending)):
                told = order._replace(job=cloudpickle.dumps(job))
                pending.append((job, executor.submit(_do, *told)))
            if not pending:
                return
            _wait_for_first(pending, what)
            yield cloudpickle.loads(pending.popleft()[1].result().payload)
    finally:
        if order.name != _OWN:  # own processes are killed: the pool's thread may fail at what is cancelled then
            for _, future in pending:
                future.cancel()


def _wait_for_first(pending: deque[tuple[Any, Future[_Answer]]], what: str) -> None:
    """Wait until the first job is done, or raise the error of any that has failed."""
    while True:
        for job, future in pending:
            if future.done():
                _raise_if_failed(job, future, what)
        if pending[0][1].done():
            return
        wait([future for _, future in pending if not future.done()], return_when=FIRST_COMPLETED)


def _raise_if_failed(job: Any, future: Future[_Answer], what: str) -> None:
    try:
        answer = future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            f"A worker process has died while {what}: at {job}, or at a job that was under way beside it. Where it was "
            "killed, memory may have been short: use fewer workers."
        ) from error
    except Exception as error:
        add_note(error, _note(what, job))
        raise
    if answer.is_error:
        sent = cloudpickle.loads(answer.payload)
        add_note(sent, _note(what, job))
        raise sent


_OWN = b"own"
_functions: dict[bytes, Callable[[Any], Any]] = {}  # of this process, the last ones by name
_loading = threading.Lock()


def _do(name: bytes, function: bytes | None, job: bytes) -> _Answer:
    """Do a job in a worker; what it raises is sent as a result, as not every error can be made again there."""
    _use_one_thread()
    try:
        return _Answer(False, cloudpickle.dumps(_named(name, function)(cloudpickle.loads(job))))
    except Exception as error:
        return _Answer(True, _packed(error))


def _use_one_thread() -> None:
    """Let torch use one thread in a worker process: it would wait for those of its parent, which a fork lacks."""
    if multiprocessing.parent_process() is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def _named(name: bytes, payload: bytes | None) -> Callable[[Any], Any]:
    with _loading:
        if name not in _functions and payload is not None:
            for old in list(_functions)[:-1]:
                del _functions[old]
            _functions[name] = cloudpickle.loads(payload)
        return _functions[name]


def _packed(error: Exception) -> bytes:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    add_note(error, f"Traceback of the worker:\n{lines}")
    try:
        payload: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(payload)
    except Exception:
        payload = cloudpickle.dumps(WorkerError(f"{type(error).__name__}: {error}\n{lines}"))
    return payload


class _Parcel:
    """A function that a process that is forked inherits, and one that is spawned gets by cloudpickle."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getstate__(self) -> Any:
        return cloudpickle.dumps(self.function)

    def __setstate__(self, state: bytes) -> None:
        self.function = cloudpickle.loads(state)


@contextmanager
def _own_pool(function: Callable[[Any], Any], num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that end with the block: at once if that ends by an error."""
    pool = ProcessPoolExecutor(num_workers, initializer=_begin, initargs=(_Parcel(function),))
    try:
        yield pool
    except BaseException:
        _kill(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _kill(pool: ProcessPoolExecutor) -> None:
    """End processes whatever they are doing; of what they were sending, half may have come."""
    processes = list((pool._processes or {}).values())
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    pool._result_queue._writer.close()  # type: ignore[attr-defined]  # or the pool's thread waits for the other half


def _begin(parcel: _Parcel) -> None:
    """Begin as a worker: interrupts are the parent's business, and without it there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is not meant for it
    _use_one_thread()
    _functions[_OWN] = parcel.function
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="kdpipes-parent", daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
