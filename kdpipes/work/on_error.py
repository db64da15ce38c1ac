"""What becomes of samples that cannot be made."""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from typing import Literal

from kdpipes._sample_pipe import sample_pipe
from kdpipes.errors import ChainError, DataError, FieldError, check_choice, must_be
from kdpipes.sample import Sample
from kdpipes.storage.held_files import CAN_HOLD

__all__ = ["ErrorHandler"]

Action = Literal["raise", "skip", "quarantine"]


@sample_pipe("on_error")
class ErrorHandler:
    """Says what `deal` does with a sample that cannot be made (functional name: ``on_error``).

    Holds for the whole chain up to `deal`, wherever it stands; the last one counts. A sample that is left out shortens
    its batch and moves no other; a batch that loses all of them is left out, or an error where other ranks would wait
    for it. Each is logged, counted in `Loader.stats()`, and listed in `Loader.skipped`. Mistakes in the chain
    (`ChainError`, `FieldError`) are raised all the same. Without `deal` it does nothing.

    A shard that `kdp.stream_shards` cannot read on, or that is missing, is left out from there: one entry, under the
    shard's name, as nobody knows the keys that follow; those before stay. What moves up then is the same in all
    workers, if they see the same damage. Where each of them reads the whole stream and one reads what another cannot,
    `Loader` raises an error, as samples would be lost and doubled; other loaders, and other ranks, cannot know:
    `deal(split="shards")` has no such dependence. Other errors of reading a stream on are raised, as that of a label
    that `filter_classes` does not find, and so are those before a pipe that reads in a thread of its own
    (`.prefetch()`).

    Args:
        action: "raise" the error; "skip" the sample; or put it into "quarantine": skip it, write it down in the file
            `path`, and try no sample that is listed there again, in later epochs and runs as well (shards are read
            again up to the damage, and listed once). With the last two, a
            sample at which worker processes die is left out, too.
        path: A local file of one JSON object per line, `{"key": ..., "error": ...}`.

    Raises:
        ValueError: `path` is given without "quarantine", or the other way round.
        FileNotFoundError: The folder of `path` is missing.
        DataError: What `path` holds is no quarantine, when an epoch begins.

    Example:
        >>> ones = kdp.from_dataset([(1, 0), (0, 0), (4, 0)]).transform("x", lambda x: 1 / x)
        >>> list(ones.on_error("skip").select("x").deal(batch_size=3))
        [[(1.0,), (0.25,)]]
    """

    handles_errors = True
    changes_no_sample = True

    def __init__(self, action: Action = "raise", *, path: str | os.PathLike[str] | None = None) -> None:
        check_choice("action", action, ("raise", "skip", "quarantine"))
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(must_be("path", "a path", path))
        if (path is not None) != (action == "quarantine"):
            raise ValueError('`path` must be given with `on_error("quarantine", path=...)`, and only there.')
        self._action = action
        self._num_looking = 0
        self._path = None if path is None else Path(path).absolute()
        if self._path is not None and not self._path.parent.is_dir():
            raise FileNotFoundError(must_be("path", "in a folder that exists", path))

    def __call__(self, sample: Sample) -> Sample:
        return sample

    def field_names(self, known: frozenset[str]) -> frozenset[str]:
        return known

    def ignores(self, name: str) -> bool:
        """Return whether what it makes does not depend on a field: it makes nothing."""
        return True

    def column_name(self, name: str) -> str | None:
        return name

    def tolerates(self, error: Exception) -> bool:
        """Return whether a sample may be left out for `error`."""
        return self._action != "raise" and not isinstance(error, ChainError | FieldError)

    @property
    def is_tolerant(self) -> bool:
        """Whether samples may be left out at all."""
        return self._action != "raise"

    def begin_looking(self) -> None:
        """Write nothing down until `end_looking`; copies that are made meanwhile never do."""
        self._num_looking += 1

    def end_looking(self) -> None:
        """End what `begin_looking` began."""
        self._num_looking -= 1

    def listed(self) -> dict[str, str]:
        """Return the errors of the samples in quarantine, by key."""
        if self._path is None or not self._path.exists():
            return {}
        listed = {}
        *lines, rest = self._path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate([*lines, rest], 1):
            try:
                entry = json.loads(line or "{}")
                listed.update({entry["key"]: entry["error"]} if entry else {})
            except (ValueError, TypeError, KeyError) as error:
                if line is not rest:  # a process that was killed may have left half a line at the end
                    raise DataError(
                        f"Line {number} of the quarantine {str(self._path)!r} cannot be read ({error}): remove it."
                    ) from error
        return listed

    def write_down(self, key: str, error: str, *, once: bool = False) -> None:
        """Put a sample into quarantine: one line, which processes append whole.

        Args:
            key: Of the sample, or the name of a shard.
            error: Why.
            once: Whether other processes meet the same, and one line will do.
        """
        if self._path is not None and not self._num_looking:
            line = json.dumps({"key": key, "error": error}) + "\n"
            with self._path.open("a+b", buffering=0) as file:
                if once:
                    _lock(file)
                    if key in self.listed():
                        return
                    file.seek(0, os.SEEK_END)
                is_torn = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
                file.write(("\n" if is_torn else "").encode() + line.encode())


def _lock(file: FileIO) -> None:
    """Hold a file until it is closed; where files cannot be locked, two processes may write the same entry."""
    if CAN_HOLD:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
