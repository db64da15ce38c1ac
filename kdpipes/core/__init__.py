"""The building blocks of all pipes: base classes, samples, randomness, registry, errors.

It imports no other part of kdpipes. `pipe` is the base of all pipes; `map_pipe`, `iter_pipe`, `plan_pipe` and
`sample_pipe` are those of sources, streams, plan pipes and work pipes. `sample` holds the lazy fields of one sample,
`column` the values of one field, `traits` what a pipe declares of itself, `chain` the pipes of a chain, `fingerprint`
their identity, and `randomness` the keys of random numbers. `labels` decides what a label is. To begin with, read
`traits`, `sample` and `map_pipe`.
"""
