"""The doctor: finds mistakes in a chain, its bottleneck, and the change that would help most."""
