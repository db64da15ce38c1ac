"""A composition layer over torchdata DataPipes: one chain from files and tar shards to batches.

Importing it registers every pipe as a method of all DataPipes. Functions and classes are imported when they are first
used: see `_names.py`.
"""

import gc as _gc
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
_INSTEAD = {
    **dict.fromkeys(("from_csv", "from_parquet", "from_pandas", "read_csv", "read_parquet"), "from_table"),
    **dict.fromkeys(("KFold", "StratifiedKFold", "folds", "random_split", "train_test_split"), "split"),
}
_OF_TORCHVISION = (
    *("AugMix", "AutoAugment", "Compose", "GaussianBlur", "RandAugment", "RandomAffine", "RandomApply"),
    *("RandomErasing", "RandomHorizontalFlip", "RandomPerspective", "RandomRotation", "RandomVerticalFlip"),
    *("ToTensor", "TrivialAugmentWide"),
)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        hint = _closest(_INSTEAD.get(name, name), __all__)
        if name in _OF_TORCHVISION:
            hint += f' torchvision\'s works: `.transform("x", v2.{name}(...))`.'
        # Python adds a suggestion of its own where it knows the object.
        raise AttributeError(f"`kdpipes` has no attribute {name!r}.{hint}", name=name, obj=None)
    module, member = _PUBLIC[name]
    value = globals()[name] = getattr(_import_module(f"kdpipes.{module}"), member)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
