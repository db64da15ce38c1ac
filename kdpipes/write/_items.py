"""What records are made of: the samples of an indexed chain, or the items of a data list."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.callback import Callback, call_seeded
from kdpipes.core.chain import Chain
from kdpipes.core.errors import ChainError, DataError, add_note, must_be
from kdpipes.core.fingerprint import digest, digest_values
from kdpipes.core.map_pipe import MapPipe
from kdpipes.core.pipe import gives_samples
from kdpipes.core.progress import shown_if_slow
from kdpipes.core.randomness import SampleKey, hash_key
from kdpipes.core.sample import Sample
from kdpipes.storage.files import read_url
from kdpipes.storage.record_part import Record
from kdpipes.storage.shared import PackedStrings, Shared
from kdpipes.storage.urls import is_local
from kdpipes.write._left_out import made_or_left_out

__all__ = ["Items", "items_of"]

_AT_ONCE = 256  # positions that are announced together, to sources that lie elsewhere
_LISTS = (".txt", ".csv")

Encode = Callable[[Any], Any]


class Items:
    """What records are made of, by position.

    Args:
        source: An indexed chain, or a sequence of items.
        encode: Makes a dictionary of fields of an item; None takes a sample's own fields.
        place: Where the items come from, for errors.
    """

    def __init__(self, source: MapPipe | Sequence[Any], encode: Encode | None, place: str) -> None:
        self._chain = source if isinstance(source, MapPipe) else None
        self._items: Shared[Sequence[Any]] | None = None if isinstance(source, MapPipe) else Shared(source)
        self._size = len(source)
        self._encode = None if encode is None else Callback("encode", encode)
        self._place = place

    def __len__(self) -> int:
        return self._size

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes, if the chain knows them."""
        return None if self._chain is None else self._chain.class_names()

    def fingerprint(self) -> str:
        """Return a hash of what the items are, and of what becomes of them."""
        parts: list[Any] = [digest(None if self._encode is None else self._encode.function)]
        if self._items is not None:
            parts.append(digest(self._items))
        else:
            nodes = [node for node in reversed(Chain.of(self._chain)) if not node.traits.is_transparent]
            parts += (part for node in nodes for part in (digest(node.pipe), digest_values(node.pipe)))
        return hash_key(*parts).hex()[:32]

    def records(self, positions: Any, what: str) -> Iterator[Record]:
        """Yield the records of some positions; those that `on_error` lets be left out are."""
        handler = None if self._chain is None else Chain.of(self._chain).error_handler()
        listed = {} if handler is None else handler.listed()
        for place, position in shown_if_slow(enumerate(positions.tolist()), len(positions), what):
            if place % _AT_ONCE == 0 and self._chain is not None:
                self._chain.announce(positions[place : place + _AT_ONCE])
            record = self._tried(position, handler, listed)
            if record is not None:
                yield record

    def _tried(self, position: int, handler: Any, listed: Mapping[str, str]) -> Record | None:
        def record(sample: Sample) -> Record | None:
            return None if sample.key in listed else self._record(sample, position)

        return made_or_left_out(partial(self._sample, position), record, position=position, handler=handler)

    def _sample(self, position: int) -> Sample:
        if self._chain is None:
            return Sample({}, key=str(position), index=position, draw=SampleKey(position=position))
        sample: Sample = self._chain[position]
        return sample

    def _record(self, sample: Sample, position: int) -> Record:
        if self._encode is None:
            return Record(sample.key, dict(sample))
        item = sample if self._items is None else self._items.value[position]
        try:
            made = call_seeded(self._encode, sample, "encode", item, ctx=None)
        except Exception as error:
            what = f"sample {sample.key!r}" if self._items is None else f"item {position} of {self._place}"
            add_note(error, f"kdpipes: while encoding {what}")
            raise
        if isinstance(made, Sample):
            return Record(made.key, dict(made))
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            what = type(made).__name__
            raise TypeError(f"`encode` must return a dictionary of fields, but has returned {what} for {item!r:.80}.")
        fields = dict(made)
        return Record(str(fields.pop("key", sample.key)), fields)


def items_of(source: Any, encode: Encode | None) -> Items:
    """Return the items of what `write_records` was given.

    Raises:
        TypeError: It is neither an indexed chain of samples, nor a data list, nor a sequence.
    """
    if isinstance(source, MapPipe):
        return Items(gives_samples(source, "write_records"), encode, type(source).__name__)
    if isinstance(source, IterDataPipe | MapDataPipe):
        is_stream = isinstance(source, IterDataPipe)
        way_out = "`kdp.open_shards` is indexed." if is_stream else "Make samples first: `.to_samples(...)`."
        raise ChainError(
            f"`write_records` needs an indexed chain of samples, but {type(source).__name__} is "
            f"{'a stream' if is_stream else 'none'}. {way_out}"
        )
    if isinstance(source, str | os.PathLike):
        return _of_list(os.fspath(source), encode)
    rule = "an indexed chain, the path of a .txt or .csv file, or a sequence of items"
    if not isinstance(source, Sequence | np.ndarray) or isinstance(source, bytes):
        way_out = "`kdp.from_dataset` makes a chain of a dataset." if hasattr(source, "__getitem__") else ""
        raise TypeError(must_be("source", rule, source, way_out))
    if encode is None:
        raise TypeError(must_be("encode", "a function from item to fields, as `source` holds no samples", encode))
    return Items(source if isinstance(source, Sequence) else list(source), encode, "the sequence")


def _of_list(path: str, encode: Encode | None) -> Items:
    if not path.lower().endswith(_LISTS) or not is_local(path):
        raise ValueError(must_be("source", "a .txt or .csv file of this machine, one item per line", path))
    with Path(path).expanduser().open(encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = PackedStrings([line.rstrip("\n") for line in file if line.strip()])
    is_csv = path.lower().endswith(".csv")
    if is_csv and encode is None and len(lines) > 1:
        labels = [_Rows(lines)[place][-1].strip() for place in (0, 1)]
        if [label.lstrip("-").isdecimal() for label in labels] == [False, True]:  # the first line is a header
            lines = PackedStrings(list(lines)[1:])
    return Items(_Rows(lines) if is_csv else lines, encode or _image_and_label, repr(path))


class _Rows(Sequence[list[str]]):
    """The lines of a csv file, each as a list of its cells."""

    def __init__(self, lines: PackedStrings) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return next(csv.reader([self._lines[index]], skipinitialspace=True))

    def fingerprint(self) -> Any:
        """Return what tells it from another."""
        return self._lines


def _image_and_label(item: str | list[str]) -> dict[str, Any]:
    """Return the fields of a line `path/to/image.jpg 3`: the file's bytes, and the number of its class."""
    cells = item.rsplit(None, 1) if isinstance(item, str) else item
    if len(cells) != 2 or not cells[1].strip().lstrip("-").isdecimal():
        raise DataError(f"An item must be a path and the number of a class, but is {item!r}. `encode=` reads others.")
    return {"key": cells[0], "x": read_url(cells[0]), "y": int(cells[1])}
