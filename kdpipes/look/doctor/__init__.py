"""What is wrong with a chain, its bottleneck, and the one change that would help most."""
