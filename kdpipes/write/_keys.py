"""Keys that tars can hold, each of them once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.errors import DataError

__all__ = ["KnownKeys", "as_tar_key", "check_tar_key", "hashes_of", "twice_error"]

_SUFFIX = re.compile(r"(?<=[^/])\.[A-Za-z][A-Za-z0-9]{0,4}$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WAY_OUT = "Name samples otherwise: `key=lambda sample: ...`."


def as_tar_key(key: str) -> str:
    """Return the key of a sample as webdataset can hold it: a path whose file name has no dot.

    A file's extension is left out, other dots become underscores, as do backslashes; slashes stay.

    >>> as_tar_key("heron/0001.jpg"), as_tar_key("photos.tar/0001.v2.jpg"), as_tar_key("/data/1.5")
    ('heron/0001', 'photos.tar/0001_v2', 'data/1_5')
    """
    folder, _, name = _SUFFIX.sub("", key).replace("\\", "_").rpartition("/")
    parts = [part for part in folder.split("/") if part not in ("", ".")]
    return check_tar_key("/".join([*parts, name.replace(".", "_")]), key)


def check_tar_key(key: str, shown: str | None = None) -> str:
    """Return a key that webdataset can hold, or refuse it."""
    if not isinstance(key, str):
        raise TypeError(f"`key` must return a string, but returned {type(key).__name__}.")
    folder, _, name = key.rpartition("/")
    bad = "has no name" if not name else "leads out of its folder" if ".." in folder.split("/") else ""
    bad = bad or ("has a dot in its name, at which webdataset would cut it" if "." in name else "")
    bad = bad or ("holds control characters" if _CONTROL.search(key) else "is absolute" if key.startswith("/") else "")
    if bad:
        raise DataError(f"Key {key if shown is None else shown!r} cannot stand in a tar: it {bad}. {_WAY_OUT}")
    return key


def hashes_of(keys: Iterable[str]) -> NDArray[np.uint64]:
    """Return 64 bits for each key."""
    digests = b"".join(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(digests, dtype=np.uint64)


class KnownKeys:
    """Notices a key that comes twice, by 64 bits of each: 12 bytes a sample.

    What comes is compared in batches that grow with what is known, so that all of it takes n log n.

    Args:
        keys_of: Returns the keys of a shard, for the error.
    """

    def __init__(self, keys_of: Callable[[int], Iterable[str]]) -> None:
        self._keys_of = keys_of
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._shards = np.zeros(0, dtype=np.int32)
        self._new: list[tuple[NDArray[np.uint64], int]] = []
        self._num_new = 0

    def add(self, hashes: NDArray[np.uint64], shard: int) -> None:
        """Take the keys of a shard."""
        self._new.append((hashes, shard))
        self._num_new += len(hashes)
        if 2 * self._num_new >= len(self._hashes):
            self.check()

    def check(self) -> None:
        """Raise an error if a key has come twice so far."""
        hashes = np.concatenate([self._hashes, *(part for part, _ in self._new)])
        new = [np.full(len(part), shard, dtype=np.int32) for part, shard in self._new]
        shards = np.concatenate([self._shards, *new])
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._shards, self._new, self._num_new = hashes[order], shards[order], [], 0
        twice = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        if len(twice):
            self._refuse(int(twice[0]))

    def _refuse(self, place: int) -> None:
        wanted, first, second = self._hashes[place], int(self._shards[place]), int(self._shards[place + 1])
        keys = list(self._keys_of(first))
        key = keys[int(np.flatnonzero(hashes_of(keys) == wanted)[0])]
        raise twice_error(key, f"shards {first} and {second}")


def twice_error(key: str, where: str) -> DataError:
    """Return the error for a key that two samples have."""
    return DataError(
        f"Two samples have the key {key!r}, in {where}: keys must be unique. A chain that gives samples again "
        "(`.oversample()`, `.repeat_until()`) names them by position: `key=lambda sample: f'{sample.ordinal:09}'`."
    )
