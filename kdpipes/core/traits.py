"""`Traits`, the declaration of what a pipe does to samples, which is used by other pipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from kdpipes.core.errors import check_choice, check_type

Role = Literal["source", "plan", "order", "work", "cache", "deal", "batch", "device"]
Gives = Literal["samples", "items", "batches"]
_PASSING = ("plan", "order", "cache")  # roles of pipes that pass samples unchanged


class ItemForm(NamedTuple):
    """The form of the items and batches of a chain.

    Args:
        names: The names of the parts, in order.
        has_ctx: Whether items are pairs `(parts, ctx)`.
        kind: "tuple" if the parts form a tuple, "dict" if they form a dictionary by name, "bare" if there is only one
            part, which is the item.
    """

    names: tuple[str, ...]
    has_ctx: bool = False
    kind: Literal["tuple", "dict", "bare"] = "tuple"

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return the parts as one item, without the ctx."""
        if self.kind == "tuple":
            return tuple(parts)
        return dict(zip(self.names, parts, strict=True)) if self.kind == "dict" else parts[0]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The declaration of what a pipe, or the operation of a work pipe, does to samples.

    The defaults are conservative: a pipe may read and change every field. For pipes that pass samples on
    unchanged (roles "plan", "order" and "cache"), the defaults of `reads` and `changes` are no fields.

    Args:
        role: The role of the pipe in a chain. "source" makes samples; "plan" chooses samples or joins several sources,
            and passes them unchanged; "order" changes only their order or which worker gets them; "work" changes
            samples; "cache" keeps their values; "deal" makes batches; "batch" makes one item from each batch; "device"
            runs in the main process, as do all pipes after it.
        gives: What the pipe yields: "samples", "items" as `select` makes them, or "batches".
        item_form: The form of the items or batches; None if they are samples, or the form is unknown.
        needs: The names of the fields that samples must have before the operation, as a set.
        reads: The names of the fields that the results depend on, as a set; None if that is unknown.
        changes: The names of the fields whose values change, or that are added, as a set; None if that is unknown.
        renames: New names of fields, each with a tuple of old names, of which the first that a sample has is renamed.
        random: The name of the part that draws random numbers, so that results differ between epochs; None if no part
            is known to draw any.
        records: The name of the part whose parameters `record_ctx` records; None if there is none.
        seeds: The names of the functions for which global random generators are seeded.
        freezes: Whether the pipe keeps the first results of random operations upstream for all later epochs.
        is_eager: Whether the operation may load fields when a sample passes. Otherwise, it loads a field only when the
            field is read.
        is_transparent: Whether the pipe leaves all samples unchanged, so that states fit chains with and without it.
        holds_back: Whether a stream may buffer samples, so that the sample that leaves the pipe need not be the one
            that was read last.
        counts_whole: Whether the output depends on the whole stream, so that it cannot be read in lanes; for a source,
            whether it may yield its samples several times in an epoch.
        is_remote: Whether a source reads over a network and can prefetch samples.
        reads_files: Whether a source reads a local file for each sample and can prefetch samples.
    """

    role: Role = "work"
    gives: Gives = "samples"
    item_form: ItemForm | None = None
    needs: Set[str] = frozenset()
    reads: Set[str] | None = None
    changes: Set[str] | None = None
    renames: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    random: str | None = None
    records: str | None = None
    seeds: tuple[str, ...] = ()
    freezes: bool = False
    is_eager: bool = False
    is_transparent: bool = False
    holds_back: bool = True
    counts_whole: bool = False
    is_remote: bool = False
    reads_files: bool = False

    def __post_init__(self) -> None:
        check_choice("role", self.role, get_args(Role))
        check_choice("gives", self.gives, get_args(Gives))
        unknown: Set[str] | None = frozenset() if self.role in _PASSING else None
        given = {"needs": self.needs, "reads": self.reads, "changes": self.changes}
        for name, fields in given.items():
            check_type(name, fields, Set | None, 'a set of names of fields, like {"x"}')
            object.__setattr__(self, name, unknown if fields is None else frozenset(fields))

    @property
    def is_plan(self) -> bool:
        """Whether the pipe chooses samples, which pass unchanged."""
        return self.role == "plan"

    def fields_after(self, known: frozenset[str]) -> frozenset[str] | None:
        """Return the fields that every sample has after the operation; None if that is unknown.

        Args:
            known: The fields that every sample has before the operation.
        """
        if self.changes is None:
            return None
        old = {name for names in self.renames.values() for name in names}
        return (known - old) | frozenset(self.renames) | self.changes

    def column_before(self, name: str) -> str | None:
        """Return the upstream field that provides the values of field `name`; None if the operation computes them."""
        if name in self.renames:
            names = self.renames[name]
            return names[0] if len(names) == 1 else None
        is_renamed = any(name in names for names in self.renames.values())
        if self.changes is None or name in self.changes or is_renamed:
            return None
        field, dot, entry = name.rpartition(".")  # "json.width" is an entry of the field "json"
        before = self.column_before(field) if dot else None
        return name if not dot else None if before is None else f"{before}.{entry}"

    def ignores(self, name: str) -> bool:
        """Return whether the results do not depend on the field `name`."""
        return self.reads is not None and not any(name == read or read.startswith(f"{name}.") for read in self.reads)


UNDECLARED = Traits()  # the traits of pipes and operations that declare none
