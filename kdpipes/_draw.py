"""Randomness that depends on (seed, epoch, ordinal, operation) alone, never on the process that runs it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import random
import sys
import threading
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

__all__ = [
    "Draw",
    "EarlyDraws",
    "EpochCounter",
    "current_draw",
    "drawing",
    "generator",
    "hash_key",
    "is_drawing",
    "is_replaying",
    "lent_generator",
    "made_under",
    "plan_epoch",
    "planning",
    "seeded_globals",
]


def hash_key(*parts: object) -> bytes:
    """Return 32 bytes that depend on the text of every part and on where one part ends and the next begins."""
    return _hash(b"".join(map(_as_word, parts)))


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32).digest()


def _as_word(part: object) -> bytes:
    word = part if isinstance(part, bytes) else str(part).encode()
    return len(word).to_bytes(8, "little") + word


_as_kept_word = lru_cache(maxsize=256, typed=True)(_as_word)  # of what many samples share


class Draw(NamedTuple):
    """Which delivered sample is being made: the source of all of its randomness.

    Args:
        seed: The seed of the loader's order.
        epoch: The number of the epoch, from 0.
        ordinal: The sample's position in the dealt, shuffled epoch, from 0.
        is_padding: Whether the sample fills up a last batch (`deal(uneven="pad")`).
        is_early: Whether the ordinal is that of the sample's making: the sample of a stream is made before it is
            known when it will be delivered.
        replayed: In a replay, the ctx whose parameters are used in place of new ones.
    """

    seed: int = 0
    epoch: int = 0
    ordinal: int = 0
    is_padding: bool = False
    is_early: bool = False
    replayed: Mapping[str, Any] | None = None

    def key(self, operation: str) -> bytes:
        """Return the key of one operation of this sample."""
        words = _as_kept_word(self.seed), _as_kept_word(self.epoch), _as_word(self.ordinal), _as_kept_word(operation)
        return _hash(b"".join((*words, _as_kept_word("early")) if self.is_early else words))

    def rng(self, operation: str) -> np.random.Generator:
        """Return the operation's own generator: counter-based (Philox), the same in every process."""
        return generator(self.key(operation))

    def as_entry(self) -> dict[str, int]:
        """Return the draw as a ctx records it."""
        return {"seed": self.seed, "epoch": self.epoch, "ordinal": self.ordinal}


class _Key(ISpawnableSeedSequence):
    """The key of a Philox generator in the place of a seed: beside a key, NumPy asks the system for entropy.

    Args:
        words: Two words of 64 bits.
    """

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return self._words

    def spawn(self, n_children: int) -> list[np.random.SeedSequence]:
        return np.random.SeedSequence(int.from_bytes(self._words.tobytes(), "little")).spawn(n_children)


def generator(key: bytes) -> np.random.Generator:
    """Return the generator of a key."""
    return np.random.Generator(np.random.Philox(_Key(np.frombuffer(key, np.uint64, 2))))  # type: ignore[arg-type]


class _Lent(threading.local):
    """The generator of a thread that is set to one key after the other, which takes a quarter of making one."""

    def __init__(self) -> None:
        self.generator = generator(bytes(16))
        self.state: Any = self.generator.bit_generator.state


_lent = _Lent()


def lent_generator(key: bytes) -> np.random.Generator:
    """Return the generator of a key for who keeps it no longer than until this thread asks for the next one."""
    _lent.state["state"]["key"] = np.frombuffer(key, np.uint64, 2)
    _lent.generator.bit_generator.state = _lent.state
    return _lent.generator


class EarlyDraws:
    """The draws of the samples that a stream makes in an epoch, numbered as they are made: until they are delivered."""

    def __init__(self, seed: int, epoch: int, *, start: int = 0) -> None:
        self.seed = seed
        self.epoch = epoch
        self._numbers = count(start)

    def take(self) -> Draw:
        """Return the draw of the next sample."""
        return Draw(self.seed, self.epoch, next(self._numbers), is_early=True)


