"""The registry of functional names. Only this module adds methods to torch's pipes and names pipes in errors."""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from kdpipes.core.errors import check_choice, closest, must_be
from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe
from kdpipes.core.user_code import is_kdpipes

Flavour = Literal["map", "iter"]
_BASES: dict[str, Any] = {"map": MapDataPipe, "iter": IterDataPipe}
_INDEXED_ONLY = " It needs an indexed source, like `kdp.open_shards`; this is a stream."
_INSTEAD = {  # hints for arguments that a pipe does not have
    ("deal", "batching"): _INDEXED_ONLY,
    **{
        ("deal", name): ' Write `batching=kdp.by_length("FIELD", max_tokens=...)`.'
        for name in ("batch_by", "bucket", "buckets", "bucket_by", "length", "max_tokens")
    },
    ("deal", "pack"): ' Write `batching=kdp.packed("FIELD", max_tokens=...)`.',
    **{("deal", name): " Write `batching=kdp.own_order(...)`." for name in ("order", "sampler")},
    **{("deal", name): " Write `split=kdp.lanes(...)`, on a stream." for name in ("lanes", "max_ranks")},
    ("deal", "window"): " Write `shuffle=kdp.by_shard(window=...)`.",
    ("shuffle", "buffer_size"): " It is for streams. Shuffle an indexed chain with `.deal(shuffle=True)`.",
    ("deal", "drop_last"): ' Write `uneven="drop"`.',
    ("deal", "num_workers"): " Pass it to the loader: `kdp.Loader(chain, num_workers=...)`.",
    ("deal", "collate_fn"): " Add `.collate_samples()` or `.map(function)` after it.",
    ("deal", "pin_memory"): ' End the chain with `.to_device("cuda")`.',
}
_POSITIONAL = {  # hints for arguments that were passed without a name
    "take_percent": " `to_percent=0.5` takes the first half.",
    "rename_fields": ' Write the new name first: `.rename_fields(new="old")`.',
    "filter_samples": ' Write `.filter_samples(columns="width", keep=function)`.',
    "collate_samples": " Your own function goes into `.collate(function)`.",
}
_ours: dict[tuple[str, str], Callable[..., Any]] = {}
_hints: dict[str, str] = {}  # by the name of a pipe that exists in one flavour only
_checked_ours: dict[tuple[str, str], Callable[..., Any]] = {}  # wrapped to check their arguments
_HOOKS = {
    "composition",
    "counters",
    "end_epoch",
    "has_column",
    "has_quick_length",
    "operation",
    "prepare_for_workers",
    "redrawn_by",
    "shard_numbers",
}
# Methods of kdpipes' base classes, including those that only some pipes define.
_methods: dict[str, set[str]] = {"map": {*_HOOKS}, "iter": {*_HOOKS}}

PipeClass = TypeVar("PipeClass", bound=type)


def register(name: str, function: Callable[..., Any], *, flavour: Flavour) -> None:
    """Make `function(source_datapipe, ...)` callable as `source_datapipe.name(...)`.

    The same definition may be registered again, as by a reloaded module. In a notebook or a script (`__main__`),
    another definition replaces the earlier one, even if that was registered by torch's `functional_datapipe`. If
    another library has registered a name of kdpipes, that library's method remains on all pipes except kdpipes' own.

    Raises:
        ValueError: Another pipe or method has that name.
    """
    reject_taken(name, function, flavour=flavour)
    give_up(name, function, flavour)
    checked = _checked(name, function)
    if not _is_of_others(name, flavour):
        _BASES[flavour].register_function(name, checked)
    _ours[name, flavour] = function
    _checked_ours[name, flavour] = checked
    if isinstance(function, type):
        note_name(function, name)


