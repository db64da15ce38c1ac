"""Decide what happens to samples that cannot be made."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from filelock import FileLock

from kdpipes.core.errors import (
    ChainError,
    DataError,
    FieldError,
    check_choice,
    check_count,
    check_number,
    check_type,
    must_be,
)
from kdpipes.core.messages import counted
from kdpipes.core.operation import ErrorHandler, entry_name
from kdpipes.core.sample_pipe import work_pipe

_LEAST = 100  # `max_share` counts at least this many samples, as a share of fewer means little
Action = Literal["raise", "skip", "quarantine", "substitute"]


@work_pipe("on_error")
class OnError(ErrorHandler):
    """Sets what `deal` does with samples that cannot be made (functional name: ``on_error``).

    It applies to the whole chain up to `deal`, wherever it is; if there are several, the last one counts. A sample that
    is left out makes its batch shorter and does not move other samples. A batch without samples is left out, or raises
    an error if other ranks would wait for it. Each failure is logged, counted in `Loader.stats()` and listed in
    `Loader.skipped`. Mistakes in the chain (`ChainError`, `FieldError`) are always raised. Without `deal`, this pipe
    has no effect.

    A bug in a transform looks like bad data. Therefore the epoch ends with an error if more samples fail than
    `max_share` or `max_samples` allow, or if no sample can be made. Each rank counts its own samples. `kdp.Loader`
    counts those of all workers in the order of the batches, so that the error does not depend on the number of workers;
    in other loaders, each worker counts its own samples. Shards are not counted, and writers have no limits.

    If `kdp.stream_shards` finds a shard missing or damaged, the rest of the shard is left out. There is one entry under
    the name of the shard, because the keys of the lost samples are unknown. The samples that follow move up, equally in
    all workers if all see the same damage. If workers each read the whole stream (`deal(split="samples")`) and only
    some can read the shard, `kdp.Loader` raises an error, because samples would be lost and duplicated. Other loaders
    and other ranks cannot detect this; streams that are read in lanes do not depend on it. Other errors while a
    stream is read are raised: those of its source, of plan pipes such as `filter_classes`, and of torch's own pipes.
    Work pipes of your own (`kdp.sample_pipe`) work as samples pass. Samples at which they fail are left out if all
    pipes between them and `deal` are work pipes or `.shuffle()`.

    Args:
        action: What to do with a sample that fails. "raise": raise the error. "skip": leave the sample out.
            "quarantine": leave it out, list it in the file `path`, and never try it again, including later epochs and
            runs (shards are read again up to the damage, and listed once). "substitute": replace it with another sample
            of the chain, so that batches keep their shapes. Except for "raise", this includes samples at which worker
            processes die. The substitute is drawn from the seed, the epoch and the ordinal, so it is the same for any
            number of workers and after a resume. It has its own key, the ordinal of the replaced sample, and
            `is_padding` True; the entry in `Loader.skipped` has `is_replaced` True. Streams, and batches by length or
            by value, cannot substitute; `write_shards` and `write_records` skip the sample.
        path: The local file for "quarantine", with one JSON object per line: `{"key": ..., "error": ...}`.
        max_share: The largest share of failures among the samples of an epoch so far, from 0 to 1. For fewer than 100
            samples, it is a share of 100.
        max_samples: The largest number of failures in an epoch; None for no limit.

    Raises:
        ValueError: `path` and "quarantine" are not used together, or a limit is out of range.
        FileNotFoundError: The folder of `path` does not exist.
        ChainError: `deal` does not support "substitute"; or a sample in quarantine has no key.
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
        self.max_share = check_number("max_share", max_share, "a share, from 0 to 1", 0, 1)
        self.max_samples = None if max_samples is None else check_count("max_samples", max_samples, minimum=0)
        check_type("path", path, str | os.PathLike | None, "a path")
        if (path is not None) != (action == "quarantine"):
            raise ValueError('`path` must be given with `on_error("quarantine", path=...)`, and only there.')
        self._action = action
        self._path = None if path is None else Path(path).absolute()
        if self._path is not None and not self._path.parent.is_dir():
            raise FileNotFoundError(must_be("path", "a file in an existing folder", path))

    def tolerates(self, error: Exception) -> bool:
        return self._action != "raise" and not isinstance(error, ChainError | FieldError)

    @property
    def is_tolerant(self) -> bool:
        return self._action != "raise"

    @property
    def substitutes(self) -> bool:
        return self._action == "substitute"

    def reject_many(self, num_skipped: int, num_seen: int, key: str, error: str) -> None:
        if self.max_samples is not None and num_skipped > self.max_samples:
            what = f"{counted(num_skipped, 'sample')} could not be made: more than `max_samples={self.max_samples}`"
            self._reject(what, key, error)
        if num_skipped > self.max_share * max(num_seen, _LEAST):
            what = (
                f"{num_skipped} of about {num_seen} samples could not be made: more than `max_share={self.max_share}`"
            )
            self._reject(what, key, error)

    def reject_all(self, key: str, error: str) -> NoReturn:
        self._reject("No sample could be made", key, error)

    def _reject(self, what: str, key: str, error: str) -> NoReturn:
        listed = "" if self._path is None else f", and remove the samples that {str(self._path)!r} lists because of it"
        raise DataError(
            f"{what}. The last one is {key!r}: {error}. If a pipe has a bug, fix it{listed}. If the data are really "
            "that bad, raise the limits `max_share` and `max_samples` of `.on_error(...)`."
        )

    def listed(self) -> dict[str, str]:
        if self._path is None or not self._path.exists():
            return {}
        listed = {}
        *lines, rest = self._path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate([*lines, rest], 1):
            try:
                entry = json.loads(line or "{}")
                listed.update({entry_name(entry["key"], entry.get("position", ())): entry["error"]} if entry else {})
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if line is not rest:  # a process that was killed may have left half a line at the end
                    raise DataError(
                        f"Line {number} of the quarantine {str(self._path)!r} cannot be read ({error}): remove it."
                    ) from error
        return listed

    def write_down(self, key: str, error: str, *, position: Sequence[int] = (), once: bool = False) -> None:
        if self._path is not None and not self.num_looking:
            if not key:  # it would stand for all other samples without a key, too
                raise ChainError(
                    "`on_error` identifies samples in quarantine by their keys, but a sample that failed has none: "
                    f"{error}. Pass a unique key, `kdp.Sample(fields, key=...)`, in the source."
                )
            place = {"position": list(position)} if position else {}
            line = json.dumps({"key": key, **place, "error": error}) + "\n"
            lock = FileLock(self._path.with_name(f".{self._path.name}.lock"))
            with lock, self._path.open("a+b") as file:
                if once and entry_name(key, position) in self.listed():
                    return
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                start = b"" if file.read() in b"\n" else b"\n"  # a process was killed while it wrote
                file.write(start + line.encode())
