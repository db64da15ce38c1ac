"""kdpipes' own reading services for DataLoader2: worker processes and worker threads."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, check_choice, check_count, must_be
from kdpipes.core.handles import warn_of_handles
from kdpipes.core.iter_pipe import Streaming
from kdpipes.core.messages import warn
from kdpipes.core.on_use import call_slot
from kdpipes.core.pipe import prepare_for_workers
from kdpipes.core.processes import uninterrupted
from kdpipes.core.stock import is_of_torchdata
from kdpipes.core.torch_pipes import Collator, IterDataPipe, Mapper
from kdpipes.core.tracebacks import shorten
from kdpipes.delivery.clock import EpochClock, Position
from kdpipes.delivery.dealer import fix_ranks
from kdpipes.delivery.layout import NEW_LOADER, Ranks, check_ranks, ranks_now
from kdpipes.delivery.skipping import SkipLimits
from kdpipes.delivery.state import Checkpointer, main_part
from kdpipes.delivery.to_device import DeviceMoverIterDataPipe
from kdpipes.loader.merge import Agreement, Counters, Merger, compare_ranks
from kdpipes.loader.processes import NUM_BORROWED, ProcessPool, ProcessWorker, name_classes
from kdpipes.loader.profile import Probes
from kdpipes.loader.threads import InlineWorker, ThreadWorker
from kdpipes.loader.worker import Options, Seeds, Worker, seed_of
from kdpipes.storage.access import check_timeout
from kdpipes.storage.jobs import Payload

if TYPE_CHECKING:
    from torchdata.dataloader2 import CheckpointableReadingServiceInterface as _Interface
else:
    _Interface = object  # torchdata is registered when it is used; Python 3.13 and later have none


ENDED = "The workers of this iterator have been ended. Begin a new epoch: `for batch in loader`."


class ReadingService(_Interface):  # type: ignore[misc]  # torchdata carries no types for mypy
    """The base of kdpipes' reading services: the same order for any number and kind of workers, and a state.

    The methods are those of torchdata's `CheckpointableReadingServiceInterface`, by which DataLoader2 calls them.
    """

    num_workers = 1
    prefetch = 1
    timeout_s: float | None = None
    has_workers = True
    is_exact = True  # whether it knows which batches were delivered, so that states lie within epochs
    is_profiled = False  # whether workers measure their pipes

    def __init__(self) -> None:
        self._forget()
        call_slot("introduce_to_torchdata", ReadingService)

    def __del__(self) -> None:
        if uninterrupted is not None:  # at the end of the interpreter, modules may be empty
            self.finalize()

    def _forget(self) -> None:
        self._chain: Any = None
        self._workers: list[Worker] = []
        self._seeds: Any = None
        # Seeds each epoch by its number, in place of DataLoader2's generator.
        self.base_seed: int | None = None
        self.clock = EpochClock()  # a loader puts its own here
        self._num_main = 0
        self._has_warned = False
        self._is_main_one_to_one = True
        self._ranks: Ranks | None = None  # the ranks that the chain is dealt to; None if each gets all batches
        self._agreement: Agreement | None = None
        self._items: Any = None  # the pipes of the main process
        self._epoch: Iterator[Any] = iter(())  # their items
        self._asked_at = 0.0
        self.main_probes: Probes | None = None  # of the part of the chain that runs in the main process
        self._checkpointer = Checkpointer(None, 1)
        self.counters = Counters()

    def _start_workers(self) -> list[Worker]:
        raise TypeError(f"{type(self).__name__} must implement `_start_workers`.")

    def _options(self, number: int) -> Options:
        """Return the options of a worker."""
        return Options(number, self.num_workers, self.prefetch, self.is_profiled, self._num_main, self.timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        """Return only the arguments. Copies get neither the workers nor the position."""
        own = vars(self)
        runtime = vars(ReadingService())
        return {name: value for name, value in own.items() if name not in runtime}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self.__dict__.update(state)

    def initialize(self, datapipe: Any) -> Any:
        """Called by DataLoader2 once: start the workers."""
        call_slot("introduce_to_torchdata", ReadingService)
        ends, chain = main_part(datapipe, has_workers=self.has_workers)
        if any(is_of_torchdata(pipe, "ShardingRoundRobinDispatcher") for pipe in Chain.of(chain).pipes):
            raise ChainError(
                "`.sharding_round_robin_dispatch()` needs torchdata's MultiProcessingReadingService. `.deal()` gives "
                "each worker batches of its own, without a process in between."
            )
        self._chain = chain
        self._num_main = len(ends)
        self._checkpointer = Checkpointer(chain, self.num_workers)
        for pipe in Chain.of(chain).pipes:
            prepare_for_workers(pipe)
        dealer = Chain.of(chain).resumable_deal()
        self._ranks = fix_ranks(chain)
        if self.base_seed is None:
            self.clock.resume_at(self._checkpointer.first_position())
        self.clock.continues = dealer is not None and dealer.clock.continues
        is_agreed = dealer is not None and dealer.has_lanes and dealer.has_waiting_ranks()
        self._agreement = Agreement(is_padded=dealer.uneven == "pad") if is_agreed else None
        # Whether each pipe in the main process yields one item for each that it takes, even if it holds some back.
        kinds = (DeviceMoverIterDataPipe, Mapper, Collator)
        self._is_main_one_to_one = all(
            isinstance(end, kinds) or is_of_torchdata(end, "FullSync", "PinMemory") for end in ends
        )
        self.finalize()  # ends the workers that an interrupted call has left
        with uninterrupted():
            self._workers = self._start_workers()
        service = weakref.proxy(self)  # in a cycle, workers and caches would wait for the garbage collector
        self._items = _ItemPipe(lambda: service._merger())
        for end in reversed(ends):  # the merged items take the place of the part that workers run
            name = next(name for name, value in vars(end).items() if isinstance(value, IterDataPipe))
            setattr(end, name, self._items)
            self._items = end
        if self.is_profiled:
            self.main_probes = Probes(self._items)
            self.main_probes.is_on = True
        return _ItemPipe(self.begin)

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        """Called by DataLoader2 at the start of an epoch."""
        if self._ranks is not None:
            check_ranks(self._ranks, ranks_now(), NEW_LOADER)
        self._seeds = seed_generator
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        """Called by DataLoader2 at the end of an epoch; does nothing."""

    def finalize(self) -> None:
        """Called by DataLoader2 at the end: end the workers."""
        with uninterrupted():
            workers = self._workers
            self._workers = []
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.close()

    def checkpoint(self) -> bytes:
        """Called by DataLoader2's `state_dict`, before it pickles the chain."""
        call_slot("note_position")
        return json.dumps(self._checkpointer.state_at(self.clock.position)).encode()

    def restore(self, datapipe: Any, serialized_state: bytes) -> Any:
        """Called by DataLoader2 in place of `initialize`, after its `from_state` or `load_state_dict`."""
        end = self.initialize(datapipe)
        self.clock.resume_at(self._checkpointer.position_in(json.loads(serialized_state), strict=True))
        return end

    def wait(self) -> None:
        """Wait until every worker has made its first batch of the epoch that has begun."""
        try:
            for worker in self._workers:
                worker.peek()
        except BaseException:  # after Ctrl-C, messages in transit may be lost
            for worker in self._workers:
                worker.is_torn = True
            raise

    @property
    def is_running(self) -> bool:
        """Whether the service has been initialized, and not finalized since."""
        return bool(self._workers)

    def queue_depth(self) -> int:
        """Return the number of items that the main process has received but not yet delivered."""
        return sum(len(worker.messages) for worker in self._workers) + len(self.clock.ahead)

    def begin(self) -> Batches:
        """Begin an epoch, and return its iterator.

        If an epoch is resumed after its last batch, the iteration delivers nothing, and the next iteration is the next
        epoch.
        """
        start = self.clock.start()
        try:
            self._epoch = iter(self._items)
        except BaseException:
            self.clock.resume_at(start)
            raise
        self.counters.delivered.begin(start)
        self._asked_at = 0.0
        return Batches(self.deliver)

    def deliver(self, _: Batches | None = None) -> Any:
        """Return the next item of the pipes in the main process, and record the position after it."""
        clock = self.clock
        counters = self.counters
        if not self.is_running:
            raise RuntimeError(ENDED)
        if self._ranks is not None:
            check_ranks(self._ranks, ranks_now())
        if clock.is_fresh:
            clock.is_fresh = False
            compare_ranks(self._chain, clock.latest, self._checkpointer.pipes)
        asked_at = self._asked_at or time.perf_counter()
        try:
            item = next(self._epoch)
        except StopIteration:
            counters.delivered.end(clock.end())
            raise
        counters.delivered.note(clock.deliver(is_one_to_one=self._is_main_one_to_one))
        self._asked_at = time.perf_counter()
        counters.busy_s += self._asked_at - asked_at
        return item

    def _merger(self) -> Merger:
        clock = self.clock
        chain = Chain.of(self._chain)
        num_workers = len(self._workers)
        position = clock.latest
        seeds = self._seeds if self.base_seed is None else Seeds(seed_of(self.base_seed, position.epoch))
        dealer = chain.resumable_deal()
        handler = chain.error_handler()
        limits = plan = None
        if dealer is not None and handler is not None:
            limits = SkipLimits(
                handler, dealer.sharding().num_ranks, position.number, rejects_twins=dealer.has_unique_keys
            )
        if dealer is not None and dealer.has_lanes:
            plan = dealer.lane_plan()
            if plan is not None and num_workers > plan.num_groups and not self._has_warned:
                self._has_warned = True
                warn(plan.idle_text(num_workers))
        return Merger(
            self._workers,
            position,
            clock,
            [None if seeds is None else seeds.spawn(number) for number in range(num_workers)],
            self.counters,
            plan,
            None if plan is None else self._agreement,
            limits,
        )

    def _pause(self, num_batches: int | None = None) -> None:
        """Called by DataLoader2's `pause`, `resume` and `limit`; does nothing: the state is right at any moment."""

    _resume = _limit = _pause


