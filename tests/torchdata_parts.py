"""What the tests use of torchdata 0.9, which has no wheels for Python 3.13 and later.

Without it, each name is a stand-in: a test that calls one is skipped, the other tests of its module run.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import pytest

from kdpipes.core.stock import load_torchdata

HAS_TORCHDATA = load_torchdata() is not None
needs_torchdata = pytest.mark.skipif(not HAS_TORCHDATA, reason="torchdata 0.9 is not installed")


def part(module: str, name: str) -> Any:
    """Return what a module of torchdata holds, or what skips the test that calls it."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return type(name, (), {"__new__": skip, "from_state": skip})


def skip(*_: Any, **__: Any) -> NoReturn:
    """Skip the test that is running."""
    pytest.skip("torchdata 0.9 is not installed")


CheckpointableReadingServiceInterface = part(
    "torchdata.dataloader2.reading_service", "CheckpointableReadingServiceInterface"
)
DataLoader2 = part("torchdata.dataloader2", "DataLoader2")
DistributedReadingService = part("torchdata.dataloader2", "DistributedReadingService")
InProcessReadingService = part("torchdata.dataloader2", "InProcessReadingService")
MultiProcessingReadingService = part("torchdata.dataloader2", "MultiProcessingReadingService")
SequentialReadingService = part("torchdata.dataloader2", "SequentialReadingService")
StatefulDataLoader = part("torchdata.stateful_dataloader", "StatefulDataLoader")
SeedGenerator = part("torchdata.dataloader2.random", "SeedGenerator")
set_graph_random_seed = part("torchdata.dataloader2.graph.settings", "set_graph_random_seed")
FSSpecFileLister = part("torchdata.datapipes.iter", "FSSpecFileLister")
SampleMultiplexer = part("torchdata.datapipes.iter", "SampleMultiplexer")
