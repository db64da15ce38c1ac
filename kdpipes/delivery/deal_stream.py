"""`deal` for streams: divide each epoch into batches, and distribute them to ranks and workers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, repeat, takewhile
from typing import Any, Literal

from torch.utils.data import get_worker_info

from kdpipes.core.chain import Chain, Shards, why_whole
from kdpipes.core.errors import ChainError, DataError, check_count, check_type, must_be
from kdpipes.core.iter_pipe import IterPipe, Tolerance, samples_of, seed_streams, with_tolerance
from kdpipes.core.messages import counted, warn
from kdpipes.core.operation import Operation, Step, finished
from kdpipes.core.pipe import Pipe
from kdpipes.core.randomness import SampleKey, hash_key, with_stream_keys
from kdpipes.core.registry import functional_pipe, pipe_name
from kdpipes.core.sample import Block, Sample, stack
from kdpipes.core.sample_pipe import SampleMapper, SampleMapperIterDataPipe
from kdpipes.core.stock import is_of_torchdata
from kdpipes.core.torch_pipes import IterDataPipe, Shuffler
from kdpipes.core.traits import UNDECLARED
from kdpipes.delivery.by_shard import ByShard, Shuffle
from kdpipes.delivery.dealer import Batch, Dealer, DealRanks, Dealt, Run, item_of, items_at_once
from kdpipes.delivery.lanes import (
    Cursor,
    KeptLanes,
    Lane,
    LanePlan,
    Lanes,
    Passes,
    hash_of_sample,
    resumable_shards,
    shards_behind,
)
from kdpipes.delivery.layout import Layout, Sharding, Uneven, share_out
from kdpipes.delivery.skipping import LEFT_OUT

Split = Literal["auto", "samples"] | Lanes
_DEFAULT_RANKS = 4  # the largest default of `max_ranks`


@functional_pipe("deal", flavour="iter")
class DealerIterDataPipe(Dealer, IterDataPipe[Batch]):
    """Cuts the epochs of a stream into batches and deals them to ranks and workers (functional name: ``deal``).

    Each batch is a list of items. A stream of shards is read in lanes. The shards of an epoch are distributed to the
    lanes in turn, each lane makes batches of its own samples, and each lane belongs to one worker. Each shard is
    therefore read only once per epoch. The batches depend only on the chain, `seed`, the epoch number and `lanes`. They
    are the same for any number of workers, in every loader of kdpipes, and, with `global_batch_size`, for any number of
    ranks that divides `max_ranks`. Each iteration is the next epoch, even if the previous one was not finished.

    Args:
        source_datapipe: A stream, which may be endless. Each lane has its own copy of the pipes upstream of `deal`, so
            `.shuffle(buffer_size=...)` has one buffer per lane and mixes only the samples of that lane. Stock pipes
            that draw random numbers are seeded from `seed`, the epoch and the lane.
        batch_size: The number of samples in a batch of one rank. The batches of several ranks then depend on their
            number.
        global_batch_size: The number of samples in the batches of all ranks together. The number of ranks must divide
            it. Pass either this or `batch_size`.
        shuffle: "shards" reads the shards of `stream_shards` in a different order in each epoch. To mix their samples,
            too, put `.shuffle(buffer_size=...)` before `deal`. True is not available for streams.
        num_batches: The number of batches of an epoch, for each rank. The next epoch continues where this one ended,
            even on an endless stream, and no batch is short. Each pass over the stream yields each sample once. A lane
            begins its next pass without waiting for longer lanes, so only with one lane or lanes of equal size is
            every sample used once before any is used twice. All ranks make the same number of batches.
        seed: The seed of the order of shards and of all random operations upstream, from 0 to 2**64 - 1.
        uneven: What to do with a batch that is short because a lane has ended: "keep" it; "pad" it with samples from
            the start of the lane, for which the field `is_padding` is True; or "drop" it, together with the samples
            that remain in the other lanes of the same global batch. The ranks of a process group must end an epoch
            together. There, lanes need "pad" or "drop", and `kdp.Loader`, in which the ranks agree on the end once per
            round of all lanes.
        split: `kdp.lanes(...)` reads in lanes, as described above. With "samples", every worker of every rank reads the
            whole stream, but loads only the fields of its own samples. The batches follow the order of the stream for
            any number of workers and ranks, but w workers on each of r ranks read, transfer and unpack all data w * r
            times. "auto" means
            `kdp.lanes()` if all sources of the chain are `stream_shards` and no pipe needs the whole stream, as
            `.repeat_until(min_size=...)` and `.oversample(mode="exact")` do. Otherwise, and if there are fewer shards
            than `max_ranks`, it means "samples".
        ranks: "auto" gives each rank its share. The rank and the number of ranks are read when an epoch begins, from
            torch's process group, otherwise from `RANK` and `WORLD_SIZE`. 1 gives every rank all batches; use it for
            Accelerate's `prepare(DataLoader(...))` and transformers' Trainer, which split batches between ranks.

    Length: `num_batches`; without it, the number of batches of one rank, over all of its workers, if the source has a
        length and is split by samples.

    Memory: For each lane that a worker runs, the unloaded samples of a batch or of the buffer of `.shuffle`, and up to
        36 MiB of a remote shard and the next one. Fewer lanes take less. If a stock pipe follows `select`, samples are
        loaded early, and `ordinal` and `is_padding` are not those of the delivered sample. Put `select` last.

    Workers: Batch n of all lanes comes from lane n % lanes; with `global_batch_size`, a group is `max_ranks` lanes, and
        batch n comes from group n % groups. After a lane has ended, its batch numbers are skipped. torch's DataLoader
        and other loaders that take batches from their workers in turn give the same order if the number of workers
        divides the number of lanes (or groups), until the first lane ends; after that, and with other numbers of
        workers, they give the same batches in another order.

    Seed: Only `seed` matters; the seed of the loader is not used.

    Raises:
        ValueError: An argument is out of range. Raised at the start of an epoch if the ranks would not end together,
            and at its end if a rank would get no samples (`split="samples"`).
        ChainError: A pipe upstream shards already, or the chain does not allow `split=kdp.lanes(...)`.
    """

    def __init__(
        self,
        source_datapipe: IterDataPipe[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: Shuffle = False,
        num_batches: int | None = None,
        seed: int = 0,
        uneven: Uneven = "keep",
        split: Split = "auto",
        ranks: DealRanks = "auto",
    ) -> None:
        check_type("source_datapipe", source_datapipe, IterDataPipe, "a stream")
        self.source = source_datapipe
        self._layout = Layout(batch_size, global_batch_size, uneven)
        self._set_lanes(split)
        self._num_batches = None if num_batches is None else check_count("num_batches", num_batches)
        if num_batches is not None and uneven != "keep":
            raise ValueError(
                "`uneven` has no effect with `num_batches`, because no batch is short then. Remove `uneven`."
            )
        self._kept = KeptLanes()
        self._has_warned = False  # about dropped batches
        self._configure(self._layout, shuffle, seed, ranks)
        self.clock.continues = num_batches is not None
        self.has_unique_keys = uneven != "pad" and not self.may_repeat
        handler = Chain.of(self).error_handler()
        if handler is not None and handler.substitutes:
            raise ChainError(
                '`on_error("substitute")` needs an indexed source, like `kdp.open_shards`, but '
                f'`{pipe_name(self.source)}` is a stream, which cannot return another sample. Use `on_error("skip")`.'
            )
        if shuffle is True or (isinstance(shuffle, ByShard) and shuffle.window is not None):
            raise ChainError(
                f"`deal(shuffle={'True' if shuffle is True else 'kdp.by_shard(window=...)'})` needs an indexed source "
                f"(`kdp.open_shards`), but `{pipe_name(source_datapipe)}` is a stream. Put "
                "`.shuffle(buffer_size=1000)` before `.deal()`."
            )
        if shuffle and not Chain.of(self.source).of_type(Shards):  # type: ignore[type-abstract]
            raise ChainError('`deal(shuffle="shards")` needs `kdp.stream_shards` upstream, on a stream.')

    def _set_lanes(self, split: Split) -> None:
        if not isinstance(split, Lanes) and split not in ("auto", "samples"):
            raise ValueError(must_be("split", '"auto", "samples" or `kdp.lanes(...)`', split))
        reason = why_whole(self.source)
        if isinstance(split, Lanes) and reason is not None:
            raise ChainError(f'`deal(split=kdp.lanes())` cannot cut this stream: {reason}. Use `split="samples"`.')
        self.has_lanes = split != "samples" and reason is None
        lanes = split if isinstance(split, Lanes) else Lanes()
        self._lanes = lanes.number
        size = self._layout.global_batch_size
        self._max_ranks = None if size is None else math.gcd(_DEFAULT_RANKS, self._lanes, size)
        if lanes.max_ranks is not None:
            self._max_ranks = lanes.max_ranks
            if size is None:
                raise ValueError("`kdp.lanes(max_ranks=...)` needs `deal(global_batch_size=...)`.")
            if size % self._max_ranks or self._lanes % self._max_ranks:
                rule = f"a divisor of `global_batch_size`, {size}, and of the number of lanes, {self._lanes}"
                raise ValueError(must_be("max_ranks", rule, lanes.max_ranks))

    def __len__(self) -> int:
        if self._num_batches is not None:
            return self._num_batches
        if self.has_lanes:
            raise TypeError("`deal` does not know the length of a stream")
        return self._layout.num_batches(len(self.source), self.sharding().num_ranks)

    def fingerprint(self) -> Any:
        cut = (self._lanes, self._max_ranks) if self.has_lanes else None
        own = () if self._num_batches is None else (("num_batches", self._num_batches),)
        return self._seed, self._shuffle, self.uneven, cut, *own

    def sizes(self) -> dict[str, Any]:
        if not self.has_lanes:
            return super().sizes()
        num_ranks = self.sharding().num_ranks
        pieces = num_ranks if self._max_ranks is None else self._max_ranks
        return {**super().sizes(), "pieces": pieces}

    @property
    def may_repeat(self) -> bool:
        """Whether samples of the same key may come more than once in an epoch."""
        chain = Chain.of(self.source)
        repeats = (
            # Other plan pipes choose without repeating.
            (node.traits.is_plan and node.traits.holds_back) or is_of_torchdata(node.pipe, "Cycler", "Repeater")
            for node in chain
        )
        return self.clock.continues or len(chain.sources) != 1 or chain.sources[0].traits.counts_whole or any(repeats)

    def num_planned(self) -> int | None:
        """Return the number of samples in an epoch of all ranks together; None if it is unknown."""
        if self._num_batches is not None:
            return self._num_batches * self._layout.size_of(self.sharding().num_ranks)
        # None if a pipe may change the number of samples.
        chain = Chain.of(self.source)
        shards = shards_behind(self.source)
        is_kept = all(
            (isinstance(node.pipe, Pipe) or node.traits.role == "order")
            and not (node.traits.is_plan or node.traits is UNDECLARED)
            for node in chain
        )
        return shards.num_indexed() if self.uneven != "drop" and shards is not None and is_kept else None

    def lane_plan(self) -> LanePlan | None:
        """Return the plan of the lanes; None if every worker reads the whole stream, for example with too few shards.

        Raises:
            ValueError: The number of ranks does not divide `max_ranks`.
        """
        if not self.has_lanes:
            return None
        num_ranks = self.sharding().num_ranks
        if self._max_ranks is not None and self._max_ranks % num_ranks:
            raise ValueError(
                f"The number of ranks, {num_ranks}, must divide `max_ranks`, which is {self._max_ranks}. Use "
                f"`deal(global_batch_size=..., split=kdp.lanes({num_ranks * 4}, max_ranks={num_ranks}))`, with a "
                f"global batch of a multiple of {num_ranks} samples."
            )
        size = self._layout.size_of(num_ranks)
        num_pieces = self._max_ranks or num_ranks
        # Each lane needs a shard of each source.
        sources = Chain.of(self.source).of_type(Shards)  # type: ignore[type-abstract]
        num_groups = min(-(-self._lanes // num_pieces), min(shards.num_shards for shards in sources) // num_pieces)
        return LanePlan(num_groups, num_pieces, size // num_pieces) if num_groups else None

    def batches_of(self, run: Run) -> Generator[tuple[Dealt, Callable[[], list[Any]]]]:
        """Yield the batches of this worker's groups of lanes, round by round.

        With `num_batches`, batch n of epoch e is batch e * num_batches + n of the lanes, which never end. Groups are
        numbered within the epoch (n % num_groups), so that workers and ranks alternate as without `num_batches`.
        """
        plan = self.lane_plan() or LanePlan(1, 1, self._layout.size_of(run.sharding.num_ranks), is_whole=True)
        tail = [pipe.operation for pipe in tail_of(self.source)]
        tell = self._agree_on_end(plan)
        shared = self._shared_by(run, plan)
        begun = list[Shards]()
        lanes, cursors = self._lanes_of_epoch(run, plan, shared, begun)
        too_short: list[int] = []  # the sample counts of lanes that are too short for one batch
        turns = count()
        has_ended = False
        try:
            for number, place, taken in self._turns(run, plan, lanes, tell):
                group = lanes[place]
                is_short = [lane.is_short(self.uneven) for lane in group]
                if (any if self.uneven == "drop" else all)(is_short) and (tell is None or self.uneven != "pad"):
                    del lanes[place]
                    if self.uneven == "drop" and number < plan.num_groups:
                        too_short.append(min(map(len, taken)))
                    continue
                if shared.num_workers == 1 and run.sharding.num_workers > 1:  # all workers read all lanes
                    turn = number if plan.is_whole else next(turns)
                    if turn % run.sharding.num_workers != run.sharding.worker:
                        continue
                parts = self._parts(run, plan, number, group, taken)
                at = tuple((lane.number, lane.cursor) for lane in group if lane.cursor is not None)
                dealt = Dealt(number, len(parts), at)
                yield dealt, partial(self._items_of, run, dealt, parts, tail)
            has_ended = True
            self._warn_of_short(plan, too_short)
        finally:
            for shards in begun:
                shards.stop_reading()
            if self._num_batches is not None:
                every = {lane.number: lane for group in lanes.values() for lane in group}
                latest = {number: lane.cursor for number, lane in every.items() if lane.cursor is not None}
                self._kept = KeptLanes(self, plan, every, cursors | latest)
                if not has_ended:
                    self._kept.close()

    def _shared_by(self, run: Run, plan: LanePlan) -> Sharding:
        """Return the sharding of the lanes: that of the run, unless all workers or ranks read all lanes."""
        sharding = run.sharding
        # torchdata's MultiProcessingReadingService fails if one worker yields two batches more than another. There, and
        # for a stream without lanes, each worker reads all lanes, and makes every num_workers-th batch.
        is_of_torch = get_worker_info() is not None
        is_merged = is_of_torch or (self.monitor is not None and self.monitor.is_worker)
        if plan.is_whole or not is_merged:
            sharding = replace(sharding, worker=0, num_workers=1)
        if plan.is_whole:
            sharding = replace(sharding, rank=0, num_ranks=1)
        return sharding

    def _turns(
        self, run: Run, plan: LanePlan, lanes: dict[int, list[Lane]], tell: Callable[[int, Any], None] | None
    ) -> Iterator[tuple[int, int, list[list[Any]]]]:
        """Yield the number, group and samples of each batch of some groups of lanes, until no lane is left."""
        num_groups = plan.num_groups
        limit = self._num_batches
        first = run.start.number
        before = run.start.epoch * (limit or 0)

        def take(number: int) -> list[list[Any]]:
            return [lane.take((before + number) // num_groups) for lane in lanes[number % num_groups]]

        for turn in count(first // num_groups):
            run.batch = turn * num_groups
            due = [run.batch + place for place in lanes if run.batch + place >= first]
            if limit is not None:
                if run.batch >= limit:
                    return
                due = [number for number in due if number < limit]
            taken: dict[int, list[list[Any]]] = {}
            if tell is not None:  # the ranks exchange their state before any makes a batch of this round
                cursors = {lane.number: lane.cursor for group in lanes.values() for lane in group}
                taken = {number: take(number) for number in due}
                has = {lane.number: not lane.is_short(self.uneven) for group in lanes.values() for lane in group}
                tell(run.batch, {lane: (has[lane], cursor) for lane, cursor in cursors.items()})
            for number in due:
                run.batch = number
                yield number, number % num_groups, taken.get(number) or take(number)
            if not lanes:
                return

    def _parts(
        self, run: Run, plan: LanePlan, batch: int, group: list[Lane], taken: list[list[Any]]
    ) -> list[tuple[Any, SampleKey]]:
        """Return this rank's samples of a batch with their keys, padded if necessary."""
        parts: list[tuple[Any, SampleKey]] = []
        for lane, items in zip(group, taken, strict=True):
            start = batch * plan.batch_size + lane.number % plan.num_pieces * plan.piece_size
            padding = lane.padding(plan.piece_size - len(items)) if self.uneven == "pad" else []
            for place, item in enumerate([*items, *padding]):
                parts.append(
                    (item, SampleKey(self._seed, run.start.epoch, start + place, is_padding=place >= len(items)))
                )
        if not plan.is_whole:
            return parts
        own = share_out(0, len(parts), run.sharding)
        return parts[own.start : own.stop]

    def _warn_of_short(self, plan: LanePlan, too_short: list[int]) -> None:
        """Warn once if lanes are too short for one batch, and suggest numbers that fit."""
        if self._has_warned or not (any(too_short) if plan.is_whole else too_short):
            return
        self._has_warned = True
        if plan.is_whole:
            text = f"makes no batch of {counted(too_short[0], 'sample')}: a global batch has {plan.batch_size}."
        else:
            num_groups = min(too_short) * plan.num_groups // plan.piece_size
            least = min(too_short) * plan.num_pieces
            fitting = (
                f"`kdp.lanes({num_groups * plan.num_pieces})`"
                if num_groups
                else f"batches of at most {counted(least, 'sample')}"
            )
            use = f'{fitting}, `uneven="keep"` or `uneven="pad"`' if num_groups or least else '`uneven="keep"` or "pad"'
            lanes = "lane" if plan.num_pieces == 1 else f"group of {plan.num_pieces} lanes"
            text = (
                f"makes no batch from {len(too_short)} of {plan.num_groups} parts of the stream: a {lanes} needs "
                f"{counted(plan.piece_size, 'sample')} per lane for one batch, but one has only {min(too_short)}. "
                f"These samples are dropped. Use {use}."
            )
        warn(f"`deal(uneven='drop')` {text}")

    def _lanes_of_epoch(
        self, run: Run, plan: LanePlan, sharding: Sharding, begun: list[Shards]
    ) -> tuple[dict[int, list[Lane]], dict[int, Cursor]]:
        """Return this worker's lanes, keyed by their group in the epoch, and the known cursors of all lanes."""
        cursors = dict(run.start.cursors)
        lanes: dict[int, list[Lane]] = {}
        if self._num_batches is None:
            for group in plan.groups_of(sharding):
                lanes[group] = [
                    self._lane(plan, lane, run.start.epoch, cursors.get(lane), begun)
                    for lane in plan.lanes_of(group, sharding)
                ]
            return lanes, cursors
        (kept, latest), self._kept = self._kept.of(self, plan), KeptLanes()
        for lane, cursor in latest.items():
            if lane not in cursors or cursors[lane].num_batches <= cursor.num_batches:
                cursors[lane] = cursor
        first = run.start.number
        for group in plan.groups_of(sharding):
            number = run.start.epoch * self._num_batches + first + (group - first) % plan.num_groups
            turn, place = divmod(number, plan.num_groups)
            lanes[group] = []
            for lane in plan.lanes_of(place, sharding):
                at = cursors.get(lane)
                if at is not None and at.num_batches > turn:  # an epoch before the last one
                    at = None
                    del cursors[lane]
                same = kept.get(lane)
                if same is None or same.num_batches > turn:
                    same = self._lane_in_passes(plan, lane, at, begun)
                lanes[group].append(same)
        self.clock.note(run.start.epoch, first, tuple(sorted(cursors.items())))
        return lanes, cursors

    def _lane_in_passes(self, plan: LanePlan, number: int, cursor: Cursor | None, begun: list[Shards]) -> Lane:
        """Return an endless lane that starts over at the end of each pass."""
        # A weak reference avoids a reference cycle, whose files would not be closed in order.
        dealer = weakref.proxy(self)

        def begin(number_of_pass: int, cursor: Cursor | None) -> tuple[Iterator[Any], Shards | None]:
            source = Chain.of(dealer.source).copy_streams()
            resumable = resumable_shards(source)
            at = None if resumable is None else cursor
            items = dealer._items(source, number_of_pass, number, plan.num_lanes, at)
            if not number_of_pass or cursor is not None:
                dealer._start_reading(source, begun)
            return items, resumable

        shards = resumable_shards(self.source)
        num_shards = 1 if shards is None else len(range(number, shards.num_shards, plan.num_lanes))
        passes = Passes(begin, num_shards, cursor)
        return Lane(number, passes, iter(()), plan.piece_size, passes.place, cursor, is_endless=True)

    def close_kept(self) -> None:
        """Close the files kept open for the next epoch. That epoch then opens its shards again."""
        self._kept.close()

    def _agree_on_end(self, plan: LanePlan) -> Callable[[int, Any], None] | None:
        """Return the function that reports ended lanes to the other ranks; None if no rank waits for this one.

        Raises:
            ValueError: The ranks would wait for each other.
        """
        # With `num_batches`, all ranks have equally many batches, and only exchange the cursors of their lanes.
        ends = self._num_batches is None
        if not self.has_waiting_ranks() or (ends and plan.is_whole):
            return None
        monitor = self.monitor
        if monitor is not None and not monitor.is_worker:
            monitor = None
        if ends and (self.uneven == "keep" or monitor is None):
            raise ValueError(
                "Ranks that read their own lanes have different numbers of samples, and would wait for each other "
                'at the end. Use `deal(uneven="pad")` or `deal(uneven="drop")` in a `kdp.Loader`, or '
                '`deal(split="samples")`.'
            )
        return None if monitor is None else monitor.report_turn

    def _lane(self, plan: LanePlan, number: int, epoch: int, cursor: Cursor | None, begun: list[Shards]) -> Lane:
        """Return a lane with its own copy of the pipes upstream, start reading its sources, and add them to `begun`."""
        source = self.source if plan.is_whole else Chain.of(self.source).copy_streams()
        items = self._items(source, epoch, number, plan.num_lanes, cursor)
        if not plan.is_whole:
            self._start_reading(source, begun)
        shards = resumable_shards(source)
        padding = self._endless(plan, number, epoch)
        is_endless = any(is_of_torchdata(pipe, "Cycler") and pipe.count is None for pipe in Chain.of(source).pipes)
        return Lane(
            number,
            items,
            padding,
            plan.piece_size,
            lambda: None if shards is None else shards.cursor,
            cursor,
            is_endless=is_endless,
        )

    def _start_reading(self, source: Any, begun: list[Shards]) -> None:
        """Start reading the first shard of each source, and add the sources to `begun`."""
        if any(node.traits.role == "cache" for node in Chain.of(source)):  # a cache may make reading unnecessary
            return
        for shards in Chain.of(source).of_type(Shards):  # type: ignore[type-abstract]
            shards.start_reading()
            begun.append(shards)

    def _endless(self, plan: LanePlan, number: int, epoch: int) -> Iterator[Any]:
        """Repeat a lane's samples endlessly; if it is empty, those of the next lane that is not."""
        num_empty = 0
        while num_empty < plan.num_lanes:
            source = self.source if plan.is_whole else Chain.of(self.source).copy_streams()
            is_empty = True
            for item in self._items(source, epoch, (number + num_empty) % plan.num_lanes, plan.num_lanes):
                is_empty = False
                yield item
            num_empty += is_empty
        raise DataError(
            "The stream was empty when it was read again to pad the last batch. Use `uneven='keep'`, without padding."
        )

    def _items(
        self, source: Any, epoch: int, part: int = 0, num_parts: int = 1, cursor: Cursor | None = None
    ) -> Iterator[Any]:
        """Return the items of a part of the stream, starting at a cursor."""
        seed = int.from_bytes(hash_key(self._seed, "part", part)[:7], "little") if part else self._seed
        seed_streams(reversed(Chain.of(source)), seed, epoch, place=self._num_dropped)
        for shards in Chain.of(source).of_type(Shards):  # type: ignore[type-abstract]
            shards.order_by(hash_key("shards", self._seed, epoch) if self._shuffle else None)
            shards.read_part(part, num_parts)
            if cursor is not None:
                shards.seek(cursor[:3])
        tail = tail_of(source)
        if tail:
            items = samples_of(tail[0].source, tail[0].name)
        else:
            items = source.samples() if isinstance(source, IterPipe) else iter(source)
        skipper = self._run.skipper
        if skipper is not None:
            dealer = weakref.proxy(self)
            tolerance = Tolerance(lambda *damage: dealer._give_up(*damage), self._gets_failures())
            items = with_tolerance(tolerance, iter(items))
            if skipper.knows_bad_samples and not self.may_repeat:
                items = skipper.without_twins(items)
        return with_stream_keys(items, seed, epoch, start=0 if cursor is None else cursor.num_samples)

    def _gets_failures(self) -> bool:
        """Return whether only work pipes and shuffles lie between the first work pipe and this one.

        Other pipes, such as users' own and those that read labels, might process a failed sample.
        """
        chain = Chain.of(self)
        passing = takewhile(lambda node: isinstance(node.pipe, SampleMapper | Shuffler), chain.path()[1:])
        return {node for node in chain if node.operation is not None} <= set(passing)

    def _give_up(self, key: str, index: int, error: Exception) -> bool:
        """Report a damaged shard to `on_error` for the current epoch, because a kept lane outlives its epoch."""
        run = self._run
        return run.skipper is not None and run.skipper.give_up(run.start.epoch, run.batch, key, index, error)

    def _prepare(self) -> None:
        if (shards := shards_behind(self)) is not None:
            _ = shards.num_shards  # globs are expanded once, alike for all workers

    def _items_of(
        self, run: Run, dealt: Dealt, parts: list[tuple[Any, SampleKey]], tail: Sequence[Operation]
    ) -> list[Any]:
        """Return the items of a batch, and record its samples for a receipt."""
        items = None
        block = _stacked(parts) if tail else None
        if block is not None:
            # After an error, the samples are processed one by one, so that the first bad sample raises its own error.
            with suppress(Exception):
                for operation in tail[:-1]:
                    operation.run(block)
                parts = [(block.sample(number), sample_key) for number, (_, sample_key) in enumerate(parts)]
                tail = []
                if run.skipper is None or not run.skipper.knows_bad_samples:
                    items = list(items_at_once([block], self.source, self._seed, run.start.epoch).values())
        if items is None:
            try:
                items = [
                    item_of(run, key, dealt.number, repeat(part).__next__, partial(self._finish, key, tail))
                    for part, key in parts
                ]
            finally:
                if block is not None:
                    block.drop_failures()
        for (part, sample_key), item in zip(parts, items, strict=True):
            if item is not LEFT_OUT:
                known = hash_of_sample(part.key) if isinstance(part, Sample) else b"\1" * 8
                dealt.hashes.extend(bytes(8) if sample_key.is_padding else known)
        return items

    def _finish(self, sample_key: SampleKey, tail: Sequence[Operation], item: Any) -> Any:
        if isinstance(item, Sample):
            if item.failure is not None:
                raise item.failure
            item = item if isinstance(self.source, IterPipe) else item.fork()  # a stock pipe may have kept it
            item.bind(sample_key)
        for operation in tail[:-1]:  # the last one is `select`
            item = operation(item)
        return finished(self.source, item) if isinstance(self.source, IterPipe) else item


def tail_of(source: Any) -> list[SampleMapperIterDataPipe]:
    """Return the work pipes at the end of a stream that can process many samples at once, upstream first.

    They must end in `select`. A profiled pipe has its own `samples` and is not included.
    """
    pipes: list[SampleMapperIterDataPipe] = []
    pipe = source
    while type(pipe) is SampleMapperIterDataPipe and "samples" not in vars(pipe) and isinstance(pipe.operation, Step):
        pipes.insert(0, pipe)
        pipe = pipe.source
    return pipes if len(pipes) > 1 and pipes[-1].traits.gives == "items" else []


def _stacked(parts: Sequence[tuple[Sample, SampleKey]]) -> Block | None:
    """Return the samples of a batch as one block; None if their fields differ or a sample has failed."""
    for sample, sample_key in parts:
        sample.bind(sample_key)
    return stack([sample for sample, _ in parts]) if len(parts) > 1 else None
