"""Users' functions, called for one sample: with the `ctx` and `rng` that they ask for, and seeded global generators."""

from __future__ import annotations

from typing import Any

from kdpipes._draw import seeded_globals
from kdpipes.callback import Callback
from kdpipes.sample import Sample

__all__ = ["call_seeded", "is_seeded"]


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
        ctx: Where it may write; None where what it writes is dropped.
        is_recorded: Whether the draw of a random function is recorded, too; by default, where there is a `ctx`.
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
