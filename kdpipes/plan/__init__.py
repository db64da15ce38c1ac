"""Pipes that choose and order samples: filters, class balancing, splits, mixes, repetitions.

Each module is one pipe or function. A pipe is a `PlanPipe` (see `kdpipes.core.plan_pipe`) whose `plan` returns
positions in its sources; streams have a variant that chooses samples as they pass. These pipes read labels and keys,
and no other fields. `class_counts`, `concat` and `split` are functions. Start reading with `permute` and
`filter_classes`.
"""
