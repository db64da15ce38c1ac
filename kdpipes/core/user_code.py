"""Distinguish users' code from libraries, and find what it depends on: globals, class members, objects that it holds.

`reached_from` is the only search through users' objects. Caches watch the generators and the values that it finds, and
processes are warned of open files and generators. Hashing (`fingerprint`) visits objects by itself, because it needs
each part of a value, in an order that keys of existing caches depend on.

Reading a sample may change them: a dataset counts its reads, or a function fills a global dictionary. Keys of caches
therefore depend on the first values, which are kept per process for as long as the objects live.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import random
import re
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from importlib import metadata
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

MISSING: Any = object()  # the first value of an attribute that did not exist at first
PLAIN = (bytes, str, bool, int, float, complex, np.generic)
VALUES = (*PLAIN, tuple, list, dict, set, frozenset, np.ndarray, torch.Tensor, PurePath, torch.dtype)
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# Objects of these types may hold objects of users.
CARRIERS = (Mapping, list, tuple, deque, Set, functools.partial, FunctionType, MethodType)
# Limits of the search: objects in all, and entries of one collection.
_MOST_OBJECTS = 20_000
_MOST_ENTRIES = 100
_LIBRARIES = frozenset(["builtins", "kdpipes", "numpy", "torch"])  # wherever they are, as in a checkout
_SITE_FOLDERS = frozenset(["site-packages", "dist-packages"])
_WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    type(functools.cache(len)),
)
# Libraries that draw from the global generators only in functions and methods with such names.
_KNOWN_LIBRARIES = frozenset(["PIL", "numpy", "torch", *sys.stdlib_module_names])
_DRAWING = re.compile(
    "attention|bernoulli|binomial|cauchy|distributions|dropout|exponential|fractional|generator|geometric|gumbel"
    "|lobpcg|lowrank|multinomial|normal(?!iz)|poisson|rand|rrelu|seed|uniform|^nn$"
)
_DATA = (*VALUES, Image.Image)
# Attributes of samples and data, and built-in functions. Other names may be those of methods that draw.
_NAMES = frozenset(
    ["ctx", "key", "ordinal", "position", *dir(builtins), *(name for kind in _DATA for name in dir(kind))]
) - {"__import__", "eval", "exec", "getattr", "globals", "locals", "super", "vars"}


def is_users(kind: type) -> bool:
    """Return whether a class was written by a user, so that its code may change while its name stays."""
    module: Any = kind.__module__  # Python 3.10 has a descriptor here for some built-in classes
    return isinstance(module, str) and is_users_module(module)


def is_kdpipes(definition: Any) -> bool:
    """Return whether a class or a function is defined in kdpipes."""
    module: Any = getattr(definition, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] == "kdpipes"


def is_users_module(name: str) -> bool:
    """Return whether a module belongs to a user: it is not part of Python, kdpipes or an installed package.

    A package that is installed in place (`pip install -e`) belongs to a user, because its code may change while its
    version stays.
    """
    if name == "__main__":  # including notebooks and programs run by a library's launcher
        return True
    if name.partition(".")[0] in _LIBRARIES:
        return False
    package = name
    while package:
        file = getattr(sys.modules.get(package), "__file__", None)
        if isinstance(file, str) and PurePath(file).is_absolute():
            return not _is_library_file(file, package)
        package = package.rpartition(".")[0]  # some libraries make modules that have no file
    return name.partition(".")[0] not in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def _is_library_file(file: str, module: str) -> bool:
    path = PurePath(file)
    is_in_python = any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    if is_in_python or not _SITE_FOLDERS.isdisjoint(path.parts):
        return True
    depth = module.count(".") + path.name.startswith("__init__.")
    folder = path.parents[min(depth, len(path.parents) - 1)]
    return path.relative_to(folder).parts[0] in _names_installed_in(str(folder))


@functools.cache
def _names_installed_in(folder: str) -> frozenset[str]:
    """Return the names of the files and folders that installed packages have in a folder of `sys.path`."""
    records = [package.read_text("RECORD") or "" for package in metadata.distributions(path=[folder])]
    lines = (line for record in records for line in record.splitlines())
    return frozenset(line.partition(",")[0].partition("/")[0] for line in lines)


def own_members(kind: type) -> list[Any]:
    """Return the methods and plain attributes that users' code defines in a class, as pairs [name, value]."""
    return [
        [name, part]
        for each in kind.__mro__
        if is_users(each)
        for name, member in sorted(vars(each).items())
        if isinstance(part := _unwrapped(member), FunctionType)
        or (isinstance(part, VALUES) and not (name.startswith("_") and name.endswith("_")))
    ]


