"""Chains whose states are taken, for tests, and states as they come back from a file."""

from __future__ import annotations

from typing import Any

from torch.utils.data import graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import kdpipes as kdp


def chain(size: int = 22, *, batch_size: int = 4, **deal: Any) -> Any:
    source = kdp.from_dataset([(number, number % 2) for number in range(size)])
    augmented = source.transform("x", lambda x, rng: x + rng.random()).select("x is_padding")
    return augmented.deal(batch_size, shuffle=True, **deal)


def epochs_of(pipe: Any, number: int = 3) -> list[list[Any]]:
    return [list(pipe) for _ in range(number)]


def of_rank(pipe: Any, rank: int) -> Any:
    graph_settings.apply_sharding(pipe, 2, rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return pipe
