"""Test your own chains and pipes, and disturb them.

`checks` compares batches for other numbers of workers, after resuming, and with the contract of a pipe. `stores` holds
the contract of cache stores. `verify_receipts` and `shuffle_quality` judge what a run delivered. `faults` kill workers
and fill disks. To begin with, read `checks`.
"""

from kdpipes.loader.receipt import verify_receipts
from kdpipes.look.shuffle_quality import shuffle_quality
from kdpipes.testing.checks import check_elastic, check_exactly_once, check_pipe, check_resumable
from kdpipes.testing.faults import full_disk, kill_one_worker, slow_consumer
from kdpipes.testing.stores import check_store

__all__ = [
    "check_elastic",
    "check_exactly_once",
    "check_pipe",
    "check_resumable",
    "check_store",
    "full_disk",
    "kill_one_worker",
    "shuffle_quality",
    "slow_consumer",
    "verify_receipts",
]