def _unwrapped(member: Any) -> Any:
    """Return the function of a method, a property or a cached function; any other member as it is."""
    for attribute in ("__func__", "fget", "func", "__wrapped__"):
        member = getattr(member, attribute, member) if isinstance(member, _WRAPPERS) else member
    return member


def library_of(value: Any) -> tuple[str, ...] | None:
    """Return the name and version of a library's module, function or class; None for values and users' code."""
    if isinstance(value, ModuleType):
        name = value.__name__
        inner = ""
    elif isinstance(value, type | FunctionType | BuiltinFunctionType) and getattr(value, "__self__", None) is None:
        if getattr(value, "__closure__", None) is not None:  # perhaps a library's decorator around users' code
            return None
        name = value.__module__ or ""
        inner = value.__qualname__
    elif isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType):
        name = value.__self__.__name__
        inner = value.__qualname__
    else:
        return None
    if is_users_module(name):
        return (name,) if isinstance(value, ModuleType) else None
    # Changes of kdpipes itself are covered by the version of the key format.
    root = name.partition(".")[0]
    version = "" if root == "kdpipes" else _version_of(root)
    return name, inner, version.partition("+")[0]


def _version_of(package: str) -> str:
    """Return the version of a library; empty if it states none. No code of the library runs."""
    stated = getattr(sys.modules.get(package), "__dict__", {}).get("__version__")
    return _installed_version(package) if stated is None else str(stated)


@functools.cache
def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def globals_read(function: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the globals that a user's function reads and does not assign, each as a namespace and a name."""
    if not isinstance(function, FunctionType):
        return []
    namespace = function.__globals__
    if not is_users_module(namespace.get("__name__") or "kdpipes"):
        return []
    read, assigned, _ = _globals_of(function.__code__)
    return [(namespace, name) for name in dict.fromkeys(path[0] for path in read) if name not in assigned]


def global_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names of the globals that a function reads, such as `config.size`, and their values.

    Globals that the function itself assigns are left out: they are its state, not its input.
    """
    read, assigned, _ = _globals_of(function.__code__)
    for path in read:
        if path[0] in function.__globals__ and path[0] not in assigned:  # not a built-in function
            length, value = _resolved(function.__globals__, path)
            yield ".".join(path[:length]), value


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[tuple[tuple[str, ...], ...], frozenset[str], frozenset[str]]:
    """Return the globals that code reads, inner functions included, as sorted paths: `config.size`, `helper`.

    The second value is the names of the globals that it assigns, the third one those of attributes of other objects,
    and "import" if it imports.
    """
    read = set[tuple[str, ...]]()
    assigned = set[str]()
    others = set[str]()
    waiting = [code]
    while waiting:
        current = waiting.pop()
        waiting += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
        path: tuple[str, ...] = ()
        for instruction in dis.get_instructions(current):
            is_attribute = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            if path and is_attribute:
                path = (*path, instruction.argval)
            elif instruction.opname != "EXTENDED_ARG":
                read |= {path} if path else set()
                path = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                assigned.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                others.add("import")
            elif is_attribute and not path:
                others.add(instruction.argval)
    return tuple(sorted(read)), frozenset(assigned), frozenset(others)


def _resolved(namespace: dict[str, Any], path: tuple[str, ...]) -> tuple[int, Any]:
    """Return how many names of a path such as `config.image.size` can be resolved, and the value found there.

    Attributes are followed only if looking them up runs no code: in users' modules, and in the `__dict__` of objects.
    """
    value = namespace[path[0]]
    changed = _changed_globals.get((namespace.get("__name__") or "", path[0]))
    value = value if changed is None else changed.known_by(value)
    for length, name in enumerate(path[1:], 1):
        held = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
        kind: Any = type(value)
        is_plain = kind.__getattribute__ in (object.__getattribute__, ModuleType.__getattribute__)
        is_library = isinstance(value, ModuleType) and not is_users_module(value.__name__)
        if name not in held or not is_plain or is_library or hasattr(getattr(kind, name, None), "__set__"):
            return length, value
        value = held[name]
    return len(path), value


def closure_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the closure variables of a function and their values."""
    return zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ()), strict=True)


