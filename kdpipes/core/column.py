"""`Column`: one field of all samples of a block, computed lazily."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import repeat
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kdpipes.core import activity
from kdpipes.core.errors import add_note
from kdpipes.core.randomness import KeyNeededError, RowKey, row_key

if TYPE_CHECKING:
    from kdpipes.core.sample import Block, Sample

# Consecutive steps run on this many samples at a time, because intermediate values may be large.
_CHUNK_SIZE = 16
UNLOADED: Any = type("_Unloaded", (), {"__repr__": lambda self: "<not loaded>"})()


class Inputs(NamedTuple):
    """The inputs of a column, apart from values that the source has not loaded yet.

    Args:
        names: The names of the fields that are passed to functions of whole samples.
        columns: The columns of the source that are already loaded, or are cheap to load.
    """

    names: tuple[str, ...]
    columns: tuple[Column, ...]


class _Failure:
    """The error of a cell in a block of several samples, kept so that no function is called twice."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class Column:
    """One field of all samples of a block. Each cell is computed once, when it is first read.

    Args:
        load: A function that is called as `load(sample, *values)` with the values of `inputs`, for one sample.
        inputs: The columns that this one is computed from.
        what: A description for the note on an error, such as "reading field 'x'".
        scope: The fields of the sample that `load` gets, if they are not the current ones.
        is_cheap: Whether loading is so fast that caches do not keep the values.
        many: A function that is called as `many(block, *columns)`, and computes all cells at once. If it returns None
            or raises an error, `load` is called for each sample.
        reads_once: Whether `load` reads each field of `scope` at most once.
        within: A decorator of functions that call `load`, such as one that sets the number of torch's threads.
    """

    is_cheap = False
    _scope: Mapping[str, Column] | None = None
    _many: Callable[..., Sequence[Any] | None] | None = None
    _within: Callable[[Any], Any] | None = None
    _reads_once = _is_passing = False
    _cells: Any = None
    _num_left = -1

    def __init__(
        self,
        load: Callable[..., Any],
        *inputs: Column,
        what: str,
        scope: Mapping[str, Column] | None = None,
        is_cheap: bool = False,
        many: Callable[..., Sequence[Any] | None] | None = None,
        reads_once: bool = False,
        within: Callable[[Any], Any] | None = None,
    ) -> None:
        self.what = what
        self._load = load
        self._inputs = inputs
        # Streams create many columns, so unset attributes are left to class defaults.
        if scope is not None:
            self._scope = scope
            self._reads_once = reads_once
        if is_cheap:
            self.is_cheap = True
        if many is not None:
            self._many = many
        if within is not None:
            self._within = within

    @property
    def is_loaded(self) -> bool:
        """Whether all cells have been computed."""
        return self._num_left == 0

    def get(self, sample: Sample) -> Any:
        """Return the value for a sample of the block. An error gets a note that names the sample and the operation."""
        cells = self._cells
        number = sample.number
        value = UNLOADED if cells is None else cells[number]
        if value is UNLOADED:
            return self._compute(sample, number)
        if type(value) is _Failure:
            try:
                raise value.error
            finally:
                # Avoid a reference cycle: the traceback would refer to the error, which refers to the traceback.
                del value
        return value

    def drop_failures(self) -> None:
        """Drop the errors: their tracebacks refer to the block and would delay freeing it."""
        if type(self._cells) is list:
            self._cells[:] = [UNLOADED if type(cell) is _Failure else cell for cell in self._cells]

    def _compute(self, sample: Sample, number: int) -> Any:
        size = len(sample.block.positions)
        if self._cells is None and not self._is_passing:
            self._cells = [UNLOADED] * size
            self._num_left = size
        try:
            values = [column.get(sample) for column in self._inputs]
            record = activity.current
            activity_before = record.now if record is not None else (None, "")
            if record is not None:
                record.begin(sample, self.what)
            try:
                load = self._load if self._within is None else self._within(self._load)
                value = load(sample if self._scope is None else sample.view(self._scope), *values)
            # This includes SystemExit, which workers send to the main process.
            except BaseException as error:
                _note(error, self.what, sample)
                raise
            finally:
                if record is not None:
                    record.leave(activity_before)
        except Exception as error:
            if size > 1 and not self._is_passing:
                self._cells[number] = _Failure(error)
            raise
        if not self._is_passing:
            self._cells[number] = value
            self._num_left -= 1
            if not self._num_left:
                self._forget_inputs()
        return value

    def values(self, block: Block) -> Sequence[Any]:
        """Return the values of all samples of a block."""
        if block.is_part:
            return [self.get(sample) for sample in block.samples()]
        if self._num_left == 0:
            return self._cells  # type: ignore[no-any-return]
        holder = row_key()
        record = activity.current
        if holder is not None:
            key = holder.key
        activity_before = record.now if record is not None else (None, "")
        try:
            values = self._load_all(block, holder) if self._many is not None and self._cells is None else None
            if values is None:
                first, *steps = self._steps()
                run = first._run
                for within in {step._within for step in (first, *steps) if step._within is not None}:
                    run = within(run)
                values = run(self, steps, block, holder)
            return values
        finally:
            if holder is not None:
                # The function may have read another chain. Continue with the random key of this column's own sample.
                holder.key = key
            if record is not None:
                record.leave(activity_before)

    def _steps(self) -> list[Column]:
        """Return this column, preceded by inputs that only the next step reads, in the order of computation."""
        steps = [self]
        while len(steps[0]._inputs) == 1 and steps[0]._inputs[0]._is_passing and steps[0]._scope is None:
            steps.insert(0, steps[0]._inputs[0])
        return steps

    def _run(self, last: Column, steps: Sequence[Column], block: Block, holder: RowKey | None) -> Sequence[Any]:
        """Compute the cells of `last` from this column through `steps`, a chunk of samples at a time."""
        if last._cells is None:
            last._cells = [UNLOADED] * len(block)
            last._num_left = len(block)
        cells = last._cells
        samples = [each for each in block.samples() if last._cells[each.number] is UNLOADED]
        for column in self._inputs:
            if column._many is not None:
                # Reading the cell raises this error again.
                with suppress(Exception):
                    column.values(block)
        value = None
        values = list[Any]()
        arguments = list[Any]()
        for start in range(0, len(samples), _CHUNK_SIZE):
            chunk = samples[start : start + _CHUNK_SIZE]
            inputs: Iterable[Any] = map(partial(self._input_values, holder), chunk) if self._inputs else repeat(())
            previous = self
            values = self._load_each(chunk, inputs, holder)
            for step in steps:
                chunk = chunk[: len(values)]
                arguments = values
                inputs = [each if type(each) is _Failure else (each,) for each in arguments]
                values = step._load_each(chunk, inputs, holder)
                previous._keep_values(chunk[len(values) :], arguments[len(values) :], len(cells))
                previous = step
            for sample, value in zip(chunk, values, strict=False):
                cells[sample.number] = value
            if values and type(values[-1]) is _Failure:
                break
        last._num_left = sum(cell is UNLOADED or type(cell) is _Failure for cell in cells)
        if not last._num_left:
            last._forget_inputs()
            return cells  # type: ignore[no-any-return]
        failure = next(cell for cell in cells if type(cell) is _Failure)
        if len(cells) == 1:
            cells[0] = UNLOADED
        try:
            raise failure.error
        finally:
            del (
                failure,
                value,
                values,
                arguments,
                cells,
            )  # the traceback would refer to them, and so the error to itself

    def _keep_values(self, samples: Sequence[Sample], values: Sequence[Any], size: int) -> None:
        """Store values that the next step did not use because an earlier sample failed."""
        if samples:
            self._is_passing = False
            self._cells = self._cells or [UNLOADED] * size
            self._num_left = size
            for sample, value in zip(samples, values, strict=True):
                self._cells[sample.number] = value

    def _input_values(self, holder: RowKey | None, sample: Sample) -> Any:
        if holder is not None:
            holder.key = sample.row.sample_key
        try:
            return [column.get(sample) for column in self._inputs]
        except Exception as error:
            return _Failure(error)

    def _load_each(self, samples: Sequence[Sample], arguments: Iterable[Any], holder: RowKey | None) -> list[Any]:
        """Return the value of each sample up to the first failure, followed by that failure.

        An argument may itself be the failure of an earlier step.
        """
        results = list[Any]()
        record = activity.current
        scope = self._scope
        for sample, values in zip(samples, arguments, strict=False):
            if type(values) is _Failure:
                return [*results, values]
            if holder is not None:
                holder.key = sample.row.sample_key
            if record is not None:
                record.begin(sample, self.what)
            try:
                results.append(self._load(sample if scope is None else sample.view(scope), *values))
            except Exception as error:
                _note(error, self.what, sample)
                return [*results, _Failure(error)]
            # This includes SystemExit, which workers send to the main process.
            except BaseException as error:
                _note(error, self.what, sample)
                raise
        return results

    def _load_all(self, block: Block, holder: RowKey | None) -> Sequence[Any] | None:
        assert self._many is not None
        try:
            inputs = [column.values(block) for column in self._inputs]
            if holder is not None:
                holder.key = None
            if activity.current is not None and not self.is_cheap:
                activity.current.begin(block.first(), self.what)
            values = self._many(block, *inputs)
        # Fall back to `load` per sample: its error names the failing sample, and random numbers get that sample's key.
        except (Exception, KeyNeededError):
            return None
        if values is not None:
            self._cells = values
            self._num_left = 0
            self._forget_inputs()
        return values

    def _forget_inputs(self) -> None:
        self._load = UNLOADED
        self._many = None
        self._inputs = ()
        self._scope = None

    def reaches(self, other: Column) -> bool:
        """Return whether this column is `other`, or depends on it and is not loaded yet."""
        return any(column is other for column in upstream_of([self]))

    def inputs(self, others: Collection[Column]) -> Inputs:
        """Return the inputs of this column, direct or through `others`, in a deterministic order."""
        first = self
        # Most fields are a sequence of steps on one value.
        while first._scope is None and len(first._inputs) == 1:
            first = first._inputs[0]
        if first._scope is None and not first._inputs and not others:
            return Inputs((), (first,) if first.is_loaded or first.is_cheap else ())
        names = list[str]()
        columns = list[Column]()
        for column in upstream_of([first, *others]):
            if column._scope is not None:
                names += sorted(column._scope)
            elif not column._inputs and (column.is_loaded or column.is_cheap):
                columns.append(column)
        return Inputs(tuple(names), tuple(columns))

    def without_steps(self, is_step: Callable[[str], bool]) -> Column | None:
        """Return the column before the trailing steps; None if its inputs have been dropped.

        `is_step` takes the description of a column and returns whether it is such a step.
        """
        column = self
        while is_step(column.what):
            if column.is_loaded or not column._inputs:
                return None
            column = column._inputs[0]
        return column

    def wrap(
        self,
        wrapped: Callable[[Callable[..., Any], str], Callable[..., Any] | None],
        wrapped_many: Callable[[Callable[..., Any], str], Callable[..., Any]],
    ) -> None:
        """Replace each function that computes this column or its inputs with `wrapped(function, description)`.

        If `wrapped` returns None, the column and its inputs are left unchanged. `wrapped_many` does the same for
        functions that compute many values.
        """
        if self._num_left != 0 and (load := wrapped(self._load, self.what)) is not None:
            self._load = load
            if self._many is not None:
                self._many = wrapped_many(self._many, self.what)
            for column in self._inputs:
                column.wrap(wrapped, wrapped_many)

    def fork(self, sample: Sample, forks: dict[Column, Column]) -> Column:
        """Return a column for another delivery of a sample. Values that are not loaded yet are computed separately.

        `forks` maps the columns already forked for that delivery to their forks; this one is added.
        """
        if self not in forks:
            cell = UNLOADED if self._cells is None else self._cells[sample.number]
            if cell is not UNLOADED and type(cell) is not _Failure:
                forks[self] = Loaded(cell)
            # `load` may depend on the sample's row in the block.
            elif len(sample.block.positions) > 1:
                forks[self] = Column(lambda _: self.get(sample), what=self.what, is_cheap=self.is_cheap)
            else:
                scope = self._scope and {name: column.fork(sample, forks) for name, column in self._scope.items()}
                inputs = [column.fork(sample, forks) for column in self._inputs]
                forks[self] = Column(self._load, *inputs, what=self.what, scope=scope, is_cheap=self.is_cheap)
        return forks[self]


