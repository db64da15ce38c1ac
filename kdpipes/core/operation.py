"""`Operation` and `Step`, the work of work pipes, and the interface of `.on_error(...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kdpipes.core.errors import reject_field
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.sample import Block, Sample
from kdpipes.core.traits import UNDECLARED, Traits

MEASURED_ITEMS = "_kdpipes_measured_items"  # an attribute of a pipe that is being profiled: what `items_of` calls


class Operation(Fingerprinted):
    """The operation of a work pipe: a callable that changes a sample and returns it.

    `traits` declares what it does. A subclass whose traits depend on its arguments sets `self.traits` in `__init__`, or
    makes `traits` a property.
    """

    traits: Traits = UNDECLARED

    def __call__(self, sample: Sample) -> Any:
        """Change the sample and return it."""
        raise TypeError(f"{type(self).__name__} must implement `__call__`.")

    def check(self, known: frozenset[str]) -> None:
        """Raise FieldError if a field that the operation needs is missing.

        Args:
            known: The fields that every sample of the source has.
        """
        for name in sorted(self.traits.needs - known):
            reject_field(name, "The source", known)

    def run(self, block: Block) -> Sequence[Block]:
        """Apply the operation to a block of one sample. Only a `Step` gets blocks of several samples."""
        (sample,) = block.samples()
        changed: Block = self(sample).block
        return (changed,)

    def items_of(self, block: Block) -> Sequence[Any]:
        """Return one item for each sample of a block: by default, the sample itself."""
        return block.samples()

    def drawing(self) -> tuple[str, ...]:
        """Return the names of the functions that were seen to draw from the global generators in this process."""
        return ()

    def fingerprint(self) -> Any:
        """Return plain data that identifies the operation: by default, its attributes."""
        return {name: value for name, value in vars(self).items() if name != "traits"}


class Working:
    """A pipe that applies an operation to each sample."""

    _operation: Operation

    @property
    def operation(self) -> Operation:
        """The operation on each sample."""
        return self._operation


def operation_of(pipe: Any) -> Operation | None:
    """Return the operation of a work pipe; None for all other pipes."""
    return pipe.operation if isinstance(pipe, Working) else None


def items_of(pipe: Any, block: Block) -> Sequence[Any]:
    """Return one item for each sample of a block: the sample, or what `select` makes of it. Profiles measure it."""
    operation = operation_of(pipe)
    make: Callable[[Block], Sequence[Any]] = Block.samples if operation is None else operation.items_of
    measured = vars(pipe).get(MEASURED_ITEMS)
    items: Sequence[Any] = make(block) if measured is None else measured(make, block)
    return items


def finished(pipe: Any, sample: Sample) -> Any:
    """Return the item of a sample at the end of a chain: the sample, or what `select` makes of it."""
    return items_of(pipe, sample.block.only(sample.number))[0]


class Step(Operation):
    """An operation on all samples of a block at once: it replaces columns, which are computed lazily."""

    def change(self, block: Block) -> None:
        """Add, replace or remove columns of a block."""
        raise TypeError(f"{type(self).__name__} must implement `change`.")

    def run(self, block: Block) -> Sequence[Block]:
        self.change(block)
        return (block,)

    def __call__(self, sample: Sample) -> Any:
        self.change(sample.block)
        return sample


class ErrorHandler(Step):
    """The interface of `.on_error(...)`, which decides about samples that cannot be made."""

    traits = Traits(reads=frozenset(), changes=frozenset(), is_transparent=True)

    def change(self, block: Block) -> None:
        """Leave the samples as they are: `deal` asks the handler."""

    @property
    def is_tolerant(self) -> bool:
        """Whether samples may be left out at all."""
        raise NotImplementedError

    @property
    def substitutes(self) -> bool:
        """Whether another sample replaces one that failed."""
        raise NotImplementedError

    def tolerates(self, error: Exception) -> bool:
        """Return whether a sample may be left out for `error`."""
        raise NotImplementedError

    def reject_many(self, num_skipped: int, num_seen: int, key: str, error: str) -> None:
        """Raise DataError if more of the samples so far were skipped than the limits allow.

        `key` and `error` are those of the last one, and `num_seen` is approximate.
        """
        raise NotImplementedError

    def reject_all(self, key: str, error: str) -> NoReturn:
        """Raise DataError because no sample could be made. The arguments are those of `reject_many`."""
        raise NotImplementedError

    def begin_looking(self) -> None:
        """Write nothing to the quarantine until `end_looking`. Copies that are made meanwhile never write to it."""

    def end_looking(self) -> None:
        """Allow writing to the quarantine again, after `begin_looking`."""

    def listed(self) -> dict[str, str]:
        """Return the errors of the samples in quarantine, by `entry_name`."""
        return {}

    def write_down(self, key: str, error: str, *, position: Sequence[int] = (), once: bool = False) -> None:
        """Put a sample, or a shard by its name, into quarantine.

        Args:
            key: The key of the sample, or the name of the shard.
            error: Why it cannot be read.
            position: The route and the position of a sample of an indexed source, because other samples may have its
                key. Without it, all samples of the key are left out.
            once: Whether to write nothing if the entry is already listed, as for an error that several processes find.
        """


def entry_name(key: str, position: Sequence[int]) -> str:
    """Return the name of an entry of the quarantine: that of one sample, or of all samples of a key."""
    return "\0".join([key, *map(str, position)])


def entry_names(sample: Sample) -> tuple[str, str]:
    """Return the names of the entries of the quarantine that stand for a sample."""
    return sample.key, entry_name(sample.key, position_of(sample))


def position_of(sample: Sample) -> tuple[int, ...]:
    """Return the route of a sample and its position in its source."""
    return *sample.route, sample.index
