"""Sample-wise pipes: written once, as a callable from sample to sample, and registered for both flavours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

from numpy.typing import NDArray
from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes._called import CALLED, note_call
from kdpipes._calling import call_seeded, is_seeded
from kdpipes._functional import refuse_taken, register
from kdpipes._item_form import ItemForm
from kdpipes._iter_pipe import IterPipe, samples_of
from kdpipes._map_pipe import MapPipe, is_key
from kdpipes._pipe import gives_samples
from kdpipes.callback import Callback
from kdpipes.core.order import Order
from kdpipes.errors import ChainError
from kdpipes.sample import Sample, as_sample

__all__ = ["Operation", "SampleMapperIterDataPipe", "SampleMapperMapDataPipe", "register_operation", "sample_pipe"]

_FILLED = ("ctx", "rng")  # parameters of a user's function that get their values from kdpipes


class Operation(Protocol):
    """What is done to one sample. It changes the sample it is given and returns it."""

    def __call__(self, sample: Sample) -> Any: ...


class SampleMapper:
    """What both flavours share: the operation, and what is known of its fields before any sample is read."""

    _name: str
    _operation: Any
    _source: Any
    is_selected: bool

    def _configure(self, source_datapipe: Any, operation: Any, name: str) -> None:
        self._source = gives_samples(source_datapipe, name)
        self._operation = operation
        self._name = name
        self.is_selected = bool(getattr(operation, "is_selector", False))
        known = _fields_of(self._source)
        if known is not None and hasattr(operation, "check"):
            operation.check(known)

    def apply(self, sample: Sample) -> Sample:
        """Do the operation, unless it is what `finish` does."""
        if self.is_selected:
            return sample
        called = _users_callback(self._operation)
        if called is None:
            changed = self._operation(sample)
        else:
            place, ctx = sample.claim_name(f"sample_pipe.{self._name}"), sample.ctx if sample.is_recording else None
            changed = call_seeded(called, sample, place, sample, ctx=ctx)
        if changed is not sample and not isinstance(changed, Sample):
            raise ChainError(f"`{self._name}` must return the sample, but returned {type(changed).__name__}.")
        return changed

    def step(self) -> Callable[[Sample], Sample]:
        """Return what does the operation; without a look at the result where it is our own."""
        is_trusted = type(self._operation).__module__.startswith("kdpipes.work.")
        return cast("Callable[[Sample], Sample]", self._operation) if is_trusted else self.apply

    def finish(self, sample: Sample) -> Any:
        return self._operation(sample) if self.is_selected else sample

    def item_names(self) -> ItemForm | None:
        """Return the form of the items that `select` makes; None where items are samples."""
        return self._operation.form if self.is_selected else None

    def class_names(self) -> tuple[str, ...] | None:
        column_name = getattr(self._operation, "column_name", None)
        if column_name is not None and column_name("y") is None:
            return None  # the labels are no longer the source's
        names: Callable[[], tuple[str, ...] | None] | None = getattr(self._source, "class_names", None)
        return names() if names is not None else None

    def field_names(self) -> frozenset[str] | None:
        known = _fields_of(self._source)
        name_fields = getattr(self._operation, "field_names", None)
        return name_fields(known) if known is not None and name_fields is not None else None


def _fields_of(source: Any) -> frozenset[str] | None:
    field_names: Callable[[], frozenset[str] | None] | None = getattr(source, "field_names", None)
    return field_names() if field_names is not None else None


@functools.cache
def _is_ours(kind: type) -> bool:
    """Return what `isinstance` would, which asks torch's metaclass for each sample and pipe."""
    return issubclass(kind, MapPipe)


