"""The only module that registers functional names, on both flavours of pipes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes._pipe_name import note_name, pipe_name
from kdpipes.errors import ChainError, check_choice, closest

__all__ = ["Flavour", "functional_pipe", "register", "registered"]

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
        owner = f"`{pipe_name(source_datapipe)}`"
        if hasattr(source_datapipe, "batch_draw") and flavour == "iter":
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
