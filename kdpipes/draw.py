"""Randomness that depends on (seed, epoch, ordinal, operation) alone, never on the process that runs it."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Draw", "EpochCounter", "current_draw", "drawing", "hash_key", "seeded_globals"]


def hash_key(*parts: object) -> bytes:
    """Return 32 bytes that depend on the text of every part and on where one part ends and the next begins."""
    text = b"".join(len(word).to_bytes(8, "little") + word for word in (str(part).encode() for part in parts))
    return hashlib.blake2b(text, digest_size=32).digest()


@dataclass(frozen=True)
class Draw:
    """Which delivered sample is being made: the source of all of its randomness.

    Args:
        seed: The seed of the loader's order.
        epoch: The number of the epoch, from 0.
        ordinal: The sample's position in the dealt, shuffled epoch, from 0.
        is_padding: Whether the sample fills up a last batch (`deal(uneven="pad")`).
    """

    seed: int = 0
    epoch: int = 0
    ordinal: int = 0
    is_padding: bool = False

    def key(self, operation: str) -> bytes:
        """Return the key of one operation of this sample."""
        return hash_key(self.seed, self.epoch, self.ordinal, operation)

    def rng(self, operation: str) -> np.random.Generator:
        """Return the operation's own generator: counter-based (Philox), the same in every process."""
        words = np.frombuffer(self.key(operation)[:16], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words))


_current: ContextVar[Draw | None] = ContextVar("kdpipes_draw", default=None)


def current_draw() -> Draw | None:
    """Return the draw that `deal` opened around this read, if any."""
    return _current.get()


@contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Let the samples that are made inside capture `draw`."""
    token = _current.set(draw)
    try:
        yield
    finally:
        _current.reset(token)


_globals_lock = threading.RLock()


@contextmanager
def seeded_globals(key: bytes) -> Iterator[None]:
    """Seed the global generators of `random`, NumPy and torch (CPU) from `key`; restore them afterwards.

    Threads take turns. Each generator gets words of its own: `random.seed(k)` and `np.random.seed` of k's words
    would otherwise give the same stream.
    """
    words = np.frombuffer(hash_key(key, "globals"), dtype=np.uint32)
    with _globals_lock:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(words[:3].tobytes())
        np.random.seed(words[3:6])
        torch.default_generator.manual_seed(int.from_bytes(words[6:].tobytes(), "little") >> 1)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


class EpochCounter:
    """Counts the iterations of one pipe, across the copies that loaders make of it in other processes.

    Counting calls of `__iter__` alone would repeat epoch 0 for ever in torch's DataLoader, whose workers are made anew
    for each epoch from a parent that never iterates. That parent calls `set_seed` twice an epoch, once before and once
    after it makes the workers; so a copy that finds itself in a new process takes half of the calls that no
    iteration followed for the number of epochs that other copies have run.
    """

    def __init__(self) -> None:
        self._next = 0
        self._unused_seeds = 0
        self._process = os.getpid()

    def seeded(self) -> None:
        """Note a call of `set_seed`."""
        self._recover()
        self._unused_seeds += 1

    def set(self, epoch: int) -> None:
        """Make `epoch` the number of the next iteration."""
        self._recover()
        self._next = epoch
        self._unused_seeds = 0

    def begin(self) -> int:
        """Return the number of the iteration that begins now."""
        self._recover()
        epoch = self._next
        self._next, self._unused_seeds = epoch + 1, 0
        return epoch

    def _recover(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._next += self._unused_seeds // 2
            self._unused_seeds = 0
