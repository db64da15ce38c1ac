"""Find what processes must not share: open files, connections and random generators that a chain holds."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any, NamedTuple

from kdpipes.core.callback import Callback
from kdpipes.core.messages import warn
from kdpipes.core.pipe import Pipe
from kdpipes.core.shared import Shared
from kdpipes.core.user_code import CARRIERS, GENERATORS, Reached, is_kdpipes, is_users, reached_from

# Classes of open files and connections, by the module that defines them. They matter only if a script imported it.
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
}


class Held(NamedTuple):
    """A value held by a user's object that processes must not share.

    Args:
        name: The attribute or variable that holds it: "Rows.file".
        kind: Its class.
        is_random: Whether it draws random numbers, or is a generator; otherwise, it is an open file or a connection.
    """

    name: str
    kind: str
    is_random: bool


def warn_of_handles(value: Any, *, is_forked: bool) -> None:
    """Warn of values in a chain that make samples depend on the number of workers.

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
    """Yield the open files, connections and generators that users' objects hold in a chain or a function."""
    connections = _loaded(_CONNECTIONS)
    generators = (*_loaded(_GENERATORS), *GENERATORS, GeneratorType)
    for reached in reached_from(value, follows_code=False):
        part = reached.value
        if isinstance(part, generators):
            # The generators of a dataset or of a user's own source are never seeded.
            for holder in (each.value for each in _holders_of(reached)):
                is_source = isinstance(holder, Pipe) and is_users(type(holder)) and holder.traits.role == "source"
                if is_source or isinstance(holder, Shared):
                    yield Held(reached.name, type(part).__name__, is_random=True)
                    break
        elif (isinstance(part, connections) or _is_open(part)) and _is_of_user(reached):
            yield Held(reached.name, type(part).__name__, is_random=False)


def _holders_of(reached: Reached) -> Iterator[Reached]:
    """Yield the holder of an object, the holder of that one, and so on."""
    while reached.holder is not None:
        reached = reached.holder
        yield reached


def _is_of_user(reached: Reached) -> bool:
    """Return whether an object is referred to by a user's object or function, directly or through collections."""
    holders = (holder.value for holder in _holders_of(reached))
    nearest = next((value for value in holders if not isinstance(value, CARRIERS)), None)
    return isinstance(nearest, Shared | Callback) or (nearest is not None and not is_kdpipes(type(nearest)))


def _loaded(classes: Mapping[str, tuple[str, ...]]) -> tuple[type, ...]:
    """Return the classes whose modules have been imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, names in classes.items() for name in names)
    return tuple(kind for kind in found if isinstance(kind, type))


def _is_open(value: Any) -> bool:
    """Return whether a value reads from an operating system descriptor, such as a file, an archive or a socket."""
    file = getattr(value, "fp", None) or getattr(value, "fileobj", None) or value  # of a ZipFile or a TarFile
    if not callable(getattr(file, "fileno", None)) or isinstance(file, type):
        return False
    try:
        return file.fileno() >= 0 and (not isinstance(file, io.IOBase) or file.readable())
    except Exception:  # any class: the file is closed or in memory
        return False
