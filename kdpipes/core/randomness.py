"""Random numbers that depend only on seed, epoch, position and operation, not on the process that draws them."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random.bit_generator import ISpawnableSeedSequence
from numpy.typing import NDArray

from kdpipes.core.processes import ForkLock


def hash_key(*parts: object) -> bytes:
    """Return 32 bytes that depend on the text of every part and on where one part ends and the next begins."""
    return hashlib.blake2b(b"".join(map(_as_word, parts)), digest_size=32).digest()


def _as_word(part: object) -> bytes:
    word = part if isinstance(part, bytes) else str(part).encode()
    return len(word).to_bytes(8, "little") + word


_as_kept_word = lru_cache(maxsize=256, typed=True)(_as_word)  # for parts that many samples share


class SampleKey(NamedTuple):
    """The random key of one delivered sample, as in JAX: all random numbers of the sample derive from it.

    The same key yields the same numbers in every process, for any number of workers and ranks.

    Args:
        seed: The seed of the epochs' order.
        epoch: The epoch number, from 0.
        position: The sample's position in the dealt, shuffled epoch, from 0. A ctx records it as `ordinal`.
        is_padding: Whether the sample fills up a last batch (`deal(uneven="pad")`).
        is_early: Whether `position` counts samples in the order in which a stream makes them, because their positions
            in the dealt epoch are not known yet.
        replayed: In a replay, the ctx whose recorded parameters are used instead of new random ones.
    """

    seed: int = 0
    epoch: int = 0
    position: int = 0
    is_padding: bool = False
    is_early: bool = False
    replayed: Mapping[str, Any] | None = None

    @property
    def ordinal(self) -> int:
        """The position, under the name that it has in a ctx and as `Sample.ordinal`."""
        return self.position

    def key(self, operation: str) -> bytes:
        """Return the key of one operation on this sample."""
        # Not by `hash_key`, because this runs for each random operation on each sample.
        position = str(self.position).encode()
        size = len(position).to_bytes(8, "little")
        words = _as_kept_word(self.seed), _as_kept_word(self.epoch), size, position, _as_kept_word(operation)
        text = b"".join((*words, _as_kept_word("early")) if self.is_early else words)
        return hashlib.blake2b(text, digest_size=32).digest()

    def rng(self, operation: str) -> np.random.Generator:
        """Return the generator of one operation on this sample."""
        return generator(self.key(operation))

    def as_entry(self) -> dict[str, int]:
        """Return the key as a ctx records it."""
        return {"seed": self.seed, "epoch": self.epoch, "ordinal": self.position}

    @classmethod
    def from_entry(cls, entry: Mapping[str, int], **more: Any) -> SampleKey:
        """Return the key that a ctx has recorded; `more` sets the fields that are not recorded."""
        fields: dict[str, Any] = {("position" if name == "ordinal" else name): value for name, value in entry.items()}
        return cls(**fields, **more)


class _Key(ISpawnableSeedSequence):
    """Two words of 64 bits as the key of a Philox generator and of the generators spawned from it.

    `Philox(key=...)` asks the system for entropy, which takes 7 microseconds instead of 3, and its `Generator.spawn`
    returns other generators in each run.
    """

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return self._words

    def spawn(self, n_children: int) -> list[np.random.SeedSequence]:
        return np.random.SeedSequence(int.from_bytes(self._words.tobytes(), "little")).spawn(n_children)


def generator(key: bytes) -> np.random.Generator:
    """Return the counter-based generator (Philox) of a key, which is the same in every process."""
    return np.random.Generator(np.random.Philox(_Key(np.frombuffer(key, np.uint64, 2))))  # type: ignore[arg-type]


class _Borrowed(threading.local):
    """One generator per thread, which is set to one key after the other instead of making a generator for each key.

    Measured: about 3 microseconds less for each random transform of a sample. This is 11 % of a chain that flips
    cached images of 32 by 32 pixels, and 8 % of one that crops and flips them.
    """

    def __init__(self) -> None:
        self.generator = generator(bytes(16))
        self.state: Any = self.generator.bit_generator.state


_borrowed = _Borrowed()


def borrowed_generator(key: bytes) -> np.random.Generator:
    """Return the generator of a key. It is valid until this thread asks for the next one."""
    _borrowed.state["state"]["key"] = np.frombuffer(key, np.uint64, 2)
    _borrowed.generator.bit_generator.state = _borrowed.state
    return _borrowed.generator


class _StreamKeys:
    """The keys of the samples of one epoch of a stream, in the order in which they are made."""

    def __init__(self, seed: int, epoch: int, start: int) -> None:
        self.seed = seed
        self.epoch = epoch
        self._positions = count(start)

    def take(self) -> SampleKey:
        return SampleKey(self.seed, self.epoch, next(self._positions), is_early=True)


class KeyNeededError(BaseException):
    """A function needs the key of its sample, but many samples are read at once. Users' code must not handle it."""


