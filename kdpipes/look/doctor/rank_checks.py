"""Ranks that would not share out the data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from kdpipes.core.registry import pipe_name
from kdpipes.delivery.layout import group_ranks, ranks_now
from kdpipes.look.doctor.chain_facts import dealer_in
from kdpipes.look.doctor.finding import Facts, Finding

__all__ = ["all_to_each_rank", "unclear_rank"]

_ONE_PROCESS = (("", ""), ("", "1"), ("0", "1"))


def unclear_rank(chain: Any, facts: Facts) -> Iterator[Finding]:
    """Environment variables that name no rank, so that this process takes itself for the only one."""
    named = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    dealer = dealer_in(chain)
    is_for_all = dealer is not None and dealer.is_for_all_ranks
    if named in _ONE_PROCESS or is_for_all or group_ranks() is not None or ranks_now().num_ranks > 1:
        return
    shown = ", ".join(f"{name}={value!r}" if value else f"no {name}" for name, value in zip(_NAMES, named, strict=True))
    yield Finding(
        "unclear-rank",
        "warning",
        pipe_name(chain),
        f"The environment has {shown}, and there is no process group.",
        "That names no rank, so this process takes itself for the only one: every rank gets all samples.",
        "Set both, RANK from 0 to WORLD_SIZE - 1, as torchrun does, or call "
        "`torch.distributed.init_process_group` before the epoch; of a single process, set neither.",
    )


_NAMES = ("RANK", "WORLD_SIZE")


def all_to_each_rank(chain: Any, facts: Facts) -> Iterator[Finding]:
    """A `deal(ranks=1)` on several ranks, where no library that hands batches out to ranks is loaded."""
    dealer, num_ranks = dealer_in(chain), ranks_now().num_ranks
    if dealer is not None and dealer.is_for_all_ranks and num_ranks > 1 and "accelerate" not in sys.modules:
        yield Finding(
            "same-batches",
            "warning",
            "deal",
            f"`deal(ranks=1)` gives each of {num_ranks} ranks all batches.",
            "Accelerate and transformers' Trainer hand them out to ranks, but neither is loaded: all ranks train on "
            "the same batches.",
            "Leave `ranks` out: each rank gets its part.",
        )
