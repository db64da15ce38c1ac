"""Find what processes must not share: open files, connections and random generators that a chain holds."""

from __future__ import annotations

import functools
import io
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from kdpipes.core.callback import Callback
from kdpipes.core.fingerprint import attributes_of
from kdpipes.core.messages import warn
from kdpipes.core.pipe import Pipe
from kdpipes.core.shared import Shared
from kdpipes.core.user_code import is_kdpipes, is_users

_MOST_OBJECTS, _MOST_ENTRIES = 10_000, 100  # that are looked at, in all and of a collection
# Classes of open files and connections, by the module that has them if a script has imported it.
_CONNECTIONS = {
    "av.container": ("InputContainer",),
    "cv2": ("VideoCapture",),
    "decord": ("VideoReader",),
    "duckdb": ("DuckDBPyConnection",),
    "h5py": ("File", "Group", "Dataset"),
    "lmdb": ("Environment",),
    "netCDF4": ("Dataset",),
    "psycopg": ("Connection",),
    "psycopg2.extensions": ("connection",),
    "pyarrow.parquet": ("ParquetFile",),
    "pymysql": ("Connection",),
    "rasterio": ("DatasetReader",),
    "sqlite3": ("Connection", "Cursor"),
    "tables": ("File",),
}
_GENERATORS = {
    "albumentations": ("BaseCompose",),
    "numpy.random": ("Generator", "RandomState"),
    "random": ("Random",),
    "torch": ("Generator",),
}


class Held(NamedTuple):
    """A value in the objects of a user that processes must not share.

    Args:
        name: The attribute or variable that holds it: "Rows.file".
        kind: Its class.
        is_random: Whether it draws random numbers, or is a generator; otherwise, it is an open file or a connection.
    """

    name: str
    kind: str
    is_random: bool


class _Part(NamedTuple):
    value: Any
    name: str
    is_users: bool  # whether it belongs to a user's object
    is_data: bool  # whether it belongs to a dataset, whose generators kdpipes does not seed


def warn_of_handles(value: Any, *, is_forked: bool) -> None:
    """Warn of what a chain holds that makes samples depend on the workers.

    Args:
        value: A chain, or a function that holds one.
        is_forked: Whether workers are forked, so that they share open files.
    """
    for held in find_handles(value):
        if held.is_random:
            warn(
                f"`{held.name}` ({held.kind}) has a state of its own in each worker, so that samples depend on the "
                "number of workers. Draw random numbers in `.transform()`, or from a parameter `rng`; datasets may "
                "use the generators of `random`, NumPy and torch as well, which are seeded for each sample.",
            )
        elif is_forked:
            warn(
                f"Forked workers share `{held.name}` ({held.kind}), which is open: reads of one disturb those of "
                "others, and samples may get the values of other rows. Open it at the first read in each process, "
                "`if self.pid != os.getpid(): ...`, and not before workers start.",
            )


def find_handles(value: Any) -> Iterator[Held]:
    """Yield the open files, connections and generators that users' objects hold, in a chain or a function."""
    connections, generators = _loaded(_CONNECTIONS), _loaded(_GENERATORS)
    waiting = deque([_Part(value, type(value).__name__, is_users=False, is_data=False)])
    seen: dict[int, Any] = {}  # values are held, so that no other one gets their address
    while waiting and len(seen) < _MOST_OBJECTS:
        part = waiting.popleft()
        if id(part.value) in seen:
            continue
        seen[id(part.value)] = part.value
        if part.is_users and (isinstance(part.value, connections) or _is_open(part.value)):
            yield Held(part.name, type(part.value).__name__, is_random=False)
        elif part.is_data and isinstance(part.value, (*generators, GeneratorType)):
            yield Held(part.name, type(part.value).__name__, is_random=True)
        else:
            waiting.extend(_parts_of(part))


def _loaded(classes: Mapping[str, tuple[str, ...]]) -> tuple[type, ...]:
    """Return those of the classes whose modules have been imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, names in classes.items() for name in names)
    return tuple(kind for kind in found if isinstance(kind, type))


def _is_open(value: Any) -> bool:
    """Return whether a value reads from a descriptor of the system, such as a file, an archive or a socket."""
    file = getattr(value, "fp", None) or getattr(value, "fileobj", None) or value  # of a ZipFile or TarFile
    if not callable(getattr(file, "fileno", None)) or isinstance(file, type):
        return False
    try:
        return file.fileno() >= 0 and (not isinstance(file, io.IOBase) or file.readable())
    except Exception:  # of any class: it is closed, or in memory
        return False


def _parts_of(part: _Part) -> Iterator[_Part]:
    value = part.value
    if isinstance(value, Shared):
        yield _Part(value.value, type(value.value).__name__, is_users=True, is_data=True)
    elif isinstance(value, Callback):
        yield _Part(value.function, value.name, is_users=True, is_data=part.is_data)
    elif isinstance(value, Mapping):
        yield from (part._replace(value=each) for each in islice(value.values(), _MOST_ENTRIES))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from (part._replace(value=each) for each in islice(value, _MOST_ENTRIES))
    elif isinstance(value, functools.partial):
        yield from (part._replace(value=each) for each in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield part._replace(value=value.__self__, name=type(value.__self__).__name__)
    elif isinstance(value, FunctionType):
        yield from _variables_of(part, value)
    elif _is_followed(value):
        yield from _attributes_of(part, value)


def _variables_of(part: _Part, function: FunctionType) -> Iterator[_Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield part._replace(value=cell.cell_contents, name=f"{name}` of `{function.__name__}")
        except ValueError:  # it is not defined yet
            continue


def _is_followed(value: Any) -> bool:
    kind = type(value)
    return not isinstance(value, type) and (is_kdpipes(kind) or is_users(kind) or isinstance(value, Dataset))


def _attributes_of(part: _Part, value: Any) -> Iterator[_Part]:
    kind = type(value)
    is_source = isinstance(value, Pipe) and is_users(kind) and value.traits.role == "source"
    of_user, of_data = not is_kdpipes(kind), part.is_data or is_source
    for name, each in attributes_of(value).items():
        yield _Part(each, f"{kind.__name__}.{name}", of_user, of_data)
