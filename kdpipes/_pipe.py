"""What pipes of both flavours share: errors about names, and sources that are refused."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.errors import ChainError, closest, must_be

__all__ = ["Suggesting", "a_datapipe", "gives_samples"]


class UnknownPipeError(AttributeError):
    """The error for a method that is none; what was meant is looked up only if somebody reads it."""

    def __str__(self) -> str:
        owner, name, names = self.args
        return f"{owner} has no pipe or attribute {name!r}.{closest(name, names)}"


class Suggesting:
    """A pipe whose unknown methods are errors that name the closest one."""

    functions: ClassVar[Any]
    reduce_ex_hook: ClassVar[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        hook = type(self).reduce_ex_hook
        if hook is not None:  # torch walks the graph: it looks for pipes among the attributes
            try:
                return hook(self)
            except NotImplementedError:
                return object, (), self.__getstate__()  # the class may be one of a notebook, which does not pickle
        return super().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        try:
            return _as_method(super().__getattr__(name))  # type: ignore[misc]  # torch's look-up of functional names
        except AttributeError:
            if name.startswith("_"):
                raise
            raise UnknownPipeError(type(self).__name__, name, tuple(type(self).functions)) from None


def _as_method(found: Any) -> Any:
    """Return a functional pipe as a method whose help shows its arguments, not as a partial of two."""
    if not isinstance(found, functools.partial):
        return found

    def method(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **kwargs)

    signature = inspect.signature(found.func)
    parameters = list(signature.parameters.values())[1:]
    method.__signature__ = signature.replace(parameters=parameters, return_annotation=signature.empty)  # type: ignore[attr-defined]
    return functools.update_wrapper(method, found.func, ("__doc__", "__name__", "__qualname__", "__module__"), ())


PipeType = TypeVar("PipeType")


def gives_samples(source_datapipe: PipeType, name: str) -> PipeType:
    """Return the source of pipe `name`, or refuse one whose samples have been turned into tuples by `select`."""
    if getattr(source_datapipe, "is_selected", False):
        raise ChainError(
            f"`.{name}()` takes samples, but `.select()` has made tuples of them. Put `.{name}()` before `.select()`."
        )
    return a_datapipe(source_datapipe)


def a_datapipe(source_datapipe: PipeType) -> PipeType:
    """Return the source of a pipe, or refuse what is none."""
    if not isinstance(source_datapipe, IterDataPipe | MapDataPipe):
        raise TypeError(must_be("source_datapipe", "a datapipe", source_datapipe))
    return source_datapipe
