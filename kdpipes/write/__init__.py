"""Write datasets: as shards, as records, and as local copies.

`shards` and `records` write in resumable jobs (see `kdpipes.storage.jobs`); `members` encodes values as files. `copy`
copies datasets and `localize` single files, when they are read. To begin with, read `shards`.
"""

from typing import TYPE_CHECKING

from kdpipes.core.on_use import exports

if TYPE_CHECKING:
    from kdpipes.write.copy import copy_to_local
    from kdpipes.write.localize import FileLocalizer

__all__ = ["FileLocalizer", "copy_to_local"]

__getattr__ = exports(__name__, {"FileLocalizer": "kdpipes.write.localize", "copy_to_local": "kdpipes.write.copy"})