class Loaded(Column):
    """A field with one known value for all samples of the block."""

    _inputs: Any = ()
    _num_left = 0
    what: Any = ""
    is_loaded: Any = True

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, sample: Sample) -> Any:
        return self._value

    def values(self, block: Block) -> Sequence[Any]:
        return [self._value] * len(block)

    def fork(self, sample: Sample, forks: dict[Column, Column]) -> Column:
        return self


def _note(error: BaseException, what: str, sample: Sample) -> None:
    add_note(error, f"kdpipes: while {what} of sample {sample.key!r} (ordinal {sample.ordinal})")


def filled(values: Sequence[Any]) -> Column:
    """Return a column of known values."""
    column = Column(UNLOADED, what="")
    column._cells = values
    column._num_left = 0
    return column


def stacked(columns: Sequence[Column], samples: Sequence[Sample]) -> Column:
    """Return one column that combines the columns of several one-sample blocks."""
    if all(column.is_loaded for column in columns):
        return filled([column.get(sample) for column, sample in zip(columns, samples, strict=True)])

    def load(sample: Sample) -> Any:
        return columns[sample.number].get(samples[sample.number])

    return Column(load, what=columns[0].what, is_cheap=all(column.is_cheap for column in columns))


def upstream_of(columns: Iterable[Column]) -> list[Column]:
    """Return the columns and all columns that they still depend on, each once, in a deterministic order."""
    found = list[Column]()
    waiting = list(columns)
    seen = set[int]()
    while waiting:
        column = waiting.pop()
        if id(column) not in seen:
            seen.add(id(column))
            found.append(column)
            scope = column._scope
            waiting += [] if scope is None else [scope[name] for name in sorted(scope)]
            waiting += column._inputs
    return found


