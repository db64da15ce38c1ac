"""What runs a chain: workers, the memory and messages that they share, and the merging of their batches."""
