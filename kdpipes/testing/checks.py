"""Checks of chains and pipes: the same batches everywhere, resume at any batch, every sample once, sound pipes.

Each check raises AssertionError with what broke and where. They start worker processes.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any, Literal

import numpy as np
import torch

from kdpipes.core import pickling
from kdpipes.core.chain import Chain
from kdpipes.core.errors import add_note, must_be
from kdpipes.core.map_pipe import MapPipe, redrawing_name
from kdpipes.core.operation import operation_of
from kdpipes.core.pipe import Pipe
from kdpipes.core.sample import Sample
from kdpipes.core.stock import Seeded
from kdpipes.core.torch_pipes import IterableWrapper, IterDataPipe, MapDataPipe
from kdpipes.delivery.dealer import Dealer
from kdpipes.loader.loader import Loader
from kdpipes.loader.receipt import verify_receipts
from kdpipes.loader.services import ThreadReadingService
from kdpipes.look.batch import dealer_of
from kdpipes.sources.to_samples import SampleMakerIterDataPipe, SampleMakerMapDataPipe
from kdpipes.testing.faults import kill_one_worker
from kdpipes.work.fields import Selector

Make = Callable[..., Any]
Flavour = Literal["map", "iter"]
_ITEMS = tuple((float(number), number % 3) for number in range(7))
_POINTS = 5  # batches after which `check_resumable` resumes
_NOTHING: Any = object()


def plain(value: Any) -> Any:
    """Return a batch or an item as data that `==` compares completely: bytes of tensors, arrays and images."""
    if isinstance(value, Sample):
        return "sample", value.key, plain(dict(value)), plain(value.ctx)
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else tuple(map(plain, value))
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(value, str | bytes | int | float | None):
        return repr(value)  # NaN equals itself here
    try:
        array = np.asarray(value)
    except Exception:  # whatever a user's class raises
        array = np.asarray(None)
    if array.dtype != object:
        return type(value).__name__, str(array.dtype), array.shape, array.tobytes()
    return type(value).__name__, pickle.dumps(value)


@contextmanager
def as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """Make this process a rank, as `torchrun` does by `RANK` and `WORLD_SIZE`."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _made(chain: Any) -> Any:
    """Return a chain; a function is called to make a new one, as in another process."""
    return chain() if callable(chain) else chain


def _dealt(chain: Any) -> Any:
    """Return the `deal` of a chain, or of one that a function makes."""
    return dealer_of(_made(chain))


def _check_same(expected: Sequence[Any], found: Sequence[Any], where: str, hint: str) -> None:
    """Raise if two lists of epochs, of batches or of items differ, naming the first difference."""
    for number, (one, other) in enumerate(zip_longest(expected, found, fillvalue=_NOTHING)):
        if one is _NOTHING or other is _NOTHING:
            raise AssertionError(f"{where}: {len(found)} batches, but {len(expected)} were expected. {hint}")
        if one != other:
            raise AssertionError(f"{where}: batch {number} differs. {hint}")


