"""Run jobs in worker processes or any executor: results in order, few jobs ahead, errors at once.

The worker processes are those of `concurrent.futures`, not of loky 3.7. Measured: two workers of loky, which are new
interpreters, took 19 s to import kdpipes, two forks 0.14 s. If a worker hangs while it sends its result, loky's
`shutdown(kill_workers=True)` does not return, and its workers outlive the parent.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing import connection
from typing import Any, TypeVar

import cloudpickle
import torch
from PIL import Image

from kdpipes.core import pickling
from kdpipes.core.errors import WorkerError, add_note, check_count, must_be
from kdpipes.core.handles import warn_of_handles
from kdpipes.core.messages import shown_if_slow, warn
from kdpipes.core.processes import ForkLock
from kdpipes.core.shared import sharing
from kdpipes.core.tracebacks import traceback_text
from kdpipes.storage.access import Threads
from kdpipes.storage.decoding import is_pillows

Job = TypeVar("Job")
Result = TypeVar("Result")
_AHEAD = 2  # jobs per worker: one running, one waiting
_STEP_S = 1.0  # after this time, Python handles a Ctrl-C that it has missed
_LARGE = 16 << 20  # size of a function, sent with each job, from which on to warn
_SETTINGS = (
    ("PIL.Image", "MAX_IMAGE_PIXELS"),
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"),
    ("PIL.ImageFile", "MAXBLOCK"),
    ("PIL.GifImagePlugin", "LOADING_STRATEGY"),
    ("PIL.PngImagePlugin", "MAX_TEXT_CHUNK"),
    ("PIL.PngImagePlugin", "MAX_TEXT_MEMORY"),
    ("PIL.TiffImagePlugin", "READ_LIBTIFF"),
)
_NUM_UNKNOWN = 32  # assumed workers of an executor that does not report their number


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    executor: Executor | None,
    num_workers: int,
    what: str,
    progress: bool = True,
) -> Iterator[Result]:
    """Yield the result of a function for each job, in the order of the jobs, as soon as each is available.

    The function, jobs and results are pickled by cloudpickle, so lambdas and classes of a notebook work. An executor
    receives the function with each job, with a warning if it is large; the worker processes receive it once. At most
    two jobs per worker are submitted ahead.

    The first error stops everything: waiting jobs are cancelled, worker processes are killed at once, and the error is
    raised with a note that names the job (`str(job)`) and the traceback of the worker. The same happens if the caller
    stops early, for example because of an interrupt; with `closing`, this happens at once. An executor
    completes the jobs that are already running.

    Args:
        function: A function that is called with a job.
        jobs: The arguments of the calls.
        executor: An executor for the jobs, from `concurrent.futures`, Dask (`client.get_executor()`), mpi4py, ...
        num_workers: Without an executor, the number of processes; 0 runs the jobs in this process. With an executor
            that does not report it, the number of jobs that it runs at a time.
        what: A description of the work for the progress bar and errors, such as "writing shards".
        progress: Whether to show a progress bar if it takes long.

    Raises:
        WorkerError: A process has died, or an error cannot be pickled.
    """
    check_workers(executor, num_workers)
    if not jobs or (executor is None and not num_workers):
        results = _in_this_process(function, jobs, what)
    else:
        results = _in_workers(function, jobs, executor, num_workers, what)
    return _shown(results, len(jobs), what) if progress else results


def check_workers(executor: object, num_workers: int) -> None:
    """Raise unless `num_workers` is a valid number of workers and `executor` is an executor or None."""
    check_count("num_workers", num_workers, minimum=0)
    if executor is not None and not isinstance(executor, Executor):
        hint = "Dask has one: `client.get_executor()`."
        raise TypeError(must_be("executor", "a concurrent.futures.Executor", executor, hint))


def in_parallel(
    action: Callable[[Job], Result],
    items: Iterable[Job],
    num_threads: int,
    stop: Callable[[], object] | None = None,
    *,
    waits: bool = True,
) -> Iterator[Result]:
    """Yield the result of `action` for each item, in order, from threads that work slightly ahead.

    The threads use the caller's access settings, and do not delay interpreter exit. After an error, no thread starts
    another item, and `stop` is called. With `waits`, the error is raised once all threads are idle.
    """
    threads = Threads(num_threads, "kdpipes-jobs")
    rest = iter(items)
    pending: deque[Future[Result]] = deque()
    try:
        while True:
            ahead = islice(rest, 4 * num_threads - len(pending))
            pending.extend(threads.submit(partial(action, item)) for item in ahead)
            if not pending:
                return
            # Python misses a Ctrl-C that arrives just before a wait without a timeout, until that wait ends.
            while not wait((pending[0],), _STEP_S).done:
                pass
            yield pending.popleft().result()
    except BaseException:
        for future in pending:
            future.cancel()
        if stop is not None:
            stop()
        if waits:
            wait(pending)
        raise


def _shown(results: Iterator[Any], total: int, what: str) -> Iterator[Any]:
    with closing(results):  # type: ignore[type-var]  # all of them are generators
        yield from shown_if_slow(results, total, what, "job")


def _in_this_process(function: Callable[[Any], Any], jobs: Sequence[Any], what: str) -> Iterator[Any]:
    for job in jobs:
        try:
            result = function(job)
        except Exception as error:
            add_note(error, _note(what, job))
            raise
        yield result


def _note(what: str, job: Any) -> str:
    return f"kdpipes: while {what}: {job}"


def _in_workers(
    function: Callable[[Any], Any], jobs: Sequence[Any], executor: Executor | None, num_workers: int, what: str
) -> Iterator[Any]:
    pending: deque[tuple[Any, Future[Any]]] = deque()
    with ExitStack() as stack:
        if executor is None:
            # Unpickling registers classes of a notebook, so that results have the same classes. Objects that cannot be
            # pickled raise later, if they have to be pickled.
            with sharing(), suppress(Exception):
                pickling.dumps(function)
            warn_of_handles(function, is_forked=multiprocessing.get_start_method() == "fork")
            num_at_once = min(num_workers, len(jobs))
            name = _OWN
            payload = None
            executor = stack.enter_context(_own_pool(function, num_at_once))
        else:
            payload = dumps_with_pillow(function)
            if len(payload) > _LARGE:
                warn(
                    f"While {what}, {len(payload) / 1e6:.0f} MB of the chain and its functions go with each job. Keep "
                    "large data in files that workers open by themselves; or use `num_workers=`, whose processes get "
                    "it once.",
                )
            name = hashlib.blake2b(payload, digest_size=16).digest()
            num_at_once = num_workers or getattr(executor, "_max_workers", None) or _NUM_UNKNOWN
            stack.callback(_forget, name, pending)
        rest = iter(jobs)
        while True:
            for job in islice(rest, _AHEAD * num_at_once - len(pending)):
                pending.append((job, executor.submit(_do, name, payload, pickling.dumps(job))))
            if not pending:
                return
            while True:  # wait until the first job ends or any job fails
                for job, future in pending:
                    if future.done():
                        _raise_if_failed(job, future, what)
                if pending[0][1].done():
                    break
                wait([future for _, future in pending if not future.done()], return_when=FIRST_COMPLETED)
            yield cloudpickle.loads(pending.popleft()[1].result()[1])


def _forget(name: bytes, pending: Iterable[tuple[Any, Future[Any]]]) -> None:
    """Cancel waiting jobs, and drop the function that this process's threads hold, with the chain and its caches."""
    for _, future in pending:
        future.cancel()
    with _loading.lock:
        _functions.pop(name, None)


