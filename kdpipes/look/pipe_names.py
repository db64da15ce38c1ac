"""What pipes are called where they are shown, and what kind of work they do."""

from __future__ import annotations

from typing import Any, Literal

from torch.utils.data import IterDataPipe, MapDataPipe

from kdpipes._functional import registered
from kdpipes._graph import sources_of
from kdpipes._sample_pipe import SampleMapper
from kdpipes.delivery.behind_deal import DEALERS

__all__ = ["Kind", "kind_of", "pipe_name"]

Kind = Literal["source", "plan", "decoding", "transforms", "cache", "batching", "sending", "device"]
_KINDS: dict[str, Kind] = {
    "decode_images": "decoding",
    "transform": "transforms",
    "add_field": "transforms",
    "to_device": "device",
    "pin_memory": "device",
    "collate_samples": "batching",
    "collate": "batching",
    "mixup": "batching",
    "cutmix": "batching",
    "map": "transforms",
}


def pipe_name(pipe: Any) -> str:
    """Return the functional name of a pipe; of a source the function's that makes it, of a user's class its own."""
    if isinstance(pipe, SampleMapper):
        return pipe._name
    kind = type(pipe)
    for (name, _), definition in registered().items():
        if definition is kind:
            return name
    package, _, module = kind.__module__.rpartition(".")
    if package.startswith("kdpipes.") and module != "from_dataset":
        return module
    return _stock_name(kind)


def _stock_name(kind: Any) -> str:
    if kind.__name__ == "DatasetReaderMapDataPipe":
        return "from_dataset"
    for base in (IterDataPipe, MapDataPipe):
        for name, function in base.functions.items():
            if kind in getattr(function, "args", ()) or getattr(function, "__wrapped__", None) is kind:
                return str(name)
    return str(kind.__name__.removesuffix("IterDataPipe").removesuffix("MapDataPipe"))


def kind_of(pipe: Any) -> Kind:
    """Return what kind of work a pipe does."""
    if not sources_of(pipe):
        return "source"
    if callable(getattr(pipe, "counted_by_cache", None)):
        return "cache"
    if isinstance(pipe, DEALERS):
        return "batching"
    if getattr(pipe, "is_plan", False):
        return "plan"
    return _KINDS.get(pipe_name(pipe), "transforms" if isinstance(pipe, SampleMapper) else "batching")
