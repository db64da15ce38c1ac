"""What becomes of samples that cannot be made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal, NoReturn

from filelock import FileLock

from kdpipes.core.errors import ChainError, DataError, FieldError, check_choice, check_count, is_number, must_be
from kdpipes.core.operation import ErrorHandler
from kdpipes.core.sample import Sample
from kdpipes.core.sample_pipe import work_pipe

__all__ = ["OnError"]

_LEAST = 100  # samples that `max_share` applies to from the start, as a share of fewer means little
Action = Literal["raise", "skip", "quarantine", "substitute"]


@work_pipe("on_error")
class OnError(ErrorHandler):
    """Says what `deal` does with a sample that cannot be made (functional name: ``on_error``).

    Holds for the whole chain up to `deal`, wherever it stands; the last one counts. A sample that is left out shortens
    its batch and moves no other; a batch that loses all of them is left out, or an error where other ranks would wait
    for it. Each is logged, counted in `Loader.stats()`, and listed in `Loader.skipped`. Mistakes in the chain
    (`ChainError`, `FieldError`) are raised all the same. Without `deal` it does nothing.

    A bug in a transform looks like bad data. Therefore the epoch ends with an error if more samples fail than
    `max_share` or `max_samples` allow, or if no sample can be made. Each rank counts its own samples. `kdp.Loader`
    counts those of all workers in the order of the batches, so that the error does not depend on the number of workers;
    in other loaders, each worker counts its own samples. Shards are not counted, and writers have no limits.

    A shard that `kdp.stream_shards` cannot read on, or that is missing, is left out from there: one entry, under the
    shard's name, as nobody knows the keys that follow; those before stay. What moves up then is the same in all
    workers, if they see the same damage. Where each of them reads the whole stream and one reads what another cannot,
    `Loader` raises an error, as samples would be lost and doubled; other loaders, and other ranks, cannot know:
    streams that are read in lanes have no such dependence. Other errors of reading a stream on are raised, as that of a
    label that `filter_classes` does not find, and so are those before a pipe that reads in a thread of its own
    (`.prefetch()`).

    Args:
        action: "raise" the error; "skip" the sample; "quarantine" skips it, lists it in the file `path`, and never
            tries a listed sample again, also in later epochs and runs (shards are read again up to the damage, and
            listed once); "substitute" replaces it by another sample of the chain, so that batches keep their shapes.
            With the last three, a sample at which worker processes die is skipped or replaced, too. The substitute is
            drawn from the seed, the epoch and the ordinal, and is the same for any number of workers and after a
            resume. It has its own key, the ordinal of the replaced sample, and `is_padding` True; the entry in
            `Loader.skipped` has `is_replaced` True. Streams and `deal(batch_by=...)` cannot substitute; `write_shards`
            and `write_records` skip the sample.
        path: A local file of one JSON object per line, `{"key": ..., "error": ...}`.
        max_share: The largest share, from 0 to 1, of an epoch's samples so far that may fail. Until 100 samples have
            been read, it is a share of 100.
        max_samples: How many samples may fail in an epoch; None means any number.

    Raises:
        ValueError: `path` is given without "quarantine", or the other way round; or a limit is out of range.
        FileNotFoundError: The folder of `path` is missing.
        ChainError: "substitute" is used before a `deal` that does not support it.
        DataError: When an epoch begins, `path` is not a quarantine file; or too many samples fail in an epoch.

    Example:
        >>> ones = kdp.from_dataset([(1, 0), (0, 0), (4, 0)]).transform("x", lambda x: 1 / x)
        >>> list(ones.on_error("skip").select("x").deal(batch_size=3))
        [[(1.0,), (0.25,)]]
    """

    def __init__(
        self,
        action: Action = "raise",
        *,
        path: str | os.PathLike[str] | None = None,
        max_share: float = 0.1,
        max_samples: int | None = None,
    ) -> None:
        check_choice("action", action, ("raise", "skip", "quarantine", "substitute"))
        rule = "a share, from 0 to 1"
        if not is_number(max_share):
            raise TypeError(must_be("max_share", rule, max_share))
        if not 0 <= max_share <= 1:
            raise ValueError(must_be("max_share", rule, max_share))
        self.max_share = float(max_share)
        self.max_samples = None if max_samples is None else check_count("max_samples", max_samples, minimum=0)
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

    def tolerates(self, error: Exception) -> bool:
        """Return whether a sample may be left out for `error`."""
        return self._action != "raise" and not isinstance(error, ChainError | FieldError)

    @property
    def is_tolerant(self) -> bool:
        """Whether samples may be left out at all."""
        return self._action != "raise"

    @property
    def substitutes(self) -> bool:
        """Whether another sample replaces one that failed."""
        return self._action == "substitute"

    def refuse_many(self, num_skipped: int, num_seen: int, key: str, error: str) -> None:
        """Raise if more samples were skipped than the limits allow.

        Args:
            num_skipped: The number of samples skipped so far.
            num_seen: The approximate number of samples so far.
            key: The key of the last skipped sample.
            error: The error of that sample.
        """
        if self.max_samples is not None and num_skipped > self.max_samples:
            what = f"{num_skipped} samples could not be made: more than `max_samples={self.max_samples}`"
            self._refuse(what, key, error)
        if num_skipped > self.max_share * max(num_seen, _LEAST):
            what = (
                f"{num_skipped} of about {num_seen} samples could not be made: more than `max_share={self.max_share}`"
            )
            self._refuse(what, key, error)

    def refuse_all(self, key: str, error: str) -> NoReturn:
        """Raise because no sample could be made; the arguments are those of `refuse_many`."""
        self._refuse("No sample could be made", key, error)

    def _refuse(self, what: str, key: str, error: str) -> NoReturn:
        listed = "" if self._path is None else f", and remove the samples that {str(self._path)!r} lists because of it"
        raise DataError(
            f"{what}. The last one is {key!r}: {error}. If a pipe has a bug, fix it{listed}. If the data are really "
            "that bad, raise the limits `max_share` and `max_samples` of `.on_error(...)`."
        )

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
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if line is not rest:  # a process that was killed may have left half a line at the end
                    raise DataError(
                        f"Line {number} of the quarantine {str(self._path)!r} cannot be read ({error}): remove it."
                    ) from error
        return listed

    def write_down(self, key: str, error: str, *, once: bool = False) -> None:
        """Put a sample into quarantine: append one line while no other process does.

        Args:
            key: The key of the sample, or the name of a shard.
            error: Why it could not be made.
            once: Whether other processes meet the same error, and one line is enough.
        """
        if self._path is not None and not self._num_looking:
            line = json.dumps({"key": key, "error": error}) + "\n"
            lock = FileLock(self._path.with_name(f".{self._path.name}.lock"))
            with lock, self._path.open("a+b") as file:
                if once and key in self.listed():
                    return
                is_torn = False
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    is_torn = file.read(1) != b"\n"  # a process was killed while it wrote
                file.write(("\n" if is_torn else "").encode() + line.encode())