def _raise_if_failed(job: Any, future: Future[Any], what: str) -> None:
    try:
        is_error, payload = future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            f"A worker process has died while {what}, at {job} or at another job that was running. If the system "
            "killed it, memory has run out: use fewer workers."
        ) from error
    except Exception as error:
        add_note(error, _note(what, job))
        raise
    if is_error:
        sent = cloudpickle.loads(payload)
        add_note(sent, _note(what, job))
        raise sent


_OWN = b"own"  # the name of the function in the worker processes of this module
_functions: dict[bytes, Callable[[Any], Any]] = {}  # the most recent functions of this process, by name
_loading = ForkLock()


def _do(name: bytes, function: bytes | None, job: bytes) -> tuple[bool, bytes]:
    """Run a job in a worker. Return whether it failed, and its result or error pickled by cloudpickle.

    Errors are returned rather than raised, because not every error can be unpickled.
    """
    # In a worker of an executor. It would wait for threads of its parent, which do not exist after a fork.
    if multiprocessing.parent_process() is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    try:
        with _loading.lock:
            if name not in _functions and function is not None:
                for old in list(_functions)[:-1]:
                    del _functions[old]
                _functions[name] = loads_with_pillow(function)
            action = _functions[name]
        return False, pickling.dumps(action(cloudpickle.loads(job)))
    except Exception as error:
        return True, packed_error(error)


