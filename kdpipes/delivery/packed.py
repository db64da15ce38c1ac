"""Pack samples of varying length into rows of a fixed number of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import smallest_int
from kdpipes.core.errors import DataError, check_count, check_type
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.randomness import generator, hash_key
from kdpipes.delivery.batching import Arguments, Batching, Epoch
from kdpipes.delivery.grouped import LengthOrder, read_lengths, reject_missing
from kdpipes.delivery.layout import Layout, Sharding

Content = list[tuple[int, int]]  # what a row has of each distinct length: (number of the length, how often)


class Packed(Batching):
    """Batches of rows, each of which holds several samples: `deal(batching=kdp.packed("length", max_tokens=4096))`.

    A row has as many samples as fit. `batch_size` of `deal`, 1 by default, or `global_batch_size` is the number of
    rows. `collate_samples(pad={"x": 0})` joins the samples of each row (see there).

    Args:
        field: The name of the field that holds the length of each sample, an integer: see `by_length`.
        max_tokens: The number of tokens in a row. A length of 0 counts as 1.

    Memory: Four bytes for each sample, shared by the workers.

    Raises:
        ValueError: When `deal` is called: `uneven` is "pad".
        DataError: When the lengths are read: a sample is longer than `max_tokens`, or its length is no integer.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021.

    Example:
        >>> texts = kdp.from_dataset(["to be or not", "to be", "that is", "the question"], "x")
        >>> texts = texts.add_field("length", lambda sample: len(sample["x"].split()))
        >>> list(texts.select("x").deal(batching=kdp.packed("length", max_tokens=6)))
        [[('to be or not',), ('to be',)], [('that is',), ('the question',)]]
    """

    call = "kdp.packed"
    rejects = ("num_batches",)
    fixed_by = "kdp.packed(...)"
    substitutes = False
    row_size: int

    def __init__(self, field: str, max_tokens: int) -> None:
        check_type("field", field, str, 'the name of a field, like "length"')
        self.field = field
        self.max_tokens = self.row_size = check_count("max_tokens", max_tokens)

    def set_up(self, source: Any, arguments: Arguments) -> None:
        if arguments.uneven == "pad":
            raise ValueError('`uneven="pad"` cannot be used with `kdp.packed(...)`. Use "keep" or "drop".')
        size = arguments.batch_size
        size = 1 if size is None and arguments.global_batch_size is None else size
        self._rows = Layout(size, arguments.global_batch_size, arguments.uneven)
        reject_missing(source, self.field)

    def prepare(self, source: Any, num_ranks: int) -> Any:
        self.fix(source)
        return self._once(lambda: self._packs(source))

    def fingerprint(self) -> Any:
        return "pack", self.uneven

    def sizes(self, num_ranks: int) -> dict[str, Any]:
        return {"batching": self.call, "field": self.field, "max_tokens": self.row_size, **self._rows.sizes(num_ranks)}

    def num_batches(self, source: Any, num_ranks: int) -> int:
        return self._rows.num_batches(len(self.prepare(source, num_ranks)), num_ranks)

    def epoch(self, source: Any, sharding: Sharding, seed: int, number: int) -> Epoch:
        return PackEpoch(self.prepare(source, sharding.num_ranks), self._rows, sharding, self._key(seed, number))

    def _packs(self, source: Any) -> Packs:
        order = read_lengths(source, self.field)
        limit = self.row_size
        if len(order) and order.length_at(0) > limit:
            raise DataError(
                f"Sample {source.fetch(int(order.positions[0])).key!r} has {self.field} {order.length_at(0)}, more "
                f"than the `max_tokens={limit}` of a row. Leave such samples out, "
                f"`pipe[pipe.column({self.field!r}) <= {limit}]`, or raise the limit."
            )
        return Packs(order, limit)


class Packs(Fingerprinted):
    """The rows into which the samples of a source are packed: which lengths each row has.

    All epochs have rows of the same lengths; a shuffled epoch fills them with other samples. The rows are found by
    best-fit decreasing over the distinct lengths (Krell et al., "Efficient Sequence Packing without
    Cross-contamination", 2021): only the last step, which writes them down, depends on the number of samples.

    Args:
        order: The samples in the order of their lengths, longest first, none longer than a row.
        max_tokens: The number of tokens in a row.
    """

    def __init__(self, order: LengthOrder, max_tokens: int) -> None:
        self.order = order
        values, counts = order.distinct()
        rows = _best_fit(np.maximum(values, 1).tolist(), counts.tolist(), max_tokens)
        kinds: list[NDArray[Any]] = []
        sizes: list[NDArray[Any]] = []
        for number, content in rows:
            of_row = np.repeat([kind for kind, _ in content], [times for _, times in content])
            kinds.append(np.tile(of_row.astype(smallest_int(len(values) + 1)), number))
            sizes.append(np.full(number, len(of_row), dtype=np.int32))
        self.kinds = np.concatenate(kinds) if kinds else np.zeros(0, dtype=np.int32)  # the length of each sample
        self.sizes = np.concatenate(sizes) if sizes else np.zeros(0, dtype=np.int32)  # the samples of each row

    def __len__(self) -> int:
        return len(self.sizes)

    def fingerprint(self) -> Any:
        return self.order, self.sizes

    def filled(self, key: tuple[int, int] | None) -> NDArray[Any]:
        """Return the positions of the samples of all rows, one row after the other."""
        order, (_, counts) = self.order.positions, self.order.distinct()
        if key is not None:
            # A random order of all samples, sorted by length again, is a random order within each length.
            places = generator(hash_key("pack", *key)).permutation(len(order))
            kind_of_place = np.repeat(np.arange(len(counts), dtype=self.kinds.dtype), counts)
            order = order[places[np.argsort(kind_of_place[places], kind="stable")]]
        filled = np.empty_like(order)
        filled[np.argsort(self.kinds, kind="stable")] = order
        return filled


def _best_fit(lengths: list[int], counts: list[int], max_tokens: int) -> list[tuple[int, Content]]:
    """Return the rows, in the order in which they were begun: how many have the same content, and the content.

    `lengths` are distinct, longest first, from 1 to `max_tokens`; `counts` are the numbers of samples of each.
    """
    spaces: list[int] = []  # the free spaces of open rows, sorted
    rows_with: dict[int, list[tuple[int, int, Content]]] = {}  # by free space: when begun, how many, their content
    full: list[tuple[int, int, Content]] = []
    num_begun = 0

    def keep(space: int, begun: int, number: int, content: Content) -> None:
        if not space:
            full.append((begun, number, content))
            return
        if space not in rows_with:
            insort(spaces, space)
            rows_with[space] = []
        rows_with[space].append((begun, number, content))

    for kind, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rest = count
        while rest:
            at = bisect_left(spaces, length)
            if at == len(spaces):  # no open row has room
                times = max_tokens // length
                if rest >= times:
                    keep(max_tokens - times * length, num_begun, rest // times, [(kind, times)])
                if rest % times:
                    keep(max_tokens - rest % times * length, num_begun + 1, 1, [(kind, rest % times)])
                num_begun += 2
                break
            space = spaces[at]
            begun, number, content = rows_with[space].pop()
            if not rows_with[space]:
                del rows_with[space], spaces[at]
            times = min(space // length, rest)
            used = min(number, rest // times)
            keep(space - times * length, begun, used, [*content, (kind, times)])
            if number > used:
                keep(space, begun, number - used, content)
            rest -= used * times
    found = full + [row for rows in rows_with.values() for row in rows]
    return [(number, content) for _, number, content in sorted(found, key=lambda row: row[0])]


class PackEpoch(Epoch):
    """An epoch in batches of packed rows.

    Args:
        packs: The rows.
        layout: The division of all rows into batches.
        sharding: The rank and the number of ranks.
        key: The seed and the epoch of a shuffled order; None if the epoch is not shuffled.
    """

    def __init__(self, packs: Packs, layout: Layout, sharding: Sharding, key: tuple[int, int] | None) -> None:
        self._packs = packs
        self._layout = layout
        self._sharding = sharding
        self._key = key
        self._rows = np.arange(len(packs))
        if key is not None:
            self._rows = generator(hash_key("rows", *key)).permutation(len(packs))
            # Rows of a global batch come in the order in which they were begun. The first sample of each has no room in
            # the row before it, so that `collate_samples` finds where rows begin from the lengths alone.
            size = layout.size_of(sharding.num_ranks)
            whole = len(self._rows) // size * size
            self._rows[:whole].reshape(-1, size).sort(axis=1)
            self._rows[whole:].sort()
        self._stops = np.concatenate([[0], np.cumsum(packs.sizes[self._rows], dtype=np.int64)])
        self._starts = np.cumsum(packs.sizes, dtype=np.int64) - packs.sizes
        self.num_samples = int(self._stops[-1])
        self.num_batches = layout.num_batches(len(packs), sharding.num_ranks)
        self.full_size = layout.size_of(sharding.num_ranks)
        self.shortest = self.num_batches - 1
        self._filled: NDArray[Any] | None = None  # built for the first batch

    def _rows_of(self, batch: int) -> range:
        return self._layout.ordinals(batch, len(self._packs), self._sharding)

    def ordinals(self, batch: int) -> range:
        rows = self._rows_of(batch)
        return range(int(self._stops[rows.start]), int(self._stops[rows.stop]))

    def positions(self, batch: int) -> NDArray[Any]:
        """Return the positions of the samples in this rank's part of a batch, row by row."""
        if self._filled is None:
            self._filled = self._packs.filled(self._key)
        rows = self._rows_of(batch)
        parts = [
            self._filled[self._starts[row] : self._starts[row] + self._packs.sizes[row]]
            for row in self._rows[rows.start : rows.stop].tolist()
        ]
        return np.concatenate(parts)
