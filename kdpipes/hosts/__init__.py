"""All that touches classes and objects of other libraries, at the end of `import kdpipes`. No other module imports it.

`torch` lets libraries share names of pipes, gives trainers what they look for in loaders and datasets, and is used
through slots (`core/on_use.py`). `fsspec` keeps open file systems through a fork. docs/trainers.md lists each change.
"""
