"""Sources of chains: folders, shards, records, tables, datasets and streams of other libraries.

Each module is one source. `_member_reader` and `_file_reader` prefetch members of shards and whole files, and
`core/labels.py` defines the rules for labels. Start reading with `image_folder`.
"""
