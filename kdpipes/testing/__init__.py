"""For tests of pipelines, yours too: storage that fails on a schedule, as object stores do, and a real one."""

from kdpipes.testing.faults import Fault, Request
from kdpipes.testing.faulty_storage import FaultyFileSystem, StorageStats, faulty_storage
from kdpipes.testing.s3_server import s3_server

__all__ = ["Fault", "FaultyFileSystem", "Request", "StorageStats", "faulty_storage", "s3_server"]