def keep_no_inputs(roots: Sequence[Column]) -> None:
    """Discard values after use if only one other column reads them, such as the bytes of files.

    Args:
        roots: The columns that may be read from outside.
    """
    uses: dict[int, int] = {id(root): 2 for root in roots}
    columns = upstream_of(roots)
    for column in columns:
        for other in column._inputs:
            uses[id(other)] = uses.get(id(other), 0) + (1 if column._many is None else 2)
        for other in () if column._scope is None else column._scope.values():
            uses[id(other)] = uses.get(id(other), 0) + (1 if column._reads_once else 2)
    for column in columns:
        if uses[id(column)] == 1 and column._num_left != 0 and column._many is None:
            column._is_passing = True


def as_column(values: Any) -> NDArray[Any]:
    """Return values as an array `[n]`: of numbers or of strings if all values are of that kind, otherwise of objects.

    Zero-dimensional arrays and tensors become plain values. Texts that end with NUL are stored as objects, because
    NumPy would strip the NUL.
    """
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if isinstance(values, np.ndarray) and values.ndim == 1 and not values.dtype.hasobject:
        return values
    arrays = torch.Tensor | np.ndarray
    is_scalar = [isinstance(value, arrays) and value.ndim == 0 and value is not np.ma.masked for value in values]
    values = [value.item() if scalar else value for value, scalar in zip(values, is_scalar, strict=True)]
    kinds = {type(value) for value in values}
    if any(issubclass(kind, Enum) for kind in kinds):  # NumPy would truncate the texts of text enums
        values = [
            value.value if isinstance(value, Enum) and isinstance(value, str | int) else value for value in values
        ]
        kinds = {type(value) for value in values}
    is_text = all(issubclass(kind, str) for kind in kinds) and not any(value[-1:] == "\0" for value in values)
    if is_text or all(issubclass(kind, Number | np.generic) for kind in kinds):
        return number_array(values)  # for which NumPy would not truncate texts
    column = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # NumPy would stack lists and arrays of equal length
        column[place] = value.item() if isinstance(value, np.number | np.bool_) else value
    return column


def number_array(values: Sequence[Any]) -> NDArray[Any]:
    """Return numbers or texts as an array. NumPy makes floats of integers from 2**63 on; these stay integers.

    >>> number_array([2**63 + 1, 1]), number_array([2**63 + 1, -1])
    (array([9223372036854775809,                   1], dtype=uint64), array([9223372036854775809, -1], dtype=object))
    """
    array = np.asarray(values)
    if array.dtype.kind != "f" or not len(values) or not all(isinstance(value, int | np.integer) for value in values):
        return array
    integers = list(map(int, values))
    return np.asarray(integers, dtype=np.uint64 if min(integers) >= 0 else object)
