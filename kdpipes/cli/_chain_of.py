"""Find the chain that a command-line argument names: `module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdpipes.cli._commands import Answer, line_of
from kdpipes.core.errors import closest

_NAMED = re.compile(r"[\w.]+:\w+|.+\.py:\w+")


def names_chain(place: str) -> bool:
    """Return whether a word names a chain, or a file that makes one, rather than data.

    >>> names_chain("train:chain"), names_chain("s3://birds/0.tar"), names_chain("birds.tar")
    (True, False, False)
    """
    return place.endswith(".py") or (bool(_NAMED.fullmatch(place)) and not Path(place).exists())


def chain_of(place: str) -> Any:
    """Return the pipe that `module:name` or `file.py:name` names, or makes.

    Modules are also found in the working directory. The module is run, as by an import. Until the command ends, its
    folder is on the import path, because functions of the module may import from there.
    """
    from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe

    module, _, name = place.rpartition(":")
    if not module or not name:
        raise ValueError(f"CHAIN must be module:name or file.py:name, as in train.py:chain, but is {place!r} instead.")
    names = _names_in(module)
    if name not in names:
        raise ValueError(
            f"{module} does not define {name!r}.{closest(name, names)} `kdpipes doctor {module}` lists its chains."
        )
    found = names[name]
    chain = found
    if callable(found) and not isinstance(found, IterDataPipe | MapDataPipe):
        with _naming(place):
            chain = found()
    if not isinstance(chain, IterDataPipe | MapDataPipe):
        raise ValueError(
            f"{place} is of type {type(found).__name__}, neither a chain nor a function that returns one. Name another."
        )
    return chain


def list_chains(module: str) -> Answer:
    """List the chains that a module or a file makes. Functions are not called."""
    from kdpipes.core.messages import counted
    from kdpipes.core.torch_pipes import IterDataPipe, MapDataPipe

    if Path(module).exists() and not module.endswith(".py"):
        raise ValueError(
            f"{module!r} is not a module. Name a chain, like train.py:chain, or run `kdpipes inspect {module}`."
        )
    found = _names_in(module).items()
    names = [f"{module}:{name}" for name, value in found if isinstance(value, IterDataPipe | MapDataPipe)]
    if not names:
        raise ValueError(
            f"{module} has no chain. Assign one to a variable, or name a function that returns one: `{module}:make`."
        )
    return Answer({"chains": names}, [f"{module} has {counted(len(names), 'chain')}:", *names])


def _names_in(module: str) -> dict[str, Any]:
    if module.endswith(".py") and not Path(module).exists():
        raise FileNotFoundError(f"There is no file {module!r} in {str(Path.cwd())!r}. Check the path.")
    folder = Path(module).parent if module.endswith(".py") else Path.cwd()
    sys.path.insert(0, str(folder.absolute()))
    arguments, sys.argv = sys.argv, [module]  # a script that reads its arguments would take those of the command
    try:
        with _naming(module):
            return runpy.run_path(module) if module.endswith(".py") else vars(importlib.import_module(module))
    finally:
        sys.argv = arguments


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Name the module or the function in errors of a user's code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        hint = "`kdpipes --traceback` shows where"
        if isinstance(error, ModuleNotFoundError) and place.startswith(str(error.name)):
            hint = "the name of a file needs its suffix: train.py:chain"
        raise RuntimeError(f"{place} cannot be run: {line_of(error)} ({hint})") from error
