"""Chains that are copied with lambdas, closures and classes of a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
from torch.utils.data import IterDataPipe

from kdpipes.core.chain import Chain
from kdpipes.core.iter_pipe import Streaming
from kdpipes.storage.shared import Shared, is_sharing

__all__ = ["Shipped"]


class Shipped(Streaming[Any], IterDataPipe[Any]):
    """A chain of which a copy in this process shares what does not move, and a copy for another one is cloudpickle's.

    Args:
        source_datapipe: The chain.
    """

    def __init__(self, source_datapipe: Any) -> None:
        self._chain = source_datapipe
        self._copy: Shared[Any] | None = None

    def iterate(self) -> Iterator[Any]:
        return iter(self._chain)

    def __getstate__(self) -> Any:
        if IterDataPipe.getstate_hook is not None:
            return IterDataPipe.getstate_hook({"_chain": self._chain})
        if is_sharing():
            self._copy = Shared(Chain.of(self._chain).copy_streams())  # kept until it has arrived
            return {"copy": self._copy}
        return {"payload": cloudpickle.dumps(self._chain)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._chain = state["copy"].value if "copy" in state else cloudpickle.loads(state["payload"])
        self._copy = None
