"""`Pipe`, the base class of all pipes, and functions that check and query a pipe's sources."""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from kdpipes.core.call_text import CALLED, note_call
from kdpipes.core.errors import ChainError, check_type, closest
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.frozen import TAG
from kdpipes.core.on_use import call_slot
from kdpipes.core.registry import argument_check, other_flavour_hint, own_method, pipe_name
from kdpipes.core.stock import NAMES_OF_TORCHDATA, edges_from, load_torchdata, passes_on
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.traits import UNDECLARED, ItemForm, Traits
from kdpipes.core.user_code import is_kdpipes, with_first_values

_NOT_ARGUMENTS = (CALLED, TAG, "traits")
_FOREIGN_NAMES = {  # what to write in place of a name that other libraries have
    "filter": " To choose samples, use `.filter_samples(columns=..., keep=...)` or `.filter_classes(...)`.",
    **dict.fromkeys(("take", "head"), " On an indexed chain, `chain[:100]` takes the first 100 samples."),
    **dict.fromkeys(("labels", "targets"), ' `chain.column("y")` returns the labels of all samples.'),
    "classes": " `chain.class_names()` returns the names of the classes.",
    "skip": " On an indexed chain, `chain[100:]` leaves out the first 100 samples.",
    "repeat": " A loader starts the next epoch with the next `for`. `.repeat_until(...)` lengthens an epoch.",
    "prefetch": " A loader prefetches: `kdp.Loader(chain, num_workers=2, prefetch=2)`.",
    "augment": ' Write `.transform("x", function)`.',
}
_FUNCTIONS = (  # functions of kdpipes that take a chain
    *("Loader", "class_counts", "doctor", "plot_classes", "profile", "replay", "show_batch", "split"),
    *("write_records", "write_shards"),
)


class UnknownPipeError(AttributeError):
    """A pipe does not have the requested method. The hint is computed only when the message is read."""

    __slots__ = ("_pipe",)  # not pickled

    def __init__(self, owner: str, name: str, names: tuple[str, ...], pipe: Any = None) -> None:
        # With `obj`, Python would add a suggestion of its own. A copy of the error has no pipe.
        super().__init__(owner, name, names, name=name, obj=None)
        self._pipe = pipe

    def __str__(self) -> str:
        owner, name, names = self.args
        pipe = self._pipe
        upstream = (
            [source for source, _ in edges_from(pipe)[1:]] if isinstance(pipe, IterDataPipe | MapDataPipe) else []
        )
        known = next((pipe_name(one) for one in upstream if isinstance(one, Pipe) and name in dir(type(one))), None)
        if known is not None:
            hint = f" `{known}` upstream has it: keep that pipe in a variable, and use the variable."
        elif (otherwise := other_flavour_hint(name)) is not None:
            return _of_the_other_flavour(pipe, name, otherwise)
        elif name in MapDataPipe.functions:  # exists only in the other flavour
            hint = f" `.{name}()` is a pipe of indexed sources; this is a stream."
        elif name in _FOREIGN_NAMES:
            hint = _FOREIGN_NAMES[name]
        elif name in IterDataPipe.functions:
            hint = f" `.{name}()` is a pipe of streams: put it after `.deal()`."
        else:
            is_function = name in _FUNCTIONS
            hint = f" It is a function: `kdp.{name}(chain, ...)`." if is_function else closest(name, names)
        return f"`{owner}` has no pipe or attribute {name!r}.{hint}"


def _of_the_other_flavour(pipe: Any, name: str, otherwise: str) -> str:
    """Return the error message for a pipe that exists only in the other flavour."""
    owner = f"`{pipe_name(pipe)}`"
    if isinstance(pipe, MapDataPipe):
        return f"`.{name}()` needs a stream, but {owner} is indexed. {otherwise}"
    if isinstance(pipe, Pipe) and pipe.traits.gives == "batches":
        return f"`.{name}()` takes samples, but {owner} gives batches. Put `.{name}()` before `.deal()`."
    return f"`.{name}()` needs an indexed source, but {owner} is a stream. {otherwise}"


def _without_first(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty)


Made = TypeVar("Made", bound="Pipe")


