"""Unique keys for samples whose names repeat, such as table rows that name the same image."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MARK = " #"  # between a name and its repetition number
_REPETITION = re.compile(r" #\d+$")


def repetitions(names: Sequence[str]) -> NDArray[np.int32] | None:
    """Return a number that makes each name unique, `[n]`: 0 for its first occurrence, then 2, 3, ...

    Return None if no name repeats.

    >>> repetitions(["a", "b", "a", "a #2", "a"])
    array([0, 0, 3, 0, 4], dtype=int32)
    """
    hashes = np.fromiter(map(hash, names), dtype=np.int64, count=len(names))
    order = np.argsort(hashes, kind="stable")
    is_equal = np.diff(hashes[order]) == 0
    if not is_equal.any():
        return None
    numbers = np.zeros(len(names), dtype=np.int32)
    taken = {name for name in names if _MARK in name}
    last: dict[str, int] = {}
    for place in np.union1d(order[:-1][is_equal], order[1:][is_equal]).tolist():
        name = names[place]
        if name not in last:
            last[name] = 1
            continue
        number = last[name] + 1
        while unique_key(name, number) in taken:
            number += 1
        last[name] = numbers[place] = number
    return numbers if numbers.any() else None


def unique_key(name: str, number: int) -> str:
    """Return the key of the repetition of a name: `a.jpg #2`."""
    return f"{name}{_MARK}{number}" if number else name


def without_repetition(key: str) -> str:
    """Return the name that a key was made from.

    >>> without_repetition("a.jpg #2")
    'a.jpg'
    """
    return _REPETITION.sub("", key)
