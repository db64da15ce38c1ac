"""Whole shards from elsewhere, kept on this machine: downloaded ahead of need, shared by processes, limited in size."""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdpipes.core.errors import DataError
from kdpipes.core.masked import masked
from kdpipes.core.processes import forget_after_fork
from kdpipes.storage.download import ReplacedError, Shard
from kdpipes.storage.files import Version, cache_folder
from kdpipes.storage.forward import pread
from kdpipes.storage.held_files import CAN_HOLD, HeldFile
from kdpipes.storage.shard_fetcher import ShardFetcher
from kdpipes.storage.shard_folder import ShardFolder
from kdpipes.storage.shard_order import ShardOrder

__all__ = ["Shard", "ShardCache"]

_log = logging.getLogger(__name__)


class ShardCache:
    """Whole shards in a folder, shared with all processes of this machine that use the same one.

    A shard is downloaded by one process, and resumed where that one was killed; it is there for others when all of it
    is there and verified. Room is made by removing shards that no process is reading: first those that are not in the
    order that is expected, then those that it needs last. Safe for threads and for forked processes; a copy of it has
    the same folder.

    Args:
        folder: Where; None is `shards` in the local cache (`KDPIPES_CACHE_DIR`, `~/.cache/kdpipes`).
        max_bytes: How much it may have, with what is being downloaded; None is half of what is free there.
        num_ahead: How many shards beyond the one that is read are downloaded ahead of need.
        num_ranges: How many requests are under way at a time.
        range_size: How many bytes one request has.
    """

    def __init__(
        self,
        folder: str | None = None,
        max_bytes: int | None = None,
        *,
        num_ahead: int = 2,
        num_ranges: int = 8,
        range_size: int = 1 << 23,
    ) -> None:
        self._place = folder, max_bytes
        self._sizes = {"num_ahead": num_ahead, "num_ranges": num_ranges, "range_size": range_size}
        self._end: Any = None
        self.forget()
        forget_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_anew, (self._place, self._sizes)

    def forget(self) -> None:
        """Begin anew, with no threads and nothing held."""
        self._made: ShardFetcher | None = None
        self._lock = threading.Lock()
        self._has_warned = False
        if self._end is not None:
            self._end.detach()

    def takes(self, shard: Shard) -> bool:
        """Return whether a shard can be kept, as far as is known."""
        fetcher = self._fetcher()
        try:
            if shard.name in fetcher.refused or shard.version.size > fetcher.folder.max_bytes():
                return False
        except OSError as error:
            fetcher.failure = error
        return self._is_able(fetcher)

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether so much can be kept, as far as is known."""
        fetcher = self._fetcher()
        try:
            return num_bytes <= fetcher.folder.max_bytes()
        except OSError as error:
            fetcher.failure = error
        return self._is_able(fetcher)

    @property
    def has_own_folder(self) -> bool:
        """Whether the user has chosen the folder of the cache."""
        return self._place[0] is not None

    def has_version(self, url: str, version: Version) -> bool:
        """Return whether a version of a shard is in the cache."""
        return CAN_HOLD and self.has(Shard(url, version))

    def has(self, shard: Shard) -> bool:
        """Return whether a shard is there."""
        return self._fetcher().folder.has(shard)

    def expect(self, shards: Sequence[Shard], untils: Sequence[int] | None = None) -> None:
        """Say which shards an epoch that begins will read, in order; the first of them are downloaded.

        Args:
            shards: In order of need; one that is needed again later stands there again.
            untils: For each, the last one in this order that is begun before it is done with; its own place if not
                given.
        """
        fetcher = self._fetcher()
        fetcher.failure = None
        fetcher.refused.clear()
        self._order(shards, untils)

    def announce(self, shards: Sequence[Shard]) -> None:
        """Say which shards will be read soon, where the order of the epoch is not known."""
        self._order(shards, None)

    def _order(self, shards: Sequence[Shard], untils: Sequence[int] | None) -> None:
        fetcher = self._fetcher()
        fetcher.order = ShardOrder(shards, untils)
        if self._is_able(fetcher):
            fetcher.look_ahead()

    def read(self, shard: Shard, offset: int, size: int, *, fetches: bool = True) -> bytes | None:
        """Return bytes of a shard, or those that are there; None if it is not on this machine, and cannot be.

        Args:
            shard: Which one.
            offset: Of the first byte.
            size: How many.
            fetches: Whether to download one that is not there.

        Raises:
            ReplacedError: The shard is another one now.
        """
        file = self._file(shard, fetches=fetches)
        content = None if file is None else pread(file.descriptor, size, offset)
        return content if content is None or len(content) == size else None

    def repair(self, shard: Shard, offset: int, content: bytes) -> None:
        """Put right some bytes of a shard that were damaged on the way here, or here."""
        try:
            self._fetcher().folder.repair(shard, offset, content)
        except OSError as error:  # the folder may be read-only
            _log.warning("The damaged copy of %s cannot be repaired: %s", masked(shard.url), error)

    def _file(self, shard: Shard, *, fetches: bool) -> HeldFile | None:
        fetcher = self._fetcher()
        if not CAN_HOLD:
            return None
        if fetcher.order.reach(shard):
            fetcher.look_ahead()
        try:
            is_wanted = fetches and self.takes(shard)
            file = fetcher.file_of(shard, fetches=is_wanted)
            if file is None and is_wanted and fetcher.order.need(shard.name) is not None:
                fetcher.refused.add(shard.name)  # in this epoch: what is there is needed sooner
            return file
        except ReplacedError:
            raise
        except DataError as error:  # a member alone may come all the same
            _log.warning("%s Its members are read one by one.", error)
            fetcher.refused.add(shard.name)
        except OSError as error:
            fetcher.failure = error
            self._is_able(fetcher)
        return None

    def _is_able(self, fetcher: ShardFetcher) -> bool:
        if not CAN_HOLD:
            fetcher.failure = OSError("files cannot be locked on this system")
        if fetcher.failure is not None and not self._has_warned:
            self._has_warned = True
            text = f"Shards cannot be kept in {str(fetcher.folder.path)!r}: {fetcher.failure}. Members are read alone."
            warnings.warn(text, stacklevel=2)
        return fetcher.failure is None

    def _fetcher(self) -> ShardFetcher:
        with self._lock:
            if self._made is None:
                folder, max_bytes = self._place
                path = cache_folder("shards") if folder is None else Path(folder).expanduser()
                self._made = ShardFetcher(ShardFolder(path, max_bytes), **self._sizes)
                self._end = weakref.finalize(self, self._made.stop)
            return self._made


def _made_anew(place: tuple[str | None, int | None], sizes: dict[str, Any]) -> ShardCache:
    return ShardCache(*place, **sizes)
