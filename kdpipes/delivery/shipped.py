"""Chains that travel with lambdas, closures and classes of a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
from torch.utils.data import IterDataPipe

from kdpipes._iter_pipe import Streaming

__all__ = ["Shipped"]


class Shipped(Streaming[Any], IterDataPipe[Any]):
    """A chain that is copied by cloudpickle, so that lambdas and classes of a notebook come along.

    Args:
        source_datapipe: The chain.
    """

    def __init__(self, source_datapipe: Any) -> None:
        self._chain = source_datapipe

    def iterate(self) -> Iterator[Any]:
        return iter(self._chain)

    def __getstate__(self) -> Any:
        if IterDataPipe.getstate_hook is not None:
            return IterDataPipe.getstate_hook(self.__dict__)
        return {"payload": cloudpickle.dumps(self._chain)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._chain = cloudpickle.loads(state["payload"])