class InlineReadingService(ReadingService):
    """No workers: the calling thread makes each item on request."""

    has_workers = False

    def _start_workers(self) -> list[Worker]:
        return [InlineWorker(self._chain, self._options(0))]


class ThreadReadingService(ReadingService):
    """Runs the chain in worker threads, without pickling, copying or forking.

    Batches and states are the same as with processes. All threads use the same functions and datasets, which must be
    thread-safe. Reading, decoding and NumPy run in parallel; Python code does not, and neither do transforms that draw
    random numbers without a parameter `rng`. A thread that is stuck in a user's code cannot be ended.

    Args:
        num_threads: The number of threads.
        prefetch: The number of batches that each thread makes in advance.
        timeout_s: The number of seconds without a batch after which `WorkerError` is raised; None means that there is
            no limit.

    Example:
        >>> pipe = kdp.from_dataset([(n, 0) for n in range(4)]).select("x").deal(batch_size=2)
        >>> with kdp.Loader(pipe, reading_service=kdp.ThreadReadingService(2)) as loader:
        ...     list(loader)
        [[(0,), (1,)], [(2,), (3,)]]
    """

    def __init__(self, num_threads: int, *, prefetch: int = 2, timeout_s: float | None = None) -> None:
        super().__init__()
        self.num_workers = check_count("num_threads", num_threads)
        self.prefetch = check_count("prefetch", prefetch)
        self.timeout_s = check_timeout(timeout_s)

    def _start_workers(self) -> list[Worker]:
        chains = [Chain.of(self._chain).copy_streams() for _ in range(self.num_workers)]
        return [ThreadWorker(chain, self._options(number)) for number, chain in enumerate(chains)]


