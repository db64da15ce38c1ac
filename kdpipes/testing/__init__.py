"""Checks for your own chains and pipes, and faults: storage that fails on a schedule, killed workers, a full disk."""

from kdpipes.testing.checks import check_elastic, check_exactly_once, check_pipe, check_resumable
from kdpipes.testing.faults import Fault, full_disk, kill_one_worker, slow_consumer
from kdpipes.testing.faulty_storage import FaultyFileSystem, Request, StorageStats, faulty_storage

__all__ = [
    "Fault",
    "FaultyFileSystem",
    "Request",
    "StorageStats",
    "check_elastic",
    "check_exactly_once",
    "check_pipe",
    "check_resumable",
    "faulty_storage",
    "full_disk",
    "kill_one_worker",
    "slow_consumer",
]