def check_elastic(
    chain: Any,
    *,
    num_workers: Sequence[int] = (1, 2, 3),
    num_ranks: Sequence[int] = (1, 2),
    threads: bool = True,
    num_epochs: int = 2,
) -> None:
    """Check that the batches of a chain do not depend on the number of workers and ranks.

    Ranks are compared only for `deal(global_batch_size=...)`, because with `batch_size=`, the global batch grows with
    the number of ranks. They are compared by the output of `deal` itself, without a loader. Without a process group,
    ranks do not wait for each other: of a stream, batches are compared until the first rank ends unless they are kept.

    Args:
        chain: A chain with `deal`; or a function that makes it, which is called for each run, as in another process.
        num_workers: The numbers of worker processes to compare with none.
        num_ranks: The numbers of ranks to compare with one.
        threads: Whether to also compare with two worker threads.
        num_epochs: The number of epochs to compare.

    Raises:
        AssertionError: Batches differ.
        ChainError: The chain has no `deal`.

    Example:
        >>> numbers = kdp.from_dataset([(n, n % 3) for n in range(10)])
        >>> check_elastic(numbers.select("x").deal(global_batch_size=4, shuffle=True), num_workers=[2])
    """
    deal = _dealt(chain)
    hint = (
        "Something depends on the process: a generator of the pipe's own, a counter, the time, or the order of calls. "
        "Take a parameter `rng`, and keep nothing between samples."
    )
    with as_rank(0, 1):
        expected = _epochs(chain, num_epochs)
        ways: dict[str, dict[str, Any]] = {
            f"{number} worker processes": {"num_workers": number} for number in num_workers
        }
        if threads:
            ways["2 threads"] = {"reading_service": ThreadReadingService(2)}
        for way, service in ways.items():
            found = _epochs(chain, num_epochs, **service)
            for epoch, (one, other) in enumerate(zip(expected, found, strict=True)):
                _check_same(one, other, f"With {way}, epoch {epoch}", hint)
        sizes = deal.sizes()
        whole = _epochs(lambda: _dealt(chain), num_epochs)
    for number in num_ranks:
        parts = []
        for rank in range(number):
            with as_rank(rank, number):
                if deal.sizes() == sizes:
                    parts.append(_epochs(lambda: _dealt(chain), num_epochs))
        is_cut = deal.has_lanes and deal.uneven != "keep"
        for epoch in range(num_epochs if len(parts) == number else 0):
            batches = list(zip_longest(*(part[epoch] for part in parts), fillvalue=[]))
            batches = [batch for batch in batches if all(batch)] if is_cut else batches
            joined = [[item for part in batch for item in part] for batch in batches]
            expected_whole = whole[epoch][: len(joined)] if is_cut else whole[epoch]
            _check_same(expected_whole, joined, f"With {number} ranks, epoch {epoch}", hint)


def _epochs(chain: Any, num_epochs: int, **service: Any) -> list[list[Any]]:
    with Loader(_made(chain), **service) as loader:
        return [[plain(batch) for batch in loader] for _ in range(num_epochs)]


def check_resumable(chain: Any, *, num_workers: Sequence[int] = (0, 2)) -> None:
    """Check that a chain resumes after any batch with the very next one, and that its state is small JSON.

    States are taken with each number of workers, before the first batch, after some batches, and after the last one,
    and loaded with each other number.

    Args:
        chain: A chain with `deal`, or a function that makes it: see `check_elastic`.
        num_workers: The numbers of worker processes.

    Raises:
        AssertionError: Batches differ after a resume, or a state is not plain data.

    Example:
        >>> numbers = kdp.from_dataset([(n, n % 3) for n in range(10)])
        >>> check_resumable(numbers.select("x").deal(batch_size=4, shuffle=True))
    """
    _dealt(chain)
    expected = _epochs(chain, 2)
    size = len(expected[0])
    points = sorted({0, size, *np.linspace(0, size, min(size + 1, _POINTS)).astype(int).tolist()})
    hint = "What a pipe keeps while it is iterated is not in the state: derive it from the epoch and the position."
    for number in num_workers:
        for point in points:
            with Loader(_made(chain), num_workers=number) as loader:
                batches = iter(loader)
                for _ in islice(batches, point):
                    pass
                state = loader.state_dict()
            try:
                text = json.dumps(state)
            except TypeError as error:
                raise AssertionError(f"The state after {point} batches is not plain data: {error}.") from error
            if len(text) > 2048 + 64 * len(state["pipes"]):
                raise AssertionError(f"The state after {point} batches takes {len(text):,} bytes.")
            for other in num_workers:
                with Loader(_made(chain), num_workers=other) as loader:
                    loader.load_state_dict(json.loads(text))
                    rest = [plain(batch) for batch in loader]
                    if point == size and not rest:  # a stream learns only now that the epoch is over
                        rest = [plain(batch) for batch in loader]
                where = f"Resumed after {point} of {size} batches, {number} then {other} workers"
                _check_same(expected[0][point:] if point < size else expected[1], rest, where, hint)


