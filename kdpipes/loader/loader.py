"""`Loader`, which runs a chain: it owns the epoch, the state and the reading service.

A batch passes six stations, from the worker to the user's loop:

1. `Producer` iterates the worker's copy of the chain, and numbers the batches (`worker.py`).
2. The channel carries messages: arrays lie in shared memory, threads pass objects (`channel.py`).
3. `Worker` receives the messages of one worker, a process or a thread (`worker.py`).
4. `Merger` returns the batches of all workers in the order of their numbers (`merge.py`).
5. `ReadingService` runs the pipes of the main process, and sets the `EpochClock` of the loader (`services.py`).
6. `Batches` is the iterator that the user holds: it takes turns of threads, `limit` and `pause` (`services.py`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, NoReturn, ParamSpec, cast

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, check_count, check_flag, check_seed, closest, must_be
from kdpipes.core.messages import warn
from kdpipes.core.on_use import call_slot
from kdpipes.core.pipe import counters_of, end_epoch
from kdpipes.core.processes import ForkLock, uninterrupted
from kdpipes.core.registry import pipe_name
from kdpipes.core.stock import is_of_torchdata, shards
from kdpipes.core.torch_pipes import IndexedBatcher as Batcher
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe, ShardingFilter, Shuffler
from kdpipes.delivery.clock import EpochClock, Position
from kdpipes.delivery.dealer import Dealer
from kdpipes.delivery.layout import ranks_now, unknown_rank
from kdpipes.delivery.skipping import MOST_SKIPS
from kdpipes.delivery.state import Checkpointer, main_part, seed_in
from kdpipes.loader.autotune import Tuner
from kdpipes.loader.profile import Measured, measured
from kdpipes.loader.receipt import receipt_of
from kdpipes.loader.services import Batches, InlineReadingService, ProcessReadingService, ReadingService
from kdpipes.loader.worker import Seeds, seed_of

Given = ParamSpec("Given")

_INSTEAD = {  # arguments of torch's DataLoader, and what replaces them
    "batch_size": "end the chain with `.deal(batch_size=...).collate_samples()`",
    "shuffle": "set it in the chain: `.deal(batch_size=..., shuffle=True)`",
    "sampler": "choose samples in the chain: `.deal(batch_size=..., shuffle=True)`, `.sample_weighted(...)`",
    "batch_sampler": "set it in the chain: `.deal(batch_size=...)`",
    "drop_last": 'set it in the chain: `.deal(batch_size=..., uneven="drop")`',
    "collate_fn": "end the chain with `.collate_samples()`, or with `.map(function)` after `.deal()`",
    "pin_memory": 'end the chain with `.to_device("cuda")`',
    "timeout": "write `timeout_s=...`",
    "prefetch_factor": "write `prefetch=...`",
    "persistent_workers": "remove it, because workers are always persistent",
    "worker_init_fn": "set the seed in the chain: `.deal(batch_size=..., seed=...)`",
    "generator": "set the seed in the chain: `.deal(batch_size=..., seed=...)`",
    "multiprocessing_context": "write `start_method=...`",
}


def _rejects_foreign_arguments(construct: Callable[Given, None]) -> Callable[Given, None]:
    """Make a constructor explain what to write in place of an argument that only torch's DataLoader has."""
    known = [name for name in inspect.signature(construct).parameters if name != "self"]

    @functools.wraps(construct)
    def constructed(*args: Given.args, **kwargs: Given.kwargs) -> None:
        unknown = next((name for name in kwargs if name not in known), None)
        if unknown is not None:
            instead = _INSTEAD.get(unknown)
            hint = f": {instead}." if instead is not None else f".{closest(unknown, known)}"
            raise TypeError(f"`Loader` takes no argument `{unknown}`{hint}")
        construct(*args, **kwargs)

    return constructed


