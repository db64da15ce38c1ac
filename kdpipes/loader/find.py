"""`find`: say which samples a batch of a run had, which batches had a sample, and which samples raised the loss."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, check_count, check_type, is_sequence, must_be
from kdpipes.core.map_pipe import MapPipe, blocks_at
from kdpipes.core.randomness import planning
from kdpipes.core.sample import Block, Sample
from kdpipes.delivery.layout import Ranks
from kdpipes.delivery.state import check_state
from kdpipes.loader.loader import Loader
from kdpipes.loader.services import ThreadReadingService

_AT_ONCE = 1 << 16  # samples whose keys are compared together
_WINDOW = 101  # steps, around each step, whose median loss is the usual loss


class FoundSample(NamedTuple):
    """One sample of a batch.

    Args:
        epoch: The number of the epoch, from 0.
        batch: The number of the batch in the epoch, from 0.
        rank: The rank that got the sample.
        ordinal: The position of the sample in the dealt epoch. With the seed and the epoch, it decides all random
            numbers of the sample.
        position: The position of the sample in its source.
        key: The key of the sample.
        label: The value of field `y`; None if there is no such field.
        is_padding: Whether the sample fills up a last batch (`deal(uneven="pad")`).
    """

    epoch: int
    batch: int
    rank: int
    ordinal: int
    position: int
    key: str
    label: Any
    is_padding: bool


class Suspect(NamedTuple):
    """A sample whose steps had high losses.

    Args:
        key: The key of the sample.
        label: The value of field `y`; None if there is no such field.
        position: The position of the sample in its source.
        num_steps: The number of steps with the sample whose loss is known.
        share: The geometric mean, over these steps, of the share of steps in the epoch with at least as high a loss.
        chance: The number of samples expected to have as high losses by chance. Suspect are those far below 1.
    """

    key: str
    label: Any
    position: int
    num_steps: int
    share: float
    chance: float


@dataclass(repr=False)
class Found:
    """The result of `find`. Its parts are computed when they are read.

    Args:
        chain: The chain.
        state: A state of the loader; None for a run from the beginning.
        epochs: The epochs to look at.
        batch: The number of the batch; None for the one after the state, or for all batches with a sample of `key`.
        key: The key of the samples; None for all samples.
        num_ranks: The number of ranks.
    """

    chain: Any
    state: Mapping[str, Any] | None
    epochs: Sequence[int]
    batch: int | None
    key: str | None
    num_ranks: int

    @property
    def _number(self) -> int | None:
        is_next = self.batch is None and self.key is None and self.state is not None
        return self.state["batch"] if is_next else self.batch  # type: ignore[index]

    @cached_property
    def samples(self) -> list[FoundSample]:
        """The samples, in the order of epochs, batches, ranks and ordinals.

        Samples that `on_error` has left out or replaced are named as if they had been delivered.
        """
        dealer, known = _dealer_of(Chain.of(self.chain).copy_pipes()), _Known()
        samples: list[FoundSample] = []
        for epoch in self.epochs:
            samples += sorted(self._of_epoch(dealer, epoch, known), key=lambda sample: sample[:4])
        return samples

    def blame(self, losses: ArrayLike | str | os.PathLike[str], num_samples: int = 20) -> list[Suspect]:
        """Return the samples whose steps had high losses more often than chance allows, the most suspect ones first.

        The loss of each step is compared with the median of 101 steps around it, and ranked among the steps of its
        epoch. If losses did not depend on the samples, these ranks would be uniform, and the negative logarithms of
        their shares would add up to a gamma distribution (Fisher's method). Several epochs are needed: in one epoch,
        all samples of a batch are equally suspect.

        Args:
            losses: The loss of each step since the start of the run, `[num_steps]`, NaN if unknown; or the path of a
                CSV file with the columns `step` and `loss`.
            num_samples: The maximum number of samples to return.

        Raises:
            ValueError: `find` was asked for a batch or a key; or the file has no such columns.
            TypeError: The epochs of a stream have no known number of batches.

        Example:
            >>> chain = kdp.from_dataset(range(1000), "x").deal(batch_size=10, shuffle=True)
            >>> epochs = [list(chain) for _ in range(5)]
            >>> losses = [max(sample["x"] == 7 for sample in batch) for epoch in epochs for batch in epoch]
            >>> suspect = kdp.find(chain, epoch=range(5)).blame(losses)[0]
            >>> suspect.key, suspect.num_steps, suspect.share, suspect.chance < 0.01
            ('7', 5, 0.01, True)
        """
        if self._number is not None or self.key is not None:
            raise ValueError("`blame` compares all batches of epochs: `kdp.find(chain, epoch=range(5)).blame(losses)`.")
        dealer = _dealer_of(Chain.of(self.chain).copy_pipes())
        length = len(dealer)
        by_step = losses
        if isinstance(losses, str | os.PathLike):
            table = np.atleast_1d(np.genfromtxt(losses, delimiter=",", names=True))
            if not {"step", "loss"} <= set(table.dtype.names or ()):
                raise ValueError(f"{os.fspath(losses)!r} must be a CSV file with the columns `step` and `loss`.")
            by_step = np.full(int(table["step"].max(initial=-1)) + 1, np.nan)
            by_step[table["step"].astype(np.int64)] = table["loss"]
        by_step = np.asarray(by_step, np.float64)
        numbers: dict[str, int] = {}
        sums, counts = np.zeros(0), np.zeros(0)
        for epoch in self.epochs:
            scores = _scores(by_step[epoch * length : (epoch + 1) * length])
            samples = self._of_epoch(dealer, epoch, _Known())
            places = (numbers.setdefault(sample.key, len(numbers)) * length + sample.batch for sample in samples)
            indices, batches = np.divmod(np.unique(np.fromiter(places, np.int64)), length)
            indices, batches = indices[batches < len(scores)], batches[batches < len(scores)]
            is_known = ~np.isnan(scores[batches])
            indices, batches = indices[is_known], batches[is_known]
            missing = (0, len(numbers) - len(sums))
            sums = np.pad(sums, missing) + np.bincount(indices, scores[batches], len(numbers))
            counts = np.pad(counts, missing) + np.bincount(indices, minlength=len(numbers))
        chances = torch.special.gammaincc(torch.from_numpy(counts), torch.from_numpy(sums)).numpy() * len(counts)
        chances[counts == 0] = len(counts)
        keys = list(numbers)
        top = {keys[index]: index for index in np.argsort(chances, kind="stable")[:num_samples].tolist()}
        suspects: dict[str, Suspect] = {}
        for epoch in self.epochs:
            for sample in self._of_epoch(dealer, epoch, _Known()) if len(suspects) < len(top) else ():
                index = top.get(sample.key)
                if index is not None:
                    share = math.exp(-sums[index] / max(counts[index], 1))
                    numbers_of = int(counts[index]), round(share, 6), float(chances[index])
                    suspects[sample.key] = Suspect(sample.key, sample.label, sample.position, *numbers_of)
        return [suspects[key] for key in top]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The epoch and the number of each batch with one of the samples."""
        return [step for step, _ in groupby(sample[:2] for sample in self.samples)]

    def load(self) -> Any:
        """Make the batch of this process's rank again, exactly as a loader has delivered it.

        Raises:
            ValueError: `find` was not asked for a single batch.
            IndexError: The epoch has no such batch.
        """
        if self._number is None or len(self.epochs) != 1:
            raise ValueError("`load()` needs one batch: `kdp.find(chain, epoch=..., batch=...).load()`.")
        state = self.state
        if state is None:
            with Loader(self.chain) as loader:
                state = loader.state_dict()
        return _load(self.chain, state, self.batch, self.epochs[0])

    def __iter__(self) -> Iterator[FoundSample]:
        return iter(self.samples)

    def __repr__(self) -> str:
        if not self.samples:
            return f"No batch has a sample with the key {self.key!r}. `chain.peek()` shows keys of samples."
        header = ("epoch", "batch", "rank", "ordinal", "position", "key", "label")
        rows = [header, *(tuple(map(str, sample[:7])) for sample in self.samples)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _of_epoch(self, dealer: Any, epoch: int, known: _Known) -> Iterator[FoundSample]:
        """Yield the samples of an epoch. Of an indexed chain, whose plan is known, no field but `y` is read."""
        if not isinstance(dealer.source, MapPipe):
            yield from self._read(dealer, epoch)
            return
        dealer.seed_epoch(epoch)
        for rank in range(self.num_ranks):
            plan = dealer.planned_epoch(epoch, Ranks(rank, self.num_ranks))
            batches = range(plan.num_batches)
            if self._number is not None:
                batches = batches[self._number : self._number + 1]
                if not batches:
                    raise _absent(epoch, self._number)
            for numbers, ordinals, positions in plan.parts(batches, _AT_ONCE):
                # With the keys of delivery, because a label may be drawn at random.
                rows = dealer.rows(epoch, dealer.plan_of(epoch), positions, ordinals.tolist(), plan.num_samples)
                with planning(rows.planned):
                    if self.key is not None:
                        blocks = blocks_at(dealer.source, rows)
                        rows = rows.part(sorted(place for block in blocks for place in known.places(block, self.key)))
                    for block in blocks_at(dealer.source, rows) if len(rows) else ():
                        for number, place in enumerate(block.places):
                            yield _found(block.sample(number), int(numbers[place]), rank)

    def _read(self, dealer: Any, epoch: int) -> Iterator[FoundSample]:
        """Yield the samples of an epoch of a stream, which must be read up to them; only of this process's rank."""
        rank = dealer.sharding().rank
        for number, samples in dealer.whole_batches(epoch):
            for sample in samples:
                if self._number in (None, number) and self.key in (None, sample.key):
                    yield _found(sample, number, rank)
            if number == self._number:
                return
        if self._number is not None:
            raise _absent(epoch, self._number)


def find(
    source_datapipe: Any,
    state: Mapping[str, Any] | None = None,
    batch: int | None = None,
    *,
    epoch: int | Sequence[int] | None = None,
    step: int | None = None,
    key: str | None = None,
    num_ranks: int | None = None,
) -> Found:
    """Say which samples a batch of a run had, or which batches had a sample, and make a batch again.

    An epoch is a function of the chain, the seed and the epoch's number, so nothing needs to have been recorded during
    the run. Of an indexed chain, only field `y` of the samples is loaded. A stream is read up to the batch, and only
    the samples of this process's rank are returned.

    Args:
        source_datapipe: The chain of the loader, as it was in the run.
        state: What `state_dict()` of the loader returned, taken at any time of the run. It gives the number of ranks,
            and the epoch and the batch that come next if they are not passed.
        batch: The number of the batch in the epoch, from 0.
        epoch: The number of the epoch, from 0; or several, such as `range(10)`.
        step: The number of the batch since the start of the run, in place of `batch` and `epoch`.
        key: The key of a sample, a text: only samples with this key are returned.
        num_ranks: The number of ranks; by default, that of `state`, or the current one.

    Returns:
        An object with `samples`, a list of named tuples (epoch, batch, rank, ordinal, position, key, label,
        is_padding); `steps`, the batches with one of them, as pairs (epoch, batch); `load()`, which makes the batch
        again, including augmentations; and `blame(losses)`, which says which samples raised the loss. It prints as a
        table.

    Raises:
        ChainError: The chain has no `deal` whose batches are numbered.
        IndexError: The epoch has no such batch.
        ValueError: The state is that of another chain.

    Example:
        >>> chain = kdp.from_dataset([(n, n % 2) for n in range(8)]).select("x").deal(batch_size=2, shuffle=True)
        >>> with kdp.Loader(chain, num_workers=2) as loader:
        ...     batches, state = list(loader), loader.state_dict()
        >>> kdp.find(chain, epoch=0, batch=3)
        epoch  batch  rank  ordinal  position  key  label
        0      3      0     6        1         1    1
        0      3      0     7        0         0    0
        >>> kdp.find(chain, state, 3, epoch=0).load() == batches[3]
        True
        >>> kdp.find(chain, key="1", epoch=range(3)).steps
        [(0, 3), (1, 1), (2, 3)]
    """
    if state is not None and (not isinstance(state, Mapping) or "batch" not in state):
        raise ValueError(must_be("state", "what `state_dict()` of a Loader returns", state))
    if batch is None and step is None and key is None and state is None and epoch is None:
        raise ValueError(
            "`find` needs a batch, epochs or the key of a sample: pass `batch=`, `step=`, `state`, `epoch=` or `key=`."
        )
    if step is not None and (batch, epoch) != (None, None):
        raise ValueError("`step` counts batches from the start of the run: pass neither `batch` nor `epoch`.")
    check_type("key", key, str | None, "the key of a sample, a text")
    dealer = _dealer_of(source_datapipe)
    if state is not None:
        check_state(state, Chain.of(source_datapipe).fingerprints())
    if step is not None:
        epoch, batch = divmod(check_count("step", step, minimum=0), len(dealer))
    elif batch is not None:
        batch = check_count("batch", batch, minimum=0)
    if epoch is None:
        epoch = 0 if state is None else state["epoch"]
    numbers: Any = epoch if is_sequence(epoch) else [epoch]
    epochs = [check_count("epoch", number, minimum=0) for number in numbers]
    ranks = dealer.num_ranks_in(state or {}) if num_ranks is None else check_count("num_ranks", num_ranks)
    return Found(source_datapipe, state, epochs, batch, key, ranks)


def _scores(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the negative logarithm of the share of steps whose loss exceeds the usual loss at least as much."""
    scores = np.full(len(losses), np.nan)
    known = np.flatnonzero(~np.isnan(losses))
    if len(known):
        values = losses[known]
        windows = sliding_window_view(np.pad(values, _WINDOW // 2, mode="edge"), _WINDOW)
        parts = np.array_split(windows, len(known) // _AT_ONCE + 1)  # because `median` copies them
        excess = values - np.concatenate([np.median(part, axis=1) for part in parts])
        ranks = np.searchsorted(np.sort(excess), excess)  # ties have the same share
        scores[known] = -np.log1p(-ranks / len(known))
    return scores


def _dealer_of(chain: Any) -> Any:
    """Return the `deal` that numbers the batches of a chain."""
    dealer = Chain.of(chain).resumable_deal()
    if dealer is None:
        raise ChainError("`find` needs a chain with `.deal(...)`, and after it only pipes that hold no batches back.")
    return dealer


class _Known(dict[tuple[int, ...], NDArray[np.int8]]):
    """One number per route and position: 2 if the sample has the key, 1 if not, 0 if it is not known yet."""

    def places(self, block: Block, key: str) -> list[int]:
        """Return the places of the samples in a block that have the key. Each key is compared once."""
        positions, known = np.asarray(block.positions), self.get(block.route, np.zeros(0, np.int8))
        if len(known) <= positions.max():
            known = np.pad(known, (0, int(positions.max()) + 1))
        for number in np.flatnonzero(known[positions] == 0).tolist():
            position = block.positions[number]
            # The samples of a block need not be made to know their keys, unless a user has made the only one.
            own = block.key(position) if block.key and len(block) > 1 else block.sample(number).key
            known[position] = 1 + (own == key)
        self[block.route] = known
        return [block.places[number] for number in np.flatnonzero(known[positions] == 2).tolist()]


def _found(sample: Sample, batch: int, rank: int) -> FoundSample:
    draw = sample.draw
    label = sample.get("y")
    label = label.item() if isinstance(label, np.generic) else label
    return FoundSample(draw.epoch, batch, rank, draw.position, sample.position, sample.key, label, draw.is_padding)


def _absent(epoch: int, batch: int) -> IndexError:
    return IndexError(f"Epoch {epoch} has no batch {batch}. Pass a smaller number; batches are numbered from 0.")


def _load(chain: Any, state: Mapping[str, Any], batch: int | None, epoch: int) -> Any:
    """Make a batch again; without `batch`, the one after the state."""
    number = state["batch"] if batch is None else batch
    here = {name: value for name, value in state.items() if name != "offset"} | {"batch": number, "epoch": epoch}
    if (epoch, number) != (state.get("epoch"), state["batch"]):
        here.pop("cursors", None)  # a stream is read from its start
    service = ThreadReadingService(state["num_workers"]) if state.get("num_workers") else None
    with Loader(chain, reading_service=service) as loader:
        length = math.inf
        with suppress(TypeError):  # a stream's end is not known
            length = len(loader)
        if batch is not None and number >= length:
            raise _absent(epoch, number)
        loader.load_state_dict(here)
        # After the last batch of a stream, the next batch is the first one of the next epoch.
        content = next((item for _ in range(2 if batch is None else 1) for item in loader), None)
        reached = loader.state_dict()
    # Whether the loader has just given that batch: others may have been left out.
    last = reached["batch"] if "offset" in reached else reached["batch"] - 1
    is_behind = (reached["epoch"], last) == ((epoch + 1, -1) if number == length - 1 else (epoch, number))
    if content is None or (batch is not None and not is_behind):
        raise _absent(epoch, number)
    return content
