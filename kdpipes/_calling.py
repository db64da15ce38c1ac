"""Users' functions, called for one sample: with the `ctx` and `rng` that they ask for, and seeded global generators."""

from __future__ import annotations

from typing import Any

from kdpipes._draw import Draw, seeded_globals
from kdpipes.callback import Callback
from kdpipes.sample import Sample

__all__ = ["call_drawn", "call_seeded", "is_seeded"]


def is_seeded(function: Callback) -> bool:
    """Return whether `call_seeded` seeds the global generators for a function."""
    return "rng" not in function.parameters and not function.is_fixed


def call_seeded(
    function: Callback,
    sample: Sample,
    place: str,
    *args: Any,
    ctx: dict[str, Any] | None,
    is_recorded: bool | None = None,
) -> Any:
    """Call a user's function with the `ctx` and `rng` that it asks for, and with the global generators seeded.

    A function that takes `rng` is trusted to draw from it alone, and one that says `is_random = False` of itself, to
    draw nothing: these are called as they are.

    Args:
        function: What to call.
        sample: Whose draw it is.
        place: The name of the operation, which no other of the sample has.
        args: What to call it with.
        ctx: The dictionary that it may write to; None drops what it writes.
        is_recorded: Whether to record the draw of a random function, too. By default, it is recorded if there is a
            `ctx`.
    """
    is_recorded = ctx is not None if is_recorded is None else is_recorded
    given: dict[str, Any] = {} if "ctx" not in function.parameters else {"ctx": {} if ctx is None else ctx}
    if "rng" in function.parameters:
        return function(*args, rng=sample.note_draw(place, is_recorded=is_recorded), **given)
    if function.is_fixed:
        return function(*args, **given)
    is_watched = is_recorded or sample.is_watched
    with seeded_globals(sample.key_of(place)) as has_drawn:
        value = function(*args, **given)
        is_random = is_watched and has_drawn()
    if is_random:
        sample.note_draw(place, is_recorded=is_recorded)
    return value


def call_drawn(function: Callback, draw: Draw, place: str, *args: Any) -> Any:
    """Call a user's function for an item that is not a sample, such as a batch; `call_seeded` does so for samples.

    Args:
        function: The function; it may take `rng`.
        draw: The seed, epoch and number of the item.
        place: The name of the operation, unique for the item.
        args: The arguments of the function.
    """
    if "rng" in function.parameters:
        return function(*args, rng=draw.rng(place))
    if function.is_fixed:
        return function(*args)
    with seeded_globals(draw.key(place)):
        return function(*args)