def packed_error(error: BaseException) -> bytes:
    """Return a pickle of an error, with the traceback as a note; a `WorkerError` if the error cannot be unpickled."""
    lines = traceback_text(error)
    add_note(error, f"In a worker:\n{lines}")
    try:
        payload = pickling.dumps(error)
        if not isinstance(cloudpickle.loads(payload), BaseException):
            raise TypeError("The executor returned an object that is not an error.")
    except Exception:
        payload = pickling.dumps(WorkerError(f"{type(error).__name__}: {error}\n{lines}"))
    return payload


def dumps_with_pillow(value: Any) -> bytes:
    """Return a pickle of a value for a new process, along with this process's Pillow settings and plugins."""
    plugins = [(name, *Image.OPEN[name]) for name in Image.OPEN if not is_pillows(name)]
    names = {name for name, *_ in plugins}
    suffixes = [(name, suffix) for suffix, name in Image.EXTENSION.items() if name in names]
    settings = [
        (module, name, getattr(sys.modules[module], name)) for module, name in _SETTINGS if module in sys.modules
    ]
    return pickling.dumps((settings, plugins, suffixes, value))


def loads_with_pillow(content: bytes) -> Any:
    """Return the value pickled by `dumps_with_pillow`, and restore the Pillow settings of the sending process."""
    settings, plugins, suffixes, value = cloudpickle.loads(content)
    for module, name, setting in settings:
        setattr(import_module(module), name, setting)
    if plugins:
        Image.init()  # called later, it would replace plugins for formats of its own
    for plugin in plugins:
        Image.register_open(*plugin)
    for name, suffix in suffixes:
        Image.register_extension(name, suffix)
    return value


class Payload:
    """A value for a worker process: inherited by a forked process, otherwise pickled with Pillow's settings."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._pickle = b""

    def open(self) -> Any:
        """Return the value. The worker calls this instead of `__setstate__`, so that it can report errors."""
        return self._value if self._value is not None else loads_with_pillow(self._pickle)

    def __getstate__(self) -> dict[str, Any]:
        return {"_value": None, "_pickle": dumps_with_pillow(self._value)}


@contextmanager
def _own_pool(function: Callable[[Any], Any], num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes end with the block: immediately, even in the middle of work, if it raises."""
    pool = ProcessPoolExecutor(num_workers, initializer=_begin, initargs=(Payload(function),))
    try:
        yield pool
    except BaseException:  # a pool has no public method for this before Python 3.14
        processes = list((pool._processes or {}).values())
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        # Without this, the pool's thread would wait for the rest of a result that a killed process had begun to send.
        # For the sake of the same thread, the futures are cancelled only afterwards.
        pool._result_queue._writer.close()  # type: ignore[attr-defined]
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(function: Payload) -> None:
    begin_worker(1)
    _functions[_OWN] = function.open()


def begin_worker(num_threads: int) -> None:
    """Initialize a worker process: leave interrupts to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is not meant for workers
    torch.set_num_threads(num_threads)
    threading.Thread(target=_end_with_parent, name="kdpipes-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    ends = [parent.sentinel]  # the parent's other children keep them open
    with suppress(OSError, AttributeError):
        ends.append(os.pidfd_open(parent.pid))
    connection.wait(ends)
    os._exit(1)