_current: ContextVar[Draw | EarlyDraws | None] = ContextVar("kdpipes_draw", default=None)


def current_draw() -> Draw | None:
    """Return the draw for a sample that is made now: what `deal` or a stream has opened around its making, if any."""
    current = _current.get()
    return current.take() if isinstance(current, EarlyDraws) else current


def current_epoch() -> tuple[int, int] | None:
    """Return the seed and the epoch of the samples that are made now, if they are made in one."""
    current = _current.get()
    return None if current is None else (current.seed, current.epoch)


def is_replaying() -> bool:
    """Return whether samples that are made now repeat what a ctx has recorded."""
    current = _current.get()
    return isinstance(current, Draw) and current.replayed is not None


def is_drawing() -> bool:
    """Return whether samples that are made now are given a draw."""
    return _current.get() is not None


_planned: ContextVar[int | None] = ContextVar("kdpipes_planned", default=None)


def plan_epoch() -> int:
    """Return the epoch that plan pipes choose samples for: that of `planning`, of the current sample, or else 0."""
    planned = _planned.get()
    if planned is None:
        current = _current.get()
        return 0 if current is None else current.epoch
    return planned


class planning:
    """Context manager in which plan pipes choose the samples of `epoch`, also while another epoch is read."""

    __slots__ = ("_epoch", "_token")

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def __enter__(self) -> None:
        self._token = _planned.set(self._epoch)

    def __exit__(self, *error: object) -> None:
        _planned.reset(self._token)


class drawing:  # a class: the context manager of a generator takes four times as long, for each sample
    """Let the samples that are made inside capture `draw`."""

    __slots__ = ("_draw", "_token")

    def __init__(self, draw: Draw | EarlyDraws) -> None:
        self._draw = draw

    def __enter__(self) -> None:
        self._token = _current.set(self._draw)

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)


def made_under(draws: EarlyDraws, items: Iterator[Any]) -> Iterator[Any]:
    """Yield `items`, each made while `draws` are open; they are closed while a consumer has the item."""
    end = object()
    while True:
        with drawing(draws):
            item = next(items, end)
        if item is end:
            return
        yield item


_globals_lock = threading.RLock()


def _renew_lock() -> None:
    """Take a lock that nobody holds: a process that was forked while another thread drew would wait for ever."""
    global _globals_lock
    _globals_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def seeded_globals(key: bytes) -> Iterator[Callable[[], bool]]:
    """Seed the global generators of `random`, NumPy and torch (CPU) from `key`; restore them afterwards.

    Yields what tells, once, whether one of them has moved since. Threads take turns. Each generator gets words of its
    own: `random.seed(k)` and `np.random.seed` of k's words would otherwise give the same stream.
    """
    words = np.frombuffer(hash_key(key, "globals"), dtype=np.uint32)

    def seed() -> None:
        random.seed(words[:3].tobytes())
        np.random.seed(words[3:6])
        torch.default_generator.manual_seed(int.from_bytes(words[6:].tobytes(), "little") >> 1)

    def has_moved() -> bool:
        now = random.getstate(), numpy_state.read(), torch.get_rng_state().numpy().tobytes()
        seed()
        return now != (random.getstate(), numpy_state.read(), torch.get_rng_state().numpy().tobytes())

    with _globals_lock:
        numpy_state = _numpy_state()
        states = random.getstate(), numpy_state.read(), torch.get_rng_state()
        seed()
        try:
            yield has_moved
        finally:
            random.setstate(states[0])
            numpy_state.write(states[1])
            torch.set_rng_state(states[2])


