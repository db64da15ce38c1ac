"""For tests of pipelines, yours too: storage that fails as object stores do, on a schedule."""

from kdpipes.testing.faults import Fault
from kdpipes.testing.faulty_storage import FaultyFileSystem, StorageStats, faulty_storage
from kdpipes.testing.ledger import Request

__all__ = ["Fault", "FaultyFileSystem", "Request", "StorageStats", "faulty_storage"]
