"""What pipes are called by where they are shown: the names that users have written, not those of classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.errors import closest

__all__ = ["called_as", "called_directly", "note_name", "pipe_name", "short_name", "shown_name"]

called_directly: dict[type, str] = {}  # the classes that are called as `kdp.name(...)`
_functional: dict[type, str] = {}  # those that are called as `.name(...)`

PipeClass = TypeVar("PipeClass", bound=type)


def called_as(name: str) -> Callable[[PipeClass], PipeClass]:
    """Record that a pipe class is called as `kdp.name(...)`, and use that name in errors about its arguments."""

    def decorate(pipe_class: PipeClass) -> PipeClass:
        called_directly[pipe_class] = name
        pipe_class.__init__ = _checked(name, pipe_class.__init__)  # type: ignore[misc]
        return pipe_class

    return decorate


def _checked(name: str, construct: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(construct)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()][1:]

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            names = [parameter.name for parameter in parameters]
            unknown = next((key for key in kwargs if key not in names), "")
            what = f"got an unexpected keyword argument {unknown!r}" if unknown else str(error)
            raise TypeError(f"`kdp.{name}{inspect.Signature(parameters)}`: {what}.{closest(unknown, names)}") from None
        construct(self, *args, **kwargs)

    return constructed


def note_name(pipe_class: type, name: str) -> None:
    """Note that a pipe class is called as `.name(...)`."""
    _functional.setdefault(pipe_class, name)


def pipe_name(pipe: Any) -> str:
    """Return what a pipe is called by in a chain: its functional name, as `kdp.name`, or else its class."""
    kind, held = type(pipe), getattr(pipe, "__dict__", {})  # of what is no pipe, too: errors name it
    if isinstance(held.get("_name"), str) and "_operation" in held:  # sample-wise pipes share their classes
        return str(held["_name"])
    known = called_directly.get(kind) or _functional.get(kind)
    known = known or _stock_name(kind)  # type: ignore[arg-type]  # mypy takes no class for hashable
    return known or short_name(kind).lstrip("_").removesuffix("Map")


def short_name(kind: type) -> str:
    """Return what fingerprints call a pipe class, also those in states that are kept.

    >>> from torch.utils.data.datapipes.iter import Mapper
    >>> short_name(Mapper)
    'Mapper'
    """
    return kind.__name__.removesuffix("DataPipe").removesuffix("Iter")


def shown_name(short: str) -> str:
    """Return what a pipe is called by in a chain, by what its fingerprint calls it.

    >>> shown_name("DealerMap"), shown_name("Mapper"), shown_name("decode_images")
    ('deal', 'map', 'decode_images')
    """
    named = [*called_directly.items(), *_functional.items(), *_stock_kinds(IterDataPipe), *_stock_kinds(MapDataPipe)]
    return next((name for kind, name in named if short_name(kind) == short), short)


@functools.lru_cache(maxsize=256)
def _stock_name(kind: Any) -> str | None:
    base = MapDataPipe if issubclass(kind, MapDataPipe) else IterDataPipe
    return next((name for known, name in _stock_kinds(base) if known is kind), None)


def _stock_kinds(base: Any) -> Iterator[tuple[type, str]]:
    """Yield the classes of torch and torchdata that have a functional name, and it."""
    for name, function in base.functions.items():
        if isinstance(function, functools.partial) and function.args and isinstance(function.args[0], type):
            yield function.args[0], str(name)
