"""Everything that runs a chain: the Loader, worker processes and threads, shared memory, and the merging of batches.

A batch goes from `worker` (which iterates a copy of the chain) through `channel` and `buffers` to `merge`, `services`
and `loader`. `processes` and `threads` start and replace workers, `state` is what a loader resumes from, `receipt`
proves what was delivered, and `autotune` finds the number of workers. To begin with, read `docs/what_runs_where.md`,
then `worker` and `merge`.
"""