class SampleMapperMapDataPipe(SampleMapper, MapPipe):
    """Applies an operation to each sample of an indexed source, when the sample is read.

    Args:
        source_datapipe: A pipe of samples.
        operation: Called with each sample; changes and returns it.
        name: The functional name, for errors.
    """

    def __init__(self, source_datapipe: MapDataPipe[Any], operation: Operation, name: str) -> None:
        self._configure(source_datapipe, operation, name)

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, index: int) -> Sample:
        if _is_ours(type(self._source)):  # type: ignore[arg-type]  # a type has a hash
            return self.apply(self._source.fetch(index))
        return self.apply(as_sample(self._source[index], index, self._name))

    def prefetch(self, order: Order) -> None:
        if isinstance(self._source, MapPipe):
            self._source.prefetch(order)

    def shard_numbers(self) -> NDArray[Any] | None:
        return self._source.shard_numbers() if isinstance(self._source, MapPipe) else None

    def pick(self, indices: Any) -> MapPipe:
        if self.is_selected and isinstance(self._source, MapPipe):
            picked = SampleMapperMapDataPipe(self._source.pick(indices), self._operation, self._name)
            picked.__dict__[CALLED] = self.__dict__[CALLED]
            return picked
        return super().pick(indices)

    def column(self, name: str) -> NDArray[Any]:
        column_name = getattr(self._operation, "column_name", None)
        passed = column_name(name) if column_name is not None else None
        if passed is not None and isinstance(self._source, MapPipe):
            return self._source.column(passed)
        if is_key(name, self.field_names() or ()) and isinstance(self._source, MapPipe):
            return self._source.column(name)
        return super().column(name)


class SampleMapperIterDataPipe(SampleMapper, IterPipe):
    """Applies an operation to each sample of a stream, as it passes.

    Args:
        source_datapipe: A pipe of samples.
        operation: Called with each sample; changes and returns it.
        name: The functional name, for errors.
    """

    is_straight = True

    def __init__(self, source_datapipe: IterDataPipe[Any], operation: Operation, name: str) -> None:
        super().__init__()
        self._configure(source_datapipe, operation, name)

    def __len__(self) -> int:
        return len(self._source)

    def samples(self) -> Iterator[Sample]:
        source, steps = self._row()
        for sample in source:
            for step in steps:
                sample = step(sample)
            yield sample

    def _row(self) -> tuple[Iterator[Sample], list[Callable[[Sample], Sample]]]:
        """Return what this pipe and those like it right before it do to a sample, and what they do it to.

        One that is measured has a `samples` of its own.
        """
        pipes = [self]
        while type(source := pipes[0]._source) is SampleMapperIterDataPipe and "samples" not in vars(source):
            pipes.insert(0, source)
        return samples_of(source, pipes[0]._name), [pipe.step() for pipe in pipes if not pipe.is_selected]


class _Bound:
    """A function of (sample, ...) with the rest of its arguments."""

    is_eager = True  # it may load fields when the sample passes

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changes: frozenset[str] | None,
    ) -> None:
        self._changes = changes
        bound = functools.partial(_call_with, function, args, kwargs)
        self.function = Callback("function", function).with_function(bound)

    def __call__(self, sample: Sample) -> Any:
        return self.function(sample)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.function, self._changes)

    def fingerprinted(self) -> Any:
        """Return what identifies the operation, under the names that existing states use."""
        return {"_changes": self._changes, "_function": self.function}

    def draws(self) -> str | None:
        """Return the function's name if it takes a generator."""
        return self.function.name if "rng" in self.function.parameters and not self.function.is_fixed else None

    def records(self) -> str | None:
        """Return the function's name if it takes the ctx or a generator."""
        return self.function.name if not self.function.parameters.isdisjoint(_FILLED) else None

    def seeded(self) -> list[str]:
        """Return the function's name if global generators are seeded for it."""
        return [self.function.name] if is_seeded(self.function) else []

    def column_name(self, name: str) -> str | None:
        return None if self._changes is None or name in self._changes else name


def _restored(function: Callback, changes: frozenset[str] | None) -> _Bound:
    users, args, kwargs = function.function.args
    # Made again, so that the known parameters are those of the user's function, not of the partial.
    return _Bound(users, args, kwargs, changes)


def _call_with(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sample: Sample, **filled: Any
) -> Any:
    return function(sample, *args, **kwargs, **filled)