class ProcessReadingService(ReadingService):
    """Runs the chain in worker processes, on Linux and macOS.

    Batches travel through shared memory, which is reused. The tensors that the loader returns are views of it, and
    release it when they are deleted. If you keep many batches, the others are copied. A worker that dies is replaced at
    the batch that it was making, so that the delivered batches do not change. Errors keep their type, and carry the
    traceback of the worker. Nothing is left in /dev/shm.

    Args:
        num_workers: The number of worker processes.
        prefetch: The number of batches that each worker makes in advance; if they are small, up to 32 times as many, as
            long as they take less than 64 KiB together.
        max_bytes: The maximum size in bytes of all batches that the workers together make in advance. Each worker may
            always make one.
        start_method: How processes start: "fork", "spawn" or "forkserver"; by default, as usual on the platform.
        on_worker_death: "restart" replaces a worker that dies, until `num_deaths` workers have died at the same sample;
            "raise" raises `WorkerError` at once.
        num_deaths: The number of deaths at the same sample that is an error, unless `on_error` leaves the sample out.
        max_worker_deaths: The number of deaths without a batch in between, for any reason, that is an error. At least
            `num_deaths`.
        timeout_s: The number of seconds without a batch after which a worker counts as stuck and is ended; None means
            that there is no limit.
        threads_per_worker: The number of threads that torch's operations use in each worker.

    Raises:
        WorkerError: Workers have died. The error names the process, the signal, the sample and the operation.

    Example:
        >>> service = kdp.ProcessReadingService(2, timeout_s=300)
        >>> pipe = kdp.from_dataset([(n, 0) for n in range(4)]).select("x").deal(batch_size=2)
        >>> with kdp.Loader(pipe, reading_service=service) as loader:
        ...     list(loader)
        [[(0,), (1,)], [(2,), (3,)]]
    """

    def __init__(
        self,
        num_workers: int,
        *,
        prefetch: int = 2,
        max_bytes: int = 1 << 30,
        start_method: str | None = None,
        on_worker_death: Literal["restart", "raise"] = "restart",
        num_deaths: int = 3,
        max_worker_deaths: int = 10,
        timeout_s: float | None = None,
        threads_per_worker: int = 1,
    ) -> None:
        super().__init__()
        self.num_workers = check_count("num_workers", num_workers)
        # Windows. The module is imported there nevertheless, for the threads.
        if not hasattr(socket, "send_fds"):
            raise RuntimeError(
                "Worker processes need Linux or macOS, where descriptors can be sent to another process. Use threads: "
                f"`reading_service=kdp.ThreadReadingService({num_workers})`."
            )
        self.prefetch = check_count("prefetch", prefetch)
        self.max_bytes = check_count("max_bytes", max_bytes)
        if start_method is not None:
            check_choice("start_method", start_method, multiprocessing.get_all_start_methods())
        check_choice("on_worker_death", on_worker_death, ("restart", "raise"))
        self.start_method = start_method
        self.on_worker_death = on_worker_death
        self.num_deaths = check_count("num_deaths", num_deaths)
        self.max_worker_deaths = check_count("max_worker_deaths", max_worker_deaths)
        if self.max_worker_deaths < self.num_deaths:
            rule = f"at least {self.num_deaths}, which is `num_deaths`"
            raise ValueError(must_be("max_worker_deaths", rule, max_worker_deaths, "Pass both."))
        self.timeout_s = check_timeout(timeout_s)
        self.threads_per_worker = check_count("threads_per_worker", threads_per_worker)

    def _start_workers(self) -> list[Worker]:
        if multiprocessing.current_process().daemon:
            raise RuntimeError(
                f"Process {multiprocessing.current_process().name!r} is a daemon process, and daemon processes "
                "cannot start worker processes. Start it with `daemon=False`, or use `ThreadReadingService`."
            )
        context: Any = multiprocessing.get_context(self.start_method)
        warn_of_handles(self._chain, is_forked=context.get_start_method() == "fork")
        name_classes(self._chain)
        pool = ProcessPool(
            Payload(self._chain),
            self.start_method,
            self.counters,
            is_restarted=self.on_worker_death == "restart",
            num_deaths=self.num_deaths,
            max_worker_deaths=self.max_worker_deaths,
            handler=Chain.of(self._chain).error_handler(),
        )
        workers: list[Worker] = []
        try:
            for number in range(self.num_workers):
                options = replace(
                    self._options(number),
                    num_buffers=self.prefetch + NUM_BORROWED,
                    max_bytes=self.max_bytes // self.num_workers,
                    num_threads=self.threads_per_worker,
                )
                workers.append(ProcessWorker(pool, options))
        except BaseException:
            pool.close()
            raise
        return workers