def reject_taken(name: str, function: Callable[..., Any], *, flavour: Flavour) -> None:
    """Raise ValueError if another pipe or method has the name."""
    check_choice("flavour", flavour, ("map", "iter"))
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(must_be("name", "a valid name of a method", name))
    known = _ours.get((name, flavour))
    if known is not None:
        if _place(known) != _place(function) and not _is_of_main(known, function):
            raise ValueError(f"`.{name}()` is already registered by {_place(known)}. Rename {_place(function)}.")
        return
    is_free = is_kdpipes(function) or _is_of_main(_stock_class(_BASES[flavour].functions.get(name)), function)
    if hasattr(_BASES[flavour], name) or (_is_of_others(name, flavour) and not is_free):
        raise ValueError(f"`.{name}()` already belongs to {_owner(name, flavour)}. Rename {_place(function)}.")
    if name in _methods[flavour]:
        raise ValueError(f"`.{name}()` is a method of kdpipes' own pipes. Rename {_place(function)}.")


def _is_of_others(name: str, flavour: Flavour) -> bool:
    """Return whether torch or another library has registered a function of that name."""
    function = _BASES[flavour].functions.get(name)
    return function is not None and function is not _checked_ours.get((name, flavour))


def _is_of_main(*functions: Any) -> bool:
    return all(getattr(function, "__module__", None) == "__main__" for function in functions)


def _owner(name: str, flavour: Flavour) -> str:
    """Return the name of the library that has registered a name on torch's pipes."""
    kind = _stock_class(_BASES[flavour].functions.get(name))
    module = "torch" if kind is None else kind.__module__
    return "torch or torchdata" if module.split(".")[0] in ("torch", "torchdata") else _place(kind)


def own_method(pipe: Any, name: str) -> Any:
    """Return a functional pipe of kdpipes, bound to `pipe` as torch would; None if the name is not registered."""
    flavour = "map" if isinstance(pipe, MapDataPipe) else "iter"
    function = _checked_ours.get((name, flavour))
    return None if function is None else functools.partial(function, pipe)


def give_up(name: str, function: Any, flavour: Flavour) -> None:
    """Give a name up to a new function, possibly of another library. kdpipes' own pipes keep theirs.

    In `__main__`, a new definition replaces an earlier one.
    """
    functions = _BASES[flavour].functions
    registered = functions.get(name)
    if registered in _checked_ours.values() or _is_of_main(_stock_class(registered), function):
        del functions[name]
    if _is_of_main(_ours.get((name, flavour)), function):
        del _ours[name, flavour], _checked_ours[name, flavour]


def note_methods(pipe_class: type, *, flavour: Flavour) -> None:
    """Reserve the names of the methods and attributes of a base class of pipes."""
    _methods[flavour].update(name for name in dir(pipe_class) if not name.startswith("_"))


def functional_pipe(
    name: str, *, flavour: Flavour, doc_of: type | None = None, otherwise: str | None = None
) -> Callable[[PipeClass], PipeClass]:
    """Register a pipe class as the method `.name(...)` of all indexed pipes ("map") or all streams ("iter").

    The first parameter of the class must be the source.

    Args:
        name: The functional name.
        flavour: The flavour of the source, "map" for indexed pipes or "iter" for streams. A pipe that turns an indexed
            chain into a stream is registered on "map".
        doc_of: The class of the other flavour, whose docstring this class shares.
        otherwise: A hint for a pipe of one flavour: what to do if the source has the other flavour.
    """

    def decorate(pipe_class: PipeClass) -> PipeClass:
        if doc_of is not None:
            pipe_class.__doc__ = doc_of.__doc__
        register(name, pipe_class, flavour=flavour)
        if otherwise is not None:
            _hints[name] = otherwise
        return pipe_class

    return decorate


def registered() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return all registered functions and classes by (name, flavour), including those of users."""
    return dict(_ours)


def other_flavour_hint(name: str) -> str | None:
    """Return a hint for sources of the wrong flavour for a pipe; None for pipes that support both flavours."""
    return _hints.get(name)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with argument checks whose errors show `.name(...)` instead of a class."""
    check = argument_check(f".{name}", function)

    def pipe(source_datapipe: Any, *args: Any, **kwargs: Any) -> Any:
        check(source_datapipe, args, kwargs)
        return function(source_datapipe, *args, **kwargs)

    return functools.update_wrapper(pipe, function)


