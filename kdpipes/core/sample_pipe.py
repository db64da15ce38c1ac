"""Work pipes: an operation on one sample, written once and registered for indexed sources and streams."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from numpy.typing import NDArray

from kdpipes.core.call_text import note_call
from kdpipes.core.callback import Callback, call_seeded
from kdpipes.core.errors import ChainError, add_note, check_type
from kdpipes.core.iter_pipe import IterPipe, samples_of, tolerance
from kdpipes.core.map_pipe import MapPipe, blocks_of, has_column, is_key
from kdpipes.core.operation import Operation, Working
from kdpipes.core.order import Order
from kdpipes.core.pipe import Pipe, class_names_of, fields_of, gives_samples
from kdpipes.core.registry import Named, register, reject_taken
from kdpipes.core.sample import Block, Rows, Sample
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.traits import UNDECLARED, Traits
from kdpipes.core.user_code import draws_nothing

_FILLED = ("ctx", "rng")  # parameters of users' functions that kdpipes fills


class SampleMapper(Named, Working, Pipe):
    """The base class of work pipes of both flavours: the operation, and facts known before a sample is read."""

    source: Any

    def _configure(self, source_datapipe: Any, operation: Operation, name: str) -> None:
        self.source = gives_samples(source_datapipe, name)
        self._operation = operation
        self.name = name
        self._selects = operation.traits.gives == "items"
        known = fields_of(self.source)
        if known is not None:
            operation.check(known)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """The traits of the operation. A sample passes before the next one is read."""
        return replace(self.operation.traits, holds_back=False)

    def apply(self, block: Block) -> Sequence[Block]:
        """Apply the operation to a block, unless it turns samples into items."""
        return (block,) if self._selects else self._operation.run(block)

    def apply_to(self, sample: Sample) -> Sample:
        """Apply the operation to one sample."""
        (block,) = self.apply(sample.block)
        return block.sample()

    def class_names(self) -> tuple[str, ...] | None:
        return None if self.operation.traits.column_before("y") is None else class_names_of(self.source)

    def field_names(self) -> frozenset[str] | None:
        known = fields_of(self.source)
        return None if known is None else self.operation.traits.fields_after(known)

    def fingerprint(self) -> Any:
        return self.operation.fingerprint()

    def value_fingerprint(self) -> Any:
        return self.operation.value_fingerprint()


class SampleMapperMapDataPipe(SampleMapper, MapPipe):
    """Applies an operation to each sample of an indexed source, when the sample is read."""

    def __init__(self, source_datapipe: MapDataPipe[Any], operation: Operation, name: str) -> None:
        self._configure(source_datapipe, operation, name)

    def __len__(self) -> int:
        return len(self.source)

    def read_blocks(self, rows: Rows) -> Sequence[Block]:
        blocks = blocks_of(self.source, rows, self.name)
        if len(blocks) == 1:
            return self.apply(blocks[0])
        return [changed for block in blocks for changed in self.apply(block)]

    def prefetch(self, order: Order) -> None:
        if isinstance(self.source, MapPipe):
            self.source.prefetch(order)

    def has_column(self, name: str) -> bool:
        passed = self.operation.traits.column_before(name)
        return passed is not None and has_column(self.source, passed)

    def column(self, name: str) -> NDArray[Any]:
        if isinstance(self.source, MapPipe):
            passed = self.operation.traits.column_before(name)
            if passed is not None:
                return self.source.column(passed)
            if is_key(name, self.field_names() or ()):
                return self.source.column(name)
        return super().column(name)


class SampleMapperIterDataPipe(SampleMapper, IterPipe):
    """Applies an operation to each sample of a stream as it passes."""

    def __init__(self, source_datapipe: IterDataPipe[Any], operation: Operation, name: str) -> None:
        super().__init__()
        self._configure(source_datapipe, operation, name)

    def __len__(self) -> int:
        return len(self.source)

    def samples(self) -> Iterator[Sample]:
        source, steps = self._row()
        for sample in source:
            try:
                for step in steps if sample.failure is None else ():
                    sample = step(sample)
            except Exception as error:
                # An error would end this generator, and with it the epoch. In an indexed chain, samples are made within
                # `deal`, which can leave them out. Here, the error waits until `deal` takes the sample.
                if (tolerated := tolerance()) is None or not tolerated.keeps_failures:
                    raise
                sample.fail(error)
            yield sample

    def _row(self) -> tuple[Iterator[Sample], list[Callable[[Sample], Sample]]]:
        """Return the operations of this pipe and of the work pipes directly upstream, and their source.

        A pipe that is being profiled has a `samples` method of its own, and ends the sequence.
        """
        pipes = [self]
        while type(source := pipes[0].source) is SampleMapperIterDataPipe and "samples" not in vars(source):
            pipes.insert(0, source)
        steps: list[Callable[[Sample], Sample]] = [
            pipe.operation if type(pipe) is SampleMapperIterDataPipe else pipe.apply_to
            for pipe in pipes
            if pipe.operation.traits.gives != "items"
        ]
        return samples_of(source, pipes[0].name), steps


@runtime_checkable
class _Declaring(Protocol):
    traits: Any


class UsersOperation(Operation):
    """A user's function of (sample, *args, **kwargs), or an object that is called with the sample.

    `declared` are its traits; if None, the object's own traits are used.
    """

    def __init__(
        self,
        name: str,
        called: Callback,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        declared: Traits | None = None,
    ) -> None:
        self.name = name
        self.called = called
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.declared = declared
        if declared is None:
            traits = called.function.traits if isinstance(called.function, _Declaring) else None
            declared = traits if isinstance(traits, Traits) else UNDECLARED
        if (declared.role, declared.gives) != ("work", "samples"):
            hint = "For a pipe with another role, subclass `kdp.MapPipe` or `kdp.IterPipe`."
            shown = f"Traits(role={declared.role!r}, gives={declared.gives!r})"
            raise ValueError(
                f'The traits of `.{name}()` must have role "work" and give "samples", but are {shown} instead. {hint}'
            )
        called.globals.num_watched = sys.maxsize  # caches downstream reject it as soon as it draws
        self._bound = called.with_function(functools.partial(called.function, **self.kwargs))
        self._bound.is_fixed = called.is_fixed and all(map(draws_nothing, (*args, *self.kwargs.values())))
        self.traits = replace(
            declared,
            random=declared.random or (name if called.is_random else None),
            records=declared.records or (None if called.parameters.isdisjoint(_FILLED) else name),
            seeds=self._bound.seeds,
            is_eager=True,  # it may load fields when the sample passes
        )
        self._place = f"sample_pipe.{name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return UsersOperation, (self.name, self.called, self.args, self.kwargs, self.declared)

    def __call__(self, sample: Sample) -> Sample:
        place = sample.block.claim_name(self._place)
        ctx = sample.ctx if sample.block.is_recording else None
        try:
            changed = call_seeded(self._bound, sample, place, sample, *self.args, ctx=ctx)
        except BaseException as error:
            add_note(
                error, f"kdpipes: while applying {self.name!r} to sample {sample.key!r} (ordinal {sample.ordinal})"
            )
            raise
        if changed is not sample and not isinstance(changed, Sample):
            raise ChainError(f"`{self.name}` must return the sample, but returned {type(changed).__name__}.")
        return changed

    def drawing(self) -> tuple[str, ...]:
        return self._bound.drawing

    def check(self, known: frozenset[str]) -> None:
        if isinstance(self.called.function, Operation):
            self.called.function.check(known)
        else:
            super().check(known)

    def fingerprint(self) -> Any:
        return self.called.function, self.args, self.kwargs


Definition = TypeVar("Definition", bound=Callable[..., Any])


def sample_pipe(
    name: str, *, changes: str | Set[str] | None = None, reads: str | Set[str] | None = None
) -> Callable[[Definition], Definition]:
    """Register a work pipe, `.name(...)`, on indexed pipes and on streams.

    Args:
        name: The functional name. It must not be that of a pipe or method of torch, torchdata or kdpipes.
        changes: The names of the fields that a function changes or adds, in one string, "x mask", or in a set. Other
            columns then come directly from the source. By default, all fields may change, so that a plan pipe
            downstream calls the function for every sample.
        reads: The names of the fields on which the results of a function depend, in the same form. By default, they may
            depend on all fields.

    The definition is either a function, `def brighten(sample, *, amount)`, which is called with each sample and returns
    it, or a class whose `__init__` takes the arguments of `.name(...)` and whose `__call__(sample)` does the work. A
    class declares the fields that it changes and reads in its attribute `traits`, such as `traits =
    kdp.Traits(changes={"x"}, reads={"x"})`; objects may have `traits` of their own. If it subclasses `kdp.Operation`,
    fields that the traits need but the source lacks raise `FieldError` when the chain is built, and `fingerprint()` may
    return plain data that identifies the operation.

    The function, or `__call__` of the class, may take `rng`, a `numpy.random.Generator` that depends only on (seed,
    epoch, ordinal, operation), and `ctx`, the sample's ctx; callers of `.name(...)` do not pass these. Without `rng`,
    the global generators of `random`, NumPy and torch are seeded for the call and restored afterwards, as in
    `transform`; for a function with an attribute `is_random = False`, nothing is seeded.

    Raises:
        TypeError: `changes` or `reads` is passed for a class.
        ValueError: The functional name is taken.

    Example:
        >>> @sample_pipe("doctest_scale")
        ... def scale(sample, *, by):
        ...     sample["x"] = sample["x"] * by
        ...     return sample
        >>> kdp.from_dataset([(1, 0), (2, 1)]).doctest_scale(by=10)[1]["x"]
        20
    """

    check_type("name", name, str, "the functional name", 'Write `@kdp.sample_pipe("name")`.')
    is_declared = changes is not None or reads is not None
    declared = Traits(changes=_named_in(changes), reads=_named_in(reads)) if is_declared else None

    def decorate(definition: Definition) -> Definition:
        if isinstance(definition, type) and is_declared:
            raise TypeError(
                f"`changes` and `reads` are for functions: the class {definition.__name__} must declare the fields "
                'that it changes and reads in an attribute `traits`, such as `traits = kdp.Traits(changes={"x"}, '
                'reads={"x", "y"})`.'
            )

        def make(*args: Any, **kwargs: Any) -> Operation:
            if isinstance(definition, type):
                return UsersOperation(name, Callback("operation", definition(*args, **kwargs)))
            return UsersOperation(name, Callback("function", definition), args, kwargs, declared)

        register_operation(name, definition, make)
        return definition

    return decorate


def _named_in(names: str | Set[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names.split() if isinstance(names, str) else names)


def work_pipe(name: str) -> Callable[[Definition], Definition]:
    """Register an `Operation` class of kdpipes, which manages random numbers and the ctx itself."""

    def decorate(definition: Definition) -> Definition:
        register_operation(name, definition, definition)
        return definition

    return decorate


def register_operation(
    name: str,
    definition: Any,
    make: Callable[..., Operation],
    pipes: tuple[Any, Any] = (SampleMapperMapDataPipe, SampleMapperIterDataPipe),
) -> None:
    """Register an operation as `.name(...)` on indexed pipes and on streams.

    Args:
        name: The functional name.
        definition: The function or class whose signature and docstring the method gets.
        make: A function that takes the arguments of the method, and returns the operation.
        pipes: The classes for indexed sources and for streams, called as `pipe(source_datapipe, operation, name)`.
    """
    signature = inspect.signature(definition)
    if not isinstance(definition, type):
        given = [parameter for parameter in list(signature.parameters.values())[1:] if parameter.name not in _FILLED]
        signature = signature.replace(parameters=given)
    source = inspect.Parameter("source_datapipe", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = signature.replace(parameters=[source, *signature.parameters.values()])

    def bind(pipe_class: Any) -> Callable[..., Any]:
        def pipe(source_datapipe: Any, *args: Any, **kwargs: Any) -> Any:
            piped = pipe_class(source_datapipe, make(*args, **kwargs), name)
            note_call(piped, args, kwargs)
            return piped

        pipe.__doc__ = definition.__doc__
        pipe.__name__ = name
        pipe.__qualname__ = definition.__qualname__
        pipe.__module__ = definition.__module__
        pipe.__signature__ = signature.replace(return_annotation=pipe_class)  # type: ignore[attr-defined]
        return pipe

    indexed, stream = (bind(pipe_class) for pipe_class in pipes)
    reject_taken(name, stream, flavour="iter")
    register(name, indexed, flavour="map")
    register(name, stream, flavour="iter")
