"""Join the fields of two sources by the keys of their samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kdpipes.core.arithmetic import smallest_int
from kdpipes.core.callback import Callback
from kdpipes.core.column import Column, Loaded, as_column
from kdpipes.core.entries import field_of
from kdpipes.core.errors import ChainError, DataError, check_choice, reject_field
from kdpipes.core.keys import without_repetition
from kdpipes.core.labels import number_column, number_fields
from kdpipes.core.map_pipe import MapPipe, has_column, indexed, redrawing_name
from kdpipes.core.messages import counted, warn
from kdpipes.core.order import Order
from kdpipes.core.plan_pipe import PlanPipe, warn_of_fixed
from kdpipes.core.randomness import planning
from kdpipes.core.registry import functional_pipe
from kdpipes.core.sample import Sample
from kdpipes.core.shared import Shared
from kdpipes.storage.urls import TAR_SUFFIX

_SHARD = re.compile(rf"^.*{TAR_SUFFIX}/", re.I)
_EXTENSION = re.compile(r"\.\w+$")
_NUM_NAMED = 5  # maximum number of missing keys named in a warning


def bare_key(key: str) -> str:
    """Return a key without the shard's name, the file extension and the repetition number.

    >>> bare_key("images-000.tar/cat/0007"), bare_key("cat/0007.jpg")
    ('cat/0007', 'cat/0007')
    """
    return _EXTENSION.sub("", _SHARD.sub("", without_repetition(key)))


@functional_pipe("join", flavour="map", otherwise="Streams have no positions: `kdp.open_shards` is indexed.")
class JoinerMapDataPipe(PlanPipe):
    """Adds the fields of another source to the samples with the same keys (functional name: ``join``).

    For example, captions, embeddings or latents that were computed in advance are joined to images. Fields of both
    sources are loaded only when they are read. Samples of the other source without a partner are left out.

    Args:
        source_datapipe: An indexed pipe of samples.
        other: The other indexed pipe of samples; each of its keys occurs once.
        fields: The fields to add, one name or several; by default, all of the other source's.
        how: What to do with samples whose keys the other source does not have. "inner" leaves them out and warns, with
            their number and the first few keys. "left" keeps them and sets the added fields to None, and labels to -1
            if their classes have names.
        on: A function that takes a key of either source and returns the value by which samples are matched. By default,
            this is the key without the name of the shard and without the file extension: "images-000.tar/0007" matches
            "latents-000.tar/0007", and "cat/0007.jpg" matches "cat/0007.npy".

    Length: the number of samples that have a partner; with "left", that of the source.

    Memory: eight bytes for each sample, shared by all workers; while the plan is made, the keys of both sources.

    Raises:
        ChainError: Both sources have a field of the same name.
        DataError: Two samples of the other source have the same key; or, with "inner", the sources have no key in
            common. The error is raised when the plan is made.

    Example:
        >>> images = kdp.from_dataset(["image 0", "image 1", "image 2"], "x")
        >>> captions = kdp.from_dataset(["a heron", "a stork"], "caption")
        >>> images.join(captions, how="left").column("caption")
        array(['a heron', 'a stork', None], dtype=object)
    """

    computed = (*PlanPipe.computed, "other", "_partners")

    def __init__(
        self,
        source_datapipe: MapPipe,
        other: MapPipe,
        *,
        fields: str | Sequence[str] | None = None,
        how: Literal["inner", "left"] = "inner",
        on: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__(source_datapipe)
        check_choice("how", how, ("inner", "left"))
        self.other = indexed(other, "join")
        self._fields = None if fields is None else tuple(fields.split() if isinstance(fields, str) else fields)
        self._how = how
        self._on = Callback("on", bare_key if on is None else on)
        self._partners: Shared[NDArray[Any]] | None = None
        added = self._added()
        known = self.source.field_names()
        if added is not None:
            self.traits = replace(PlanPipe.traits, changes=added)
            self._reject_taken(added & (known or frozenset()))

    def _added(self) -> frozenset[str] | None:
        """Return the names of the added fields if they are known before a sample is read."""
        known = self.other.field_names()
        missing = next((name for name in self._fields or () if known is not None and name not in known), None)
        if missing is not None:
            reject_field(missing, "The other source of `join`", known or ())
        return known if self._fields is None else frozenset(self._fields)

    def _reject_taken(self, taken: frozenset[str]) -> None:
        if taken:
            raise ChainError(
                f"Both sources of `join` have a field {min(taken)!r}. Choose which fields to add with `fields=`, or "
                f"give one another name: `other.rename_fields(other_{min(taken)}={min(taken)!r})`."
            )

    def plan(self, epoch: int) -> NDArray[Any]:
        redrawn = redrawing_name(self.other)
        if redrawn is not None:
            warn_of_fixed(redrawn, "join")
        keys = self.source.column("key").tolist()
        others = self.other.column("key").tolist()
        places: dict[Any, int] = {}
        for place, key in enumerate(others):
            first = places.setdefault(self._on(key), place)
            if first != place:
                hint = "" if key == others[first] else ", or pass a function `on=` that gives them different values"
                raise DataError(
                    f"`join` needs unique keys in the other source, but its keys {others[first]!r} and {key!r} both "
                    f"match {self._on(key)!r}. Remove the duplicate{hint}."
                )
        partners = np.asarray([places.get(self._on(key), -1) for key in keys], dtype=np.int64)
        missing = np.flatnonzero(partners < 0)
        is_inner = self._how == "inner"
        if is_inner and others and len(missing) == len(keys) > 0:
            raise DataError(
                f"`join` finds no common key: those of the source are like {keys[0]!r}, those of the other source "
                f"like {others[0]!r}. Pass `on=`, a function that maps the keys of both sources to a "
                "common value."
            )
        if is_inner and len(missing):
            named = ", ".join(repr(keys[place]) for place in missing[:_NUM_NAMED])
            warn(
                f"`join` leaves out {len(missing)} of {counted(len(keys), 'sample')}, which the other source lacks: "
                f"{named}" + (", ..." if len(missing) > _NUM_NAMED else ".")
            )
        chosen = np.flatnonzero(partners >= 0) if is_inner else np.arange(len(keys))
        self._partners = Shared(partners[chosen].astype(smallest_int(len(others))))
        return chosen.astype(smallest_int(len(keys)))

    def partners(self) -> NDArray[Any]:
        """Return the position of each sample's partner in the other source, `[n] int`; -1 if it has none."""
        self.chosen()
        assert self._partners is not None
        return self._partners.value

    def fetch(self, index: int) -> Sample:
        sample = super().fetch(index).come_from(0)  # of the two upstream pipes
        partner = int(self.partners()[index])
        if partner < 0:
            added = self._added()
            names = self._names_in(self._any_of_other()) if added is None else added
            sample.update(dict.fromkeys(names))
            number_fields(sample.block.fields, self.class_names())
            return sample
        with planning(0):
            other = self.other.fetch(partner)
        known = other.scope()
        for name in self._names_in(other):
            value = known.get(name, Loaded(None))
            what = f"reading field {name!r} of {other.key!r}"
            # Caches look up the inputs of a value at the position of the other sample.
            columns = value.inputs(()).columns
            inputs = Column(
                lambda _, columns=columns: [column.get(other) for column in columns], what=what, is_cheap=True
            )
            sample[name] = Column(
                lambda _, name=name: other[name],
                what=what,
                scope={name: inputs},
                is_cheap=value.is_loaded or value.is_cheap,
            )
        sample.depend_on(other)
        return sample

    def other_sources(self) -> tuple[MapPipe, ...]:
        return (self.other,)

    def _any_of_other(self) -> Sample:
        if not len(self.other):
            raise DataError("The other source of `join` is empty, so its fields are not known. Name them: `fields=`.")
        return self.other.fetch(0)

    def _names_in(self, other: Sample) -> tuple[str, ...]:
        if self._fields is None:
            self._reject_taken(frozenset(other) & (self.source.field_names() or frozenset()))
        return tuple(other) if self._fields is None else self._fields

    def _is_added(self, name: str) -> bool:
        known = self.source.field_names()
        if name == "key" or (known is not None and (name in known or field_of(name, known))):
            return False
        added = self._added()
        if added is None:  # only samples know their fields
            added = frozenset(self._any_of_other() if len(self.other) else ())
        return name in added or field_of(name, added) is not None

    def column(self, name: str) -> NDArray[Any]:
        if not self._is_added(name):
            return super().column(name)
        column = self.other.column(name)
        partners = self.partners()
        if not (partners < 0).any():
            return column[partners]  # type: ignore[no-any-return]
        values = [*column.tolist(), None]
        joined = as_column([values[place] for place in partners.tolist()])  # -1 takes the last value
        return number_column(joined, name, self.class_names())

    def has_column(self, name: str) -> bool:
        added = self._added()
        return has_column(self.other, name) if added is not None and name in added else super().has_column(name)

    def class_names(self) -> tuple[str, ...] | None:
        return self.other.class_names() if self._is_added("y") else super().class_names()

    def field_names(self) -> frozenset[str] | None:
        known = super().field_names()
        added = self._added()
        return None if known is None or added is None else known | added

    def prefetch(self, order: Order) -> None:
        super().prefetch(order)
        with planning(0):
            self.other.prefetch(order.through(lambda index: (partners := self.partners()[index])[partners >= 0]))
