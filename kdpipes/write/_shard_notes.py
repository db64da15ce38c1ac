"""What is noted of shards beside them: of which job they are, so that it goes on, and no other gets in between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from kdpipes.core.registry import shown_name
from kdpipes.storage.files import read_url, write_url
from kdpipes.storage.retries import retried
from kdpipes.storage.shard_notes import SavedNotes
from kdpipes.storage.urls import is_local
from kdpipes.write._shard_places import ShardPlaces

__all__ = ["ShardNotes"]


class ShardNotes(SavedNotes):
    """The notes of one job, as the job itself reads and writes them."""

    @classmethod
    def begin(
        cls, places: ShardPlaces, job: dict[str, Any], class_names: Sequence[str] | None
    ) -> tuple[ShardNotes, bool]:
        """Return the notes of a job, and whether they were there: then it goes on.

        Raises:
            FileExistsError: The notes are those of another job, or there are shards without notes.
            DataError: The notes cannot be read.
        """
        try:
            content = read_url(places.notes_url)
        except FileNotFoundError:
            content = None
        there = places.there()
        if content is not None:
            notes = cls.from_bytes(content, places.notes_url)
            differing = [name for name in job if notes.job.get(name) != job[name]]
            if not differing:
                return notes, True
            if there:
                _refuse_other(notes.job, job, differing, places)
        elif there:
            raise FileExistsError(
                f"There are shards already, {there[0]!r} for one, and no {places.notes_url!r} that says which job they "
                "are of. Write elsewhere, or remove them."
            )
        notes = cls(job, class_names)
        places.make_folder()
        notes.keep(places)
        return notes, False

    def keep(self, places: ShardPlaces, **changes: Any) -> ShardNotes:
        """Write the notes down, with changes, and return them."""
        notes = replace(self, **changes)
        content = json.dumps(asdict(notes), ensure_ascii=False, indent=1).encode("utf-8", "surrogateescape")
        if is_local(places.notes_url):
            write_url(places.notes_url, content)
        else:
            retried(lambda: write_url(places.notes_url, content))
        return notes


def _refuse_other(then: dict[str, Any], now: dict[str, Any], differing: list[str], places: ShardPlaces) -> NoReturn:
    """Refuse to go on with the shards of another job."""
    told = "; ".join(_difference(name, then.get(name), now[name]) for name in differing)
    raise FileExistsError(
        f"{places.notes_url!r} says that the shards beside it are of another job: {told}. Give what was given then, to "
        "go on; or write elsewhere; or remove them, and it, to begin anew."
    )


def _difference(name: str, then: Any, now: Any) -> str:
    if name == "arguments":
        return "`fields`, `encode`, `extensions` or `key` is not what it was"
    if name != "pipes":
        return f"`{name}` was {then!r}, and is {now!r}"
    then = then if isinstance(then, list) else []
    changed = [entry for entry in now if entry not in then] or then
    return f"the chain has changed at {', '.join(shown_name(entry.rpartition(':')[0]) for entry in reversed(changed))}"
