"""`rebuild_batch`: rebuild a single batch of an epoch without making the batches before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kdpipes.core.errors import check_count, must_be
from kdpipes.loader.loader import Loader
from kdpipes.loader.services import ThreadReadingService


def rebuild_batch(
    source_datapipe: Any, state: Mapping[str, Any], batch_number: int | None = None, *, epoch: int | None = None
) -> Any:
    """Return exactly the same batch that a loader has delivered, including augmentations.

    Args:
        source_datapipe: The chain of the loader.
        state: The return value of the loader's `state_dict()`, taken at any time.
        batch_number: The number of the batch in the epoch, from 0; by default, the one after the state.
        epoch: The epoch number, from 0; by default, that of the state.

    Raises:
        IndexError: The epoch has no such batch.
        ValueError: The state is that of another chain.

    Example:
        >>> chain = kdp.from_dataset([(n, 0) for n in range(8)]).select("x").deal(batch_size=2, shuffle=True)
        >>> with kdp.Loader(chain, num_workers=2) as loader:
        ...     batches, state = list(loader), loader.state_dict()
        >>> kdp.rebuild_batch(chain, state, 3, epoch=0) == batches[3]
        True
    """
    if not isinstance(state, Mapping) or "batch" not in state:
        raise ValueError(must_be("state", "what `state_dict()` of a Loader returns", state))
    number = state["batch"] if batch_number is None else check_count("batch_number", batch_number, minimum=0)
    when = state.get("epoch") if epoch is None else check_count("epoch", epoch, minimum=0)
    here = {name: value for name, value in state.items() if name != "offset"} | {"batch": number, "epoch": when}
    if (when, number) != (state.get("epoch"), state["batch"]):
        here.pop("cursors", None)  # a stream is read from its start
    service = ThreadReadingService(state["num_workers"]) if state.get("num_workers") else None
    with Loader(source_datapipe, reading_service=service) as loader:
        absent = IndexError(f"Epoch {when} has no batch {number}. Pass a smaller number; batches are numbered from 0.")
        if batch_number is not None and number >= _length_of(loader):
            raise absent
        loader.load_state_dict(here)
        # After the last batch of a stream, the next batch is the first one of the next epoch.
        batch = next((batch for _ in range(2 if batch_number is None else 1) for batch in loader), None)
        reached = loader.state_dict()
    if batch is None or (batch_number is not None and not _is_behind(reached, when, number, _length_of(loader))):
        raise absent
    return batch


def _is_behind(state: Mapping[str, Any], epoch: Any, number: int, length: float) -> bool:
    """Return whether a loader that stands there has just given that batch: others may have been left out."""
    if number == length - 1:
        return (state["epoch"], state["batch"]) == (epoch + 1, 0)
    given = state["batch"] if "offset" in state else state["batch"] - 1
    return state["epoch"] == epoch and given == number and number < length


def _length_of(loader: Loader) -> float:
    try:
        return len(loader)
    except TypeError:  # a stream's end is not known
        return math.inf
