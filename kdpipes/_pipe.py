"""What pipes of both flavours share: errors about names, and sources that are refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes._called import note_call
from kdpipes._graph import walk
from kdpipes._pipe_name import pipe_name
from kdpipes.errors import ChainError, closest, must_be

__all__ = ["Shown", "Suggesting", "a_datapipe", "gives_samples", "show_by"]

_WAY_OUT = "Not where the source is "  # how the docstrings of names begin that a flavour refuses


class UnknownPipeError(AttributeError):
    """The error for a method that is none; what was meant is looked up only if somebody reads it."""

    def __str__(self) -> str:
        owner, name, names = self.args
        return f"`{owner}` has no pipe or attribute {name!r}.{_upstream_with(name, self) or closest(name, names)}"


def _upstream_with(name: str, error: AttributeError) -> str:
    """Return what to do for a method of a pipe upstream of the one that Python says was asked for it; else nothing."""
    pipe: Any = getattr(error, "obj", None)
    upstream = walk(pipe)[1:] if issubclass(type(pipe), Shown) else []
    known = next((pipe_name(one) for one in upstream if isinstance(one, Shown) and hasattr(type(one), name)), None)
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


Made = TypeVar("Made", bound="Shown")


class Shown:
    """A pipe that shows its chain, and whose unknown methods are errors that name the closest one."""

    functions: ClassVar[Any]
    __signature__: ClassVar[inspect.Signature]

    def __new__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        made: Made = super().__new__(cls)
        note_call(made, args, kwargs)
        return made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = _signature_of(cls)  # or `help` would show the arguments of `__new__`

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
                raise UnknownPipeError(pipe_name(self), name, tuple(type(self).functions)) from None


class Suggesting(Shown):
    """A pipe of samples, whose class may be one of a notebook."""

    reduce_ex_hook: ClassVar[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        hook = type(self).reduce_ex_hook
        if hook is not None:  # torch walks the graph: it looks for pipes among the attributes
            try:
                return hook(self)
            except NotImplementedError:
                # The class may be defined in a notebook, which does not pickle.
                return object, (), self.__getstate__()  # type: ignore[attr-defined]  # torch's
        return super().__reduce_ex__(protocol)


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
    """Return the source of pipe `name`, or refuse one whose samples `select` has made tuples of, or `deal` batches."""
    for flag, made_by, made in [("is_selected", "select", "tuples"), ("gives_batches", "deal", "batches")]:
        if getattr(source_datapipe, flag, False):
            raise ChainError(
                f"`.{name}()` takes samples, but `.{made_by}()` has made {made} of them. Put `.{name}()` before "
                f"`.{made_by}()`."
            )
    return a_datapipe(source_datapipe)


def a_datapipe(source_datapipe: PipeType) -> PipeType:
    """Return the source of a pipe, or refuse what is none."""
    if not isinstance(source_datapipe, IterDataPipe | MapDataPipe):
        raise TypeError(must_be("source_datapipe", "a datapipe", source_datapipe))
    return source_datapipe
