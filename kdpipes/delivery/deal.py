"""`deal` for indexed chains: cut each epoch into batches and deal them to ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.chain import Chain
from kdpipes.core.errors import (
    ChainError,
    DataError,
    check_count,
    check_flag,
    check_seed,
    must_be,
    reject_field,
    without_notes,
)
from kdpipes.core.iter_pipe import seed_streams
from kdpipes.core.map_pipe import MapPipe, indexed
from kdpipes.core.messages import warn
from kdpipes.core.order import Order
from kdpipes.core.randomness import SampleKey, hash_key, planning, try_unseeded, using_key
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Block, Rows, Sample, finished
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.delivery.by_class import ClassCut
from kdpipes.delivery.by_length import LengthCut
from kdpipes.delivery.by_source import SourceCut, shares_of
from kdpipes.delivery.cut import Cut, Epoch, EqualCut, ShardCut
from kdpipes.delivery.dealer import Batch, Dealer, DealRanks, Dealt, Shuffle, items_at_once
from kdpipes.delivery.layout import Layout, Ranks, Sharding, Uneven
from kdpipes.delivery.own_order import OwnCut, OwnOrder
from kdpipes.delivery.packing import PackCut
from kdpipes.delivery.skipping import LEFT_OUT

_AHEAD = 2  # how many batches beyond the one that is made sources prefetch
_FEW = 4  # samples in a batch, below which comparing the states of the global generators takes longer than seeding them
_ALL_AT_ONCE = 1 << 30
_FEW_AT_ONCE = 16  # samples, if functions may read any field, so that all values stay in memory until they are called
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
        self._cut = _cut_of(
            source_datapipe,
            batch_by,
            {"batch_size": batch_size, "global_batch_size": global_batch_size},
            {"max_tokens": max_tokens, "global_max_tokens": global_max_tokens},
            {"classes_per_batch": classes_per_batch, "samples_per_class": samples_per_class},
            pack=pack,
            shuffle=shuffle,
            window=window,
            order=order,
            num_batches=num_batches,
            seed=seed,
            uneven=uneven,
        )
        self._at_once = 1  # how many samples of a batch are made together
        self._configure(self._cut, shuffle, seed, ranks)
        handler = Chain.of(self).error_handler()
        if handler is not None and handler.substitutes and not self._cut.substitutes:
            raise ChainError(
                '`on_error("substitute")` cannot be used with `deal(batch_by=...)`: a sample of another length would '
                'not fit into the batch. Use `on_error("skip")`.'
            )

    def __len__(self) -> int:
        return self._cut.num_batches(self.source, self.sharding().num_ranks)

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._cut.has_quick_length

    def fingerprint(self) -> Any:
        read = self._cut.source_fingerprint(self.source, self.sharding().num_ranks)
        return self._seed, self._shuffle, self._cut.fingerprint(), *read

    def planned_epoch(self, number: int, ranks: Ranks) -> Epoch:
        """Return how an epoch is cut into the batches of a rank."""
        return self._cut.epoch(self.source, Sharding(ranks.rank, ranks.num_ranks), self._seed, number)

    def row_size(self) -> int | None:
        return self._cut.row_size

    def iterate(self) -> Iterator[Batch]:
        (number, first), sharding = self._begin(), self._sharding
        seed_streams(reversed(Chain.of(self.source)), self._seed, number)
        epoch = self._cut.epoch(self.source, sharding, self._seed, number)
        size = epoch.num_samples
        if size and not epoch.num_batches:
            warn(self._cut.why_empty(epoch, sharding.num_ranks))
        if epoch.num_batches:
            epoch.ordinals(epoch.num_batches - 1)  # an epoch that ends badly is rejected at its start
        batches = range(sharding.first_from(first), epoch.num_batches, sharding.num_workers)
        traits = [node.traits for node in Chain.of(self.source)]
        is_selected = isinstance(self.source, MapPipe) and self.source.traits.gives == "items"
        functions = [node.traits for node in Chain.of(self.source) if node.operation and node.traits.gives != "items"]
        self._at_once = _FEW_AT_ONCE if any(each.reads is None for each in functions) else _ALL_AT_ONCE
        if not is_selected or any(each.is_eager for each in functions):
            self._at_once = 1
        prefetches = self.reads_ahead and isinstance(self.source, MapPipe)  # no stock pipe, which passes nothing on
        prefetches = prefetches and any(each.is_remote or each.reads_files for each in traits)
        planned = 0 if self._cut.is_fixed else number  # the epoch whose samples are delivered
        if prefetches:
            with planning(planned):
                self.source.prefetch(Order(partial(epoch.windows, first), is_epoch=True))
        for place, batch in enumerate(batches):
            if prefetches:
                for later in batches[place + (_AHEAD if place else 0) : place + _AHEAD + 1]:
                    with planning(planned):
                        self.source.prefetch(Order.of_next(epoch.positions(later)))
            ordinals = epoch.ordinals(batch)
            make = partial(self._items, epoch.positions(batch), number, ordinals, size, batch)
            if self._skipper is None and len(ordinals) >= _FEW:
                make = partial(try_unseeded, make)  # it may make the items twice, so none of them may be skipped
            if items := self._batch(number, Dealt(batch, len(ordinals)), make):
                yield items
        self._end(number)

    def _items(self, positions: NDArray[Any], epoch: int, ordinals: Sequence[int], size: int, batch: int) -> list[Any]:
        """Return the items of a batch. Ordinals that are not below `size` are padding."""
        skipper, planned = self._skipper, 0 if self._cut.is_fixed else epoch

        @cache
        def keys() -> list[SampleKey]:
            return [SampleKey(self._seed, epoch, ordinal, ordinal >= size) for ordinal in ordinals]

        rows = Rows(positions, keys, planned, range(len(ordinals)))
        items: dict[int, Any] = {}
        samples: dict[int, Sample] = {}
        failed: list[Block] = []
        with planning(planned):
            for start in range(0, len(rows), self._at_once) if min(self._at_once, len(rows)) > 1 else ():
                blocks: Sequence[Block] = ()
                try:
                    blocks = self.source.blocks_at(rows.part(range(len(rows))[start : start + self._at_once]))
                    if skipper is None or not skipper.knows_bad_samples:
                        items |= items_at_once(blocks, self.source, self._seed, epoch)
                        continue
                except Exception:  # then one sample after the other, so that the first one that fails raises its error
                    pass
                failed += blocks
                for block in blocks:
                    samples |= {place: block.sample(number) for number, place in enumerate(block.places)}
            item = self._item if skipper is None else self._item_or_nothing
            try:
                return [
                    items[number] if number in items else item(rows.part([number]), samples.get(number), batch)
                    for number in range(len(rows))
                ]
            finally:
                for block in failed:
                    block.drop_failures()

    def _item(self, row: Rows, sample: Sample | None, batch: int) -> Any:
        with using_key(row.keys()[0]):
            return self._finish(self._fetch(row) if sample is None else sample)

    def _fetch(self, row: Rows) -> Any:
        """Return the sample of a row, not loaded; of a stock pipe, its item."""
        if not isinstance(self.source, MapPipe):
            return self.source[int(row.positions[0])]
        (block,) = self.source.blocks_at(row)
        return block.sample()

    def _finish(self, sample: Any) -> Any:
        return finished(self.source, sample) if isinstance(self.source, MapPipe) else sample

    def _item_or_nothing(self, row: Rows, sample: Sample | None, batch: int) -> Any:
        skipper, (sample_key,) = self._skipper, row.keys()
        assert skipper is not None
        item = self._tried(row, sample, batch)
        if item is not LEFT_OUT or not skipper.substitutes:
            return item
        # Attempts depend only on the ordinal, so that every worker and every run finds the same substitute.
        for attempt in range(_NUM_SUBSTITUTES):
            key = hash_key(sample_key.seed, sample_key.epoch, sample_key.position, "substitute", attempt)
            other = int.from_bytes(key[:8], "little") % len(self.source)
            padding = sample_key._replace(is_padding=True)
            substitute = Rows(np.array([other]), partial(list, [padding]), row.planned, row.places)
            item = self._tried(substitute, None, batch)
            if item is not LEFT_OUT:
                return item
        assert skipper.last_error is not None
        raise DataError(
            f"A sample could not be made, nor could any of {_NUM_SUBSTITUTES} samples drawn to replace it; the last "
            f"error is {type(skipper.last_error).__name__}: {without_notes(skipper.last_error)}."
        ) from skipper.last_error

    def _tried(self, row: Rows, sample: Sample | None, batch: int) -> Any:
        assert self._skipper is not None
        (sample_key,) = row.keys()
        with using_key(sample_key):
            return self._skipper.make(
                sample_key, batch, lambda: self._fetch(row) if sample is None else sample, self._finish
            )

    def _prepare(self) -> None:
        self._cut.prepare(self.source, self.sharding().num_ranks)


def _cut_of(
    source: Any,
    batch_by: str | None,
    sizes: dict[str, Any],
    tokens: dict[str, Any],
    of_classes: dict[str, Any],
    *,
    pack: bool,
    shuffle: Shuffle,
    window: int | None,
    order: Any,
    num_batches: int | None,
    seed: int,
    uneven: Uneven,
) -> Cut:
    """Return the cut that the arguments of `deal` describe; raise an error if some of them exclude others."""
    is_by_class = bool(_given(of_classes))
    is_by_length = not is_by_class and bool(_given({"batch_by": batch_by, **tokens}))
    is_shuffled = bool(shuffle)
    if is_by_class:
        if len(_given(of_classes)) < len(of_classes) or batch_by != "class":
            raise ValueError(
                '`batch_by="class"`, `classes_per_batch` and `samples_per_class` must be given together: '
                '`deal(batch_by="class", classes_per_batch=8, samples_per_class=4)`.'
            )
        if others := _given({**sizes, **tokens, "window": window}):
            raise ValueError(f"`{others[0]}` and `classes_per_batch` cannot be given together. Remove one of them.")
        if uneven == "pad":
            raise ValueError(
                '`uneven="pad"` cannot be used with `batch_by="class"`, whose batches are all full. Remove it.'
            )
    if window is not None and (shuffle != "shards" or is_by_length):
        raise ValueError('`window` can only be used with `deal(shuffle="shards")`.')
    if shuffle == "shards" and (is_by_length or is_by_class):
        raise ValueError('`shuffle` must be True or False with `batch_by`, but is "shards" instead.')
    window = None if window is None else check_count("window", window)
    num_batches = None if num_batches is None else check_count("num_batches", num_batches)
    own_order = None if order is None else OwnOrder(order, check_seed(seed))
    for exclusive in (
        {"order": order, "num_batches": num_batches, "batch_by": batch_by},
        {"order": order, "shuffle": shuffle or None},
    ):
        if len(given := _given(exclusive)) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` cannot be given together. Remove one of them.")
    if num_batches is not None and uneven != "keep":
        raise ValueError("`uneven` cannot be used with `num_batches`, because then no batch is short. Remove it.")
    is_one_row = tokens["max_tokens"] is not None and tokens["global_max_tokens"] is None and not is_by_class
    if check_flag("pack", pack) and not is_one_row:
        raise ValueError(
            "`pack=True` needs the lengths and the size of a row: "
            '`deal(batch_by="length", pack=True, max_tokens=4096)`.'
        )
    shares = shares_of(source)
    cut: Cut
    column: Any = batch_by
    if pack:
        rows = Layout(**(sizes if _given(sizes) else {**sizes, "batch_size": 1}), uneven=uneven)
        cut = PackCut(column, tokens["max_tokens"], rows, is_shuffled=is_shuffled)
    elif is_by_class:
        cut = ClassCut(**of_classes, is_shuffled=is_shuffled)
    elif is_by_length:
        cut = LengthCut(column, sizes | tokens, uneven, is_shuffled=is_shuffled)
    else:
        layout = Layout(**sizes, uneven=uneven)
        if own_order is not None:
            cut = OwnCut(layout, own_order)
        elif shares is not None:
            cut = SourceCut(layout, shares, is_shuffled=is_shuffled)
        elif shuffle == "shards":
            cut = ShardCut(layout, window, num_batches)
        else:
            cut = EqualCut(layout, is_shuffled=is_shuffled, num_batches=num_batches)
    if shares is not None:
        by_shard = "shards" if shuffle == "shards" else None
        others = _given({"batch_by": batch_by, "order": order, "num_batches": num_batches, "shuffle": by_shard})
        if others:
            raise ValueError(
                f"`{others[0]}` cannot be used after `mix(per_batch=...)` or `mix(batches=...)`, which compose the "
                "batches. Remove one of them; `shuffle=True` is possible."
            )
    if pack or is_by_length:
        known = indexed(source, "deal", takes_samples=False).field_names()
        if known is not None and column not in known:
            hint = f'`.add_field({column!r}, lambda sample: len(sample["x"]))` adds one, for example.'
            reject_field(column, "The source", known, hint)
    return cut


def _given(arguments: dict[str, Any]) -> list[str]:
    return [name for name, value in arguments.items() if value is not None]
