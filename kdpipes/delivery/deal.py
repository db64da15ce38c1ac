"""`deal` for indexed chains: cut each epoch into batches and deal them to ranks and workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, DataError, check_type, without_notes
from kdpipes.core.map_pipe import MapPipe, blocks_at
from kdpipes.core.messages import warn
from kdpipes.core.operation import finished
from kdpipes.core.order import Order
from kdpipes.core.randomness import SampleKey, hash_key, planning, using_key
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.delivery.batching import Arguments, Batching, Epoch, EqualBatching
from kdpipes.delivery.by_shard import Shuffle
from kdpipes.delivery.by_source import BySource, shares_of
from kdpipes.delivery.dealer import Batch, Dealer, DealRanks, Dealt, Run, item_of, items_at_once
from kdpipes.delivery.layout import Ranks, Sharding, Uneven
from kdpipes.delivery.skipping import LEFT_OUT

_AHEAD = 2  # how many batches beyond the one that is made sources prefetch
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
            it. Pass either this or `batch_size`; some kinds of `batching` need neither.
        batching: What the samples of a batch have in common, or the order that they come in: `kdp.by_length(...)`
            (similar lengths), `kdp.packed(...)` (several samples in a row), `kdp.by_class(...)` (some samples of some
            classes each), `kdp.by_value(...)` (equal values of a field), `kdp.own_order(...)` or
            `kdp.own_batches(...)`.
        shuffle: Whether each epoch has its own order. True permutes all samples, and takes no memory. "shards" or
            `kdp.by_shard(window=...)` reads one shard after the other, for remote shards or shards that do not fit in
            memory.
        num_batches: The number of batches in an epoch of each rank. The next epoch continues the permutation where this
            one has ended, so that every sample is used once before any is used twice. No batch is short.
        seed: The seed of the order and of all random operations upstream, from 0 to 2**64 - 1.
        uneven: What to do with a last global batch that is short: "keep" it and share it out evenly, which is an error
            if a rank would get nothing; "pad" it with samples from the start of the epoch (of its group, with
            `kdp.by_length` and `kdp.by_value`) for which the field `is_padding` is True; or "drop" it.
        ranks: "auto" gives each rank its part. The rank and the number of ranks are read when an epoch begins, from
            torch's process group, otherwise from `RANK` and `WORLD_SIZE`. 1 gives every rank all batches; use it for
            Accelerate's `prepare(DataLoader(...))` and transformers' Trainer, which split batches between ranks.

    Length: The number of batches of one rank, over all of its workers. It is the same in every epoch.

    Memory: Constant without `batching` and `shuffle="shards"`.

    Workers: Worker w of W workers makes the batches w, w + W, and so on.

    Seed: `seed` alone decides; the seed of the loader is not used.

    Raises:
        ValueError: An argument is out of range, or makes no sense with `batching`. When an epoch begins, also if a rank
            would get nothing.
        ChainError: A pipe upstream shards already; or `shuffle="shards"` is given, but the source does not read shards.

    Example:
        >>> pipe = kdp.from_dataset([(n, 0) for n in range(5)]).select("x").deal(batch_size=2)
        >>> list(pipe)
        [[(0,), (1,)], [(2,), (3,)], [(4,)]]
    """

    def __init__(
        self,
        source_datapipe: MapDataPipe[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        batching: Batching | None = None,
        shuffle: Shuffle = False,
        num_batches: int | None = None,
        seed: int = 0,
        uneven: Uneven = "keep",
        ranks: DealRanks = "auto",
    ) -> None:
        check_type("source_datapipe", source_datapipe, MapDataPipe, "an indexed pipe")
        self.source = source_datapipe
        arguments = Arguments(batch_size, global_batch_size, shuffle, num_batches, seed, uneven)
        self._batching = _chosen(source_datapipe, batching).bind(source_datapipe, arguments)
        self._configure(self._batching, shuffle, seed, ranks)
        handler = Chain.of(self).error_handler()
        if handler is not None and handler.substitutes and not self._batching.substitutes:
            raise ChainError(
                f'`on_error("substitute")` cannot be used with `{self._batching.call}(...)`: another sample would not '
                'fit into the batch. Use `on_error("skip")`.'
            )

    def __len__(self) -> int:
        return self._batching.num_batches(self.source, self.sharding().num_ranks)

    def has_quick_length(self, *, may_plan: bool) -> bool:
        return self._batching.has_quick_length

    def fingerprint(self) -> Any:
        read = self._batching.source_fingerprint(self.source, self.sharding().num_ranks)
        return self._seed, self._shuffle, self._batching.fingerprint(), *read

    def planned_epoch(self, number: int, ranks: Ranks) -> Epoch:
        """Return how an epoch is cut into the batches of a rank."""
        return self._batching.epoch(self.source, Sharding(ranks.rank, ranks.num_ranks), self._seed, number)

    def plan_of(self, epoch: int) -> int:
        """Return the epoch whose plan decides which samples an epoch delivers."""
        return 0 if self._batching.is_fixed else epoch

    def row_size(self) -> int | None:
        return self._batching.row_size

    def batches_of(self, run: Run) -> Generator[tuple[Dealt, Callable[[], list[Any]]]]:
        self.seed_epoch(run.start.epoch)
        epoch = self._batching.epoch(self.source, run.sharding, self._seed, run.start.epoch)
        if epoch.num_samples and not epoch.num_batches:
            warn(self._batching.why_empty(epoch, run.sharding.num_ranks))
        if epoch.num_batches:
            epoch.ordinals(epoch.shortest)  # an epoch that ends badly is rejected at its start
        first = run.start.number
        batches = range(run.sharding.first_from(first), epoch.num_batches, run.sharding.num_workers)
        block_size = self._block_size()
        planned = self.plan_of(run.start.epoch)
        # A stock pipe passes no request on.
        prefetches = self.reads_ahead and isinstance(self.source, MapPipe)
        traits = [node.traits for node in Chain.of(self.source)]
        prefetches = prefetches and any(each.is_remote or each.reads_files for each in traits)
        if prefetches:
            with planning(planned):
                self.source.prefetch(Order(partial(epoch.windows, first), is_epoch=True))
        for index, batch in enumerate(batches):
            if prefetches:
                for later in batches[index + (_AHEAD if index else 0) : index + _AHEAD + 1]:
                    with planning(planned):
                        self.source.prefetch(Order.of_next(epoch.positions(later)))
            ordinals = epoch.ordinals(batch)
            rows = self.rows(run.start.epoch, planned, epoch.positions(batch), ordinals, epoch.num_samples)
            yield Dealt(batch, len(ordinals)), partial(self._items, run, rows, batch, block_size)

    def _block_size(self) -> int:
        """Return how many samples of a batch may be made together."""
        if not isinstance(self.source, MapPipe) or self.source.traits.gives != "items":
            return 1
        functions = [node.traits for node in Chain.of(self.source) if node.operation and node.traits.gives != "items"]
        if any(traits.is_eager for traits in functions):
            return 1
        # Values stay in memory until all functions that may read them were called.
        return _FEW_AT_ONCE if any(traits.reads is None for traits in functions) else sys.maxsize

    def rows(self, epoch: int, planned: int, positions: NDArray[Any], ordinals: Sequence[int], size: int) -> Rows:
        """Return the rows of a batch. Ordinals from `size` on are padding."""

        @cache
        def keys() -> list[SampleKey]:
            return [SampleKey(self._seed, epoch, ordinal, ordinal >= size) for ordinal in ordinals]

        return Rows(positions, keys, planned, range(len(ordinals)))

    def _items(self, run: Run, rows: Rows, batch: int, block_size: int) -> list[Any]:
        items: dict[int, Any] = {}
        samples: dict[int, Sample] = {}
        failed: list[Block] = []
        with planning(rows.planned):
            for start in range(0, len(rows), block_size) if min(block_size, len(rows)) > 1 else ():
                blocks: Sequence[Block] = ()
                try:
                    blocks = blocks_at(self.source, rows.part(range(len(rows))[start : start + block_size]))
                    if run.skipper is None or not run.skipper.knows_bad_samples:
                        items |= items_at_once(blocks, self.source, self._seed, run.start.epoch)
                        continue
                except Exception:  # then one sample after the other, so that the first one that fails raises its error
                    pass
                failed += blocks
                for block in blocks:
                    samples |= {place: block.sample(number) for number, place in enumerate(block.places)}
            try:
                return [
                    items[number]
                    if number in items
                    else self._item(run, rows.part([number]), samples.get(number), batch)
                    for number in range(len(rows))
                ]
            finally:
                for block in failed:
                    block.drop_failures()

    def _item(self, run: Run, row: Rows, sample: Sample | None, batch: int) -> Any:
        """Return the item of a row, of a substitute if `on_error` replaces it, or LEFT_OUT."""
        item = self._tried(run, row, sample, batch)
        if item is not LEFT_OUT or run.skipper is None or not run.skipper.substitutes:
            return item
        (sample_key,) = row.keys()
        padding = [sample_key._replace(is_padding=True)]
        # Attempts depend only on the ordinal, so that every worker and every run finds the same substitute.
        for attempt in range(_NUM_SUBSTITUTES):
            key = hash_key(sample_key.seed, sample_key.epoch, sample_key.position, "substitute", attempt)
            other = int.from_bytes(key[:8], "little") % len(self.source)
            item = self._tried(
                run, Rows(np.array([other]), partial(list, padding), row.planned, row.places), None, batch
            )
            if item is not LEFT_OUT:
                return item
        error = run.skipper.last_error
        assert error is not None
        raise DataError(
            f"A sample could not be made, nor could any of {_NUM_SUBSTITUTES} samples drawn to replace it; the last "
            f"error is {type(error).__name__}: {without_notes(error)}."
        ) from error

    def _tried(self, run: Run, row: Rows, sample: Sample | None, batch: int) -> Any:
        """Return the item of a row, or LEFT_OUT."""

        def fetch() -> Any:
            return self._fetch(row) if sample is None else sample

        (sample_key,) = row.keys()
        with using_key(sample_key):
            return item_of(run, sample_key, batch, fetch, self._finish)

    def _fetch(self, row: Rows) -> Any:
        """Return the sample of a row, not loaded; of a stock pipe, its item."""
        if not isinstance(self.source, MapPipe):
            return self.source[int(row.positions[0])]
        (block,) = blocks_at(self.source, row)
        return block.sample()

    def _finish(self, sample: Any) -> Any:
        return finished(self.source, sample) if isinstance(self.source, MapPipe) else sample

    def _prepare(self) -> None:
        self._batching.prepare(self.source, self.sharding().num_ranks)


def _chosen(source: Any, batching: Batching | None) -> Batching:
    """Return how epochs are cut into batches: as the user or a `mix` wants, else into batches of equal size."""
    shares = shares_of(source)
    if batching is None:
        return EqualBatching() if shares is None else BySource(shares)
    check_type("batching", batching, Batching, 'an object like `kdp.by_length("length", max_tokens=4096)`')
    if shares is not None:
        raise ValueError(
            "`batching` cannot be used after `mix(per_batch=...)` or `mix(batches=...)`, which compose the batches. "
            "Remove one of them; `shuffle=True` is possible."
        )
    return batching
