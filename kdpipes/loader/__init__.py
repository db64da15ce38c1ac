"""Everything that runs a chain: the Loader, worker processes and threads, shared memory, and the merging of batches."""
