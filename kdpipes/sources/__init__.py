"""Sources of chains: folders, shards, records, tables, datasets and streams of other libraries.

Each module is one source. `_member_reader` and `_file_reader` read members of shards and whole files ahead of need, and
`core/labels.py` decides what a label is. To begin with, read `image_folder`.
"""
