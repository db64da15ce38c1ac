"""The state of a loader: small plain data that says where in which epoch of which chain it stands."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from torchdata.datapipes.iter import FullSync

from kdpipes._fingerprint import fingerprints
from kdpipes._graph import sources_of
from kdpipes.delivery.producer import Position, dealer_of
from kdpipes.errors import ChainError, check_count, must_be

__all__ = ["Checkpointer", "main_part"]

_VERSION = 1


def main_part(pipe: Any) -> tuple[list[Any], Any]:
    """Return the pipes at the end of a chain that belong in the main process, last one first, and the rest."""
    ends = []
    while isinstance(pipe, FullSync) or not getattr(pipe, "is_replicable", lambda: True)():
        sources = sources_of(pipe)
        if len(sources) != 1:
            raise ChainError(
                f"`{type(pipe).__name__}` belongs in the main process, but has {len(sources)} sources. The workers of "
                "kdpipes' reading services run one chain. torchdata's MultiProcessingReadingService runs others."
            )
        ends.append(pipe)
        pipe = sources[0]
    return ends, pipe


class Checkpointer:
    """Makes and reads the states of one chain.

    Args:
        chain: What runs in the workers.
        num_workers: On which the numbers of items depend where no `deal` gives them.
    """

    def __init__(self, chain: Any, num_workers: int) -> None:
        self._chain = chain
        self._num_workers = num_workers

    @functools.cached_property
    def _pipes(self) -> list[str]:
        return fingerprints(self._chain)

    def first_position(self) -> Position:
        """Return where the chain's next iteration begins, if nobody says otherwise."""
        dealer = dealer_of(self._chain)
        return Position(dealer.next_epoch() if dealer is not None else 0)

    def state_at(self, position: Position) -> dict[str, Any]:
        """Return the state at a position: plain data, well under 2 KB."""
        dealer = dealer_of(self._chain)
        if dealer is not None:
            size = {"global_batch_size": dealer.global_batch_size()}
        else:
            size = {"num_workers": self._num_workers}
        offset = {"offset": position.offset} if position.offset else {}
        state = {"version": _VERSION, "epoch": position.epoch, "batch": position.number, **offset, **size}
        return {**state, "pipes": self._pipes}

    def position_in(self, state: Any, *, strict: bool) -> Position:
        """Return the position that a state names, or refuse a state that does not fit the chain.

        Raises:
            ValueError: It is no state, or one of another version, of other batches or another chain.
        """
        if not isinstance(state, Mapping) or not {"version", "epoch", "batch", "pipes"} <= set(state):
            raise ValueError(must_be("state_dict", "what `state_dict()` of a Loader returns", state))
        if state["version"] != _VERSION:
            raise ValueError(f"The state is of version {state['version']}, but this kdpipes reads version {_VERSION}.")
        self._refuse_other_numbers(state)
        difference = _difference(list(state["pipes"]), self._pipes)
        if difference and strict:
            way_out = "`load_state_dict(state, strict=False)` goes on all the same."
            raise ValueError(f"The state does not fit the chain: {difference} {way_out}")
        if difference:
            warnings.warn(f"The state does not fit the chain: {difference}", stacklevel=3)
        values = (check_count(name, state.get(name, 0), minimum=0) for name in ("epoch", "batch", "offset"))
        return Position(*values)

    def _refuse_other_numbers(self, state: Mapping[str, Any]) -> None:
        dealer = dealer_of(self._chain)
        then, now = state.get("global_batch_size"), None if dealer is None else dealer.global_batch_size()
        if then != now and then is not None and now is not None:
            raise ValueError(
                f"The state counts global batches of {then} samples, but this loader's have {now}. "
                f"Use `deal(global_batch_size={then})`."
            )
        if dealer is None and state.get("num_workers") != self._num_workers:
            raise ValueError(
                f"The state was taken with {state.get('num_workers')} workers, but there are {self._num_workers}: the "
                "order of a chain that does not end in `.deal()`, or has pipes behind it that keep items back, depends "
                "on that."
            )


def _difference(then: list[str], now: list[str]) -> str:
    names_then, names_now = [[entry.rpartition(":")[0] for entry in entries] for entries in (then, now)]
    if names_then != names_now:
        return f"it was {' < '.join(names_then)}, but is {' < '.join(names_now)}."
    for name, was, is_now in zip(names_now, then, now, strict=True):
        if was != is_now:
            return f"`{name}` is not what it was: its arguments, its code or its data have changed."
    return ""