def _users_callback(operation: Any) -> Callback | None:
    """Return a user's operation as a `Callback` for `call_seeded`; None for kdpipes' own operations."""
    if isinstance(operation, _Bound):
        return operation.function
    method = _users_method(type(operation))  # type: ignore[arg-type]  # a type has a hash
    return None if method is None else method.with_function(operation)


@functools.cache
def _users_method(kind: type) -> Callback | None:
    if kind.__module__.split(".")[0] == "kdpipes":
        return None
    method = Callback("operation", kind.__call__, check=False)
    method.is_fixed = getattr(kind, "is_random", None) is False
    return method


Definition = TypeVar("Definition", bound=Callable[..., Any])


def sample_pipe(name: str, *, changes: str | None = None) -> Callable[[Definition], Definition]:
    """Register a sample-wise pipe as `.name(...)` on indexed pipes and on streams.

    Args:
        name: The functional name, which torch and torchdata must not use already.
        changes: The fields that a function changes or adds, in one string: "x mask". Other columns then come straight
            from the source; otherwise a plan pipe that follows calls the function for every sample.

    The definition is either a function, `def brighten(sample, *, amount)`, called with each sample, or a class whose
    `__init__` takes the arguments of `.name(...)` and whose `__call__(sample)` returns the sample. A class may have
    more methods: `field_names(known)` returns the fields after it, `column_name(name)` the source's column that is
    column `name` unchanged (None if it is changed), and `check(known)` raises if a field is missing.

    The function, or `__call__` of the class, may take `rng`, a `numpy.random.Generator` that depends only on (seed,
    epoch, ordinal, operation), and `ctx`, the sample's ctx; callers of `.name(...)` do not pass these. Without `rng`,
    the global generators of `random`, NumPy and torch are seeded for the call and restored afterwards, as in
    `transform`; for a function with an attribute `is_random = False`, nothing is seeded.

    Example:
        >>> @sample_pipe("doctest_scale")
        ... def scale(sample, *, by):
        ...     sample["x"] = sample["x"] * by
        ...     return sample
        >>> kdp.from_dataset([(1, 0), (2, 1)]).doctest_scale(by=10)[1]["x"]
        20
    """

    changed = None if changes is None else frozenset(changes.split())

    def decorate(definition: Definition) -> Definition:
        register_operation(name, definition, (SampleMapperMapDataPipe, SampleMapperIterDataPipe), changed)
        return definition

    return decorate


def register_operation(
    name: str, definition: Any, pipes: tuple[Any, Any], changes: frozenset[str] | None = None
) -> None:
    """Register what `sample_pipe` describes, with pipe classes of one's own.

    Args:
        name: The functional name.
        definition: The function or class.
        pipes: The pipe classes, called as `pipe(source_datapipe, operation, name)`: of indexed sources, of streams.
        changes: The fields that a function changes.
    """
    signature = inspect.signature(definition)
    if not isinstance(definition, type):
        given = [parameter for parameter in list(signature.parameters.values())[1:] if parameter.name not in _FILLED]
        signature = signature.replace(parameters=given)

    def bind(pipe_class: Any) -> Callable[..., Any]:
        def pipe(source_datapipe: Any, *args: Any, **kwargs: Any) -> Any:
            is_class = isinstance(definition, type)
            made = definition(*args, **kwargs) if is_class else _Bound(definition, args, kwargs, changes)
            piped = pipe_class(source_datapipe, made, name)
            note_call(piped, args, kwargs)
            return piped

        pipe.__doc__, pipe.__name__, pipe.__qualname__ = definition.__doc__, name, definition.__qualname__
        pipe.__module__ = definition.__module__
        pipe.__signature__ = _with_source(signature)  # type: ignore[attr-defined]
        return pipe

    indexed, stream = (bind(pipe_class) for pipe_class in pipes)
    refuse_taken(name, stream, flavour="iter")
    register(name, indexed, flavour="map")
    register(name, stream, flavour="iter")


def _with_source(signature: inspect.Signature) -> inspect.Signature:
    source = inspect.Parameter("source_datapipe", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[source, *signature.parameters.values()])