def check_exactly_once(chain: Any, *, num_workers: int = 2, num_ranks: int = 2, kill: bool = True) -> None:
    """Check that ranks and workers together deliver every planned sample once, also if a worker is killed.

    Samples are identified by their keys and positions in the epoch; their fields are not loaded. For indexed chains,
    the receipts of the ranks are verified, too.

    Args:
        chain: A chain with `deal`, or a function that makes it; see `check_elastic`.
        num_workers: The number of worker processes of each rank.
        num_ranks: The number of ranks.
        kill: Whether to kill a worker of each rank after its first batch.

    Raises:
        AssertionError: Samples were lost or delivered more than once, or several samples of a source have one key.
        ChainError: The chain has no `deal`.

    Example:
        >>> numbers = kdp.from_dataset([(n, n % 3) for n in range(10)])
        >>> check_exactly_once(numbers.select("x").deal(batch_size=2, shuffle=True))
    """
    deal = _keyed(_dealt(chain))
    for node in Chain.of(deal):
        if isinstance(node.pipe, MapPipe) and not node.upstream and len(node.pipe):
            key, number = Counter(node.pipe.column("key").tolist()).most_common(1)[0]
            require(number == 1, f"{number} samples of `{node.name}` have the key {key!r}: keys must be unique.")
    found: list[Any] = []
    receipts = []
    for rank in range(num_ranks):
        made = _keyed(_dealt(chain))
        with _expecting_deaths(), as_rank(rank, num_ranks), Loader(made, num_workers=num_workers) as loader:
            for number, batch in enumerate(loader):
                found += batch
                if kill and num_workers and not number:
                    kill_one_worker()
            if isinstance(deal.source, MapPipe):
                receipts.append(loader.receipt())
    is_dropped = deal.uneven == "drop"
    with as_rank(0, 1), Loader(deal) as loader:  # of a stream, one rank may drop more samples than several
        batches = [deal.source] if is_dropped and deal.has_lanes else loader
        expected = [item for batch in batches for item in batch]
    # The ordinals of a stream that is read in lanes are those of a rank, and not compared.
    whole, got = (
        Counter((key, -1 if deal.has_lanes else ordinal) for key, ordinal, is_padding in items if not is_padding)
        for items in (expected, found)
    )
    hint = "Plans and streams must give the same in every process: no generator of their own, no counter, no set order."
    lost: Counter[tuple[str, int]] = Counter() if is_dropped else whole - got
    for what, difference in (("not delivered", lost), ("delivered too often", got - whole)):
        if difference:
            key, ordinal = min(difference)
            raise AssertionError(
                f"{difference.total()} of {whole.total()} samples were {what} to {num_ranks} ranks with {num_workers} "
                f"workers each, for example {key!r}, sample {ordinal} of the epoch. {hint}"
            )
    if receipts and (problems := verify_receipts(receipts).problems):
        raise AssertionError(" ".join(problems))


@contextmanager
def _expecting_deaths() -> Iterator[None]:
    """Log no deaths of workers, which would look as if memory had run out."""
    log = logging.getLogger("kdpipes")

    def is_other(record: logging.LogRecord) -> bool:
        return "Another one takes its place" not in record.getMessage()

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def _keyed(deal: Dealer) -> Any:
    """Return a copy of a `deal` whose batches hold the keys of samples instead of their fields."""
    source = deal.source
    while isinstance(operation_of(source), Selector):
        source = Chain.of(source).end.upstream[0].pipe
    copied = copy.copy(deal)
    copied.source = source.select("key ordinal is_padding")
    return copied


# What every pipe promises, one function each. `make` makes the pipe on a source of some items, or of those passed.


def _source(flavour: Flavour, items: Sequence[Any] = _ITEMS) -> Any:
    if flavour == "map":
        from kdpipes.core.torch_pipes import SequenceWrapper

        return SampleMakerMapDataPipe(SequenceWrapper(list(items), deepcopy=False), fields="x y")
    return SampleMakerIterDataPipe(IterableWrapper(list(items), deepcopy=False), fields="x y")


