"""Notes that `write_shards` stores beside shards: the job, the shard sizes and the class names."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kdpipes.core.errors import DataError
from kdpipes.core.messages import logger
from kdpipes.storage.files import cache_folder, cached_name, if_there, make_cache_folder, read_url, replace_file
from kdpipes.storage.retries import NUM_TRIES, NUM_TRIES_WITH_COPY
from kdpipes.storage.urls import is_local

_FORMAT = 1
_DIGITS = re.compile(r"\d+")
_log = logger(__name__)


@dataclass(frozen=True)
class SavedNotes:
    """The notes of one job.

    Args:
        job: Plain data that determines the bytes of the shards: the chain's fingerprints and the arguments.
        class_names: The names of the classes 0, 1, ...
        stops: The position in the chain at which each shard ends, as far as known.
        shards: The number of samples and of bytes of each shard, once all shards are complete.
        format: The format of the notes.
    """

    job: dict[str, Any]
    class_names: Sequence[str] | None = None
    stops: Sequence[int] | None = None
    shards: Sequence[tuple[int, int]] | None = None
    format: int = _FORMAT

    @classmethod
    def from_bytes(cls, content: bytes, url: str) -> SavedNotes:
        """Return the notes in a file.

        Raises:
            DataError: The file has another format, or does not contain notes.
        """
        try:
            found = json.loads(content.decode("utf-8", "surrogateescape"))
            if found["format"] != _FORMAT:
                raise DataError(f"{url!r} is of format {found['format']}, but this kdpipes reads format {_FORMAT}.")
            return msgspec.convert(found, cls)
        except (KeyError, TypeError, msgspec.ValidationError, json.JSONDecodeError, RecursionError) as error:
            hint = "To start over, remove it and the shards beside it."
            raise DataError(f"{url!r} cannot be read as notes of shards: {error}. {hint}") from error


class Seen(NamedTuple):
    """Known facts about an existing shard. A size of -1 or a number of None means unknown."""

    num_bytes: int
    num_samples: int | None = None


class NotesPlace(NamedTuple):
    """The URL at which notes of some shards would be, and the number in the name of each shard, by its URL."""

    url: str
    numbers: dict[str, int]


def notes_places(urls: Sequence[str]) -> list[NotesPlace]:
    """Return the possible locations of notes of shards, by the naming scheme of `write_shards`, without reading.

    >>> notes_places(["a/p-000.tar", "a/p-001.tar"])
    [NotesPlace(url='a/p-shards.json', numbers={'a/p-000.tar': 0, 'a/p-001.tar': 1})]
    """
    known: dict[str, dict[str, int]] = defaultdict(dict)
    for url in urls:
        folder, slash, name = url.rpartition("/")
        stem = name.removesuffix(".tar")
        for found in reversed(list(_DIGITS.finditer(stem)) if name.endswith(".tar") else []):
            place = f"{folder}{slash}{stem[: found.start()]}shards{stem[found.end() :]}.json"
            known[url][place] = int(found[0])
    counts = Counter(place for candidates in known.values() for place in candidates)
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for url, candidates in known.items():
        place = max(candidates, key=lambda each: counts[each])
        places[place][url] = candidates[place]
    return [NotesPlace(place, numbers) for place, numbers in places.items()]


def notes_beside(place: NotesPlace) -> SavedNotes | None:
    """Return the notes of shards; None if they are missing or invalid. Remote notes are stored in the local cache."""
    content = _content_of(place.url)
    try:
        return SavedNotes.from_bytes(content, place.url) if content else None
    except DataError as error:
        _log.warning("%s The shards are taken for those of nobody.", error)
        return None


def _content_of(url: str) -> bytes:
    copy = None if is_local(url) else cache_folder("indexes") / f"{cached_name(url)}.json"
    known = copy.read_bytes() if copy is not None and copy.exists() else None
    try:
        num_tries = NUM_TRIES if known is None else NUM_TRIES_WITH_COPY
        content = if_there(partial(read_url, num_tries=num_tries), url) or b""
    except DataError:
        if known is None:
            raise
        return known
    if copy is not None and content != known:
        with suppress(OSError):  # the cache may be read-only
            make_cache_folder(copy.parent)
            replace_file(copy, content)
    return content


def names_beside(urls: Sequence[str], look: Callable[[], Mapping[str, Seen]]) -> tuple[str, ...] | None:
    """Return the class names in the notes beside shards of a single job; None if the notes have none.

    Only one file is read. `look` returns known facts about each shard by URL. It is called only if the notes have
    names.
    """
    places = notes_places(urls)
    if len(places) != 1 or len(places[0].numbers) != len(urls):
        return None
    notes = notes_beside(places[0])
    return None if notes is None or notes.class_names is None else class_names_of(notes, places[0], look())


def class_names_of(notes: SavedNotes, place: NotesPlace, seen: Mapping[str, Seen]) -> tuple[str, ...] | None:
    """Return the names of the classes 0, 1, ...; None if the notes have none, or describe other shards."""
    shards = notes.shards or ()
    if notes.class_names is None or max(place.numbers.values()) >= len(shards):
        return None
    for url, number in place.numbers.items():
        num_samples, num_bytes = shards[number]
        if seen[url].num_bytes not in (num_bytes, -1) or seen[url].num_samples not in (num_samples, None):
            return None
    return tuple(notes.class_names)