class RowKey:
    """The key of the current sample of a block; None while functions of many samples run."""

    __slots__ = ("epoch", "key", "seed")

    def __init__(self, seed: int, epoch: int) -> None:
        self.seed = seed
        self.epoch = epoch
        self.key: SampleKey | None = None

    def take(self) -> SampleKey:
        if self.key is None:
            raise KeyNeededError
        return self.key


_current: ContextVar[SampleKey | _StreamKeys | RowKey | None] = ContextVar("kdpipes_key", default=None)
_planned: ContextVar[int | None] = ContextVar("kdpipes_planned", default=None)


class _Using:  # `contextlib.contextmanager` would take four times as long, for each sample
    """Context manager that sets a context variable."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[Any], value: Any) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._token)


def using_key(key: SampleKey | RowKey) -> _Using:
    """Return a context manager in which new samples take `key`."""
    return _Using(_current, key)


def row_key() -> RowKey | None:
    """Return the holder of the current sample's key while a block is computed; otherwise None."""
    current = _current.get()
    return current if type(current) is RowKey else None


def with_stream_keys(items: Iterator[Any], seed: int, epoch: int, *, start: int = 0) -> Iterator[Any]:
    """Yield the items of a stream, whose samples take keys numbered from `start`.

    The keys are not in effect while the consumer works on an item.
    """
    return items_with(_current, _StreamKeys(seed, epoch, start), items)


def items_with(variable: ContextVar[Any], value: Any, items: Iterator[Any]) -> Iterator[Any]:
    """Yield items that are made while a context variable has a value, which the consumer does not see."""
    end = object()
    while True:
        with _Using(variable, value):
            item = next(items, end)
        if item is end:
            return
        yield item


def current_key() -> SampleKey | None:
    """Return the key for a new sample; None outside `using_key` and `with_stream_keys`.

    Raises:
        KeyNeededError: A function of many samples is running.
    """
    current = _current.get()
    return current.take() if isinstance(current, _StreamKeys | RowKey) else current


def current_epoch() -> tuple[int, int] | None:
    """Return the seed and the epoch of new samples; None if they get no key."""
    current = _current.get()
    return None if current is None else (current.seed, current.epoch)


def is_replaying() -> bool:
    """Return whether new samples repeat what a ctx has recorded."""
    current = _current.get()
    return isinstance(current, SampleKey) and current.replayed is not None


def planning(epoch: int) -> _Using:
    """Return a context manager in which plan pipes choose the samples of `epoch`, even while another epoch is read."""
    return _Using(_planned, epoch)


_chooser: ContextVar[str | None] = ContextVar("_chooser", default=None)


def choosing(name: str) -> _Using:
    """Return a context manager in which columns are read to choose samples by their values, for the pipe `name`."""
    return _Using(_chooser, name)


def chooser() -> str | None:
    """Return the name of the pipe that chooses samples now; None if columns are only looked at."""
    return _chooser.get()


def plan_epoch() -> int:
    """Return the epoch for which plan pipes choose samples: that of `planning`, else of the current sample, else 0."""
    planned = _planned.get()
    if planned is None:
        current = current_epoch()
        return 0 if current is None else current[1]
    return planned


_globals = ForkLock()

_get_numpy: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]  # NumPy's stubs lack both
_set_numpy: Callable[[Any], None] = np.random.set_bit_generator  # type: ignore[attr-defined]
_spares: defaultdict[type, list[Any]] = defaultdict(list)


@contextmanager
def _spare_numpy_generator() -> Iterator[None]:
    """Let the functions of `np.random` use another bit generator of the same kind, and restore the old one afterwards.

    This takes 0.4 microseconds. `np.random.get_state` and `set_state` take 60, as long as all other work on a sample.
    """
    before = _get_numpy()
    spares = _spares[type(before)]
    spare = spares.pop() if spares else type(before)()
    # A thread that draws from a generator holds its lock and releases the GIL.
    with before.lock:
        _set_numpy(spare)
    try:
        yield
    finally:
        with spare.lock:
            _set_numpy(before)
        spares.append(spare)