class Batches:
    """The iterator of an epoch. Only the latest iterator of a loader yields batches; earlier ones have ended.

    Several threads may request batches: each batch goes to one of them, and all of them end with the epoch.

    Args:
        take: A function that is called with the iterator; returns its next batch, or raises StopIteration.

    Attributes:
        is_fresh: Whether no batch has been requested yet.
        interrupted_at: The position to resume from after Ctrl-C, or None.
        owner: The id of the process that the iterator belongs to.
    """

    def __init__(self, take: Callable[[Batches], Any]) -> None:
        self.is_fresh = True
        self.interrupted_at: Position | None = None
        self.owner = os.getpid()
        self._take = take
        self._left: int | None = None  # how many batches the limit still allows
        self._limit: int | None = None
        self._is_paused = self._is_over = False
        self._turn = threading.RLock()  # held by the thread that requests a batch

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        # A forked child shares the sockets and open files of its parent, which would miss what the child reads.
        if self.owner != os.getpid():
            raise RuntimeError(
                f"This iterator belongs to process {self.owner}, but process {os.getpid()}, forked from it, requests a "
                "batch. Make a loader in this process, or begin a new epoch: `for batch in loader`."
            )
        with self._turn:
            if self._is_over or self._is_paused or self._left == 0:
                raise StopIteration
            try:
                batch = self._take(self)
            except StopIteration:
                self._is_over = True
                raise
            except BaseException as error:
                shorten(error)
                raise error  # KDPIPES_TRACEBACK=full shows the frames in between
            if self._left is not None:
                self._left -= 1
            if batch is None:
                warn("The chain yields None instead of a batch: the function of a `.map()` may lack its `return`.")
            return batch

    def limit(self, num_batches: int | None) -> None:
        """Pause after every `num_batches` batches, until `resume` is called; None removes the limit."""
        self._limit = self._left = None if num_batches is None else check_count("num_batches", num_batches)

    def pause(self) -> None:
        """Let the iteration end for now; `resume` lets it continue with the very next batch."""
        self._is_paused = True

    def resume(self) -> None:
        """Continue after `pause`, or after a `limit`."""
        self._left = self._limit
        self._is_paused = False


class _ItemPipe(Streaming[Any], IterDataPipe[Any]):
    """The items of an iterator as a pipe; `begin` returns the iterator of the next epoch."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def iterate(self) -> Iterator[Any]:
        return self._begin()
