"""`deal` for indexed chains: cut each epoch into batches and deal them to ranks and workers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.bulk import Bulk, BulkReader
from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, DataError, check_count, check_flag, check_seed, must_be, reject_field
from kdpipes.core.iter_pipe import seed_upstream
from kdpipes.core.map_pipe import MapPipe, indexed
from kdpipes.core.order import Order
from kdpipes.core.plan_pipe import warn_of_fixed
from kdpipes.core.randomness import SampleKey, hash_key, planning, try_unseeded, using_key
from kdpipes.core.registry import functional_pipe
from kdpipes.delivery.by_class import ByClass, ClassEpoch, ClassOrder, read_classes
from kdpipes.delivery.by_length import ByLength, LengthEpoch, LengthOrder, read_lengths
from kdpipes.delivery.by_shard import ShardOrder, WindowedOrder, read_shards
from kdpipes.delivery.by_source import SourceOrder, shares_of
from kdpipes.delivery.dealer import Batch, Dealer, DealRanks, Dealt, Shuffle
from kdpipes.delivery.layout import EqualEpoch, Layout, Ranks, Sharding, Uneven
from kdpipes.delivery.own_order import ContinuedOrder, OwnOrder
from kdpipes.delivery.packing import PackEpoch, Packing, Packs
from kdpipes.delivery.skipping import LEFT_OUT
from kdpipes.selection import Permutation
from kdpipes.storage.shared import Shared

__all__ = ["DealerMapDataPipe"]

_AHEAD = 2  # how many batches beyond the one that is made remote sources prefetch
_FEW = 4  # samples in a batch, below which comparing the states of the global generators takes longer than seeding them
_NUM_SUBSTITUTES = 32  # how many samples are tried as a substitute for one


@functional_pipe("deal", flavour="map")
class DealerMapDataPipe(Dealer, IterDataPipe[Batch]):
    """Cuts the epochs of an indexed chain into batches and deals them to ranks and workers (functional name: ``deal``).

    Each batch is a list of items. The batches of an epoch depend only on the chain, `seed` and the epoch number. They
    are the same for any number of workers, in every loader, and, with `global_batch_size`, for any number of ranks.
    Each iteration is the next epoch, even if the previous one was not finished.

    Args:
        source_datapipe: An indexed pipe.
        batch_size: The number of samples in a batch of one rank.
        global_batch_size: The number of samples in the batches of all ranks together. The number of ranks must divide
            it. Pass either this or `batch_size`, unless `batch_by` is given.
        batch_by: "class", or the name of a field. With "class", a batch has `samples_per_class` samples of each of
            `classes_per_batch` classes, one class after the other, for metric and contrastive learning. No batch has a
            class twice. An epoch has as many such batches as the data allows; the samples that remain of a class are
            left out, and are different ones in each shuffled epoch. Classes with fewer than `samples_per_class`
            samples are left out with a warning. With the name of a field that holds the length of each sample, an
            integer, a batch has samples of similar length, as many as fit; without `shuffle`, the longest come first.
            The field is read once for all samples. It need not be selected, and `.add_field` can compute it.
        max_tokens: The maximum size of a batch of one rank, including padding, with `batch_by="FIELD"`: the number of
            its samples times the largest length. A length of 0 counts as 1. Lengths must not be random. `batch_size`
            may be given as well, or instead, and limits the number of samples.
        pack: Whether a row of a batch holds several samples, as many as fit into `max_tokens`, with
            `batch_by="FIELD"`. `batch_size`, 1 by default, or `global_batch_size` is then the number of rows.
            `collate_samples(pad={"x": 0})` joins the samples of each row (see there).
        global_max_tokens: The maximum size of the batches of all ranks together, in place of `max_tokens`. It works for
            any number of ranks. The samples are shared out evenly, so that the part of a rank may exceed its share by
            less than one sample. `global_batch_size` may be given as well, or instead.
        classes_per_batch: The number of classes in a batch of one rank, with `batch_by="class"`.
        samples_per_class: The number of samples of each of these classes.
        shuffle: Whether each epoch has its own order. True permutes all samples, and takes no memory. "shards" reads
            one shard after the other, for remote shards or shards that do not fit in memory (see Mixing). With
            `batch_by="FIELD"`, True draws the samples of a batch from those of similar length (longer by up to a tenth,
            or more if there are few), and shuffles the batches.
        window: The minimum number of samples that `shuffle="shards"` mixes at a time; by default, those of 8 shards. A
            cache of whole shards (`open_shards(cache_dir=)`) must be large enough for the shards of a window.
        order: The order of an epoch, instead of `shuffle`. Either a function that takes the epoch number, and `rng` if
            it has a parameter of that name, and returns positions in the source, `[n] int`, with the same n in every
            epoch; or a sampler of torch, or one with `set_epoch`, which is called. Positions may be repeated or left
            out. Each worker computes the whole order when an epoch begins, so it must be finite, and depend only on the
            arguments and on the global random generators, which are seeded for it. A sampler for several ranks needs
            `ranks=1`.
        num_batches: The number of batches in an epoch of each rank. The next epoch continues the permutation where this
            one has ended, so that every sample is used once before any is used twice. No batch is short.
        seed: The seed of the order and of all random operations upstream, from 0 to 2**64 - 1.
        uneven: What to do with a last global batch that is short: "keep" it and share it out evenly, which is an error
            if a rank would get nothing; "pad" it with samples from the start of the epoch (with `batch_by`, with other
            short ones) for which the field `is_padding` is True; or "drop" it.
        ranks: "auto" gives each rank its part. The rank and the number of ranks are read when an epoch begins, from
            torch's process group, otherwise from `RANK` and `WORLD_SIZE`. 1 gives every rank all batches; use it for
            Accelerate's `prepare(DataLoader(...))` and transformers' Trainer, which split batches between ranks.

    Length: The number of batches of one rank, over all of its workers. It is the same in every epoch.

    Mixing: `shuffle="shards"` draws a new order of the shards for each epoch, cuts their samples into windows, and
        permutes each window. A batch is drawn evenly from one window, so samples that are farther apart than a window
        never meet. On average, two neighbors in a shard end up a third of a window apart. Shards whose samples are
        sorted, for example by class, need a window of many shards, or `shuffle=True`.

    Memory: Constant without `batch_by`. With it, four bytes for each sample, shared by the workers, and 16 bytes for
        each batch. With `shuffle="shards"`, 8 bytes for each shard, and four bytes for each sample if pipes upstream
        change the order of the shards.

    Workers: Worker w of W workers makes the batches w, w + W, and so on.

    Seed: `seed` alone decides; the seed of the loader is not used.

    Raises:
        ValueError: An argument is out of range. When an epoch begins, also if a rank would get nothing.
        ChainError: A pipe upstream shards already; or `order` is a sampler for several ranks, without `ranks=1`; or
            `shuffle="shards"` is given, but the source does not read shards.
        DataError: A sample is longer than `max_tokens`.

    Source: `max_tokens` is fairseq's.

    Example:
        >>> pipe = kdp.from_dataset([(n, 0) for n in range(5)]).select("x").deal(batch_size=2)
        >>> list(pipe)
        [[(0,), (1,)], [(2,), (3,)], [(4,)]]
        >>> texts = kdp.from_dataset(["to be or not", "to be", "that is", "the question"], "x")
        >>> texts = texts.add_field("length", lambda sample: len(sample["x"].split()))
        >>> list(texts.select("x").deal(batch_by="length", max_tokens=6))
        [[('to be or not',)], [('to be',), ('that is',), ('the question',)]]
    """

    for_users: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        source_datapipe: MapDataPipe[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        batch_by: str | None = None,
        max_tokens: int | None = None,
        pack: bool = False,
        global_max_tokens: int | None = None,
        classes_per_batch: int | None = None,
        samples_per_class: int | None = None,
        shuffle: Shuffle = False,
        window: int | None = None,
        order: Any = None,
        num_batches: int | None = None,
        seed: int = 0,
        uneven: Uneven = "keep",
        ranks: DealRanks = "auto",
    ) -> None:
        if not isinstance(source_datapipe, MapDataPipe):
            raise TypeError(must_be("source_datapipe", "an indexed pipe", source_datapipe))
        self.source = source_datapipe
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        tokens = {"max_tokens": max_tokens, "global_max_tokens": global_max_tokens}
        of_classes = {"classes_per_batch": classes_per_batch, "samples_per_class": samples_per_class}
        is_by_class = any(argument is not None for argument in of_classes.values())
        is_by_length = not is_by_class and any(argument is not None for argument in (batch_by, *tokens.values()))
        if is_by_class:
            _reject_other_cuts(batch_by, of_classes, {**sizes, **tokens, "window": window}, uneven)
        column: Any = batch_by
        if window is not None and (shuffle != "shards" or is_by_length):
            raise ValueError('`window` must be given with `deal(shuffle="shards")`, and only there.')
        if shuffle == "shards" and (is_by_length or is_by_class):
            raise ValueError('`shuffle` must be True or False with `batch_by`, but is "shards" instead.')
        self._window = None if window is None else check_count("window", window)
        self._num_batches = None if num_batches is None else check_count("num_batches", num_batches)
        self._own_order = None if order is None else OwnOrder(order, check_seed(seed))
        self._first_order: Shared[NDArray[Any]] | None = None  # the user's order of epoch 0
        _reject_together(
            {"order": order, "num_batches": num_batches, "batch_by": batch_by},
            {"order": order, "shuffle": shuffle or None},
        )
        if num_batches is not None and uneven != "keep":
            raise ValueError("`uneven` cannot be used with `num_batches`, with which no batch is short. Remove it.")
        if check_flag("pack", pack) and (max_tokens is None or is_by_class or global_max_tokens is not None):
            raise ValueError(
                "`pack=True` needs the lengths and the size of a row: "
                '`deal(batch_by="length", pack=True, max_tokens=4096)`.'
            )
        rows = (1 if batch_size is None and global_batch_size is None else batch_size), global_batch_size
        self._layout: Layout | ByLength | ByClass | Packing = (
            Packing(column, max_tokens, Layout(*rows, uneven))  # type: ignore[arg-type]  # it is given
            if pack
            else ByClass(classes_per_batch, samples_per_class)  # type: ignore[arg-type]  # both are given
            if is_by_class
            else ByLength(column, bool(shuffle), sizes | tokens, uneven)
            if is_by_length
            else Layout(batch_size, global_batch_size, uneven)
        )
        self._lengths: Shared[LengthOrder] | None = None
        self._packs: Shared[Packs] | None = None
        self._classes: Shared[ClassOrder] | None = None
        self._shards: Shared[ShardOrder] | None = None
        self._shares = shares_of(source_datapipe)  # what a `mix` upstream wants of each batch
        self._by_source: Shared[SourceOrder] | None = None
        if self._shares is not None:
            others = {"batch_by": batch_by, "order": order, "num_batches": num_batches}
            _reject_for_mix(**others, shuffle="shards" if shuffle == "shards" else None)
        self._bulk_reader = BulkReader()
        self._is_fixed = False  # whether every epoch has the samples of epoch 0, because batches depend on lengths
        if isinstance(self._layout, ByLength | Packing):
            known = indexed(source_datapipe, "deal", takes_samples=False).field_names()
            if known is not None and column not in known:
                reject_field(column, "The source", known)
        self._configure(shuffle, seed, ranks)

    def __len__(self) -> int:
        if self._num_batches is not None:
            return self._num_batches
        if isinstance(self._layout, ByClass):
            return self._by_class(self._layout).num_batches // self.sharding().num_ranks
        if isinstance(self._layout, Packing):
            return self._layout.rows.num_batches(len(self._packed(self._layout)), self.sharding().num_ranks)
        if isinstance(self._layout, Layout):
            num_ranks = self.sharding().num_ranks
            if self._shares is not None:
                return int(self._layout.num_batches(len(self._sources(self._layout, num_ranks)), num_ranks))
            size = len(self.source) if self._own_order is None else len(self._own_positions(self._own_order, 0))
            return int(self._layout.num_batches(size, num_ranks))
        buckets = self._by_length(self._layout).buckets(self._layout, self.sharding().num_ranks)
        return buckets.num_kept(self._layout.uneven)

    def has_quick_length(self, *, may_plan: bool) -> bool:
        made = (self._lengths, self._classes, self._packs)
        return isinstance(self._layout, Layout) or any(one is not None for one in made)

    def fingerprint(self) -> Any:
        if isinstance(self._layout, ByLength):
            return *super().fingerprint(), self._by_length(self._layout)
        if isinstance(self._layout, ByClass):
            return *super().fingerprint(), self._by_class(self._layout)
        if isinstance(self._layout, Packing):
            return *super().fingerprint(), self._packed(self._layout)
        if self._shuffle == "shards":
            return *super().fingerprint(), self._window, self._by_shard(), *self._own_fingerprint()
        return *super().fingerprint(), *self._own_fingerprint()

    def _own_fingerprint(self) -> list[Any]:
        """Return what a state compares of `num_batches` and `order`; nothing where neither is given."""
        own: list[Any] = [] if self._num_batches is None else [("num_batches", self._num_batches)]
        if self._own_order is not None:
            own.append((self._own_order, self._own_positions(self._own_order, 0)))
        return own

    def _own_positions(self, order: OwnOrder, epoch: int) -> NDArray[Any]:
        """Return the positions of the user's order in an epoch; raise if epochs differ in length."""
        order.reject_ranks(self.sharding().num_ranks)
        if self._first_order is None:
            self._first_order = Shared(order.positions(0, len(self.source)))
        first = self._first_order.value
        positions = order.positions(epoch, len(self.source)) if epoch else first
        if len(positions) != len(first):
            raise ValueError(
                f"`order` must give equally many positions in each epoch, but gave {len(first)} for epoch 0 and "
                f"{len(positions)} for epoch {epoch}. `deal(num_batches=...)` makes epochs of any length."
            )
        return positions

    def planned_epoch(self, number: int, ranks: Ranks) -> EqualEpoch | LengthEpoch | ClassEpoch | PackEpoch:
        """Return how an epoch is cut into the batches of a rank."""
        dealer = copy.copy(self)
        dealer._sharding = Sharding(ranks.rank, ranks.num_ranks)
        return dealer._epoch(number)

    def _epoch(self, number: int) -> EqualEpoch | LengthEpoch | ClassEpoch | PackEpoch:
        key = (self._seed, number) if self._shuffle else None
        if isinstance(self._layout, Layout) and self._num_batches is not None:
            return self._continued(self._layout, self._num_batches, number)
        if isinstance(self._layout, Layout) and self._own_order is not None:
            positions = self._own_positions(self._own_order, number)
            return EqualEpoch(len(positions), self._layout, self._sharding, positions)
        if isinstance(self._layout, Layout) and self._shares is not None:
            by_source = self._sources(self._layout, self._sharding.num_ranks)
            return EqualEpoch(len(by_source), self._layout, self._sharding, by_source.of_epoch(key))
        if isinstance(self._layout, ByLength):
            return LengthEpoch(self._by_length(self._layout), self._layout, self._sharding, key)
        if isinstance(self._layout, Packing):
            return PackEpoch(self._packed(self._layout), self._layout, self._sharding, key)
        if isinstance(self._layout, ByClass):
            return ClassEpoch(self._by_class(self._layout), self._layout, self._sharding, key or (self._seed, 0))
        return EqualEpoch(len(self.source), self._layout, self._sharding, None if key is None else self._order(key))

    def _continued(self, layout: Layout, num_batches: int, number: int) -> EqualEpoch:
        """Return an epoch of `num_batches` batches that begins where the previous one has ended."""
        size, num_samples = len(self.source), num_batches * layout.size_of(self._sharding.num_ranks)
        if not size:
            raise ChainError("`deal(num_batches=...)` needs samples, but its source is empty.")
        self._fix_plan("deal(num_batches=...)")
        order_of = (lambda number: self._order((self._seed, number))) if self._shuffle else None
        return EqualEpoch(num_samples, layout, self._sharding, ContinuedOrder(size, number * num_samples, order_of))

    def _sources(self, layout: Layout, num_ranks: int) -> SourceOrder:
        """Return the samples by source; blocks are the batches of one rank, or global batches if their size is set."""
        if self._by_source is None:
            assert self._shares is not None
            assert isinstance(self.source, MapPipe)
            size = layout.batch_size if layout.batch_size is not None else layout.size_of(num_ranks)
            self._by_source = Shared(SourceOrder(self.source.source_numbers(), self._shares, size))
        return self._by_source.value

    def _fix_plan(self, by: str) -> None:
        """Keep the samples that the plan chooses in epoch 0, with a warning if it would choose others later."""
        if self._is_fixed:
            return
        redrawn = self.source.redrawn_by() if isinstance(self.source, MapPipe) else None
        if redrawn is not None:
            warn_of_fixed(redrawn, by)
        self._is_fixed = redrawn is not None

    def _order(self, key: tuple[int, int]) -> Permutation | WindowedOrder:
        if self._shuffle == "shards":
            return WindowedOrder(self._by_shard(key[1]), self._window, key)
        return Permutation(len(self.source), key=hash_key("order", *key))

    def _by_shard(self, epoch: int = 0) -> ShardOrder:
        """Return the positions of the source's samples by their shard, computed once for all copies.

        If the source draws other samples in each epoch, the positions of later epochs are computed when they begin.
        """
        if epoch and isinstance(self.source, MapPipe) and self.source.redrawn_by() is not None:
            with planning(epoch):
                return read_shards(self.source)
        if self._shards is None:
            self._shards = Shared(read_shards(self.source))
        return self._shards.value

    def _by_class(self, layout: ByClass) -> ClassOrder:
        """Return the positions of the source's samples by their class, computed once for all copies."""
        if self._classes is None:
            self._fix_plan('deal(batch_by="class")')
            self._classes = Shared(read_classes(self.source, layout))
        return self._classes.value

    def _packed(self, layout: Packing) -> Packs:
        """Return the rows into which the source's samples are packed, computed once for all copies."""
        if self._packs is None:
            self._fix_plan("deal(pack=True)")
            self._packs = Shared(Packs(read_lengths(self.source, layout.column), self.source, layout))
        return self._packs.value

    def row_size(self) -> int | None:
        return self._layout.max_tokens if isinstance(self._layout, Packing) else None

    def _by_length(self, layout: ByLength) -> LengthOrder:
        """Return the positions of the source's samples by their length, computed once for all copies."""
        if self._lengths is None:
            self._fix_plan("deal(batch_by=...)")
            self._lengths = Shared(read_lengths(self.source, layout.column))
        layout.reject_long(self.source, self._lengths.value, self.sharding().num_ranks)
        return self._lengths.value

    def iterate(self) -> Iterator[Batch]:
        (number, first), sharding = self._begin(), self._sharding
        seed_upstream(self, self._seed, number)
        epoch = self._epoch(number)
        size = epoch.num_samples
        if size and not epoch.num_batches:
            text = f"`deal(uneven='drop')` drops all {size} samples: a global batch has {epoch.full_size}."
            if isinstance(epoch, ClassEpoch):
                made = size // (epoch.full_size // sharding.num_ranks)
                text = (
                    f'`deal(batch_by="class")` can make {made} batches, but there are {sharding.num_ranks} ranks, so '
                    f"no rank gets a batch. Use at most {made} ranks, or smaller batches."
                )
            warnings.warn(text, stacklevel=2)
        if epoch.num_batches:
            epoch.ordinals(epoch.num_batches - 1)  # an epoch that ends badly is rejected at its start
        self._starts_epoch(first)
        batches = range(sharding.first_from(first), epoch.num_batches, sharding.num_workers)
        is_remote = self.reads_ahead and isinstance(self.source, MapPipe)  # no stock pipe, which passes nothing on
        is_remote = is_remote and any(node.traits.is_remote for node in Chain.of(self.source))
        planned = 0 if self._is_fixed else number  # the epoch whose samples are delivered
        if is_remote:
            with planning(planned):
                self.source.prefetch(Order(partial(epoch.windows, first), is_epoch=True))
        for place, batch in enumerate(batches):
            if is_remote:
                for later in batches[place + (_AHEAD if place else 0) : place + _AHEAD + 1]:
                    with planning(planned):
                        self.source.prefetch(Order.of_next(epoch.positions(later)))
            ordinals = epoch.ordinals(batch)
            self._report(Dealt(batch, len(ordinals)))
            make = partial(self._items, epoch.positions(batch), number, ordinals, size, batch)
            if self._skipper is None and len(ordinals) >= _FEW:
                make = partial(try_unseeded, make)  # it may make the items twice, so none of them may be skipped
            if items := self._batch(number, batch, make):
                yield items
        self._end(number)

    def _items(self, positions: NDArray[Any], epoch: int, ordinals: Sequence[int], size: int, batch: int) -> list[Any]:
        """Return the items of a batch.

        Args:
            positions: Where they are in the source.
            epoch: The epoch number.
            ordinals: Their positions in the dealt epoch.
            size: The number of samples in the epoch. Larger ordinals are padding.
            batch: The number of the batch.
        """
        with planning(0) if self._is_fixed else nullcontext():
            if self._skipper is None and isinstance(self.source, MapPipe):
                bulk = Bulk(self._seed, epoch, 0 if self._is_fixed else epoch, ordinals, size)
                if (items := self._bulk_reader.read(self.source, positions, bulk)) is not None:
                    return items
            item = self._item if self._skipper is None else self._item_or_nothing
            keys = (SampleKey(self._seed, epoch, ordinal, ordinal >= size) for ordinal in ordinals)
            return [item(position, key, batch) for position, key in zip(positions.tolist(), keys, strict=True)]

    def _item(self, position: int, sample_key: SampleKey, batch: int) -> Any:
        source = self.source
        with using_key(sample_key):
            return source.finish(source.fetch(position)) if isinstance(source, MapPipe) else source[position]

    def _item_or_nothing(self, position: int, sample_key: SampleKey, batch: int) -> Any:
        skipper = self._skipper
        assert skipper is not None
        item = self._tried(position, sample_key, batch)
        if item is not LEFT_OUT or not skipper.substitutes:
            return item
        # Attempts depend only on the ordinal, so that every worker and every run finds the same substitute.
        for attempt in range(_NUM_SUBSTITUTES):
            key = hash_key(sample_key.seed, sample_key.epoch, sample_key.position, "substitute", attempt)
            other = int.from_bytes(key[:8], "little") % len(self.source)
            item = self._tried(other, sample_key._replace(is_padding=True), batch)
            if item is not LEFT_OUT:
                return item
        raise DataError(
            f"A sample could not be made, nor could any of {_NUM_SUBSTITUTES} samples drawn to replace it; the last "
            f"error is {type(skipper.last_error).__name__}: {skipper.last_error}."
        ) from skipper.last_error

    def _reject_substitutes(self) -> None:
        if isinstance(self._layout, ByLength | Packing):
            raise ChainError(
                '`on_error("substitute")` cannot be used with `deal(batch_by=...)`: a sample of another length would '
                'not fit into the batch. Use `on_error("skip")`.'
            )

    def _tried(self, position: int, sample_key: SampleKey, batch: int) -> Any:
        source = self.source
        assert self._skipper is not None
        with using_key(sample_key):
            if isinstance(source, MapPipe):
                return self._skipper.make(sample_key, batch, lambda: source.fetch(position), source.finish)
            return self._skipper.make(sample_key, batch, lambda: source[position], lambda item: item)

    def _prepare(self) -> None:
        if isinstance(self._layout, ByLength):
            self._by_length(self._layout)
        elif isinstance(self._layout, ByClass):
            self._by_class(self._layout)
        elif isinstance(self._layout, Packing):
            self._packed(self._layout)
        elif self._shares is not None:
            self._sources(self._layout, self.sharding().num_ranks)
        elif self._shuffle == "shards":
            self._by_shard()
        else:
            len(self.source)