def content_of(cell: CellType) -> Any:
    """Return the value of a closure variable; None if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:  # of a recursive function that is still being defined
        return None


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    found = {name: held for name, held in getattr(value, "__dict__", {}).items() if not name.startswith("_kdpipes_")}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if mangled not in {"__dict__", "__weakref__"} and hasattr(value, mangled):
                found[mangled] = getattr(value, mangled)
    return found


class Reached(NamedTuple):
    """An object that users' code reaches.

    Args:
        value: The object.
        name: What users know it by: "Rows.file", or "rng` of `jitter" for a variable of a function.
        holder: The object through which it was reached; None for the first one.
    """

    value: Any
    name: str
    holder: Reached | None


def reached_from(value: Any, *, follows_code: bool = True, beyond: tuple[type, ...] = ()) -> Iterator[Reached]:
    """Yield each object that a pipe, an operation or a function reaches, once, the nearest first.

    Nothing is called. The search follows closures, arguments of `functools.partial`, collections, and attributes of
    datasets and of objects of kdpipes' and the user's own classes; but no attributes of modules.

    Args:
        value: Where the search begins.
        follows_code: Whether to follow the defaults of functions, the globals that their code names, and methods and
            generators of users' classes.
        beyond: Classes whose objects are left out, except `value` itself.
    """
    seen: dict[int, Any] = {}
    waiting = deque([Reached(value, type(value).__name__, None)])
    while waiting and len(seen) < _MOST_OBJECTS:
        reached = waiting.popleft()
        part = reached.value
        if id(part) in seen or (isinstance(part, beyond) and part is not value):
            continue
        seen[id(part)] = part  # held, so that no other object gets its address
        yield reached
        if isinstance(part, VALUES) and not isinstance(part, Mapping | list | tuple | Set):
            continue
        with suppress(Exception):  # an object of a library may run any code when it is looked at
            waiting += [Reached(each, name or reached.name, reached) for name, each in _parts(part, follows_code)]


def _parts(value: Any, follows_code: bool) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a value refers to, with their names; an empty name is that of the value itself."""
    if isinstance(value, Mapping):
        yield from (("", each) for each in itertools.islice(value.values(), _MOST_ENTRIES))
    elif isinstance(value, list | tuple | deque | Set):
        yield from (("", each) for each in itertools.islice(value, _MOST_ENTRIES))
    elif isinstance(value, functools.partial):
        name = getattr(value.func, "__name__", "")
        yield from (("", value.func), *((name, each) for each in (*value.args, *value.keywords.values())))
    elif isinstance(value, MethodType):
        yield from ((type(value.__self__).__name__, value.__self__), ("", value.__func__))
    elif isinstance(value, FunctionType):
        named = [*closure_of(value), *(_named_by_code(value) if follows_code else ())]
        yield from ((f"{name}` of `{value.__name__}", each) for name, each in named)
    elif is_users(type(value)) or is_kdpipes(type(value)) or isinstance(value, Dataset):
        attributes = attributes_of(value)
        if follows_code:
            attributes = {**_members_of(type(value)), **attributes}
        yield from ((f"{type(value).__name__}.{name}", each) for name, each in attributes.items())


