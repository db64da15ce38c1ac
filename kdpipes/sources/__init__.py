"""Where chains begin: folders, shards, records, tables, data sets and streams of other libraries.

Each module is one source. `_member_reader` and `_file_reader` read members of shards and whole files ahead of need, and
`_labels` turns labels into class numbers. To begin with, read `image_folder`.
"""
