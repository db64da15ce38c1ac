"""A composition layer over torchdata DataPipes: one chain from files and tar shards to batches.

Importing it registers every pipe as a method of all DataPipes. Functions and classes are imported when they are first
used: see `_names.py`.
"""

import gc as _gc
import re as _re
from importlib import import_module as _import_module

from kdpipes._names import PIPES as _PIPES
from kdpipes._names import PUBLIC as _PUBLIC
from kdpipes._version import __version__ as __version__

# The garbage collector is off during the import. Otherwise it visits all objects that torch has made, which takes a
# quarter of the time: 80 of 350 ms of CPU.
_collects = _gc.isenabled()
_gc.disable()
try:
    from kdpipes.core.errors import closest as _closest
    from kdpipes.core.on_use import fill_slots as _fill_slots
    from kdpipes.hosts import fsspec as _fsspec  # noqa: F401  # changes in other libraries
    from kdpipes.hosts import torch as _torch  # noqa: F401

    for _pipe in _PIPES:  # a pipe is registered when its module is imported
        for _module in _pipe.homes:
            _import_module(_module)
    _fill_slots("kdpipes.storage.decoding", "image_header")
    _fill_slots("kdpipes.look.peek", "Peek")
    _fill_slots("kdpipes.look.pictures", "image_png")
    _fill_slots("kdpipes.look.show", "chain_html", "chain_text")
    _fill_slots("kdpipes.look.profile", "loader_html", "show_live")
    _fill_slots("kdpipes.hosts.torch", "BatchNumbers", "EpochSampler", "NumberedBatches", "hold_dealt_chains")
    _fill_slots("kdpipes.hosts.torch", "introduce_to_accelerate", "is_shared_out_by_accelerate")
    _fill_slots("kdpipes.hosts.dataloader2", "check_stamp", "introduce_to_torchdata")
    _fill_slots("kdpipes.hosts.dataloader2", "ForeignService", "note_position", "stamp")
finally:
    if _collects:
        _gc.enable()

__all__ = list(_PUBLIC)
_HINTS = {  # patterns of names that other libraries have, and what to write in their place
    "csv|parquet|pandas": ' Write `kdp.from_table("table.csv")`; it reads Parquet and data frames, too.',
    "hugging": " Write `kdp.from_dataset(dataset)`.",
    "split|[Ff]old(s|$)|cross_val": " Write `kdp.split(chain, train=0.8, val=0.2)`, or `kdp.split(chain, folds=5)`.",
}
_NO_TRANSFORM = ("Dataset", "Folder", "Loader", "Pipe", "Sampler", "Service")  # ends of names of classes


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        hint = next((hint for names, hint in _HINTS.items() if _re.search(names, name)), "")
        if not hint:
            hint = _closest(name, __all__)
            if name[0].isupper() and not name.endswith(_NO_TRANSFORM):
                hint += f' torchvision\'s transforms work, too: `.transform("x", v2.{name}(...))`.'
        # Python adds a suggestion of its own where it knows the object.
        raise AttributeError(f"`kdpipes` has no attribute {name!r}.{hint}", name=name, obj=None)
    module, member = _PUBLIC[name]
    value = globals()[name] = getattr(_import_module(f"kdpipes.{module}"), member)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