def _named_by_code(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of a function, and the globals that it reads."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in dict.fromkeys(path[0] for path in _globals_of(code)[0]):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _members_of(kind: type) -> dict[str, Any]:
    """Return the functions and generators that users' code defines in a class."""
    members = {name: part for each in reversed(kind.__mro__) if is_users(each) for name, part in vars(each).items()}
    return {name: part for name, part in members.items() if isinstance(part, (FunctionType, *GENERATORS))}


def is_own_generator(value: Any) -> bool:
    """Return whether a value is a random generator other than the global ones, which kdpipes seeds itself."""
    # NumPy gives its global generator no public name, but its functions are methods of it.
    numpys: Any = np.random.random
    return isinstance(value, GENERATORS) and value not in (numpys.__self__, torch.default_generator)


def draws_nothing(function: Any) -> bool:
    """Return whether the code of a function shows that it does not draw from the global random generators.

    The search follows the user's functions, and methods of the object that `function` belongs to. It knows Python,
    NumPy, torch and Pillow. False means that the function may draw.
    """
    seen = dict[int, Any]()
    waiting: list[tuple[Any, Mapping[str, Any]]] = [(function, {})]
    with suppress(Exception):  # an object of a library may run any code when it is looked at
        while waiting:
            value, members = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value
                waiting += _used_by(value, members)
        return True
    return False


def _used_by(value: Any, members: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return the objects that a value may call, and for methods the attributes of the objects to which they belong.

    Raises:
        LookupError: The value may draw random numbers, or what it calls is not known.
    """
    if isinstance(value, (*_DATA, functools.partial)) and not is_users(type(value)):
        return [(part, {}) for _, part in _parts(value, follows_code=False)]
    library = library_of(value)
    if library is not None:
        if library[0].partition(".")[0] not in _KNOWN_LIBRARIES or _DRAWING.search(".".join(library[:2])):
            raise LookupError(library)
        return []
    if isinstance(value, FunctionType):
        return _used_by_code(value, members)
    if not isinstance(value, MethodType):
        value = MethodType(type(value).__call__, value)
    kind = type(value.__self__)
    if not is_users(kind) or not is_users_module(value.__module__):
        raise LookupError(value)
    # Methods that are inherited from libraries have the same names as methods of data, such as `load`.
    inherited = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("__")}
    return [(value.__func__, {**inherited, **dict(reversed(own_members(kind))), **attributes_of(value.__self__)})]


def _used_by_code(function: FunctionType, members: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    read, _, attributes = _globals_of(function.__code__)
    if any(map(_DRAWING.search, attributes.union(*read))):
        raise LookupError(function)
    names = set(attributes)
    used = [value for _, value in closure_of(function)]
    used += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for path in read:
        if path[0] in function.__globals__:
            length, value = _resolved(function.__globals__, path)
            used.append(value)
            names.update(() if isinstance(value, ModuleType) else path[length:])
        else:
            names.update(path)
    if not names <= _NAMES | members.keys():
        raise LookupError(function)
    return [*((value, {}) for value in used), *((members[name], members) for name in names & members.keys())]


class Change(NamedTuple):
    """A value that reading a sample has changed."""

    before: Any  # `MISSING` if there was none
    first: Any  # the first known value: `before`, or a copy of it, because collections may be changed in place
    last: Any

    def known_by(self, value: Any) -> Any:
        """Return the value to hash: the first one, unless the user has since assigned another object."""
        return self.first if value is self.last or value is MISSING or isinstance(value, PLAIN) else value

    def after(self, known: Change | None) -> Change:
        """Return this change, merged with an earlier one: it then starts at the first value of that."""
        is_first = known is None or known.known_by(self.before) is self.before
        return self if known is None or is_first else self._replace(first=known.first)


_changed_attributes: dict[int, tuple[weakref.ref[Any], dict[str, Change]]] = {}  # by the identity of the object
_changed_globals: dict[tuple[str, str], Change] = {}  # by module and name


def note_changed_attribute(holder: Any, name: str, change: Change) -> None:
    """Make caches identify an object by the value of an attribute before a read changed it."""
    key = id(holder)
    try:
        known = _changed_attributes.get(key) or (weakref.ref(holder, lambda _: _changed_attributes.pop(key, None)), {})
    except TypeError:  # its class does not support weak references
        return
    changed = _changed_attributes.setdefault(key, known)[1]
    changed[name] = change.after(changed.get(name))


def note_changed_global(namespace: dict[str, Any], name: str, change: Change) -> None:
    """Make caches identify a function by the value of a global before a call changed it."""
    key = namespace.get("__name__") or "", name
    _changed_globals[key] = change.after(_changed_globals.get(key))


def with_first_values(holder: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object, with the first values of those that reading from it has changed."""
    known = _changed_attributes.get(id(holder))
    if known is None or known[0]() is not holder:
        return attributes
    first = {name: changed.known_by(attributes.get(name, MISSING)) for name, changed in known[1].items()}
    return {name: value for name, value in {**attributes, **first}.items() if value is not MISSING}
