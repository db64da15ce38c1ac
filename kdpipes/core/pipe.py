"""`Pipe`, the base class of all pipes of kdpipes and of its users, and what pipes ask about their sources."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.call_text import CALLED, Called, note_call
from kdpipes.core.errors import ChainError, closest, must_be
from kdpipes.core.fingerprint import Fingerprinted
from kdpipes.core.first_values import with_first_values
from kdpipes.core.item_form import ItemForm
from kdpipes.core.operation import Operation
from kdpipes.core.registry import pipe_name
from kdpipes.core.stock import load_torchdata
from kdpipes.core.traits import UNDECLARED, Traits

__all__ = ["Pipe", "a_datapipe", "class_names_of", "fields_of", "form_of", "gives_samples", "show_by"]

_NOT_ARGUMENTS = (CALLED, "traits")
_WAY_OUT = "Not where the source is "  # how the docstrings of names begin that a flavour refuses


class UnknownPipeError(AttributeError):
    """The error for a method that is none; what was meant is looked up only if somebody reads it."""

    def __str__(self) -> str:
        owner, name, names = self.args
        hint = _upstream_with(name, self) or _elsewhere(name) or closest(name, names)
        return f"`{owner}` has no pipe or attribute {name!r}.{hint}"


def _elsewhere(name: str) -> str:
    """Return a hint if `name` is a pipe of the other flavour; that it is missing here means that this one lacks it."""
    if name in MapDataPipe.functions:
        return f" `.{name}()` is a pipe of indexed sources; this is a stream."
    return f" `.{name}()` is a pipe of streams: put it after `.deal()`." if name in IterDataPipe.functions else ""


def _upstream_with(name: str, error: AttributeError) -> str:
    """Return what to do for a method of a pipe upstream of the one that Python says was asked for it; else nothing."""
    from kdpipes.core.chain import Chain  # which builds on this module

    pipe: Any = error.obj  # the object that Python was asked for the attribute of
    upstream = Chain.of(pipe).pipes[1:] if isinstance(pipe, Pipe) else []
    known = next((pipe_name(one) for one in upstream if isinstance(one, Pipe) and name in dir(type(one))), None)
    return "" if known is None else f" `{known}` upstream has it: keep that pipe in a variable of its own, and ask it."


_shown_by: dict[str, Callable[[Any], str]] = {}


def show_by(*, text: Callable[[Any], str], html: Callable[[Any], str]) -> None:
    """Say what draws the chain of a pipe, for `repr` and in notebooks."""
    _shown_by.update(text=text, html=html)


def _signature_of(pipe_class: Any) -> inspect.Signature:
    """Return the signature of a class as its `__init__` has it."""
    if pipe_class.__init__ is object.__init__:
        return inspect.Signature()
    return _without_first(inspect.signature(pipe_class.__init__))


def _without_first(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty)


Made = TypeVar("Made", bound="Pipe")


class Pipe(Fingerprinted):
    """What all pipes of kdpipes have in common: what they declare, and how they are shown.

    `traits` declares what the pipe does to samples: as an attribute of the class, set in `__init__`, or as a property.
    """

    traits: Traits = UNDECLARED
    functions: ClassVar[Any]
    reduce_ex_hook: ClassVar[Any]
    __signature__: ClassVar[inspect.Signature]
    computed: ClassVar[tuple[str, ...]] = ()  # attributes that are not arguments, and so not part of the fingerprint

    def __new__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        made: Made = super().__new__(cls)
        note_call(made, args, kwargs)
        return made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "identity" in vars(cls):
            raise TypeError(
                f"`identity` is not called any more: the class {cls.__name__} must name the method `fingerprint`."
            )
        cls.__signature__ = _signature_of(cls)  # or `help` would show the arguments of `__new__`

    @property
    def operation(self) -> Operation | None:
        """What a work pipe does to each sample; None for all other pipes."""
        return None

    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes 0, 1, ... of field `y`, or None where the source does not know them."""
        return None

    def field_names(self) -> frozenset[str] | None:
        """Return the names of the fields that every sample has, or None where only the samples know."""
        return None

    def item_form(self) -> ItemForm | None:
        """Return the form of the items that `select` has made; None where items are samples, or the form is unknown."""
        return self.traits.item_form

    @property
    def call_arguments(self) -> tuple[str, ...]:
        """The arguments of the call that made the pipe, as text."""
        called: Called | None = vars(self).get(CALLED)
        return () if called is None else called.arguments

    def keep_call(self, other: Pipe) -> None:
        """Show the arguments of another pipe in place of the pipe's own."""
        vars(self)[CALLED] = vars(other)[CALLED]

    def has_quick_length(self, *, may_plan: bool) -> bool:
        """Return whether `len(pipe)` is quick, provided that the lengths upstream are known.

        Args:
            may_plan: Whether a plan may be made from what is in memory, or a small local folder listed.
        """
        return True

    def prepare_for_workers(self) -> None:
        """Find out now what every worker would find out otherwise: called before workers start."""

    def counters(self) -> dict[str, int]:
        """Return what the pipe has counted in all processes, by name, for the statistics of a loader."""
        return {}

    def fingerprint(self) -> Any:
        """Return plain data that differs between pipes which give other samples: by default, the attributes.

        What is upstream does not belong to it.
        """
        held = with_first_values(self, vars(self))
        return [(name, value) for name, value in sorted(held.items()) if name not in (*self.computed, *_NOT_ARGUMENTS)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        hook = type(self).reduce_ex_hook
        if hook is not None:  # torch walks the graph: it looks for pipes among the attributes
            try:
                return hook(self)
            except NotImplementedError:
                # The class may be defined in a notebook, which does not pickle.
                return object, (), self.__getstate__()  # type: ignore[attr-defined]  # torch's
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return _shown_by["text"](self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return _shown_by["html"](self)

    def __dir__(self) -> list[str]:
        refused = {name for name, pipe in self.functions.items() if (pipe.__doc__ or "").startswith(_WAY_OUT)}
        return sorted({*object.__dir__(self), *self.functions} - refused)

    if not TYPE_CHECKING:  # checkers take the names of pipes from `_fluent.pyi`

        def __getattr__(self, name: str) -> Any:
            try:
                return _as_method(super().__getattr__(name))  # torch's look-up of functional names
            except AttributeError:
                if name.startswith("_"):
                    raise
                if load_torchdata() is not None and name in type(self).functions:  # one of torchdata's pipes
                    return _as_method(super().__getattr__(name))
                raise UnknownPipeError(pipe_name(self), name, tuple(type(self).functions)) from None


def _as_method(found: Any) -> Any:
    """Return a functional pipe as a method whose help shows its arguments, not as a partial of two."""
    if not isinstance(found, functools.partial):
        return found

    def method(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **kwargs)

    called = next((argument for argument in found.args if isinstance(argument, type)), found.func)  # a stock class
    method.__signature__ = _without_first(inspect.signature(called))  # type: ignore[attr-defined]
    return functools.update_wrapper(method, called, ("__doc__", "__name__", "__qualname__", "__module__"), ())


PipeType = TypeVar("PipeType")


def gives_samples(source_datapipe: PipeType, name: str) -> PipeType:
    """Return the source of pipe `name`; raise if `select` has made items of its samples, or `deal` batches."""
    gives = source_datapipe.traits.gives if isinstance(source_datapipe, Pipe) else "samples"
    if gives != "samples":
        made_by, made = {"items": ("select", "tuples"), "batches": ("deal", "batches")}[gives]
        raise ChainError(
            f"`.{name}()` takes samples, but `.{made_by}()` has made {made} of them. Put `.{name}()` before "
            f"`.{made_by}()`."
        )
    return a_datapipe(source_datapipe)


def a_datapipe(source_datapipe: PipeType) -> PipeType:
    """Return a pipe; raise TypeError for anything else."""
    if not isinstance(source_datapipe, IterDataPipe | MapDataPipe):
        raise TypeError(must_be("source_datapipe", "a datapipe", source_datapipe))
    return source_datapipe


def fields_of(source_datapipe: Any) -> frozenset[str] | None:
    """Return the fields that every sample of a pipe has; None where that is not known."""
    return source_datapipe.field_names() if isinstance(source_datapipe, Pipe) else None


def form_of(source_datapipe: Any) -> ItemForm | None:
    """Return the form of the items of a pipe; None where items are samples, or the form is not known."""
    return source_datapipe.item_form() if isinstance(source_datapipe, Pipe) else None


def class_names_of(source_datapipe: Any) -> tuple[str, ...] | None:
    """Return the names of the classes of a pipe; None where they are not known."""
    return source_datapipe.class_names() if isinstance(source_datapipe, Pipe) else None