def argument_check(shown: str, function: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    """Return a function that raises TypeError unless `function` accepts a first argument, `args` and `kwargs`.

    Errors show the call as `shown`: ".deal", "kdp.open_shards".
    """
    signature = inspect.signature(function)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()][1:]
    names = [parameter.name for parameter in parameters]

    def check(first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature.bind(first, *args, **kwargs)
        except TypeError as error:
            unknown = next((key for key in kwargs if key not in names), "")
            what = f"got an unexpected keyword argument {unknown!r}" if unknown else str(error)
            hint = _INSTEAD.get((shown[1:], unknown)) or closest(unknown, names)
            hint += _by_name(shown, error, args, parameters)
            raise TypeError(f"`{shown}`: {what}.{hint} The call is `{shown}{inspect.Signature(parameters)}`.") from None

    return check


def _by_name(shown: str, error: TypeError, args: tuple[Any, ...], parameters: list[inspect.Parameter]) -> str:
    """Return a hint for an argument that was passed without its name."""
    if not shown.startswith(".") or not args or "too many positional" not in str(error):
        return ""
    if len([arg for arg in args if isinstance(arg, IterDataPipe | MapDataPipe)]) > 1:
        return " Put the pipes into one list."
    names = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    hint = f" Name it: `{names[0]}=...`." if len(names) == 1 else " Name the argument." if names else ""
    return _POSITIONAL.get(shown[1:], hint)


def _place(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"


called_directly: dict[type, str] = {}  # names of classes called as `kdp.name(...)`
_functional: dict[type, str] = {}  # names of classes called as `.name(...)`
_NAME = "_kdpipes_name"  # on the class itself: a worker that gets a script's class by value has not registered it


class Named:
    """A pipe that carries its functional name, because its class has several names."""

    name: str


def called_as(name: str) -> Callable[[PipeClass], PipeClass]:
    """Record that a pipe class is called as `kdp.name(...)`, and use this name in errors about its arguments."""

    def decorate(pipe_class: PipeClass) -> PipeClass:
        called_directly[pipe_class] = name
        construct: Callable[..., None] = pipe_class.__init__  # type: ignore[misc]
        check = argument_check(f"kdp.{name}", construct)

        @functools.wraps(construct)
        def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
            check(self, args, kwargs)
            construct(self, *args, **kwargs)

        pipe_class.__init__ = constructed  # type: ignore[misc]
        return pipe_class

    return decorate


def note_name(pipe_class: type, name: str) -> None:
    """Record that a pipe class is called as `.name(...)`."""
    if _NAME not in vars(pipe_class):
        setattr(pipe_class, _NAME, name)
    _functional.setdefault(pipe_class, name)


def pipe_name(pipe: Any) -> str:
    """Return the name of a pipe in a chain: its functional name, the name in `kdp`, or the name of its class."""
    kind = type(pipe)
    if isinstance(pipe, Named):
        return pipe.name
    known = called_directly.get(kind) or vars(kind).get(_NAME)
    known = known or _stock_name(kind)  # type: ignore[arg-type]  # mypy takes no class for hashable
    return known or short_name(kind).lstrip("_").removesuffix("Map")


def short_name(kind: type) -> str:
    """Return the name of a pipe class as used in fingerprints, and therefore in saved states.

    >>> from torch.utils.data.datapipes.iter import Mapper
    >>> short_name(Mapper)
    'Mapper'
    """
    return kind.__name__.removesuffix("DataPipe").removesuffix("Iter")


def shown_name(short: str) -> str:
    """Return the name of a pipe in a chain, given its name in fingerprints.

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
    """Yield the classes of torch and torchdata that have a functional name, each with this name."""
    for name, function in base.functions.items():
        kind = _stock_class(function)
        if kind is not None:
            yield kind, str(name)


def _stock_class(function: Any) -> type | None:
    """Return the class of a function registered by torch."""
    is_partial = isinstance(function, functools.partial) and function.args and isinstance(function.args[0], type)
    return function.args[0] if is_partial else None