def _items(pipe: Any) -> list[Any]:
    return [plain(item) for item in pipe]


def _copied(pipe: Any) -> Any:
    try:
        return pickle.loads(pickling.dumps(pipe))  # noqa: S301 - what was pickled here
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise AssertionError(
            f"The pipe cannot be pickled: {error}. Open files and connections at first use, and leave "
            "them out in `__getstate__`."
        ) from error


def require(is_kept: bool, text: str) -> None:
    """Raise an AssertionError unless a promise is kept."""
    if not is_kept:  # `assert` would check nothing under `python -O`
        raise AssertionError(text)


def gives_the_same_in_every_epoch(make: Make, is_random: bool) -> None:
    """Two epochs of a pipe without randomness are equal."""
    pipe = make()
    first = _items(pipe)
    second = _items(pipe)
    require(bool(first), "The pipe gives nothing of 7 samples.")
    require(
        is_random or first == second,
        "Two epochs differ, but nothing declares that it draws random numbers. If they are to differ, pass "
        "`is_random=True`.",
    )


def is_the_same_when_made_again(make: Make, is_random: bool) -> None:
    """The first epochs of two pipes are equal, as in two processes."""
    hint = "Draw random numbers from `rng`, or from a generator that is made of a seed and the epoch."
    one = make()
    other = make()
    if any(isinstance(pipe, Seeded) for pipe in Chain.of(one).pipes):  # stock pipes, which a loader seeds
        return
    first = _items(one)
    second = _items(other)
    require(first == second, f"A pipe that is made again gives something else. {hint}")


def has_columns_of_its_samples(make: Make, is_random: bool) -> None:
    """The columns of an indexed pipe hold the values of its samples."""
    pipe = make()
    if is_random or not isinstance(pipe, MapPipe) or pipe.traits.gives != "samples":
        return
    for name in sorted(pipe[0]) if len(pipe) else ():
        column = pipe.column(name).tolist()
        values = [sample[name] for sample in pipe]
        require(
            [plain(value) for value in column] == [plain(value) for value in values],
            f"Column {name!r} differs from field {name!r} of the samples. Declare the field as changed.",
        )


def begins_anew_after_a_break(make: Make, is_random: bool) -> None:
    """An epoch that was abandoned is followed by a whole one."""
    pipe = make()
    size = len(_items(pipe))
    next(iter(pipe))
    found = len(_items(pipe))
    require(found == size, f"After an epoch that was left after one item, the next one has {found} items, not {size}.")


def pickles_at_any_time(make: Make, is_random: bool) -> None:
    """The pipe pickles before, during and after an epoch, and a copy gives a whole epoch."""
    pipe = make()
    size = len(_items(_copied(pipe)))
    iterator = iter(pipe)
    next(iterator)
    require(len(_items(_copied(pipe))) == size, "A copy made during an epoch gives another number.")
    require(1 + sum(1 for _ in iterator) == size, "Pickling during an epoch changes the rest of it.")
    require(len(_items(_copied(pipe))) == size, "A copy made after an epoch gives another number.")


def has_an_exact_length_or_none(make: Make, is_random: bool) -> None:
    """The length is the number of items; streams may have none."""
    pipe = make()
    try:
        length = len(pipe)
    except TypeError:
        require(isinstance(pipe, IterDataPipe), "An indexed pipe must have a length.")
        return
    found = len(_items(pipe))
    require(length == found, f"The length is {length}, but there are {found} items.")


def gives_nothing_of_nothing(make: Make, is_random: bool) -> None:
    """An empty source gives nothing, and no error."""
    require(_items(make([])) == [], "Of an empty source, the pipe gives items.")


