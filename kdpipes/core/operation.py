"""`Operation` and `Step`, the work done by work pipes, and the interface of `.on_error(...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kdpipes.core.errors import reject_field
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.sample import Block, Sample
from kdpipes.core.traits import UNDECLARED, Traits

MEASURED_ITEMS = "_kdpipes_measured_items"  # attribute of a profiled pipe: what `items_of` calls


class Operation(Fingerprinted):
    """The operation of a work pipe: a callable that changes a sample and returns it.

    `traits` declares its effects. A subclass whose traits depend on its arguments sets `self.traits` in `__init__`, or
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
        """Apply the operation to a block of one sample. Only a `Step` receives blocks of several samples."""
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
    """Return one item per sample: the sample, or the item that `select` makes of it. Profiles measure this."""
    operation = operation_of(pipe)
    make: Callable[[Block], Sequence[Any]] = Block.samples if operation is None else operation.items_of
    measured = vars(pipe).get(MEASURED_ITEMS)
    items: Sequence[Any] = make(block) if measured is None else measured(make, block)
    return items


def finished(pipe: Any, sample: Sample) -> Any:
    """Return the item of a sample at the end of a chain: the sample, or the item that `select` makes of it."""
    return items_of(pipe, sample.block.only(sample.number))[0]


class Step(Operation):
    """An operation on all samples of a block at once. It replaces columns, which are computed lazily."""

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
    """The interface of `.on_error(...)`, which decides about samples that cannot be made.

    While `num_looking` is above 0, nothing is written to the quarantine. Copies made in the meantime never write to it.
    """

    traits = Traits(reads=frozenset(), changes=frozenset(), is_transparent=True)
    num_looking = 0

    def change(self, block: Block) -> None:
        """Leave the block unchanged: `deal` consults the handler."""

    @property
    def is_tolerant(self) -> bool:
        """Whether failed samples may be left out at all."""
        raise NotImplementedError

    @property
    def substitutes(self) -> bool:
        """Whether another sample replaces one that failed."""
        raise NotImplementedError

    def tolerates(self, error: Exception) -> bool:
        """Return whether a sample may be left out for `error`."""
        raise NotImplementedError

    def reject_many(self, num_skipped: int, num_seen: int, key: str, error: str) -> None:
        """Raise DataError if more samples were skipped so far than the limits allow.

        `key` and `error` are those of the last skipped sample, and `num_seen` is approximate.
        """
        raise NotImplementedError

    def reject_all(self, key: str, error: str) -> NoReturn:
        """Raise DataError because every sample failed. The arguments are those of `reject_many`."""
        raise NotImplementedError

    def listed(self) -> dict[str, str]:
        """Return the errors of the quarantined samples, by `entry_name`."""
        return {}

    def write_down(self, key: str, error: str, *, position: Sequence[int] = (), once: bool = False) -> None:
        """Put a sample, or a whole shard, into quarantine.

        Args:
            key: The key of the sample, or the name of the shard.
            error: Why it cannot be read.
            position: The route and the position of a sample of an indexed source, because its key may not be unique.
                Without it, all samples with the key are left out.
            once: Whether to skip an entry that is already listed, for errors that several processes encounter.
        """


def entry_name(key: str, position: Sequence[int]) -> str:
    """Return the name of a quarantine entry, for one sample or for all samples with a key."""
    return "\0".join([key, *map(str, position)])


def entry_names(sample: Sample) -> tuple[str, str]:
    """Return the names of the quarantine entries that may list a sample."""
    return sample.key, entry_name(sample.key, position_of(sample))


def position_of(sample: Sample) -> tuple[int, ...]:
    """Return the route of a sample and its position in its source."""
    return *sample.route, sample.index
