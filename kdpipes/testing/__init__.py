"""Checks for your own chains and pipes, and faults: storage that fails on a schedule, killed workers, a full disk."""

from kdpipes.testing.checks import check_elastic, check_exactly_once, check_pipe, check_resumable
from kdpipes.testing.faults import Fault, Request
from kdpipes.testing.faulty_storage import FaultyFileSystem, StorageStats, faulty_storage
from kdpipes.testing.run_faults import full_disk, kill_one_worker, slow_consumer

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