def _reject_other_cuts(batch_by: Any, of_classes: dict[str, Any], others: dict[str, Any], uneven: str) -> None:
    """Raise if arguments that cut batches of classes come with others, or not together."""
    missing = next((name for name, value in of_classes.items() if value is None), None)
    if missing is not None or batch_by != "class":
        raise ValueError(
            '`batch_by="class"`, `classes_per_batch` and `samples_per_class` must be given together: '
            '`deal(batch_by="class", classes_per_batch=8, samples_per_class=4)`.'
        )
    other = next((name for name, value in others.items() if value is not None), None)
    if other is not None:
        raise ValueError(f"`{other}` and `classes_per_batch` cannot be given together. Remove one of them.")
    if uneven == "pad":
        raise ValueError(
            '`uneven="pad"` cannot be used with `batch_by="class"`, whose batches are all full. Remove it.'
        )


def _reject_for_mix(**others: Any) -> None:
    """Raise if an argument would compose batches otherwise than a `mix` upstream does."""
    other = next((name for name, value in others.items() if value is not None), None)
    if other is not None:
        raise ValueError(
            f"`{other}` cannot be used after `mix(per_batch=...)` or `mix(batches=...)`, which compose the batches. "
            "Remove one of them; `shuffle=True` is possible."
        )


def _reject_together(*groups: dict[str, Any]) -> None:
    """Raise if two arguments are given that exclude each other."""
    for group in groups:
        given = [name for name, value in group.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` cannot be given together. Remove one of them.")
