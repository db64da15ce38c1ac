"""Distinguish users' code from libraries, and find the globals and class members that it depends on.

Reading a sample may change them: a dataset counts its reads, or a function fills a global dictionary. Keys of caches
therefore depend on the first values, which are kept per process for as long as the objects live.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import weakref
from collections.abc import Iterator
from importlib import metadata
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

MISSING: Any = object()  # the first value of an attribute that did not exist at first
PLAIN = (bytes, str, bool, int, float, complex, np.generic)
VALUES = (*PLAIN, tuple, list, dict, set, frozenset, np.ndarray, torch.Tensor, PurePath, torch.dtype)
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
        name, inner = value.__name__, ""
    elif isinstance(value, type | FunctionType | BuiltinFunctionType) and getattr(value, "__self__", None) is None:
        if getattr(value, "__closure__", None) is not None:  # perhaps a library's decorator around users' code
            return None
        name, inner = value.__module__ or "", value.__qualname__
    elif isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType):
        name, inner = value.__self__.__name__, value.__qualname__
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
    namespace = getattr(function, "__globals__", {}) if isinstance(function, FunctionType) else {}
    if not is_users_module(namespace.get("__name__") or "kdpipes"):
        return []
    return [(namespace, name) for name in dict.fromkeys(path[0] for path in _paths_read(function.__code__))]


def global_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names of the globals that a function reads, such as `config.size`, and their values."""
    for path in _paths_read(function.__code__):
        if path[0] in function.__globals__:  # not a built-in function
            length, value = _resolved(function.__globals__, path)
            yield ".".join(path[:length]), value


@functools.lru_cache(maxsize=4096)
def _paths_read(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that code reads, inner functions included, as sorted paths: `config.size`, `helper`.

    Globals that the code itself assigns are left out: they are its state, not its input.
    """
    read, assigned = set[tuple[str, ...]](), set[str]()
    waiting = [code]
    while waiting:
        current = waiting.pop()
        waiting += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
        path: tuple[str, ...] = ()
        for instruction in dis.get_instructions(current):
            if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                path = (*path, instruction.argval)
            elif instruction.opname != "EXTENDED_ARG":
                read |= {path} if path else set()
                path = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                assigned.add(instruction.argval)
    return tuple(sorted(path for path in read if path[0] not in assigned))


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
