"""Ranks whose epochs are of different length, and end together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Agreement"]

_FAILED, _ENDED, _HAS = -1, 0, 1


class Agreement:
    """Asks all ranks before each item whether they have one: one number over gloo. All ranks make it at the same time.

    A rank that has died is an error after the process group's timeout.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                'With `deal(split="shards")`, ranks need a process group to agree on where an epoch ends. Call '
                '`torch.distributed.init_process_group("gloo")`, or use `deal(split="samples")`.'
            )
        is_gloo = dist.get_backend() == "gloo"
        self._group: Any = None if is_gloo else dist.new_group(backend="gloo")

    def next_of(self, items: Iterator[Any]) -> Any:
        """Return the next item, if every rank has one.

        Raises:
            StopIteration: Some rank has none.
            RuntimeError: Some other rank has failed.
        """
        item, error = None, None
        try:
            item, mine = next(items), _HAS
        except StopIteration:
            mine = _ENDED
        except Exception as raised:
            error, mine = raised, _FAILED
        word = torch.tensor(mine)
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._group)
        if error is not None:
            raise error
        if word.item() == _FAILED:
            raise RuntimeError("Another rank has failed while it made a batch; its own error says why.")
        if word.item() == _ENDED:
            raise StopIteration
        return item
