"""Remove the frames of kdpipes from tracebacks, so that the user's own line comes last."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from kdpipes.core.errors import KdpipesError
from kdpipes.core.torch_pipes import datapipes

_VARIABLE = "KDPIPES_TRACEBACK"
_OWN = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(datapipes.__file__).parent))
_STANDARD = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")), "<frozen ")

Item = TypeVar("Item")


def shorten(error: BaseException) -> None:
    """Remove the frames of kdpipes from the traceback of an error and of its causes.

    Functions called by users do this before an error leaves them. `KDPIPES_TRACEBACK=full` keeps all frames.
    """
    if os.environ.get(_VARIABLE) == "full":
        return
    waiting: list[BaseException | None] = [error]
    seen = set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _without_own_frames(each)
        waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def with_short_tracebacks(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items, and remove the frames of kdpipes from the tracebacks of errors."""
    try:
        yield from items
    except GeneratorExit:
        raise
    except BaseException as error:
        shorten(error)
        raise error  # KDPIPES_TRACEBACK=full shows the frames in between


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error in a worker, with those of its causes, and without the error's own message."""
    shorten(error)
    described = traceback.TracebackException.from_exception(error)
    if getattr(described, "exceptions", None) is None:
        last = len(list(described.format_exception_only()))
        return "".join(list(described.format())[:-last]).rstrip()
    return "".join(described.format()).rstrip()


def calling_line() -> tuple[FrameType, int]:
    """Return the innermost frame of the user's code and its line. Without such a frame, return the outermost one."""
    # Explicit, because with None different versions of Python skip different frames.
    frames = list(traceback.walk_stack(inspect.currentframe()))
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN, *_STANDARD)) and "-packages" not in file:
            return frame, line
    return frames[-1]


def _without_own_frames(error: BaseException) -> TracebackType | None:
    entries = list(_entries(error.__traceback__))
    own = list(_are_own(entries))
    kept = [entry for entry, is_own in zip(entries, own, strict=True) if not is_own]
    is_sent = any("In a worker:" in note for note in getattr(error, "__notes__", ()))
    is_expected = is_sent or isinstance(error, KdpipesError) or not isinstance(error, Exception)
    if entries and own[-1] and not is_expected:  # shows a bug in kdpipes, or the call of compiled code
        kept.append(entries[-1])
    following: TracebackType | None = None
    for entry in reversed(kept):
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _are_own(entries: list[TracebackType]) -> Iterator[bool]:
    """Yield whether each frame belongs to kdpipes, torch's pipes, or standard library code called by them."""
    is_own = False
    for entry in entries:
        file = entry.tb_frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD) and "-packages" not in file
        is_own = (is_own and is_standard) or file.startswith(_OWN)
        yield is_own