class Loader:
    """Runs a chain of pipes. Each `for batch in loader` loop is the next epoch.

    A loader has a length, a state and statistics, and is a context manager. It does not create a CUDA context, can be
    iterated again after an error in the chain, and any number of loaders may exist at once. Ctrl-C while the loop waits
    for a batch ends the workers; they start again for the next batch or epoch. Each rank gets its own part. The rank
    and the number of ranks are read when an epoch begins, from torch's process group, otherwise from `RANK` and
    `WORLD_SIZE`. Chains may contain lambdas, closures and classes that are defined in a notebook.

    Args:
        source_datapipe: A chain that ends in a stream, such as the output of `deal` or `collate_samples`. The loader
            copies it, so later changes to it have no effect on the loader.
        num_workers: The number of worker processes; 0 loads in this process. "auto" finds it in the first seconds of
            the first epoch, within the limits of cores and memory, and finds `prefetch`, too, unless that is given.
            The batches are the same; `tuning()` reports what was chosen and why.
        prefetch: The number of batches that each worker makes in advance, or "auto"; 2 by default.
        start_method: How worker processes start: "fork", "spawn" or "forkserver"; by default, as usual on the platform.
        timeout_s: The number of seconds without a batch after which a worker is replaced. No limit by default.
        progress: Whether to show a progress bar.
        profile: Whether to measure where the time goes; `kdp.profile(loader)` reports it. Measuring costs less than 2 %
            if a batch takes a few milliseconds or longer, and nothing if it is off.
        reading_service: Instead of the arguments from `num_workers` to `timeout_s`: a `ProcessReadingService`, which
            has more arguments, a `ThreadReadingService`, one of torchdata's reading services, or one of your own.

    Length: The number of batches in an epoch, if the chain knows it.

    Raises:
        ChainError: The chain does not end in a stream; or there are several workers or ranks, but nothing in the chain
            shards, so that each of them would deliver all samples.
        WorkerError: A worker has died or got stuck (during iteration): see `ProcessReadingService`.

    Example:
        >>> pipe = kdp.from_dataset([(n, n % 2) for n in range(4)]).select("x y").deal(batch_size=2).collate_samples()
        >>> with kdp.Loader(pipe) as loader:
        ...     [x.tolist() for x, y in loader]
        [[0, 1], [2, 3]]
    """

    # Accelerate saves and loads the state of loaders that have these attributes, and does not wrap them.
    use_stateful_dataloader = True
    _is_accelerate_prepared = True
    prefetch_factor = None  # `accelerate.skip_first_batches` makes a loader with it, without workers
    reading_service: Any = None  # `__del__` runs also if the constructor has raised

    @_rejects_foreign_arguments
    def __init__(
        self,
        source_datapipe: Any,
        num_workers: int | Literal["auto"] = 0,
        *,
        prefetch: int | Literal["auto"] | None = None,
        start_method: str | None = None,
        timeout_s: float | None = None,
        progress: bool = False,
        profile: bool = False,
        reading_service: Any = None,
    ) -> None:
        if isinstance(source_datapipe, MapDataPipe):
            instead = " in place of `.batch()`" if isinstance(source_datapipe, Batcher) else ""
            raise ChainError(f"An indexed chain has no batches yet. End it with `.deal(batch_size=...)`{instead}.")
        if not isinstance(source_datapipe, IterDataPipe):
            raise TypeError(must_be("source_datapipe", "a datapipe", source_datapipe, _way_in(source_datapipe)))
        for name, value in (("progress", progress), ("profile", profile)):
            check_flag(name, value)
        if reading_service is not None and "auto" in (num_workers, prefetch):
            raise ValueError('"auto" cannot be combined with `reading_service`. Remove one of the two.')
        call_slot("introduce_to_accelerate", Loader)
        self._tuner = _tuner(num_workers, prefetch)
        if self._tuner is not None:
            num_workers, prefetch = self._tuner.setting
        given = {"prefetch": prefetch, "start_method": start_method, "timeout_s": timeout_s}
        self._service = _service(check_count("num_workers", num_workers, minimum=0), given, reading_service)
        if profile:
            self._service = copy.deepcopy(self._service)
            _exact(self._service, "profile=True").is_profiled = True
        check_shares(source_datapipe, self._service.num_workers)
        self._progress = progress
        self._base_seed = int.from_bytes(os.urandom(7), "little")
        self._clock = EpochClock()
        self._sizes: dict[str, Any] | None = None  # the batch sizes by which the clock counts
        self._ranks = ranks_now()  # the ranks of the last epoch begun
        self._is_closed = False
        self._latest = 0  # the identity of the last iterator, which holds the loader
        self._chain = Chain.of(source_datapipe).copy_streams()
        self.reading_service = copy.deepcopy(self._service)  # loaders may be made from one service
        # The part of the chain that workers run.
        self._dealt_part = main_part(self._chain, has_workers=self._service.has_workers)[1]
        self._checkpointer = Checkpointer(self._dealt_part, self._service.num_workers)
        is_exact = self._service.is_exact
        first = self._checkpointer.first_position() if is_exact else Position(self._checkpointer.next_epoch())
        self._clock.resume_at(first)
        self.reading_service.clock = self._clock
        if self._tuner is not None and "num_workers" in self._checkpointer.sizes():
            raise ChainError(
                'The batches of this chain depend on the number of workers, so that "auto" would change them. End it '
                "with `.deal(batch_size=...)` and `.collate_samples()`, or pass numbers."
            )

    def __len__(self) -> int:
        try:
            return len(self._chain)
        except TypeError as error:
            raise TypeError(
                f"The loader has no length, because its chain has none: {error}. Read shards by position with "
                "`kdp.open_shards`, or pass `deal(num_batches=...)`."
            ) from None

    def __repr__(self) -> str:
        names = " → ".join(map(pipe_name, reversed(Chain.of(self._chain).pipes)))
        num_workers = self._service.num_workers if self._service.has_workers else 0
        found = "" if self._tuner is None else ", found" if self._tuner.reason else ", to be found"
        return f"<kdpipes.Loader of {names}; {num_workers} workers{found}>"

    def _repr_html_(self) -> str:
        return str(call_slot("loader_html", self))

    def _ipython_display_(self) -> None:
        call_slot("show_live", self)

    def on_batch(self, listener: Callable[[], None] | None) -> None:
        """Call a function after each delivered batch; None removes the function."""
        self.reading_service.counters.delivered.listener = listener

    @property
    def dataset(self) -> Any:
        """The dataset with which Accelerate and transformers' Trainer skip batches; its length counts samples."""
        source = None if self._dealer is None else self._dealer.source
        return call_slot("NumberedBatches", self, self._chain, source)

    @property
    def sampler(self) -> Any:
        """The sampler on which Lightning calls `set_epoch`."""
        return call_slot("EpochSampler", self)

    @property
    def batch_sampler(self) -> Any:
        """The numbers of the batches of an epoch; trainers call its `set_epoch`."""
        return call_slot("BatchNumbers", self)

    @property
    def batch_size(self) -> int | None:
        """The number of samples in a batch of this rank; None if batches differ in size."""
        return None if self._dealer is None else self._dealer.batch_size()

    @property
    def drop_last(self) -> bool:
        """Whether `deal(uneven="drop")` leaves out a last batch that is short."""
        return self._dealer is not None and self._dealer.uneven == "drop"

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch unchanged. Loaders that trainers make from this one call it."""
        return batch

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0; between epochs, that of the next one.

        `while loader.epoch < num_epochs: for batch in loader: ...` is correct with any loaded state.
        """
        return int(self._state()["epoch"])

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        batches = self._begun()
        return iter(self._shown(batches)) if self._progress else batches

    def __next__(self) -> NoReturn:
        raise TypeError("A loader is not an iterator. `next(iter(loader))` returns the first batch of an epoch.")

    def __getitem__(self, _: Any) -> NoReturn:
        raise TypeError(
            "A loader cannot be indexed. `next(iter(loader))` returns the first batch of an epoch, and "
            "`kdp.find(chain, epoch=0, batch=3).load()` any other."
        )

    def _begun(self) -> Batches:
        """Return a new iterator of the epoch that has begun and returned nothing yet, or else of the next epoch."""
        self._begin()
        batches = Batches(self._taken)
        self._latest = id(batches)
        return batches

    def _begin(self) -> None:
        """Begin the next epoch, unless one has begun and returned nothing yet."""
        if self._is_closed:
            raise RuntimeError("The loader has been closed. Make a new one; `shutdown()` ends only the workers.")
        if self._clock.is_fresh:
            return
        with _one_at_a_time.lock:
            ranks = ranks_now()
            if self.reading_service.is_running and ranks != self._ranks:
                self.shutdown()
            self._ranks = ranks
            problem = unknown_rank()
            if problem is not None and (self._dealer is None or not self._dealer.is_for_all_ranks):
                warn(" ".join(problem))
            check_shares(self._chain, self._service.num_workers)
            before = self.reading_service
            if not before.is_running:
                self.reading_service = copy.deepcopy(self._service)
                self.reading_service.clock = before.clock
                self.reading_service.counters = before.counters
            if self._tuner is not None:
                self._tuner.begin()
            start = self._clock.upcoming()
            self._checkpointer.pipes  # noqa: B018 - read before iterating changes what users' callables hold
            then = self._sizes
            now = self._checkpointer.sizes()
            if then not in (None, now):
                if start.number or start.offset:
                    raise RuntimeError(
                        f"The number of ranks has changed within an epoch: batches were counted with {then}, but the "
                        f"sizes are now {now}. Call `torch.distributed.init_process_group` before `load_state_dict`, "
                        "and use `deal(global_batch_size=...)`, which does not depend on the number of ranks."
                    )
                self._clock.resume_at(start._replace(cursors=()))  # they are those of other lanes
            self._sizes = now
            self._open(start.epoch)

    def _open(self, epoch: int) -> None:
        """Start the reading service if it does not run, and begin an epoch; after an error, the next call begins it."""
        service = self.reading_service
        service.base_seed = self._base_seed
        try:
            if not service.is_running:
                service.initialize(Chain.of(self._chain).copy_streams())
            service.initialize_iteration(Seeds(seed_of(self._base_seed, epoch)))
            service.begin()
        except BaseException:
            self.shutdown()
            raise

    def _taken(self, batches: Batches) -> Any:
        """Return the next batch for an iterator.

        Raises:
            StopIteration: The epoch is over.
            RuntimeError: The loader has given a newer iterator since, or it has been closed.
        """
        if id(batches) != self._latest:
            raise RuntimeError("This iterator was invalidated: another iterator has been created from the same loader.")
        if batches.interrupted_at is not None:  # workers ended with Ctrl-C: go on where they were
            self._clock.return_to(batches.interrupted_at)
            self._begin()
        elif batches.is_fresh:  # the epoch may have been set since `iter(loader)`
            self._begin()
        batches.interrupted_at = None
        batches.is_fresh = False
        try:
            batch = self.reading_service.deliver()
            self._tune(batches)
            return batch
        except StopIteration:
            self.reading_service.finalize_iteration()
            for pipe in Chain.of(self._chain).pipes:
                end_epoch(pipe, in_worker=False)
            raise
        except KeyboardInterrupt:
            # In a notebook the last traceback holds the loader, even if the user deletes it. So the workers end with
            # the interrupt, and start again when the next batch is asked for, or the next epoch.
            if self._service.has_workers:
                with uninterrupted():
                    self.shutdown()
                    batches.interrupted_at = self._clock.latest
            raise
        except Exception:
            self.shutdown()
            raise

    def _tune(self, batches: Batches) -> None:
        """Let other workers make the batches that follow, if the tuner tries another setting."""
        tuner = self._tuner
        if tuner is None or tuner.reason:
            return
        with uninterrupted():  # the batch that has come must reach the loop
            setting = tuner.note_batch(self.reading_service.counters.wait_s)
            if setting is not None:
                self.shutdown()
                batches.interrupted_at = self._clock.latest
                self._service.num_workers, self._service.prefetch = setting

    def tuning(self) -> dict[str, Any]:
        """Return what `num_workers="auto"` or `prefetch="auto"` have found so far, as plain data, fit for JSON.

        Returns:
            A dictionary: `num_workers` and `prefetch`, the current settings; `is_settled`, whether they are final;
            `reason`, why they were chosen; and `trials`, a list of the measured settings, each with `batches_per_s` and
            `wait_share`, the share of the time that the loop waited for batches.

        Raises:
            ValueError: The loader has fixed numbers.
        """
        if self._tuner is None:
            raise ValueError('`tuning()` needs a loader that tunes itself: `kdp.Loader(pipe, num_workers="auto")`.')
        return self._tuner.as_dict()

    def from_batch(self, number: int) -> Iterator[Any]:
        """Return an iterator over the next epoch from batch `number` on, for `loader.dataset`."""
        dealer = Chain.of(self._dealt_part).numbering_deal()
        # The numbers of batches from lanes have gaps once a lane has ended, but trainers count batches.
        if not self._service.is_exact or dealer is None or dealer.has_lanes:
            return islice(iter(self), number, None)
        clock = self._clock
        clock.resume_at(Position(clock.latest.epoch if clock.is_fresh else clock.peek(), number))
        self._sizes = self._checkpointer.sizes()
        return iter(self)

    def seed(self, seed: int) -> None:
        """Seed the stock pipes downstream of `deal`. Order and augmentation depend only on `deal(seed=...)`."""
        self._base_seed = check_seed(seed)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (from 0) the number of the next iteration. A state that was loaded for that epoch stays valid.

        This also applies to an iterator that has returned nothing yet, because trainers make one before they set the
        epoch. torchdata's services are restarted, unless `epoch` is the next number anyway.
        """
        epoch = check_count("epoch", epoch, minimum=0)
        clock = self._clock
        begins = clock.latest if clock.is_fresh else clock.upcoming()
        if epoch == begins.epoch and (clock.is_fresh or not self._service.is_exact):
            return
        if not self._service.is_exact:
            self.shutdown()
        clock.choose(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch as small plain data, fit for JSON.

        Prefetched batches do not count as delivered. A state can be loaded with any number and kind of workers, and any
        number of ranks with the same global batch size. If the order depends on these numbers (without `deal`, or with
        pipes after it that hold items back), the state can be loaded with the same numbers only. With torchdata's
        reading services, a state records whole epochs only, and an incomplete epoch starts again.
        """
        return self._state()

    def _state(self) -> dict[str, Any]:
        # The loader reads this, not `state_dict`, which a subclass may override to wrap the state.
        return {**self._checkpointer.state_at(self._clock.position, self._sizes), "seed": self._base_seed}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume the next iteration with the batch after the one at which `state_dict` was taken.

        A state that was taken after the last batch starts the next epoch if the number of batches is known. A stream
        does not know it: its next iteration delivers nothing, and then `epoch` is the next one. The chain must be the
        same. Arguments, the code of functions, labels, lengths, and keys if the source knows them are compared, but not
        the contents of samples.

        Args:
            state_dict: The return value of `state_dict`.
            strict: Whether the state of another chain is an error or only a warning.

        Raises:
            ValueError: The state belongs to another chain (the error names the pipe that differs), or is damaged.
        """
        position = self._checkpointer.position_in(state_dict, strict=strict)
        if not self._service.is_exact:
            if position != Position(position.epoch):
                raise ValueError(
                    "The state lies within an epoch, but torchdata's reading services begin whole epochs only. Use "
                    "`kdp.Loader(chain, num_workers=...)`."
                )
            self.set_epoch(position.epoch)
        else:
            self._clock.resume_at(position)
        self._base_seed, self._sizes = seed_in(state_dict), self._checkpointer.sizes()

    @classmethod
    def from_state(cls, state: Any, reading_service: Any) -> Any:
        """Raise TypeError: unlike DataLoader2's, a state holds no chain. Call `load_state_dict` of a new loader."""
        raise TypeError(
            "A Loader's state holds no chain. Make the loader as before, `kdp.Loader(pipe, ...)`, and call its "
            "`load_state_dict(state)`."
        )

    def warm_up(self) -> None:
        """Start the workers now, and wait until each of them has made its first batch of the next epoch.

        Errors in the chain are raised later, by the iteration.
        """
        self._begun()
        self.reading_service.wait()

    def stats(self) -> dict[str, float]:
        """Return what has been counted since the loader was made.

        Returns:
            A dictionary of numbers. `batches` and `samples` were delivered (samples are counted by `deal`);
            `batches_per_s` and `samples_per_s` are rates between the first request and the last delivery of each epoch;
            `wait_s` is the time in which the loop waited for a batch, and `wait_share` its share of the whole;
            `queue_depth` is the number of batches that were received, but not delivered yet; `worker_deaths` counts
            workers; `skipped_samples` (which include those that were replaced) and `skipped_shards` are what `on_error`
            left out; `copied_batches` were copied because the user held many others; `slow_batches` found no room in
            shared memory. If the chain has caches, `cache_hits`, `cache_misses` and `cache_healed` count since they
            were made, in all processes and loaders; `cache_bytes` and `cache_entries` are the contents of caches in
            memory or in LMDB.

        Raises:
            TypeError: The reading service is not one of kdpipes'.
        """
        service = _exact(self.reading_service, "stats()")
        counters = service.counters
        busy_s = counters.busy_s or float("inf")
        of_caches: Counter[str] = Counter()
        for pipe in Chain.of(self._chain).pipes:
            of_caches.update(counters_of(pipe))
        return {
            "batches": counters.num_items,
            "samples": counters.num_samples,
            "batches_per_s": counters.num_items / busy_s,
            "samples_per_s": counters.num_samples / busy_s,
            "wait_s": counters.wait_s,
            "wait_share": min(counters.wait_s / busy_s, 1.0),
            "queue_depth": service.queue_depth(),
            "worker_deaths": counters.num_deaths,
            "skipped_samples": counters.num_skipped[False],
            "skipped_shards": counters.num_skipped[True],
            "copied_batches": counters.num_copied,
            "slow_batches": counters.num_slow,
            **of_caches,
        }

    def receipt(self) -> dict[str, Any]:
        """Return a record of the samples that were delivered in the current epoch, or between epochs in the last one.

        A receipt is plain data, fit for JSON: the numbers of the batches, the number of their samples, a digest of
        these samples that ignores their order, a digest of their order, and the same for the whole planned epoch.
        `kdpipes verify` and `kdpipes.testing.verify_receipts` read the receipts of all ranks, and of all parts of a
        resumed epoch, and check that together they delivered every sample exactly once.

        The epochs of a stream are not planned. Its samples are identified by their keys, and the receipt holds the
        hashes of up to 65,536 keys, which reveal samples that were delivered twice. If you load a state from before the
        last delivered batch into the same loader, the receipt of a stream begins at that state: save it with the state.

        Raises:
            ChainError: The chain has no `deal`, or a pipe downstream of it may hold batches back; or a stock pipe
                upstream has replaced the samples of a stream, so that they have no keys.
            TypeError: The reading service is not one of kdpipes'.
        """
        counters = _exact(self.reading_service, "receipt()").counters
        pipes = self._checkpointer.pipes
        sizes = self._checkpointer.sizes() if self._sizes is None else self._sizes
        skips = counters.skips.values()
        if counters.delivered.epoch == counters.dropped_skips:
            raise ChainError(
                f"A receipt lists all skipped samples, but more than {MOST_SKIPS:,} samples were skipped in epoch "
                f"{counters.dropped_skips}, and only the latest ones are known."
            )
        return receipt_of(self._dealt_part, counters.delivered, skips, self._ranks, pipes=pipes, sizes=sizes)

    def measured(self) -> Measured:
        """Return the measurements of `profile=True` since the loader was made; `kdp.profile(loader)` reads them.

        Raises:
            ValueError: The loader was made without `profile=True`.
        """
        if not self.reading_service.is_profiled:
            raise ValueError(
                "The loader was made without `profile=True`. Write `kdp.Loader(pipe, ..., profile=True)`, or profile "
                "its chain: `kdp.profile(pipe)`."
            )
        return measured(self._chain, self.reading_service)

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """The samples that `on_error` skipped: `epoch`, `batch`, `ordinal`, `key`, `error`, `is_shard`, `is_replaced`.

        The latest 65,536 are kept. The entry of a shard stands for all that would have followed in it; its ordinal is
        how many samples the stream had given before.
        """
        return [dataclasses.asdict(skip) for skip in self.reading_service.counters.skips.values()]

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. The loader cannot be iterated afterwards; closing it again has no effect."""
        self._is_closed = True
        self.shutdown()

    def shutdown(self) -> None:
        """End the workers; the next iteration starts new ones."""
        with uninterrupted():
            if self.reading_service.is_running:
                self._clock.is_fresh = False
                self.reading_service.finalize_iteration()
            self.reading_service.finalize()

    def __del__(self) -> None:
        # At the end of the interpreter, modules may be empty.
        if uninterrupted is not None and self.reading_service is not None:
            self.shutdown()

    @property
    def _dealer(self) -> Any:
        return Chain.of(self._dealt_part).resumable_deal()

    def _shown(self, batches: Any) -> Any:
        from tqdm.auto import tqdm  # it warns notebooks that lack widgets, which only a bar's user should see

        begun = self._clock.position.number
        total = None
        with contextlib.suppress(TypeError):  # streams have no length
            total = len(self)
        return tqdm(batches, total=total, initial=begun, unit="batch")


def _tuner(num_workers: Any, prefetch: Any) -> Tuner | None:
    """Return what finds the numbers that are "auto"; None if neither is."""
    if "auto" not in (num_workers, prefetch):
        return None  # other values are checked where the service is made
    if num_workers == 0:
        raise ValueError('`prefetch="auto"` needs workers, but `num_workers` is 0. Pass `num_workers="auto"`, too.')
    workers = None if num_workers == "auto" else check_count("num_workers", num_workers)
    ahead = 2 if prefetch is None else None if prefetch == "auto" else check_count("prefetch", prefetch)
    return Tuner(workers, None if prefetch is None and workers is None else ahead)


def _service(num_workers: int, given: Mapping[str, Any], reading_service: Any) -> ReadingService:
    chosen = {name: value for name, value in given.items() if value is not None}
    if reading_service is not None and (num_workers or chosen):
        names = ", ".join(f"`{name}`" for name in ("num_workers", *given))
        raise ValueError(f"`reading_service` cannot be combined with {names}. Pass these to the reading service.")
    if isinstance(reading_service, type):
        hint = f"Write `{reading_service.__name__}(...)` to make one."
        raise TypeError(must_be("reading_service", "a reading service", reading_service, hint))
    if isinstance(reading_service, ReadingService):
        return reading_service
    if reading_service is not None:
        return cast("ReadingService", call_slot("ForeignService", reading_service))
    if num_workers:
        return ProcessReadingService(num_workers, **chosen)
    if chosen:
        name = next(iter(chosen))
        raise ValueError(
            f"`{name}` needs workers, but `num_workers` is 0. Pass `num_workers=`, too, or remove `{name}`."
        )
    return InlineReadingService()


def _way_in(source: Any) -> str:
    """Return a hint how to begin a chain from a source that is not a datapipe."""
    if isinstance(source, str | os.PathLike):
        return (
            "A chain begins with a source, like `kdp.image_folder(path)` or `kdp.open_shards(urls)`, and ends with "
            "`.deal(batch_size=...).collate_samples()`."
        )
    return "`kdp.from_dataset(dataset)` begins a chain." if hasattr(source, "__getitem__") else ""


def _exact(service: ReadingService, what: str) -> ReadingService:
    """Return a service that knows which batches were delivered; raise TypeError for one of another library."""
    if not service.is_exact:
        raise TypeError(
            f"`{what}` needs one of kdpipes' reading services: `num_workers=...`, or "
            "`reading_service=kdp.ThreadReadingService(...)`."
        )
    return service


def check_shares(pipe: Any, num_workers: int) -> None:
    """Raise ChainError if workers or ranks would lose or repeat samples, or a stock cache would repeat random ones."""
    parts = {"worker": max(num_workers, 1), "rank": ranks_now().num_ranks}
    crowd = next((f"{number} {part}s" for part, number in parts.items() if number > 1), None)
    chain = Chain.of(pipe)
    if crowd is not None and not any(map(shards, chain.pipes)):
        raise ChainError(
            f"Each of the {crowd} would deliver every sample, because no pipe divides them. End the chain with "
            "`.deal(batch_size=...)`, or put `.sharding_filter()` after its source."
        )
    for node in chain:
        above = Chain.of(node.pipe).pipes[1:] if shards(node.pipe) else ()
        other = next(filter(shards, above), None)
        if other is not None:
            raise ChainError(
                f"`.{node.name}()` and `.{pipe_name(other)}()` both shard the samples, so samples would be lost. Keep "
                "one of them."
            )
        is_seeded = isinstance(node.pipe, Dealer) or type(node.pipe) is ShardingFilter
        if not is_seeded and any(isinstance(each, Shuffler) for each in above):
            raise ChainError(
                f"`{node.name}` shards the output of `.shuffle()`, but is not a `sharding_filter`: each worker would "
                "shuffle differently, and samples would be lost and repeated. Use `.sharding_filter()`, or "
                "`.deal(batch_size=...)`."
            )
        if is_of_torchdata(node.pipe, "InMemoryCacheHolder", "EndOnDiskCacheHolder"):
            drawing = Chain.of(node.pipe).random_name()
            if drawing is not None:
                raise ChainError(
                    f"`.{node.name}()` would cache the random results of `{drawing}`: every epoch would repeat those "
                    "of the first one. Put the cache before it."
                )


# torch's graph traversal works through hooks on its classes, which two threads must not set at the same time.
_one_at_a_time = ForkLock()
