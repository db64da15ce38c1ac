"""Where the entries of a cache of files lie: spread over folders, none of which gets too many."""

from __future__ import annotations

import math
from typing import NamedTuple

from kdpipes.cache.store import bound_to

__all__ = ["LEAST_FILES_PER_FOLDER", "FileLayout"]

LEAST_FILES_PER_FOLDER = 32
_BESIDES = 8  # files and folders of the cache itself
_MOST_DIGITS = 16
_LOG_RISK = math.log(1e-9)  # that any folder gets too many


class FileLayout(NamedTuple):
    """How entries are spread: by the first digits of a digest of their keys.

    Args:
        num_digits: Which stand for folders.
        digits_per_folder: How many of them name one folder.
    """

    num_digits: int
    digits_per_folder: int

    @classmethod
    def planned(cls, num_entries: int, max_files: int) -> FileLayout:
        """Return a layout in which no folder gets more than `max_files` entries of a number of them.

        >>> FileLayout.planned(1_000_000, 1000).path_of(b"heron")
        '4c/3/4c34d2975d0bd9bb626fccc3d2347c9588a67fc2'
        """
        room = max_files - _BESIDES
        digits_per_folder = int(math.log(room, 16))
        if num_entries <= room:
            return cls(0, digits_per_folder)
        fits = (digits for digits in range(1, _MOST_DIGITS) if _is_safe(num_entries, 16**digits, room))
        return cls(next(fits, _MOST_DIGITS), digits_per_folder)

    def path_of(self, key: bytes) -> str:
        """Return the path of an entry in the cache's folder."""
        name = bound_to(key).hex()
        starts = range(0, self.num_digits, self.digits_per_folder)
        folders = [name[start : min(start + self.digits_per_folder, self.num_digits)] for start in starts]
        return "/".join([*folders, name])


def _is_safe(num_entries: int, num_folders: int, room: int) -> bool:
    """Return whether entries that are spread at random fit, by Chernoff's bound on the fullest folder."""
    mean = num_entries / num_folders
    return mean < room and room - mean + room * math.log(mean / room) + math.log(num_folders) < _LOG_RISK