class Pipe(Fingerprinted):
    """The base class of all pipes.

    `traits` declares what the pipe does to samples. It is a class attribute, set in `__init__`, or a property.
    """

    traits: Traits = UNDECLARED
    functions: ClassVar[Any]
    reduce_ex_hook: ClassVar[Any]
    __signature__: ClassVar[inspect.Signature]
    computed: ClassVar[tuple[str, ...]] = ()  # attributes that are not arguments, so not in the fingerprint
    set_by_init: ClassVar[tuple[str, ...]] = ()  # attributes that exist only if `super().__init__(...)` was called
    # Other attributes of kdpipes' classes are hidden from `dir`, and thereby from completion in notebooks.
    for_users: ClassVar[tuple[str, ...]] = ("class_names", "field_names")

    def __new__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        made: Made = super().__new__(cls)
        vars(made)[TAG] = os.urandom(8)
        note_call(made, args, kwargs)
        return made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Without this, `help` would show the arguments of `__new__`.
        made_by: Any = cls.__init__
        is_plain = made_by is object.__init__
        cls.__signature__ = inspect.Signature() if is_plain else _without_first(inspect.signature(made_by))

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes 0, 1, ... of field `y`; None if they are unknown."""
        return None

    def field_names(self) -> frozenset[str] | None:
        """Return the field names that every sample has; None if they are unknown before a sample is read."""
        return None

    def fingerprint(self) -> Any:
        """Return plain data that identifies the pipe, without the pipes upstream: by default, its attributes.

        Pipes that yield different samples must return different data.
        """
        held = with_first_values(self, vars(self))
        return [(name, value) for name, value in sorted(held.items()) if name not in (*self.computed, *_NOT_ARGUMENTS)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        hook = type(self).reduce_ex_hook
        if hook is not None:  # torch traverses the graph: it looks for pipes among the attributes
            try:
                return hook(self)
            except NotImplementedError:
                # The class may be defined in a notebook and not be picklable.
                return object, (), self.__getstate__()  # type: ignore[attr-defined]  # torch's
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return str(call_slot("chain_text", self))

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return str(call_slot("chain_html", self))

    def __dir__(self) -> list[str]:
        """Return the pipes that can follow and the attributes for users, without internals of kdpipes and torch."""
        internal: set[str] = set()
        shown: set[str] = set()
        for owner in type(self).__mro__:
            if is_kdpipes(owner) or not issubclass(owner, Pipe):
                internal.update(name for name in vars(owner) if not name.startswith("_"))
                shown.update(vars(owner).get("for_users", ()))
        return sorted({*object.__dir__(self), *self.functions} - internal | shown | {*self.functions})

    if not TYPE_CHECKING:  # checkers read the names of pipes from `_fluent.pyi`

        def __getattr__(self, name: str) -> Any:
            own = own_method(self, name)  # first, because another library may use the same name
            if own is not None:
                return _as_method(own, name)
            try:
                return _as_method(super().__getattr__(name), name)  # torch's base class looks up functional names
            except AttributeError:
                if name in type(self).set_by_init:
                    owner = type(self).__name__
                    hint = f"Call `super().__init__(...)` in `{owner}.__init__`."
                    raise AttributeError(f"`{owner}` has no {name!r}, which its base class sets. {hint}") from None
                if name.startswith("_"):
                    raise
                if name in NAMES_OF_TORCHDATA and load_torchdata() is not None and name in type(self).functions:
                    return _as_method(super().__getattr__(name), name)
                raise UnknownPipeError(pipe_name(self), name, tuple(type(self).functions), self) from None


@runtime_checkable
class _Preparing(Protocol):
    def prepare_for_workers(self) -> None: ...


@runtime_checkable
class _Ending(Protocol):
    def end_epoch(self, *, in_worker: bool) -> None: ...


@runtime_checkable
class _Counting(Protocol):
    def counters(self) -> dict[str, int]: ...


def prepare_for_workers(pipe: Any) -> None:
    """Make a pipe compute, once and before workers start, what all workers need."""
    if isinstance(pipe, _Preparing):
        pipe.prepare_for_workers()


def end_epoch(pipe: Any, *, in_worker: bool) -> None:
    """Notify a pipe of the end of an epoch: in each worker after its last batch, then in the main process."""
    if isinstance(pipe, _Ending):
        pipe.end_epoch(in_worker=in_worker)


def counters_of(pipe: Any) -> dict[str, int]:
    """Return the counters of a pipe over all processes, by name, for the statistics of a loader."""
    return pipe.counters() if isinstance(pipe, _Counting) else {}


def _as_method(found: Any, name: str) -> Any:
    """Return a functional pipe as a method whose help shows its arguments, unlike torch's partial."""
    if not isinstance(found, functools.partial):
        return found

    given = found.func.args if isinstance(found.func, functools.partial) else ()
    stock = [argument for argument in given if isinstance(argument, type)]
    called = stock[0] if stock else found.func
    check = argument_check(f".{name}", called) if stock else None  # pipes of kdpipes check their arguments themselves

    def method(*args: Any, **kwargs: Any) -> Any:
        if check is not None:
            check(None, args, kwargs)
        return found(*args, **kwargs)

    method.__signature__ = _without_first(inspect.signature(called))  # type: ignore[attr-defined]
    return functools.update_wrapper(method, called, ("__doc__", "__name__", "__qualname__", "__module__"), ())


PipeType = TypeVar("PipeType")


def gives_samples(source_datapipe: PipeType, name: str) -> PipeType:
    """Return the source of pipe `name`. Raise ChainError if it yields items or batches instead of samples."""
    gives = source_datapipe.traits.gives if isinstance(source_datapipe, Pipe) else "samples"
    if gives != "samples":
        made_by, made = {"items": ("select", "tuples"), "batches": ("deal", "batches")}[gives]
        is_function = name in _FUNCTIONS
        hint = f"Pass it the chain before `.{made_by}()`" if is_function else f"Put `.{name}()` before `.{made_by}()`"
        shown = f"kdp.{name}" if is_function else f".{name}()"
        raise ChainError(f"`{shown}` takes samples, but `.{made_by}()` has made {made} of them. {hint}.")
    return a_datapipe(source_datapipe)


def a_datapipe(source_datapipe: PipeType) -> PipeType:
    """Return `source_datapipe`; raise TypeError unless it is a datapipe."""
    check_type("source_datapipe", source_datapipe, IterDataPipe | MapDataPipe, "a datapipe")
    return source_datapipe


def fields_of(source_datapipe: Any) -> frozenset[str] | None:
    """Return the fields that every sample of a pipe has; None if they are unknown."""
    return source_datapipe.field_names() if isinstance(source_datapipe, Pipe) else None


def form_of(source_datapipe: Any) -> ItemForm | None:
    """Return the form of a pipe's items; None if the items are samples or the form is unknown."""
    return source_datapipe.traits.item_form if isinstance(source_datapipe, Pipe) else None


def class_names_of(source_datapipe: Any) -> tuple[str, ...] | None:
    """Return the class names of a pipe; None if they are unknown."""
    while (upstream := passes_on(source_datapipe)) is not None:  # for example torch's `.shuffle()`
        source_datapipe = upstream
    return source_datapipe.class_names() if isinstance(source_datapipe, Pipe) else None
