"""What `write_shards` has noted beside shards: of which job they are, and what their classes are called."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kdpipes.core.errors import DataError
from kdpipes.storage.drafts import replace_file
from kdpipes.storage.files import cache_folder, make_cache_folder, read_url
from kdpipes.storage.refusals import is_refused
from kdpipes.storage.retries import NUM_TRIES
from kdpipes.storage.urls import identity_of, is_local

__all__ = ["NotesPlace", "SavedNotes", "Seen", "class_names_of", "names_beside", "notes_beside", "notes_places"]

_FORMAT = 1
_NUM_TRIES_WITH_COPY = 2
_DIGITS = re.compile(r"\d+")
_log = logging.getLogger(__name__)

Notes = TypeVar("Notes", bound="SavedNotes")


@dataclass(frozen=True)
class SavedNotes:
    """The notes of one job.

    Args:
        job: What the bytes of the shards depend on, as plain data: the chain's fingerprints, and the arguments.
        class_names: The names of the classes 0, 1, ...
        stops: Up to which position of the chain each shard goes, as far as it has been found out.
        shards: Of each shard, how many samples and bytes it has, once all of them are there.
        format: Of the notes.
    """

    job: dict[str, Any]
    class_names: Sequence[str] | None = None
    stops: Sequence[int] | None = None
    shards: Sequence[Sequence[int]] | None = None
    format: int = _FORMAT

    @classmethod
    def from_bytes(cls: type[Notes], content: bytes, url: str) -> Notes:
        """Return what a file says.

        Raises:
            DataError: It is that of another version, or no notes.
        """
        try:
            found = json.loads(content.decode("utf-8", "surrogateescape"))
            if found["format"] != _FORMAT:
                raise DataError(f"{url!r} is of format {found['format']}, but this kdpipes reads format {_FORMAT}.")
            notes = cls(**found)
            notes._refuse_others()
            return notes
        except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
            way_out = "To start over, remove it and the shards beside it."
            raise DataError(f"{url!r} cannot be read as notes of shards: {error}. {way_out}") from error

    def _refuse_others(self) -> None:
        names = [] if self.class_names is None else self.class_names
        are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        shards = self.shards or ()
        are_sizes = all(len(each) == 2 and all(isinstance(size, int) for size in each) for each in shards)
        if not isinstance(self.job, dict) or not are_names or not are_sizes:
            raise TypeError("what it says is of another kind")


class Seen(NamedTuple):
    """What is known of a shard that is there.

    Args:
        num_bytes: Its size; -1 if it is not known.
        num_samples: None if it is not known.
    """

    num_bytes: int
    num_samples: int | None = None


class NotesPlace(NamedTuple):
    """Where the notes of some shards lie, if there are any.

    Args:
        url: Of the notes.
        numbers: Of the shards, as their URLs have them.
    """

    url: str
    numbers: dict[str, int]


def notes_places(urls: Sequence[str]) -> list[NotesPlace]:
    """Return where the notes of shards would lie, by the way `write_shards` calls them; nothing is read.

    >>> notes_places(["a/p-000.tar", "a/p-001.tar"])
    [NotesPlace(url='a/p-shards.json', numbers={'a/p-000.tar': 0, 'a/p-001.tar': 1})]
    """
    known = {url: _candidates(url) for url in urls}
    counts = Counter(place for candidates in known.values() for place in candidates)
    found: dict[str, dict[str, int]] = {}
    for url, candidates in known.items():
        if candidates:
            place = max(candidates, key=lambda each: counts[each])
            found.setdefault(place, {})[url] = candidates[place]
    return [NotesPlace(place, numbers) for place, numbers in found.items()]


def _candidates(url: str) -> dict[str, int]:
    """Return where a shard's notes would lie for each number in its name that may be the shard's, last one first."""
    folder, slash, name = url.rpartition("/")
    if not name.endswith(".tar"):
        return {}
    stem = name.removesuffix(".tar")
    places = ((stem[: found.start()], int(found[0]), stem[found.end() :]) for found in _DIGITS.finditer(stem))
    return {f"{folder}{slash}{head}shards{tail}.json": number for head, number, tail in reversed(list(places))}


def notes_beside(place: NotesPlace) -> SavedNotes | None:
    """Return the notes of shards; None if there are none, or none that can be read.

    Raises:
        DataError: The storage cannot be reached, and there is no copy of the notes.
    """
    content = _content_of(place.url)
    if not content:
        return None
    try:
        notes = SavedNotes.from_bytes(content, place.url)
    except DataError as error:
        _log.warning("%s The shards are taken for those of nobody.", error)
        return None
    return notes


def _content_of(url: str) -> bytes:
    """Return the content of notes, empty if there are none; the local cache keeps a copy of remote notes."""
    copy = None if is_local(url) else _copy_of(url)
    known = copy.read_bytes() if copy is not None and copy.exists() else None
    try:
        content = read_url(url, num_tries=NUM_TRIES if known is None else _NUM_TRIES_WITH_COPY)
    except (FileNotFoundError, NotADirectoryError):
        content = b""
    except DataError as error:
        if not (is_local(url) or is_refused(error)):  # some stores answer "forbidden" for missing files
            if known is None:
                raise
            return known
        content = b""
    if copy is not None and content != known:
        with suppress(OSError):  # the cache may be read-only
            make_cache_folder(copy.parent)
            replace_file(copy, content)
    return content


def _copy_of(url: str) -> Path:
    name = hashlib.blake2b(identity_of(url).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return cache_folder("indexes") / f"{name}.json"


def names_beside(urls: Sequence[str], look: Callable[[], Mapping[str, Seen]]) -> tuple[str, ...] | None:
    """Return the names of the classes 0, 1, ... that `write_shards` has noted beside shards; None if it has not.

    One file is read.

    Args:
        urls: Of shards of one job.
        look: Returns what is known of each shard, by its URL; called only if there are names.

    Raises:
        DataError: The storage cannot be reached.
    """
    places = notes_places(urls)
    if len(places) != 1 or len(places[0].numbers) != len(urls):
        return None
    notes = notes_beside(places[0])
    if notes is None or notes.class_names is None:
        return None
    return class_names_of(notes, places[0], look())


def class_names_of(notes: SavedNotes, place: NotesPlace, seen: Mapping[str, Seen]) -> tuple[str, ...] | None:
    """Return the names of the classes 0, 1, ...; None where there are none, or the notes are not of these shards.

    Args:
        notes: The notes.
        place: Where they lie.
        seen: What is known of each shard, by its URL.
    """
    if notes.class_names is None or not all(_is_noted(notes, place.numbers[url], seen[url]) for url in place.numbers):
        return None
    return tuple(notes.class_names)


def _is_noted(notes: SavedNotes, number: int, seen: Seen) -> bool:
    if notes.shards is None or number >= len(notes.shards):
        return False
    num_samples, num_bytes = notes.shards[number]
    return seen.num_bytes in (num_bytes, -1) and seen.num_samples in (num_samples, None)
