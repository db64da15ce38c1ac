"""Functional names: registered here and nowhere else, on both flavours of pipes, and shown in errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes.core.errors import ChainError, check_choice, closest

__all__ = [
    "Flavour",
    "Named",
    "called_as",
    "called_directly",
    "functional_pipe",
    "note_name",
    "pipe_name",
    "refuse_flavour",
    "refuse_taken",
    "register",
    "registered",
    "short_name",
    "shown_name",
]

Flavour = Literal["map", "iter"]
_BASES: dict[str, Any] = {"map": MapDataPipe, "iter": IterDataPipe}
_INSTEAD = {  # hints for arguments of torch's DataLoader that users pass to a pipe
    ("deal", "drop_last"): ' Write `uneven="drop"`.',
    ("deal", "num_workers"): " Pass it to the loader: `kdp.Loader(chain, num_workers=...)`.",
    ("deal", "collate_fn"): " Add `.collate_samples()` or `.map(function)` after it.",
    ("deal", "pin_memory"): ' End the chain with `.to_device("cuda")`.',
    ("deal", "sampler"): " Choose samples with `.sample_weighted(...)` or `.subset(...)` before it.",
}
_ours: dict[tuple[str, str], Callable[..., Any]] = {}

PipeClass = TypeVar("PipeClass", bound=type)


def register(name: str, function: Callable[..., Any], *, flavour: Flavour) -> None:
    """Make `function(source_datapipe, ...)` callable as `source_datapipe.name(...)`.

    The same definition may be registered again (a reloaded module, a notebook cell that is run twice); the name of
    somebody else's pipe or method is refused.
    """
    refuse_taken(name, function, flavour=flavour)
    _BASES[flavour].register_function(name, _checked(name, function))
    _ours[name, flavour] = function
    if isinstance(function, type):
        note_name(function, name)


def refuse_taken(name: str, function: Callable[..., Any], *, flavour: Flavour) -> None:
    """Raise the error of `register` for a name that is somebody else's."""
    check_choice("flavour", flavour, ("map", "iter"))
    base = _BASES[flavour]
    known = _ours.get((name, flavour))
    if known is not None and not _is_same(known, function):
        raise ValueError(f"`.{name}()` is registered by {_place(known)}; {_place(function)} needs a name of its own.")
    if known is None and (name in base.functions or hasattr(base, name)):
        raise ValueError(f"`.{name}()` belongs to torch or torchdata; {_place(function)} needs a name of its own.")


def functional_pipe(name: str, *, flavour: Flavour, doc_of: type | None = None) -> Callable[[PipeClass], PipeClass]:
    """Register a pipe class whose first parameter is `source_datapipe` as `.name(...)` on pipes of `flavour`.

    Args:
        name: The functional name.
        flavour: That of the *source*: a pipe that turns an indexed chain into a stream is registered on "map".
        doc_of: The class of the other flavour, whose docstring is that of this class, too.
    """

    def decorate(pipe_class: PipeClass) -> PipeClass:
        if doc_of is not None:
            pipe_class.__doc__ = doc_of.__doc__
        register(name, pipe_class, flavour=flavour)
        return pipe_class

    return decorate


def registered() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return what kdpipes (and its users' own pipes) have registered, by (name, flavour)."""
    return dict(_ours)


def refuse_flavour(name: str, *, flavour: Flavour, way_out: str) -> None:
    """Register `.name()` on the flavour that cannot do it, as the sentence that says what to do instead."""
    needs, is_what = {"map": ("a stream", "indexed"), "iter": ("an indexed source", "a stream")}[flavour]

    def refuse(source_datapipe: Any, *args: Any, **kwargs: Any) -> Any:
        from kdpipes.core.pipe import Pipe  # which builds on this module

        owner = f"`{pipe_name(source_datapipe)}`"
        is_dealt = isinstance(source_datapipe, Pipe) and source_datapipe.traits.gives == "batches"
        if flavour == "iter" and is_dealt:
            raise ChainError(f"`.{name}()` takes samples, but {owner} gives batches. Put `.{name}()` before `.deal()`.")
        raise ChainError(f"`.{name}()` needs {needs}, but {owner} is {is_what}. {way_out}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not where the source is {is_what}. {way_out}"
    register(name, refuse, flavour=flavour)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with errors about its arguments that speak of `.name()`, not of a class behind it."""
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    shown = f".{name}{inspect.Signature(parameters[1:])}"

    def pipe(source_datapipe: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(source_datapipe, *args, **kwargs)
        except TypeError as error:
            unknown = next((key for key in kwargs if key not in signature.parameters), "")
            what = f"got an unexpected keyword argument {unknown!r}" if unknown else str(error)
            names = [key for key in signature.parameters if key != "source_datapipe"]
            hint = _INSTEAD.get((name, unknown)) or closest(unknown, names)
            raise TypeError(f"`{shown}`: {what}.{hint}{_by_name(error, args, parameters)}") from None
        return function(source_datapipe, *args, **kwargs)

    return functools.update_wrapper(pipe, function)


def _by_name(error: TypeError, args: tuple[Any, ...], parameters: list[inspect.Parameter]) -> str:
    """Return how to write an argument that was given without its name."""
    if (
        "too many positional" in str(error)
        and len([arg for arg in args if isinstance(arg, IterDataPipe | MapDataPipe)]) > 1
    ):
        return " Put the pipes into one list."
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return f" Name it: `{names[0]}=...`." if "too many positional" in str(error) and args and names else ""


def _is_same(one: Any, other: Any) -> bool:
    return _place(one) == _place(other)


def _place(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"


called_directly: dict[type, str] = {}  # the classes that are called as `kdp.name(...)`
_functional: dict[type, str] = {}  # those that are called as `.name(...)`


class Named:
    """A pipe that carries its functional name, because several names share its class."""

    name: str


def called_as(name: str) -> Callable[[PipeClass], PipeClass]:
    """Record that a pipe class is called as `kdp.name(...)`, and use that name in errors about its arguments."""

    def decorate(pipe_class: PipeClass) -> PipeClass:
        called_directly[pipe_class] = name
        pipe_class.__init__ = _checked_constructor(name, pipe_class.__init__)  # type: ignore[misc]
        return pipe_class

    return decorate


def _checked_constructor(name: str, construct: Callable[..., None]) -> Callable[..., None]:
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
    """Record that a pipe class is called as `.name(...)`."""
    _functional.setdefault(pipe_class, name)


def pipe_name(pipe: Any) -> str:
    """Return what a pipe is called by in a chain: its functional name, as `kdp.name`, or else its class."""
    kind = type(pipe)
    if isinstance(pipe, Named):
        return pipe.name
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