@contextmanager
def seeded_globals(key: bytes) -> Iterator[Callable[[], bool]]:
    """Seed the global generators of `random`, NumPy and torch (CPU) from `key`; restore them afterwards.

    Yields a function that returns whether one of them was used. The function uses them itself, so call it once, at the
    end. Threads take turns. Each generator is seeded with different words: `random` and NumPy would otherwise yield the
    same stream for the same seed.
    """
    words = np.frombuffer(hash_key(key, "globals"), dtype=np.uint32)

    def seed() -> None:
        random.seed(words[:3].tobytes())
        np.random.seed(words[3:6])
        torch.default_generator.manual_seed(int.from_bytes(words[6:].tobytes(), "little") >> 1)

    def next_words() -> tuple[Any, ...]:
        # Compare the next 128 bits: reading the whole state takes 30 times as long.
        return random.getrandbits(128), _get_numpy().random_raw(4).tolist(), torch.get_rng_state().numpy().tobytes()

    def has_moved() -> bool:
        now = next_words()
        seed()
        return now != next_words()

    with _globals.lock, _spare_numpy_generator():
        states = random.getstate(), torch.get_rng_state()
        seed()
        try:
            yield has_moved
        finally:
            random.setstate(states[0])
            torch.set_rng_state(states[1])


class GlobalUse:
    """Whether a function has been seen to draw from the global generators.

    Watching takes 30 microseconds a call, as long as seeding, so only the first `num_watched` calls are watched.
    """

    __slots__ = ("is_seen", "num_watched")

    def __init__(self, *, is_seen: bool = False) -> None:
        self.is_seen = is_seen
        self.num_watched = 100

    def call(
        self, key: bytes, function: Callable[..., Any], *args: Any, is_watched: bool, **kwargs: Any
    ) -> tuple[Any, bool]:
        """Call a function with global generators seeded from `key`; return its result, and whether it drew from them.

        If `is_watched` is False, the second value may be False although the function drew.
        """
        is_watched = is_watched or (self.num_watched > 0 and not self.is_seen)
        # Threads may count a call less: then one more is watched, which only takes time.
        self.num_watched -= 1
        with seeded_globals(key) as has_drawn:
            value = function(*args, **kwargs)
            is_random = is_watched and has_drawn()
        self.is_seen = self.is_seen or is_random
        return value, is_random

    def call_for_many(self, function: Callable[[Any], Any], values: Any) -> Any:
        """Return the result of a function for many samples; None if it has drawn, so that each needs its own key."""
        if self.is_seen:
            return None
        result, is_random = self.call(b"", function, values, is_watched=True)
        return None if is_random else result


class EpochCounter:
    """Counts the iterations of one pipe, across the copies that loaders make of it in other processes.

    Counting only the calls of `__iter__` would repeat epoch 0 in torch's DataLoader, which starts new workers for each
    epoch from a parent process that never iterates. The parent calls `set_seed` twice per epoch, before and after it
    starts the workers; loaders that iterate themselves call it once. So the number of epochs that copies in other
    processes have run is half the number of calls that no iteration followed, rounded down. Persistent workers of
    torch's DataLoader count by themselves. A pipe that is taken out of such a loader starts at epoch 0 again, unless
    `set_epoch` is called.
    """

    def __init__(self) -> None:
        self._next = 0
        self._ahead: Any = 0  # added to the count; after `share`, an integer in memory that all processes share
        self._unused_seeds = 0
        self._process = os.getpid()

    def seeded(self) -> None:
        """Note a call of `set_seed`."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._recover()
        self._unused_seeds += 1

    def share(self, ahead: torch.Tensor, *, is_new: bool) -> None:
        """Let `move_to` change the epoch number of all processes through `ahead`, an integer in shared memory."""
        if is_new:  # a worker that starts late must not undo changes of others
            ahead.fill_(int(self._ahead))
        self._ahead = ahead

    def set(self, epoch: int) -> None:
        """Set the number of the next epoch in this process."""
        self.skip(epoch - self.peek())

    def move_to(self, epoch: int) -> None:
        """Set the number of the next epoch in all processes. Several workers may call this for the same epoch."""
        if isinstance(self._ahead, torch.Tensor):
            self._recover()
            self._ahead.fill_(epoch - self._next)
        else:
            self.set(epoch)

    def skip(self, number: int) -> None:
        """Skip the next `number` epochs."""
        self._recover()
        self._next += number

    def peek(self) -> int:
        """Return the number of the next epoch."""
        self._recover()
        return self._next + int(self._ahead)

    def begin(self) -> int:
        """Start the next epoch and return its number."""
        epoch = self.peek()
        self._next += 1
        return epoch

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ahead": int(self._ahead)}

    def _recover(self) -> None:
        self._next += self._unused_seeds // 2
        self._unused_seeds = 0
