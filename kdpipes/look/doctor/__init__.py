"""The doctor: finds mistakes in a chain, its bottleneck, and the change that would help most.

`rules` registers rules and runs them; `order`, `data` and `work` hold the rules about plans and shuffling, about values
and labels, and about the work and its speed. `examine` runs them and compares measured times. To begin with, read it.
"""
