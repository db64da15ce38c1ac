"""The building blocks of all pipes: base classes, samples, randomness, registry, errors."""