def leaves_the_input_alone(make: Make, is_random: bool) -> None:
    """Check that values from the source are not modified in place: caches and datasets would keep the change."""
    items = [(np.array(number), label) for number, label in _ITEMS]  # `x += 1` changes such an array
    _items(make(items))
    found = [(float(number), label) for number, label in items]
    require(found == list(_ITEMS), "The pipe changes the values of its source in place: make new ones.")


def gives_the_same_in_workers(make: Make, is_random: bool) -> None:
    """Two worker processes give what one process gives."""
    pipe = make()
    if not any(node.traits.role == "deal" for node in Chain.of(pipe)):
        gives_items = isinstance(pipe, Pipe) and pipe.traits.gives == "items"
        pipe = (pipe if gives_items else pipe.select("key")).deal(batch_size=2)
    check_elastic(pipe, num_workers=[1, 2], num_ranks=(), threads=False, num_epochs=1)


def hides_no_method(make: Make, is_random: bool) -> None:
    """No attribute has the name of a method of pipes, which it would hide."""
    names = {*IterDataPipe.functions, *MapDataPipe.functions}
    pipe = make()
    hidden = sorted(names & set(vars(pipe)))
    require(not hidden, f"The attributes {', '.join(hidden)} hide methods of the same name: rename them.")


Promise = Callable[[Make, bool], None]
PROMISES: tuple[Promise, ...] = (
    hides_no_method,
    gives_the_same_in_every_epoch,
    is_the_same_when_made_again,
    has_columns_of_its_samples,
    begins_anew_after_a_break,
    pickles_at_any_time,
    has_an_exact_length_or_none,
    gives_nothing_of_nothing,
    leaves_the_input_alone,
    gives_the_same_in_workers,
)


def check_pipe(build: Any, *, flavour: Flavour | None = None, is_random: bool | None = None) -> None:
    """Check what every pipe promises: on 7 samples with a number `x` and a class `y`, and on none.

    A pipe must yield the same items in every epoch (unless it is random), when it is made again and with two workers,
    and a whole epoch after one that was abandoned. Columns must hold the values of the samples. It must be picklable at
    any time, have an exact length or none, yield nothing for an empty source, leave the data of its source unchanged,
    and hide no method of datapipes.

    Args:
        build: The class of a pipe that takes only its source, or a function from pipe to pipe. A function may add other
            pipes, such as `deal` before a batch pipe.
        flavour: The kind of the source: "map" for an indexed one, "iter" for a stream; by default, that of the class.
        is_random: Whether epochs differ; by default, what the pipes of the chain declare.

    Raises:
        AssertionError: A promise is broken; the message says which.

    Example:
        >>> check_pipe(lambda source: source.take_percent(to_percent=0.5))
    """
    if isinstance(build, IterDataPipe | MapDataPipe) or not callable(build):
        hint = "Write `lambda source: source.name(...)`. For a whole chain, there is `check_elastic`."
        raise TypeError(must_be("build", "a function from pipe to pipe", build, hint))
    if flavour is None:
        flavour = "iter" if isinstance(build, type) and issubclass(build, IterDataPipe) else "map"
    source = _source(flavour)
    chain = Chain.of(build(source))
    if not any(pipe is source for pipe in chain.pipes):
        hint = "Check a source of your own in a chain: `check_elastic(lambda: Source(...).select(...).deal(...))`."
        raise ValueError(must_be("build", "a function that adds pipes to its argument", build, hint))
    if is_random is None:
        redrawn = (redrawing_name(pipe) for pipe in chain.of_type(MapPipe))
        is_shuffled = chain.deal is not None and chain.deal.pipe.is_shuffled
        is_random = is_shuffled or chain.random_name() is not None or any(name is not None for name in redrawn)
    for promise in PROMISES:
        try:
            promise(lambda items=_ITEMS: build(_source(flavour, items)), is_random)
        except AssertionError as error:
            raise AssertionError(f"{promise.__name__.replace('_', ' ')}: {error}") from None
        except Exception as error:
            add_note(error, f"kdpipes: while checking that the pipe {promise.__name__.replace('_', ' ')}")
            raise