class _NumpyMemory:
    """The state of NumPy's global generator as the memory that it lies in: `get_state` takes 50 times as long.

    A second normal number that the generator keeps back is not part of it: it is let go of when the state is written.
    """

    _SIZE = 625 * 4  # a Mersenne Twister: 624 words of 32 bits, and which of them comes next

    def __init__(self, generator: Any) -> None:
        self._address = generator.ctypes.state_address
        self._lock = generator.lock

    def read(self) -> bytes:
        with self._lock:
            return ctypes.string_at(self._address, self._SIZE)

    def write(self, state: bytes) -> None:
        with self._lock:
            np.random.seed(0)  # which lets go of that number
            ctypes.memmove(self._address, state, self._SIZE)

    def is_understood(self) -> bool:
        """Return whether the memory is what it is taken for."""
        state: Any = np.random.get_state(legacy=False)
        key = state["state"]["key"].tobytes() if state["bit_generator"] == "MT19937" else b""
        return self.read() == key + int(state["state"].get("pos", 0)).to_bytes(4, sys.byteorder)


class _NumpyState:
    """The state of NumPy's global generator, of whatever kind that is."""

    def read(self) -> bytes:
        return pickle.dumps(np.random.get_state(legacy=False))

    def write(self, state: bytes) -> None:
        np.random.set_state(pickle.loads(state))  # noqa: S301 - read above


_numpy_by_generator: tuple[Any, _NumpyMemory | _NumpyState] = None, _NumpyState()


def _numpy_state() -> _NumpyMemory | _NumpyState:
    """Return how to read and write the state of NumPy's global generator, which may be set to another one."""
    global _numpy_by_generator
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs lack it
    if generator is not _numpy_by_generator[0]:
        memory = _NumpyMemory(generator) if isinstance(generator, np.random.MT19937) else None
        _numpy_by_generator = generator, memory if memory is not None and memory.is_understood() else _NumpyState()
    return _numpy_by_generator[1]


class EpochCounter:
    """Counts the iterations of one pipe, across the copies that loaders make of it in other processes.

    Counting calls of `__iter__` alone would repeat epoch 0 for ever in torch's DataLoader, whose workers are made anew
    for each epoch from a parent that never iterates. That parent calls `set_seed` twice an epoch, once before and once
    after it makes the workers; loaders that iterate themselves call it once. So half of the calls that no iteration
    followed, rounded down, is the number of epochs that copies in other processes have run. Persistent workers of
    torch's DataLoader count for themselves; a pipe that is taken out of such a loader begins anew: `set_epoch`.
    """

    def __init__(self) -> None:
        self._next = 0
        self._ahead: Any = 0  # added to the count; after `share`, it is in memory that all processes share
        self._unused_seeds = 0
        self._process = os.getpid()

    def seeded(self) -> None:
        """Note a call of `set_seed`."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._recover()
        self._unused_seeds += 1

    def set(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration."""
        self._recover()
        self._next = epoch - int(self._ahead)
        self._unused_seeds = 0

    def share(self, ahead: torch.Tensor, *, is_new: bool) -> None:
        """Let `move_to` in one process move the numbers of all, by one integer in shared memory.

        Args:
            ahead: The integer.
            is_new: Whether it is still to be set: a worker that starts late must not undo what others have moved.
        """
        if is_new:
            ahead.fill_(int(self._ahead))
        self._ahead = ahead

    def move_to(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration in all processes, which count on from there.

        Several workers may call this for the same epoch.
        """
        self._recover()
        if isinstance(self._ahead, torch.Tensor):
            self._ahead.fill_(epoch - self._next)
        else:
            self._next = epoch

    def skip(self, number: int) -> None:
        """Leave out the next `number` iterations."""
        self._recover()
        self._next += number

    def peek(self) -> int:
        """Return the number of the next iteration."""
        self._recover()
        return self._next + int(self._ahead)

    def begin(self) -> int:
        """Return the number of the iteration that begins now."""
        self._recover()
        self._next += 1
        return self._next - 1 + int(self._ahead)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ahead": int(self._ahead)}

    def _recover(self) -> None:
        self._next += self._unused_seeds // 2
        self._unused_seeds = 0
